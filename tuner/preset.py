"""Presets of the guided search: every constant that decides what it proposes.

A run's header names its preset (strategy and revision), so that old logs replay with the constants
they were made with. Changing a preset that logs were made with breaks their replay: add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kt.costmodel.model import Trees
from kt.logs.record import Settings
from kt.spaces.errors import SettingsError

TREES = Trees()


@dataclass(frozen=True)
class Preset:
    """How a guided strategy models, anneals, explores and sizes its batches."""

    trees: Trees = TREES
    chains: int = 256
    steps: int = 48
    temperature: float = 0.08
    """At the start, in units of normalised throughput; it falls linearly to zero."""
    climbs: int = 0
    """Rounds of scoring neighbours of the best points after annealing."""
    at_once: bool = False
    """Whether the tries for a neighbour are judged at once."""
    listing: int = 0
    """A space of at most this many points is scored completely instead of annealed."""
    likely: int = 0
    """Points besides its default that a family's heuristic gives to the first batches."""
    promising: float = 0.0
    """Share of every later batch for those points that are left, of families that keep up."""
    keeping_up: float = 0.6
    """A family does whose best has this throughput, where the best of all has 1."""
    near: float = 0.0
    """Share of the cold rest of a batch without a model that is near such points."""
    fresh: int = 8
    """One in so many chains begins anew in every batch."""
    exploration: str = "uniform"
    """Where random trials go: "uniform", or best predicted of a random knob's other "levels"."""
    uniform_share: float = 1.0
    """Share of the exploring trials that are uniform all the same."""
    growth: float = 1.1
    """Refit when there are this many times the rows of the last fit; 1: with any new row."""
    all_columns: bool = True
    """Whether the model sees columns that are constant in its data."""
    patience: int = 2
    """After this many batches without a better best, part of a batch sweeps around it."""
    sweep_share: float = 0.5
    """Share of the guided trials that do."""
    judged: int = 0
    """Trust follows the last this many predictions; 0: the mean of the last two batches."""
    trusted: float = 0.25
    """Rank correlation below which half of a batch explores."""
    transfer: bool = False
    """Whether earlier logs teach the model."""
    taught: float = 0.2
    """Rank correlation of their model with what was measured, below which they are dropped."""
    first_batches: int = 2
    """Batches that each workload gets before the scheduler `gain` compares them."""
    looking_back: int = 3
    """Observed batches whose gain it expects of the next one."""
    ramp: tuple[tuple[int, int], ...] = ()
    """(trials, size): before so many trials a batch has this size at most."""

    def size(self, full: int, trials: int) -> int:
        """Size of the batch that follows `trials` trials, where a full one has `full`."""
        for end, most in self.ramp:
            if trials < end:
                return min(full, most)
        return full


_SECOND = Preset(
    trees=Trees(rounds=80, eta=0.2), chains=512, steps=32, temperature=0.03, climbs=6,
    at_once=True, listing=2**16, exploration="levels", uniform_share=0.3, growth=1.0,
    all_columns=False, judged=32, trusted=0.1, transfer=True, ramp=((1, 8), (32, 4), (128, 8)),
)  # fmt: skip
_FOURTH = replace(_SECOND, chains=1024, steps=12, climbs=4, ramp=((1, 8), (32, 4), (64, 8)))
_FIFTH = replace(_FOURTH, chains=512, likely=6, near=0.8, fresh=32, uniform_share=0.1)
REVISIONS: Mapping[int, Preset] = {
    1: Preset(),
    2: _SECOND,
    3: replace(_SECOND, ramp=((128, 16),)),
    4: _FOURTH,
    5: _FIFTH,
    6: replace(_FIFTH, promising=0.25),
}
"""Presets of `--strategy kt` and `forest` by the header's revision.

The third and the fourth are the second for GPUs, with up to 32 and 16 trials a batch. The fourth
begins with small batches: they learn more from equal trials. More chains take fewer steps, which
costs half the time and finds as much. The fifth begins with what the families' heuristics rank
high and with points near that, and seldom looks elsewhere: in logged GPU runs points drawn from
everywhere were hardly ever the best so far. The sixth measures all of those points: a model of few
trials passed over tiles that were best.
"""
REVISION, CUDA_REVISION = 2, 6
"""What new runs use on a CPU and on GPUs."""
EPSILON = 0.25
"""Share of the trials that explore, in new runs."""
AUTOTVM = Preset(trees=Trees(100, 3, 0.3, 1.0, 1.0), chains=128, steps=500, temperature=1.0,
                 patience=2**30, trusted=-1.0)  # fmt: skip
"""The published settings of AutoTVM's tuner on this code: depth 3, 128 chains of 500 steps.

Its batches are of 64, 5 % of them random: `--batch-size 64 --epsilon 5%`.
"""


def preset_of(settings: Settings) -> Preset:
    """The preset that a header's settings name."""
    if settings.strategy == "autotvm":
        return AUTOTVM
    if settings.revision not in REVISIONS:
        raise SettingsError(
            f"search revision {settings.revision}: accepts {', '.join(map(str, REVISIONS))}"
        )
    return REVISIONS[settings.revision]
