"""Finalists: who is re-measured, who wins, when a difference is a tie."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from fake_runs import GEMM, read_run, tuned
from fakes import AnalyticMeasurer, analytic_us

from kt.logs.query import Run, best_of
from kt.logs.record import Failure, FinalEntry, FinalRecord, Timing
from kt.spaces.theta import Theta
from kt.spaces.workload import Workload
from kt.tuner.measure import Candidate
from kt.tuner.tune import Result

pytestmark = pytest.mark.usefixtures("fake_families")


class Deciding(AnalyticMeasurer):
    """Finals by a given function of θ: samples, or the text of a failure."""

    def __init__(self, final: Callable[[Theta], tuple[float, ...] | str], **more: Any) -> None:
        super().__init__(**more)
        self.final = final

    def finals(
        self, workload: Workload, candidates: Sequence[Candidate], deadline: float | None = None
    ) -> list[FinalEntry]:
        self.asked = [candidate.trial for candidate in candidates]
        found = [(c.trial, self.final(c.kernel.theta)) for c in candidates]
        return [
            FinalEntry(n, (), 0.0, got) if isinstance(got, str) else FinalEntry(n, got, median(got))
            for n, got in found
        ]


def decided(log: Path, measurer: AnalyticMeasurer, **more: Any) -> tuple[Result, Run, FinalRecord]:
    settings: dict[str, Any] = {"strategy": "random", "trials": 48, "finalists": 4}
    result = tuned(log, measurer=measurer, **settings | more)
    run = read_run(log)
    return result, run, run.finals[GEMM]


def times(run: Run) -> list[tuple[float, int]]:
    return sorted(
        (t.outcome.median_us, n) for n, t in run.trials.items() if isinstance(t.outcome, Timing)
    )


def test_the_default_and_the_fastest_are_measured_again(tmp_path: Path) -> None:
    measurer = Deciding(lambda theta: (analytic_us(theta),) * 3)
    result, run, final = decided(tmp_path / "a.jsonl", measurer)
    assert measurer.asked == [number for _, number in times(run)[:4]] + [0]
    assert final.best == result.best[GEMM] == times(run)[0][1] and final.default == 0
    best = best_of(run, GEMM)
    assert best is not None and best.final == final and best.trial.trial == final.best


def test_a_default_that_is_among_the_fastest_is_asked_once(tmp_path: Path) -> None:
    flat = AnalyticMeasurer(lambda theta: Timing((5.0,), 5.0))
    _, run, final = decided(tmp_path / "a.jsonl", flat)
    asked = [entry.trial for entry in final.entries]
    assert asked == [0, 1, 2, 3] and len(run.trials) == 48
    assert final.best == 0  # all tie: the default's own knobs are the simplest


def test_the_finals_times_decide_and_not_the_searchs(tmp_path: Path) -> None:
    slower: dict[str, float] = {}

    def final(theta: Theta) -> tuple[float, ...]:
        return (slower.setdefault(theta.key(), 200.0 - 10 * len(slower)),) * 5

    _, _, record = decided(tmp_path / "a.jsonl", Deciding(final), finalists=3)
    assert record.best == record.entries[-1].trial  # the last asked was the fastest


def test_a_finalist_that_fails_is_out(tmp_path: Path) -> None:
    fastest: list[str] = []

    def final(theta: Theta) -> tuple[float, ...] | str:
        fastest.append(theta.key())
        return "wrong_result on seed 2" if len(fastest) == 1 else (analytic_us(theta),) * 3

    result, run, record = decided(tmp_path / "a.jsonl", Deciding(final))
    assert record.entries[0].failure and record.best == record.entries[1].trial
    assert result.best[GEMM] == record.best
    best = best_of(run, GEMM)
    assert best is not None and best.trial.trial == record.best


def test_when_all_finalists_fail_there_is_no_winner(tmp_path: Path) -> None:
    result, run, record = decided(tmp_path / "a.jsonl", Deciding(lambda theta: "wrong"))
    assert record.best == result.best[GEMM] == -1
    best = best_of(run, GEMM)
    disqualified = {entry.trial for entry in record.entries}
    assert best is not None and best.trial.trial not in disqualified


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.1])
def test_times_inside_the_noise_tie_and_the_simplest_theta_wins(
    spread: float, tmp_path: Path
) -> None:
    def final(theta: Theta) -> tuple[float, ...]:
        default = theta.tile == {"bm": 8, "bn": 8, "bk": 8}
        middle = 100.0 + 0.4 * (default and theta.unroll["ku"] == 1)
        return tuple(middle * (1 + spread * step) for step in (-2, -1, 0, 1, 2))

    _, run, record = decided(tmp_path / "a.jsonl", Deciding(final))
    # Twice the standard error of a median: 1.2533 sigma / sqrt(5), with sigma = 1.4826 MAD.
    error = 1.2533 * 1.4826 * spread / 5**0.5
    assert record.noise == pytest.approx(min(0.1, max(0.005, 8**0.5 * error)), abs=1e-5)
    base = run.trials[0].theta.flat().items()
    simple = {e.trial: len(run.trials[e.trial].theta.flat().items() - base) for e in record.entries}
    assert record.best == 0 and simple[0] == 0  # 0.4 % slower: inside the least noise


def test_a_difference_beyond_the_noise_is_no_tie(tmp_path: Path) -> None:
    def final(theta: Theta) -> tuple[float, ...]:
        return (100.0 if theta.tile != {"bm": 8, "bn": 8, "bk": 8} else 101.0,) * 5

    _, _, record = decided(tmp_path / "a.jsonl", Deciding(final))
    assert record.noise == 0.005 and record.best != 0


def test_without_any_time_there_is_no_final(tmp_path: Path) -> None:
    failed = AnalyticMeasurer(lambda theta: Failure("crash", "run", ""))
    result = tuned(tmp_path / "a.jsonl", measurer=failed, trials=16, strategy="random")
    assert result.best == {GEMM: -1} and read_run(tmp_path / "a.jsonl").finals == {}


def test_near_copies_of_the_best_leave_room_for_other_tiles_and_structures_that_are_close(
    tmp_path: Path,
) -> None:
    """Tiles of 8 are fastest, those of 16 close behind, all others far."""
    base = {8: 100.0, 16: 104.0}

    def outcome(theta: Theta) -> Timing:
        us = base.get(int(theta.tile["bm"]), 300.0) + analytic_us(theta) * 1e-4
        return Timing((us,), us)

    _, run, record = decided(
        tmp_path / "a.jsonl", AnalyticMeasurer(outcome), trials=96, finalists=7
    )
    assert sum(us < 104 for us, _ in times(run)) > 7 and any(104 < us < 105 for us, _ in times(run))
    found = [run.trials[entry.trial].theta for entry in record.entries]
    ranked = [run.trials[number].theta for _, number in times(run)]
    close = [run.trials[number].theta for us, number in times(run) if us < 1.08 * times(run)[0][0]]

    def structure(theta: Theta) -> object:
        return theta.tile, theta.map, theta.sync

    def unlike(kind: Callable[[Theta], object], count: int) -> Theta:
        """The fastest that is close and unlike the first `count` of those found."""
        seen = list(map(kind, found[:count]))
        left = [theta for theta in ranked if theta not in found[:count]]
        return next((t for t in left if t in close and kind(t) not in seen), left[0])

    first, second = unlike(lambda t: t.tile, 1), unlike(structure, 2)
    fourth = next(theta for theta in ranked if theta not in found[:3])
    assert found[:4] == [ranked[0], first, second, fourth]
    assert found[4:6] == [unlike(lambda t: t.tile, 4), unlike(structure, 5)]
    assert found[1].tile != found[0].tile
    assert len(record.entries) == 7 + (record.default not in [e.trial for e in record.entries[:7]])


def test_a_censored_time_is_no_finalist(tmp_path: Path) -> None:
    def outcome(theta: Theta) -> Timing:
        us = analytic_us(theta)
        return Timing((us,), us, censored=us > 180, bound_us=180.0 if us > 180 else 0.0)

    _, run, record = decided(tmp_path / "a.jsonl", AnalyticMeasurer(outcome), finalists=40)
    outcomes = [run.trials[entry.trial].outcome for entry in record.entries]
    assert outcomes and not any(o.censored for o in outcomes if isinstance(o, Timing))
    assert record.default == -1  # the default was cut: it has no time of its own


class Qualifying(AnalyticMeasurer):
    """A round under load in which the slowest are fastest, after `spent` seconds."""

    def __init__(self, us: Callable[[Theta], float] = analytic_us, spent: float = 0.0) -> None:
        super().__init__(lambda theta: Timing((us(theta),), us(theta)))
        self.asked: list[int] = []
        self.spent = spent

    def qualify(
        self, workload: Workload, candidates: Sequence[Candidate], deadline: float | None = None
    ) -> list[FinalEntry]:
        self.asked = [candidate.trial for candidate in candidates]
        time.sleep(self.spent)
        times = [(c.trial, 1e6 / analytic_us(c.kernel.theta)) for c in candidates]
        return [FinalEntry(trial, (us,) * 3, us) for trial, us in times]


def test_what_is_fastest_under_load_is_in_the_final(tmp_path: Path) -> None:
    measurer = Qualifying()
    _, run, record = decided(tmp_path / "a.jsonl", measurer)
    assert len(measurer.asked) == 12 and measurer.asked[0] == times(run)[0][1]
    assert [entry.trial for entry in record.qualifying] == measurer.asked
    slowest = sorted(measurer.asked, key=lambda n: -analytic_us(run.trials[n].theta))
    assert [entry.trial for entry in record.entries[:4]] == slowest[:4]
    assert record.default in [entry.trial for entry in record.entries]


def test_what_fails_under_load_is_no_finalist(tmp_path: Path) -> None:
    class Failing(Qualifying):
        def qualify(self, *asked: Any) -> list[FinalEntry]:
            first, *others = super().qualify(*asked)
            return [FinalEntry(first.trial, (), 0.0, "crash"), *others]

    measurer = Failing()
    _, _, record = decided(tmp_path / "a.jsonl", measurer, finalists=20, trials=96)
    assert len(measurer.asked) == 36  # not 60
    assert measurer.asked[0] not in [entry.trial for entry in record.entries]


def test_there_is_no_round_under_load_among_few_or_slow_kernels(tmp_path: Path) -> None:
    measurer = Qualifying()
    _, _, record = decided(tmp_path / "a.jsonl", measurer, trials=16, finalists=64)
    assert record.qualifying == () and not measurer.asked and len(record.entries) > 4
    measurer = Qualifying(lambda theta: 2000.0 + analytic_us(theta))
    _, run, record = decided(tmp_path / "b.jsonl", measurer)
    assert not measurer.asked and record.entries[0].trial == times(run)[0][1]


@pytest.mark.usefixtures("clock")
def test_a_round_that_took_too_long_leaves_no_final(tmp_path: Path) -> None:
    measurer = Qualifying(spent=9.6)
    result = tuned(
        tmp_path / "a.jsonl", measurer=measurer, strategy="random", trials=48, seconds=10.0
    )
    assert measurer.asked and result.best[GEMM] >= 0
    assert read_run(tmp_path / "a.jsonl").finals == {}


def test_the_winner_of_an_earlier_final_is_in_the_next_one(tmp_path: Path) -> None:
    """Its trial was the slowest of the four finalists', and many later ones are faster."""
    log, asked = tmp_path / "a.jsonl", dict[str, float]()

    def final(theta: Theta) -> tuple[float, ...]:
        """The fourth that is asked is fastest; the default comes last."""
        return (asked.setdefault(theta.key(), 100.0 if len(asked) == 3 else 200.0),) * 5

    _, run, first = decided(log, Deciding(final))
    assert first.best == times(run)[3][1] == first.entries[3].trial
    measurer = Deciding(final)
    _, run, _ = decided(log, measurer, trials=480, resume=True)
    assert first.best not in [number for _, number in times(run)[:4]]
    assert set(measurer.asked) == {*[n for _, n in times(run)[:4]], first.default, first.best}
