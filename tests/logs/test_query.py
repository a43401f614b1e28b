"""Questions asked of logs."""

from __future__ import annotations

import msgspec
import pytest
from fake_runs import GEMM, THETA, header, one_of_each, proposed, trial

from kt.logs.query import best_of, best_trials, curve, failures, runs
from kt.logs.record import (
    BatchRecord,
    Entry,
    Failure,
    FinalEntry,
    FinalRecord,
    ModelReport,
    Record,
    ResumeRecord,
    Settings,
    StopRecord,
    Timing,
)

CRASH = Failure("crash", "run", "signal 11")
SLOW = Timing((), 50.0, censored=True, bound_us=50.0)
OTHER = "gemm 8x8x8 dtype=fp32"


def final(*entries: FinalEntry, best: int, default: int = 0, run: str = "r") -> FinalRecord:
    return FinalRecord(
        run=run, workload=GEMM, entries=entries, best=best, default=default, noise=0.01, time="t"
    )


def batch(number: int, *trials: int, run: str = "r") -> BatchRecord:
    return BatchRecord(
        run=run, batch=number, workload=GEMM, predicted=tuple(t / 10 for t in trials), time="t",
        entries=tuple(Entry(t, "fake", THETA, "model") for t in trials), model=ModelReport(),
    )  # fmt: skip


def test_records_are_sorted_into_their_runs() -> None:
    a, b = one_of_each("a"), one_of_each("b")
    mixed: list[Record] = [record for pair in zip(a, b, strict=True) for record in pair]
    first, second = runs([*mixed, trial(7, run="nobody's")])
    assert (first.header, second.header) == (a[0], b[0])
    assert list(first.trials) == list(second.trials) == [0, 1, 2]
    assert first.finals[GEMM] == a[5] and first.resumes == [a[6]] and first.stop == a[7]
    assert first.batches == [a[1]]


def test_a_resume_takes_the_stop_back() -> None:
    stop = StopRecord(run="r", reason="trials", trials=1, best={}, seconds={}, time="t")
    resume = ResumeRecord(run="r", boot="", settings=Settings(), time="t")
    assert runs([header(), stop, resume])[0].stop is None
    assert runs([header(), stop, resume, stop])[0].stop == stop


def test_the_first_record_of_a_trial_and_of_a_run_counts() -> None:
    (run,) = runs(proposed(header(), trial(0, 5.0), trial(0, 4.0), header(seed=9), trial(1, 6.0)))
    assert run.trials == {0: trial(0, 5.0), 1: trial(1, 6.0)}
    assert run.header.seed == 0


def test_trials_of_a_workload_that_the_run_does_not_have_are_left_out() -> None:
    (run,) = runs(proposed(header(), trial(0, workload=OTHER), trial(1)))
    assert list(run.trials) == [1]


def test_a_batch_that_was_cut_is_completed_by_its_second_record() -> None:
    (run,) = runs([header(), batch(0, 0, 1), batch(1, 2, 3), batch(1, 4, 5), batch(2, 6)])
    assert [[e.trial for e in b.entries] for b in run.batches] == [[0, 1], [2, 3, 4, 5], [6]]
    assert run.batches[1].predicted == (0.2, 0.3, 0.4, 0.5)


def test_batches_of_two_resumes_at_once_are_not_doubled() -> None:
    (run,) = runs([header(), batch(0, 0, 1), batch(1, 2), batch(1, 2), batch(0, 0, 1), batch(2, 3)])
    assert [[e.trial for e in b.entries] for b in run.batches] == [[0, 1], [2], [3]]


def test_the_best_is_the_fastest_time_that_is_a_result() -> None:
    records = [header(), trial(0, 90.0, source="default"), trial(1, CRASH), trial(2, SLOW),
               trial(3, 70.0), trial(4, 70.0)]  # fmt: skip
    (run,) = runs(proposed(*records))
    best = best_of(run, GEMM)
    assert best is not None
    assert (best.trial.trial, best.us, best.default_us, best.final) == (3, 70.0, 90.0, None)
    assert best_of(runs(proposed(header(), trial(0, CRASH), trial(1, SLOW)))[0], GEMM) is None
    assert best_of(run, OTHER) is None


def test_a_final_decides_with_its_own_times() -> None:
    decided = final(FinalEntry(0, (88.0,), 88.0), FinalEntry(4, (71.0,), 71.0), best=4)
    (run,) = runs(proposed(header(), trial(0, 90.0), trial(3, 70.0), trial(4, 72.0), decided))
    best = best_of(run, GEMM)
    assert best is not None
    assert (best.trial.trial, best.us, best.default_us, best.final) == (4, 71.0, 88.0, decided)


def test_what_failed_its_verification_is_never_the_best() -> None:
    failed = FinalEntry(3, (), 0.0, "wrong_result on seed 2")
    records = [header(), trial(0, 90.0, source="default"), trial(3, 70.0), trial(4, 80.0),
               final(failed, FinalEntry(0, (), 0.0, "wrong"), best=-1)]  # fmt: skip
    (run,) = runs(proposed(*records))
    best = best_of(run, GEMM)
    assert best is not None
    assert (best.trial.trial, best.us, best.default_us) == (4, 80.0, None)


def test_a_final_that_names_a_trial_it_did_not_time_is_not_believed() -> None:
    for best in (3, 99):
        (run,) = runs(proposed(header(), trial(0, 90.0), trial(3, 70.0),
                       final(FinalEntry(0, (1.0,), 1.0), best=best)))  # fmt: skip
        found = best_of(run, GEMM)
        assert found is not None and (found.trial.trial, found.us) == (3, 70.0)


@pytest.mark.parametrize("entry", [FinalEntry(3, (0.0,), 0.0), FinalEntry(3, (), 5.0)])
def test_a_final_without_a_time_is_not_believed(entry: FinalEntry) -> None:
    (run,) = runs(proposed(header(), trial(0, 90.0), trial(3, 70.0), final(entry, best=3)))
    found = best_of(run, GEMM)
    assert found is not None and (found.us, found.final) == (70.0, None)


def test_the_best_trials_are_by_workload_and_device_over_all_runs() -> None:
    target = header().target
    elsewhere = msgspec.structs.replace(target, processor="another")
    records: list[Record] = [
        header("a"), trial(0, 9.0, "a"), header("b", workloads=(GEMM, OTHER)), trial(0, 8.0, "b"),
        trial(1, 5.0, "b", workload=OTHER), header("c", target=elsewhere), trial(0, 1.0, "c"),
        header("d", workloads=("conv2d",)),
    ]  # fmt: skip
    found = [
        (b.workload, b.us, b.trial.run, b.target.processor) for b in best_trials(proposed(*records))
    ]
    assert found == [
        (GEMM, 8.0, "b", target.processor), (OTHER, 5.0, "b", target.processor),
        (GEMM, 1.0, "c", "another"),
    ]  # fmt: skip


def test_failures_are_counted_most_frequent_first() -> None:
    slow = Failure("run_timeout", "run", "10 s")
    trials = [trial(0, slow), trial(1, CRASH), trial(2, CRASH), trial(3)]
    assert list(failures(trials).items()) == [("crash", 2), ("run_timeout", 1)]
    assert failures([trial(0)]) == {}


def test_the_curve_has_a_point_wherever_the_best_improved() -> None:
    outcomes = [CRASH, 50.0, 60.0, SLOW, 40.0, 40.0, 30.0]
    assert list(curve([trial(i, o) for i, o in enumerate(outcomes)])) == [(2, 50), (5, 40), (7, 30)]
    assert list(curve([])) == []
