"""The scheduler by gain: where batches go, and that this is a function of header and outcomes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_runs import CPU, proposals, read_run, tuned
from fakes import AnalyticMeasurer

from kt.logs.query import Run
from kt.logs.record import Failure, Outcome, Timing
from kt.spaces.errors import SettingsError, WorkloadError
from kt.spaces.workload import parse
from kt.tuner import api
from kt.tuner.api import effective_settings
from kt.tuner.measure import Candidate, Measured
from kt.tuner.replay import check_identity
from kt.tuner.request import weighted_workloads
from kt.tuner.tune import tune

pytestmark = pytest.mark.usefixtures("fake_families")

A, B, C = (f"gemm {n}x64x64 dtype=fp32" for n in (64, 128, 256))
GAIN: dict[str, Any] = {
    "scheduler": "gain", "revision": 3, "batch_size": 8, "trials": 48, "epsilon": 0.25
}  # fmt: skip


class Scaled(AnalyticMeasurer):
    """Times of the formula by a factor a workload; 0: all its kernels take 100 µs, None: fail."""

    def __init__(self, factors: dict[str, float | None], **options: Any) -> None:
        super().__init__(**options)
        self.factors = factors

    def _measured(self, candidate: Candidate, first: int) -> Measured:
        measured = super()._measured(candidate, first)
        if measured.outcome is None:
            return measured
        outcome = self._scaled(str(candidate.kernel.workload), measured.outcome)
        return replace(measured, outcome=outcome)

    def _scaled(self, workload: str, outcome: Outcome) -> Outcome:
        factor = self.factors[workload]
        if factor is None:
            return Failure("crash", "run", "signal 11")
        if isinstance(outcome, Failure):
            return outcome
        us = factor * outcome.median_us or 100.0
        return Timing((us,), us)


def shared(log: Path, factors: dict[str, float | None], **options: Any) -> Run:
    """A finished run by gain over the workloads of `factors`."""
    measurer = Scaled(factors, shuffle=options.pop("shuffle", 0))
    result = tuned(log, *factors, measurer=measurer, **GAIN | options)
    run = read_run(log)
    assert result.reason == "trials" and len(run.trials) == result.trials
    assert result.trials == (GAIN | options)["trials"] * len(factors)
    return run


def batches(run: Run) -> Counter[str]:
    return Counter(batch.workload for batch in run.batches)


def test_workloads_that_have_nothing_to_gain_stop_getting_batches(tmp_path: Path) -> None:
    found = batches(shared(tmp_path / "a.jsonl", {A: 0, B: 1, C: 0}, trials=40))
    assert max(found[A], found[C]) <= 3 and found[B] >= 9


def test_the_longest_of_equals_gets_most(tmp_path: Path) -> None:
    found = batches(shared(tmp_path / "a.jsonl", {A: 1, B: 30, C: 1}))
    assert found[B] > 1.5 * max(found[A], found[C]) and min(found.values()) >= 2


def test_few_trials_leave_no_workload_without_any(tmp_path: Path) -> None:
    """The first batch alone would take what two workloads have together."""
    run = shared(tmp_path / "a.jsonl", {A: 1, B: 1, C: 1}, trials=4)
    assert [(b.workload, len(b.entries)) for b in run.batches] == [(A, 4), (B, 4), (C, 4)]
    assert not check_identity(run).difference
    run = shared(tmp_path / "b.jsonl", {A: 1, B: 1, C: 1}, trials=1)
    assert [trial.source for trial in run.trials.values()] == ["default"] * 3


def test_a_weight_counts_like_a_longer_time(tmp_path: Path) -> None:
    log, factors = tmp_path / "a.jsonl", {A: 1.0, B: 1.0, C: 1.0}
    texts = list(map(parse, factors))
    settings, measurer = effective_settings(CPU, GAIN), Scaled(dict(factors))
    tune(texts, CPU, log, measurer, settings, weights={texts[0]: 1, texts[1]: 30})
    run = read_run(log)
    assert run.header.weights == {B: 30}
    longest = shared(tmp_path / "b.jsonl", {A: 1, B: 30, C: 1})
    assert batches(run)[B] == batches(longest)[B] > batches(run)[A]
    assert not check_identity(run).difference
    with pytest.raises(SettingsError, match="its workloads have other weights"):
        tune(texts, CPU, log, measurer, settings, resume=True, weights={texts[1]: 2})


def test_a_line_of_the_workloads_file_has_a_weight(tmp_path: Path) -> None:
    file = tmp_path / "shapes.txt"
    file.write_text(f"{A} weight=2.5\n{B}  # once\n")
    weighted = weighted_workloads((), {}, file, "fp32")
    assert weighted == {parse(A): 2.5, parse(B): 1.0}
    for wrong in ("weight=0", "weight=x", "weight=nan", "weight=1 weight=2", "weight=1e10"):
        file.write_text(f"{A} {wrong}")
        with pytest.raises(WorkloadError, match=r"shapes.txt:1: weight=.* accepts one number of"):
            weighted_workloads((), {}, file, "fp32")
    with pytest.raises(WorkloadError, match="weight"):
        weighted_workloads((f"{A} weight=2",), {}, None, "fp32")
    for weights, says in (([1.0], "1 for 2 workloads"), ([1.0, -1.0], "weight -1.0: accepts")):
        with pytest.raises(SettingsError, match=says):
            api.tune([A, B], target=CPU, weights=weights, measurer=AnalyticMeasurer())


def test_one_whose_kernels_all_fail_does_not_take_the_others_turns(tmp_path: Path) -> None:
    found = batches(shared(tmp_path / "a.jsonl", {A: None, B: 1}, trials=40))
    assert found[A] <= 3 and found[B] >= 7


def test_workloads_that_have_all_converged_take_even_turns(tmp_path: Path) -> None:
    found = batches(shared(tmp_path / "a.jsonl", {A: 0, B: 0, C: 0}))
    assert set(found.values()) == {6}


@pytest.mark.parametrize(("strategy", "lag"), [("kt", 0), ("kt", 1), ("random", 1)])
def test_a_replay_finds_the_same_turns(tmp_path: Path, strategy: str, lag: int) -> None:
    run = shared(tmp_path / "a.jsonl", {A: 1, B: 5}, lag=lag, strategy=strategy)
    assert not check_identity(run).difference
    even = msgspec.structs.replace(run.header.settings, scheduler="even")
    run.header = msgspec.structs.replace(run.header, settings=even)
    assert "proposes for" in check_identity(run).difference


def test_the_order_of_results_does_not_matter(tmp_path: Path) -> None:
    factors: dict[str, float | None] = {A: 1, B: 5}
    one, other = (shared(tmp_path / f"{n}.jsonl", factors, lag=1, shuffle=n) for n in (0, 8))
    assert proposals(one) == proposals(other)


@pytest.mark.parametrize(("lag", "after"), [(0, 37), (1, 3), (1, 61)])
def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(
    tmp_path: Path, lag: int, after: int
) -> None:
    factors: dict[str, float | None] = {A: 1, B: 5}
    whole = shared(tmp_path / "whole.jsonl", factors, lag=lag)
    log, settings = tmp_path / "cut.jsonl", GAIN | {"lag": lag}
    first = tuned(log, A, B, measurer=Scaled(factors, die_after=after), **settings)
    assert first.reason == "interrupted"
    tuned(log, A, B, measurer=Scaled(factors), resume=True, **settings)
    assert proposals(read_run(log)) == proposals(whole)


def test_a_larger_budget_goes_on_where_a_smaller_one_ended(tmp_path: Path) -> None:
    factors: dict[str, float | None] = {A: 1, B: 5}
    whole = shared(tmp_path / "whole.jsonl", factors)
    log = tmp_path / "a.jsonl"
    tuned(log, A, B, measurer=Scaled(factors), **GAIN | {"trials": 21})
    assert len(read_run(log).trials) == 42  # the last batch was cut
    tuned(log, A, B, measurer=Scaled(factors), resume=True, **GAIN)
    assert proposals(read_run(log)) == proposals(whole)


def test_a_resumed_run_keeps_its_scheduler(tmp_path: Path) -> None:
    shared(tmp_path / "a.jsonl", {A: 0, B: 0}, trials=16)
    with pytest.raises(SettingsError, match="it has --scheduler gain, not even"):
        tuned(tmp_path / "a.jsonl", A, B, resume=True, **GAIN | {"scheduler": "even"})


def test_a_scheduler_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SettingsError, match="--scheduler fair: accepts even, gain"):
        effective_settings(CPU, {"scheduler": "fair"})


def test_the_command_shares_the_trials(kt: Any, tmp_path: Path) -> None:
    words = ("gemm", "64x64x64", "gemm", "8x8x8", "--strategy", "random", "--trials", "24")
    ran = kt("tune", *words, "--scheduler", "gain", "--log", "a.jsonl", "--plain")
    assert ran.code == 0, ran.err
    run = read_run(tmp_path / "a.jsonl")
    assert run.header.settings.scheduler == "gain" and len(run.trials) == 48
