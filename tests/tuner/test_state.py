"""What a search knows of one workload."""

from __future__ import annotations

import numpy as np
import pytest
from odd_families import space

from kt.tuner.state import Observation, State


def state() -> State:
    return State(space("fake"), np.empty(0, dtype=np.int64))


def test_observations_are_kept_in_order_and_the_best_is_a_result() -> None:
    known = state()
    known.observe([Observation(5, 80.0), Observation(3, None), Observation(9, 40.0, censored=True)])
    assert (known.best_point, known.best_us) == (5, 80.0)
    known.observe([Observation(2, 80.0), Observation(1, 20.0)])
    assert (known.best_point, known.best_us) == (1, 20.0)
    assert known.measured.tolist() == [5, 3, 9, 2, 1]


def test_throughput_is_relative_to_the_best_and_zero_for_failures() -> None:
    known = state()
    known.observe([Observation(5, 80.0), Observation(3, None), Observation(1, 20.0)])
    assert known.throughput.tolist() == [0.25, 0.0, 1.0]
    assert known.throughput.dtype == np.float32
    assert known.normalised(np.array([40.0, np.nan])).tolist() == [0.5, 0.0]


def test_without_a_result_everything_is_zero() -> None:
    known = state()
    known.observe([Observation(1, None), Observation(2, 9.0, censored=True)])
    assert known.best_us is None and known.best_point is None
    assert known.throughput.tolist() == [0, 0] and not len(known.best_measured(3))


def test_the_best_measured_come_first_and_failures_never() -> None:
    known = state()
    known.observe([Observation(p, us) for p, us in ((7, 30.0), (2, 10.0), (6, None), (1, 30.0))])
    assert known.best_measured(9).tolist() == [2, 1, 7]
    assert known.best_measured(2).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("batches", "stale"),
    [([[50.0]], 0), ([[50.0], [60.0]], 1), ([[50.0], [60.0], [50.0]], 2), ([[None], [None]], 2),
     ([[None], [50.0]], 0), ([[50.0], [60.0], [40.0]], 0)],
)  # fmt: skip
def test_stale_counts_batches_since_the_best_improved(
    batches: list[list[float | None]], stale: int
) -> None:
    known = state()
    for i, batch in enumerate(batches):
        known.observe([Observation(i, us) for us in batch])
    assert known.stale == stale


def test_proposed_points_are_remembered_by_batch() -> None:
    known = state()
    known.propose(np.array([4, 2]))
    known.propose(np.array([9]))
    assert known.proposed.tolist() == [4, 2, 9] and known.batches == 2
