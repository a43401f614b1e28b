"""Which workload of a run gets the next batch: even turns, or the one with most to gain.

A function of what the search was told, like its proposals: no budget and no clock is read here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kt.spaces.errors import SettingsError

from .preset import Preset
from .state import State
from .surrogate import Surrogate

SCHEDULERS = ("even", "gain")


def checked_scheduler(name: str) -> str:
    """`name`, when there is such a scheduler; else raises SettingsError."""
    if name not in SCHEDULERS:
        raise SettingsError(f"--scheduler {name}: accepts {', '.join(SCHEDULERS)}")
    return name


def fewest_batches(states: Sequence[State], among: Sequence[int]) -> int | None:
    """The workload with the fewest batches, the first of equals; None without any."""
    return min(among, key=lambda i: (states[i].batches, i), default=None)


def most_gain(
    states: Sequence[State],
    weights: Sequence[float],
    among: Sequence[int],
    surrogate: Surrogate,
    preset: Preset,
) -> int | None:
    """The workload whose next batch is expected to save most time, once each has had its first few.

    Of equals, such as workloads that all have converged, the one with the fewest batches.
    """
    fewest = fewest_batches(states, among)
    if fewest is None or states[fewest].batches < preset.first_batches:
        return fewest
    modelled = surrogate if surrogate.ready() else None
    gains = {i: weights[i] * _saved_us(states[i], modelled, i, preset) for i in among}
    return max(among, key=lambda i: (round(gains[i], 6), -states[i].batches, -i))


def _saved_us(state: State, surrogate: Surrogate | None, which: int, preset: Preset) -> float:
    """Microseconds a launch that the next batch may save.

    The mean of what the last ones did and of what the model sees in reach, the latter halved for
    each batch that did not keep such a promise.
    """
    if state.best_us is None:
        return 0.0
    seen = 0.0 if surrogate is None else _in_reach(state, surrogate, which)
    promised = state.best_us * seen * 0.5**state.stale
    return (state.saved_us(preset.looking_back) + promised) / 2


def _in_reach(state: State, surrogate: Surrogate, which: int) -> float:
    """Share of the best time that the best predicted variation of the best point would save."""
    points = np.append(state.best_measured(1), state.variations(1))
    scores = surrogate.predict(which, points)
    best, top = float(scores[0]), float(scores.max())
    return 1 - best / top if best > 0 else 0.0
