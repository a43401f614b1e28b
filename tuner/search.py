"""The search of a run: batch b as a function of the header and of the outcomes told so far.

The caller keeps the determinism contract: `observe` in batch order, `propose(b)` after exactly
the batches ≤ b − 1 − lag were observed. Nothing here reads a clock or the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kt.logs.record import ModelReport, Settings
from kt.spaces.errors import SettingsError
from kt.spaces.space import Points, Space

from .picker import Picker
from .preset import Preset, preset_of
from .schedule import checked_scheduler, fewest_batches, most_gain
from .state import Observation, Starts, State
from .strategy import MODEL_OF, STRATEGIES
from .surrogate import Surrogate
from .transfer import Lesson


@dataclass(frozen=True)
class Proposal:
    """Batch `number`: points of workload `which`, with predictions and who proposed each."""

    number: int
    which: int
    points: Points
    sources: tuple[str, ...]
    predicted: tuple[float | None, ...]
    report: ModelReport
    incumbent_us: float | None

    def first(self, n: int) -> Proposal:
        """The same batch cut to its first `n` entries (a budget that ends inside it)."""
        return Proposal(
            self.number, self.which, self.points[:n], self.sources[:n], self.predicted[:n],
            self.report, self.incumbent_us,
        )  # fmt: skip


class Search:
    """Proposes batches for one or several workloads that share a cost model."""

    def __init__(
        self,
        spaces: Sequence[Space],
        warm: Sequence[Points],
        settings: Settings,
        seed: int,
        preset: Preset | None = None,
        lessons: Sequence[Lesson] = (),
        weights: Sequence[float] = (),
        starts: Sequence[Starts] = (),
    ) -> None:
        """`preset` stands in for the one that `settings` names, for experiments.

        `starts` are what heuristics rank high in each space (default: what the spaces say now).

        `lessons` are what earlier logs teach the model, where the preset wants that; `weights` what
        a microsecond of each workload counts for the scheduler (default: 1).
        """
        self._preset = preset or preset_of(settings)
        starts = starts or [Starts.of(space, self._preset.likely) for space in spaces]
        self.states = [State(*one) for one in zip(spaces, warm, starts, strict=True)]
        self._settings, self._seed = settings, seed
        self._scheduler = checked_scheduler(settings.scheduler)
        self._weights = tuple(weights) or (1.0,) * len(spaces)
        self._models = settings.strategy in MODEL_OF
        self._surrogate = Surrogate(
            self.states, MODEL_OF.get(settings.strategy, "kt"), seed, settings.model_threads,
            self._preset, lessons if self._preset.transfer and self._models else (),
        )  # fmt: skip
        if settings.strategy not in STRATEGIES:
            raise SettingsError(
                f"unknown strategy '{settings.strategy}': accepts {', '.join(STRATEGIES)}"
            )
        if self._models:
            self._surrogate.load()
        make = STRATEGIES[settings.strategy]
        self._strategies = [
            make(self._surrogate, i, settings.epsilon, self._preset)
            for i in range(len(self.states))
        ]
        self._batch = 0
        self._exhausted = [False] * len(self.states)
        self._turn: int | None = None
        """Known until a batch is proposed or observed."""

    def propose(self, room: Sequence[int]) -> Proposal | None:
        """The next batch, at most `room` entries by workload; only these count as proposed.

        None when every space is exhausted or the workload whose turn it is has no room.
        """
        while (which := self.turn()) is not None and room[which] > 0:
            proposal = self._propose(self._batch, which).first(room[which])
            self._turn = None
            if len(proposal.points):
                self._batch += 1
                self.states[which].propose(proposal.points)
                return proposal
            self._exhausted[which] = True
        return None

    def observe(self, proposal: Proposal, observations: list[Observation]) -> None:
        """Tells the final events of a batch, in index order; unfinished entries are left out."""
        done = {o.point for o in observations}
        pairs = zip(proposal.points.tolist(), proposal.predicted, strict=True)
        predicted = [p for point, p in pairs if point in done]
        self.states[proposal.which].observe(observations)
        self._turn = None
        if self._models:
            self._surrogate.judge(proposal.which, predicted, observations)
            self._surrogate.learn(proposal.which, observations)

    def taught(self, which: int, points: Points) -> NDArray[np.float32]:
        """Scores of points of workload `which` by earlier logs alone; there must be lessons."""
        return self._surrogate.taught(which, points)

    def turn(self) -> int | None:
        """The workload that the scheduler gives the next batch; None when all ended."""
        if self._turn is None:
            self._turn = self._scheduled()
        return self._turn

    def _scheduled(self) -> int | None:
        open_ = [i for i, ended in enumerate(self._exhausted) if not ended]
        if self._scheduler == "even":
            return fewest_batches(self.states, open_)
        return most_gain(self.states, self._weights, open_, self._surrogate, self._preset)

    def _propose(self, number: int, which: int) -> Proposal:
        state = self.states[which]
        rng = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(number,)))
        size = self._settings.batch_size
        if self._models:
            size = self._preset.size(size, len(state.proposed))
        picker = Picker(state, size)
        if state.batches == 0:
            defaults = state.starts.defaults
            picker.add(defaults[state.space.legal(defaults)], "default")
            picker.add(state.warm[state.space.legal(state.warm)], "warm", picker.size // 2)
        self._strategies[which].fill(picker, rng)
        exploring = sum(source in ("random", "level") for source in picker.sources)
        random_share = exploring / max(1, len(picker.sources))
        return Proposal(
            number, which, picker.points, tuple(picker.sources),
            self._predict(which, picker.points),
            self._surrogate.report(round(random_share, 4)), state.best_us,
        )  # fmt: skip

    def _predict(self, which: int, points: Points) -> tuple[float | None, ...]:
        if not self._models or not len(points) or not self._surrogate.ready():
            return (None,) * len(points)
        return tuple(round(float(p), 4) for p in self._surrogate.predict(which, points))
