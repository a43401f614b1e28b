"""Two runs on one GPU take turns, so that neither changes the times of the other.

PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -m gpu tests/gpu/test_turns.py
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kt.logs.record import Settings, Timing
from kt.spaces.families import space_of
from kt.spaces.target import Target
from kt.spaces.workload import parse
from kt.tuner.measure import Candidate, FrozenBatch
from kt.tuner.pool import LocalMeasurer

pytestmark = pytest.mark.gpu

WORKLOAD = parse("gemm 1024x1024x1024 dtype=bf16")
KERNELS = 24


@pytest.fixture(scope="module")
def target() -> Target:
    from kt.tuner.devices import detect_gpu

    return detect_gpu("the test")


def batch(target: Target) -> FrozenBatch:
    space = space_of(WORKLOAD, target, "mma")
    points = space.sample(np.random.default_rng(0), KERNELS).tolist()
    candidates = tuple(Candidate(i, space.kernel(point)) for i, point in enumerate(points))
    return FrozenBatch(0, WORKLOAD, candidates, None)


def times(measurer: LocalMeasurer, asked: FrozenBatch) -> dict[int, float]:
    """Median microseconds of the kernels that are sound."""
    found = {measured.trial: measured.outcome for measured in measurer.finish(asked)}
    return {n: o.median_us for n, o in found.items() if isinstance(o, Timing)}


def test_times_beside_another_run_are_those_alone(target: Target) -> None:
    asked, notes = batch(target), list[str]()
    with (
        LocalMeasurer(target, Settings(), note=notes.append) as one,
        LocalMeasurer(target, Settings(), note=notes.append) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        for measurer in (one, other):
            measurer.prepare([WORKLOAD])
        alone = times(one, asked)
        assert not notes and len(alone) > KERNELS // 2
        one.prepare([WORKLOAD])  # forgets what it measured
        together = list(threads.map(times, (one, other), (asked, asked)))
    assert any("take turns" in note for note in notes)
    for found in together:
        ratios = [found[n] / alone[n] for n in alone]
        assert statistics.median(ratios) == pytest.approx(1.0, abs=0.03)
        assert sum(abs(ratio - 1) < 0.1 for ratio in ratios) > 0.8 * len(ratios)
