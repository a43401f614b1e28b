"""The score of a strategy: hand-computed values, and the official scorer's on one space."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import scored_space

from kt.tuner.score import RESOLUTION, Baseline, reached, run_of

NINE = Baseline(
    np.array([50.0, 10, 90, np.nan, 20, 40, 70, 30, 80, 60]),
    np.array([2.0, 2, 2, 4, 2, 2, 2, 2, 2, 2]),
)
"""Nine valid configurations, 10 to 90 µs with median 50, of 2 s each; a failure costs 4 s."""
OFFICIAL = {0.0: (0.031, 0.014), 1.0: (0.831, 0.011), 3.0: (0.973, 0.001)}
"""autotuning_methodology 1.1.0 on 25 runs of `scored_space`: mean and deviation of five calls.

Its curve is bagged with fresh random draws at each call; ours is the fit to all runs.
"""


def test_budgets_are_the_evaluations_that_random_search_needs() -> None:
    # From 50 to 10: 1 % is 49.6, first reached by the sixth of nine, i = 5: ceil(5 / 5) = 1.
    assert NINE.evaluations(0.01) == 1
    # 50 % is 30: i = 6, ceil(6 / 4) = 2.
    assert NINE.evaluations(0.5) == 2
    # 95 % is 12, which is the optimum (i = 8), so the one before counts: ceil(7 / 3) = 3.
    assert NINE.evaluations(0.95) == 3
    assert NINE.evaluations(1.0) == 4  # ceil(8 / 2)


def test_time_counts_the_median_for_the_grid_and_failures_for_random_search() -> None:
    assert NINE.grid[[0, -1]].tolist() == [2.0, 6.0] and len(NINE.grid) == RESOLUTION
    assert NINE.mean_seconds == pytest.approx(2 + 0.1 * 4)


def test_random_search_expects_the_rank_of_the_closed_form() -> None:
    # Evaluations k = round(t / 2.4): 1, 2, then 2.5 rounds to 2; ranks round(10 k / (k + 1)).
    assert NINE.random[0] == 40.0 and NINE.random[-1] == 20.0
    assert (np.diff(NINE.random) <= 0).all()


def test_the_score_is_one_at_the_optimum_and_zero_on_the_random_curve() -> None:
    best = run_of(np.full(8, 10.0), np.ones(8))
    assert NINE.score([best] * 3) == pytest.approx(1.0)
    # A strategy that holds 40 µs: (40 - R) / (10 - R) with R from 40 down to 20.
    held = run_of(np.full(8, 40.0), np.ones(8))
    expected = ((40 - NINE.random) / (10 - NINE.random)).mean()
    assert NINE.score([held] * 3) == pytest.approx(expected)
    assert expected < 0


def test_a_failure_costs_time_and_gives_nothing() -> None:
    elapsed, best = run_of(np.array([np.nan, 30.0, np.nan, 20.0]), np.array([4.0, 2, 4, 2]))
    assert elapsed.tolist() == [4, 6, 10, 12]
    assert np.isnan(best[0]) and best[1:].tolist() == [30, 30, 20]
    assert reached(10.0, np.array([np.nan, 30.0, 20.0]), 2) == pytest.approx(1 / 3)
    assert reached(10.0, np.array([np.nan, 30.0]), 1) == 0.0


def test_the_curve_pools_ranks_over_runs_and_is_monotone() -> None:
    where = scored_space.baseline()
    curve = where.curve(scored_space.runs(9, 1.0))
    assert (np.diff(curve) <= 0).all() and np.isin(curve, where.ascending).all()
    alone = [where.score(scored_space.runs(25, greed)) for greed in OFFICIAL]
    assert alone == sorted(alone)


def test_runs_that_end_early_are_held_at_their_last_value() -> None:
    where = scored_space.baseline()
    whole = scored_space.runs(9, 1.0)
    short = [(elapsed[:20], best[:20]) for elapsed, best in whole]
    curve = where.curve(short)
    end = min(run[0][-1] for run in short)
    assert len(set(curve[where.grid > 1.1 * end].tolist())) == 1


@pytest.mark.parametrize("greed", OFFICIAL)
def test_the_score_agrees_with_the_official_one(greed: float) -> None:
    mean, deviation = OFFICIAL[greed]
    score = scored_space.baseline().score(scored_space.runs(25, greed))
    assert score == pytest.approx(mean, abs=max(2 * deviation, 0.005))


def test_the_baseline_is_the_official_one() -> None:
    where = scored_space.baseline()
    assert where.grid[[0, -1]] == pytest.approx([2.2, 56.1])
    expected = [1275.45, 1089.724347410755, 1066.3774529361165, 1046.3]
    assert where.random[[0, 250, 500, 999]] == pytest.approx(expected, rel=1e-12)


@pytest.mark.skipif(
    importlib.util.find_spec("autotuning_methodology") is None,
    reason="the official scorer (autotuning_methodology) is not installed",
)
def test_the_installed_official_scorer_sees_the_same_baseline(tmp_path: Path) -> None:
    from autotuning_methodology.baseline import RandomSearchCalculatedBaseline
    from autotuning_methodology.searchspace_statistics import SearchspaceStatistics

    path = tmp_path / "T4.json"
    path.write_text(json.dumps(scored_space.t4()))
    keys = ["compilation", "runtimes", "framework", "search_algorithm", "validation"]
    official = SearchspaceStatistics("a", "d", True, keys, ["time"], path, full_validate=False)
    where = scored_space.baseline()
    first, last, start, end = official.cutoff_point_fevals_time_start_end(0.01, 0.95)
    assert (first, last) == (where.evaluations(0.01), where.evaluations(0.95))
    assert where.grid[[0, -1]] == pytest.approx([start, end])
    random = RandomSearchCalculatedBaseline(official).get_curve(where.grid, "time")
    np.testing.assert_allclose(where.random, random)
