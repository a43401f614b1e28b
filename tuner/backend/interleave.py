"""Kernels timed in turn, so that whatever drifts hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .serve import report
from .timing import SLOW_US, Launcher, LaunchFailed, Order, group_size, warm
from .vendor import NumpyLauncher, settle

_ROUNDS, _FEWEST_ROUNDS, _MOST_ROUNDS = 10, 3, 200
_PATIENCE = 10.0
_WARM_US, _MOST_UNTIMED = 3000.0, 32


class Spoilt(Exception):
    """The launcher at `index` failed, so that there is no comparison."""

    def __init__(self, index: int, failed: LaunchFailed) -> None:
        super().__init__(f"launch_error: {failed}")
        self.index = index


def interleave(launchers: Sequence[Launcher], seconds: float) -> tuple[tuple[float, ...], ...]:
    """Samples (µs) of each launcher: rounds of one sample each, for about `seconds`.

    At least ten rounds, or three where those take ten times as long. A sample follows an untimed
    one unless launches are slow. The index of what runs is reported as the stage; raises Spoilt.
    """
    samples: list[list[float]] = [[] for _ in launchers]
    begin, rounds, i = time.monotonic(), 0, 0
    try:
        warmed = []
        for i, launcher in enumerate(launchers):
            report(str(i))
            warmed.append(warm(launcher))
        while not _enough(rounds, time.monotonic() - begin, seconds):
            for step in range(len(launchers)):
                i = (rounds + step) % len(launchers)  # nobody always follows the same one
                report(str(i))
                samples[i].append(_one(launchers[i], warmed[i]))
            rounds += 1
    except LaunchFailed as failed:
        raise Spoilt(i, failed) from None
    return tuple(tuple(round(us, 4) for us in one) for one in samples)


def _one(launcher: Launcher, warmed_us: float) -> float:
    # The sample right after some untimed ones: whoever follows an idle pause starts with sleeping
    # threads and a slow clock, and that must not count against it.
    group = group_size(warmed_us)
    untimed = min(max(1, round(_WARM_US / (group * warmed_us))), _MOST_UNTIMED)
    count = 1 + untimed if warmed_us < SLOW_US else 1
    us = launcher(Order(group, least=count, most=count, budget_us=0.0))
    if isinstance(launcher, NumpyLauncher):
        settle()
    return us[-1]


def _enough(rounds: int, elapsed: float, seconds: float) -> bool:
    fewest = _FEWEST_ROUNDS if elapsed > _PATIENCE * seconds else _ROUNDS
    return rounds >= fewest and (elapsed >= seconds or rounds >= _MOST_ROUNDS)
