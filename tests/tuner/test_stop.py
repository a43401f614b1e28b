"""Why a run ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_runs import GEMM, read_run, tuned
from fakes import AnalyticMeasurer, FakeFamily, analytic_outcome
from odd_families import HOLES, ONE_KNOB, TWO

from kt.logs.record import Bound, Failure, FinalEntry, Outcome, Timing
from kt.spaces import families
from kt.spaces.theta import Theta
from kt.spaces.workload import Workload, parse
from kt.tuner.measure import Candidate, FrozenBatch, Measured
from kt.tuner.stop import bound_us

pytestmark = pytest.mark.usefixtures("fake_families")

OTHER = "gemm 32x32x32 dtype=fp32"
RANDOM: dict[str, Any] = {"strategy": "random", "batch_size": 8}


def always(outcome: Outcome) -> AnalyticMeasurer:
    return AnalyticMeasurer(lambda theta: outcome)


def test_after_the_trials_of_every_workload(tmp_path: Path) -> None:
    result = tuned(tmp_path / "a.jsonl", trials=20, **RANDOM)
    assert (result.reason, result.trials) == ("trials", 20)
    both = tuned(tmp_path / "b.jsonl", GEMM, OTHER, trials=20, **RANDOM)
    assert (both.reason, both.trials) == ("trials", 40)
    run = read_run(tmp_path / "b.jsonl")
    assert [len(run.of(text)) for text in (GEMM, OTHER)] == [20, 20]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_a_few_trials_reach_every_workload(batch_size: int, tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", GEMM, OTHER, trials=2, strategy="random", batch_size=batch_size)
    run = read_run(tmp_path / "a.jsonl")
    assert [len(run.of(text)) for text in (GEMM, OTHER)] == [2, 2]
    assert [run.of(text)[0].source for text in (GEMM, OTHER)] == ["default", "default"]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_when_the_space_is_exhausted(
    lag: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for family in (TWO, ONE_KNOB, HOLES):
        monkeypatch.setattr(families, "FAMILIES", {("gemm", "cpu"): (family,)})
        measurer = always(Timing((5.0,), 5.0))
        result = tuned(
            tmp_path / f"{family.name}.jsonl", measurer=measurer, lag=lag, trials=500, **RANDOM
        )
        listed = families.space_of(parse(GEMM), read_run(result.log).header.target).listed
        assert listed is not None
        assert (result.reason, result.trials) == ("exhausted", len(listed))


def test_a_small_workload_that_ends_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class OnlySmall(type(TWO)):  # type: ignore[misc]
        def refuses(self, workload: Any, target: Any) -> str | None:
            return None if workload.m == 32 else "not small"

    class OnlyLarge(FakeFamily):
        def refuses(self, workload: Any, target: Any) -> str | None:
            return None if workload.m == 64 else "not large"

    small = OnlySmall(*TWO.knobs(None, None), name="small")  # type: ignore[arg-type]
    monkeypatch.setattr(families, "FAMILIES", {("gemm", "cpu"): (small, OnlyLarge())})

    def outcome(theta: Theta) -> Outcome:
        return analytic_outcome(theta) if "bk" in theta.tile else Timing((1.0,), 1.0)

    for order in ((GEMM, OTHER), (OTHER, GEMM)):
        log = tmp_path / f"{order[0][:7]}.jsonl"
        result = tuned(log, *order, measurer=AnalyticMeasurer(outcome), trials=20, **RANDOM)
        run = read_run(log)
        assert (len(run.of(OTHER)), len(run.of(GEMM))) == (2, 20)
        assert result.reason == "trials"


@pytest.mark.usefixtures("clock")
def test_after_the_time_and_the_rest_is_measured_when_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = RANDOM | {"trials": 64}
    assert time.monotonic() == 0
    slow = AnalyticMeasurer(seconds=1.0)
    result = tuned(tmp_path / "a.jsonl", measurer=slow, seconds=20.0, **settings)
    assert result.reason == "time" and result.trials == 15  # 5 s are the final's
    assert list(read_run(tmp_path / "a.jsonl").finals) == [GEMM] and result.best[GEMM] >= 0
    done = tuned(tmp_path / "a.jsonl", resume=True, **settings)
    assert (done.reason, done.trials) == ("trials", 64)
    tuned(tmp_path / "b.jsonl", **settings)
    trials = [read_run(tmp_path / f"{name}.jsonl").trials for name in "ab"]
    assert [t.theta for _, t in sorted(trials[0].items())] == [
        t.theta for _, t in sorted(trials[1].items())
    ]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("lag", [0, 1])
def test_a_short_time_is_for_the_first_trial_and_not_for_finals(lag: int, tmp_path: Path) -> None:
    class Slow(AnalyticMeasurer):
        def prepare(self, workloads: Sequence[Workload]) -> None:
            time.sleep(3.0)  # 1.2 s of the 4 s would be the finals'
            super().prepare(workloads)

    result = tuned(tmp_path / "a.jsonl", measurer=Slow(seconds=0.5), seconds=4.0, lag=lag, **RANDOM)
    assert (result.reason, result.trials) == ("time", 2) and result.best[GEMM] >= 0
    long = tuned(tmp_path / "b.jsonl", measurer=Slow(seconds=3.0), seconds=5.0, lag=lag, **RANDOM)
    assert (long.reason, long.trials) == ("time", 1)


def test_after_failures_when_nothing_ever_succeeded(tmp_path: Path) -> None:
    crash = Failure("crash", "run", "signal 11", "stderr tail")
    result = tuned(tmp_path / "a.jsonl", measurer=always(crash), max_failures=10, **RANDOM)
    assert result.reason == "failures" and 10 <= result.trials <= 16
    assert result.failures == {"crash": result.trials}
    assert result.best == {GEMM: -1}
    assert result.first_failure == "crash: signal 11\nstderr tail"
    assert read_run(tmp_path / "a.jsonl").finals == {}


@pytest.mark.parametrize("strategy", ["kt", "forest", "anneal", "random", "grid"])
def test_failures_alone_never_break_a_strategy(strategy: str, tmp_path: Path) -> None:
    failed = always(Failure("compile_error", "build", "no"))
    settings = {"strategy": strategy, "trials": 60, "batch_size": 8}
    result = tuned(tmp_path / "a.jsonl", measurer=failed, **settings)
    assert result.reason == "trials" and result.failures == {"compile_error": 60}


def test_failures_do_not_end_a_run_that_has_a_result(tmp_path: Path) -> None:
    def mostly(theta: Theta) -> Outcome:
        failed = Failure("crash", "run", "")
        return Timing((9.0,), 9.0) if theta.tile["bm"] == 8 else failed

    measurer = AnalyticMeasurer(mostly)
    result = tuned(tmp_path / "a.jsonl", measurer=measurer, trials=80, max_failures=10, **RANDOM)
    assert result.reason == "trials" and result.failures["crash"] > 40


def test_after_patience_without_an_improvement(tmp_path: Path) -> None:
    flat = always(Timing((5.0,), 5.0))
    result = tuned(tmp_path / "a.jsonl", measurer=flat, trials=100, patience=20, **RANDOM)
    assert result.reason == "patience" and 21 <= result.trials <= 28


def test_a_run_that_improves_outlasts_its_patience(tmp_path: Path) -> None:
    times = iter(range(1000, 0, -1))
    falling = AnalyticMeasurer(lambda theta: Timing((1.0,), float(next(times))))
    result = tuned(tmp_path / "a.jsonl", measurer=falling, trials=60, patience=5, **RANDOM)
    assert result.reason == "trials"


class NearBound(AnalyticMeasurer):
    """A device whose measured bound is 95 µs for the workload."""

    def bound(self, dtype: str) -> Bound:
        return Bound(2 * 64**3 / 95e-6, 1e15)


def test_near_the_measured_bound(tmp_path: Path) -> None:
    result = tuned(tmp_path / "a.jsonl", measurer=NearBound(), near_bound=0.5, trials=500, **RANDOM)
    best = min(t.outcome.median_us for t in read_run(result.log).trials.values()
               if isinstance(t.outcome, Timing))  # fmt: skip
    assert result.reason == "near_bound" and best <= 95 * 1.5
    far = tuned(tmp_path / "b.jsonl", measurer=NearBound(), near_bound=0.01, trials=64, **RANDOM)
    assert far.reason == "trials"  # 100 µs is the fastest there is


def test_every_workload_must_be_near_its_bound(tmp_path: Path) -> None:
    result = tuned(tmp_path / "a.jsonl", GEMM, OTHER, measurer=NearBound(), near_bound=0.5,
                   trials=64, **RANDOM)  # fmt: skip
    assert result.reason == "trials"  # 32³ has an eighth of the work in the same time


def test_the_bound_is_the_slower_of_arithmetic_and_traffic() -> None:
    workload = parse("gemm 100x100x100")
    assert bound_us(workload, Bound(1e6, 1e30)) == pytest.approx(2e6)
    assert bound_us(workload, Bound(1e30, 1e6)) == pytest.approx(3 * 100 * 100 * 4)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_interrupt_ends_with_the_best_so_far(lag: int, tmp_path: Path) -> None:
    measurer = AnalyticMeasurer(die_after=20)
    result = tuned(tmp_path / "a.jsonl", measurer=measurer, trials=64, lag=lag, **RANDOM)
    run = read_run(tmp_path / "a.jsonl")
    fastest = min(
        (t.outcome.median_us, n) for n, t in run.trials.items() if isinstance(t.outcome, Timing)
    )
    assert result.reason == "interrupted" and result.trials == len(run.trials) == 20
    assert result.best == {GEMM: fastest[1]}
    assert run.stop is not None and run.stop.reason == "interrupted"
    again = tuned(tmp_path / "a.jsonl", trials=64, lag=lag, resume=True, **RANDOM)
    assert (again.reason, again.trials) == ("trials", 64)


def test_an_interrupt_before_the_first_result(tmp_path: Path) -> None:
    result = tuned(tmp_path / "a.jsonl", measurer=AnalyticMeasurer(die_after=0), **RANDOM)
    assert (result.reason, result.trials, result.best) == ("interrupted", 0, {GEMM: -1})


def test_an_interrupt_among_the_finalists(tmp_path: Path) -> None:
    class Impatient(AnalyticMeasurer):
        def finals(self, *_: Any) -> Any:
            raise KeyboardInterrupt

    result = tuned(tmp_path / "a.jsonl", measurer=Impatient(), trials=16, **RANDOM)
    assert result.reason == "interrupted" and result.best[GEMM] >= 0
    assert read_run(tmp_path / "a.jsonl").finals == {}


def test_an_interrupt_in_the_second_final_keeps_the_firsts_winner(tmp_path: Path) -> None:
    class Deciding(AnalyticMeasurer):
        """The fastest of the search fails its final; the second workload's is interrupted."""

        def finals(
            self,
            workload: Workload,
            candidates: Sequence[Candidate],
            deadline: float | None = None,
        ) -> list[FinalEntry]:
            if str(workload) == OTHER:
                raise KeyboardInterrupt
            first, *rest = super().finals(workload, candidates, deadline)
            return [FinalEntry(first.trial, (), 0.0, "wrong"), *rest]

    log = tmp_path / "a.jsonl"
    result = tuned(log, GEMM, OTHER, measurer=Deciding(), trials=16, **RANDOM)
    run = read_run(log)
    fastest = {
        text: min((t.outcome.median_us, n) for n, t in run.trials.items()
                  if t.workload == text and isinstance(t.outcome, Timing))[1]
        for text in (GEMM, OTHER)
    }  # fmt: skip
    assert result.reason == "interrupted" and set(run.finals) == {GEMM}
    decided = run.finals[GEMM].best
    assert decided >= 0 and decided != fastest[GEMM]
    assert result.best == {GEMM: decided, OTHER: fastest[OTHER]}
    assert run.stop is not None and run.stop.best == result.best


def test_a_bug_of_the_measurer_is_not_hidden(tmp_path: Path) -> None:
    class Broken(AnalyticMeasurer):
        def finish(self, batch: FrozenBatch, deadline: float | None = None) -> Iterator[Measured]:
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        tuned(tmp_path / "a.jsonl", measurer=Broken(), **RANDOM)
    assert tuned(tmp_path / "a.jsonl", trials=16, resume=True, **RANDOM).reason == "trials"
