"""LocalMeasurer on this machine's CPU: batches, duplicates, deadlines, finals, opponents."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from c_kernels import RIGHT, gemm, kernel, source
from served import descendants, wait_gone

from kt.logs.record import Failure, Settings, Timing
from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.target import CUDA_TARGETS, detect_cpu
from kt.tuner.backend.build import Binary
from kt.tuner.measure import VENDOR, Candidate, FrozenBatch
from kt.tuner.pool import LocalMeasurer

WORKLOAD = gemm("gemm 48x40x64 dtype=fp32")
SETTINGS = Settings(run_timeout=5.0, sample_seconds=0.02)
SLEEP = "usleep({us});" + RIGHT


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def measurer(cache: None) -> Iterator[LocalMeasurer]:
    with LocalMeasurer(detect_cpu(), SETTINGS) as made:
        made.prepare([WORKLOAD])
        yield made


@pytest.fixture
def fresh() -> Iterator[LocalMeasurer]:
    with LocalMeasurer(detect_cpu(), SETTINGS, builders=1) as made:
        yield made


def batch(*bodies: str, first: int = 0, incumbent: float | None = None) -> FrozenBatch:
    candidates = tuple(
        Candidate(first + i, kernel(WORKLOAD, body)) for i, body in enumerate(bodies)
    )
    return FrozenBatch(0, WORKLOAD, candidates, incumbent)


def test_a_batch_comes_back_with_its_facts(fresh: LocalMeasurer) -> None:
    asked = batch(RIGHT, "return syntax error;", SLEEP.format(us=1), RIGHT + "c[0] += 9;")
    fresh.start(asked)
    results = {r.trial: r for r in fresh.finish(asked)}
    good, bad, slow, wrong = (results[trial] for trial in range(4))
    assert isinstance(good.outcome, Timing) and good.build and len(good.build.binary) == 64
    assert len(good.outcome.us) >= 5 and 0 < good.outcome.error < 1e-6
    assert good.seconds.build > 0 and good.seconds.check > 0 and good.seconds.run > 0
    assert isinstance(bad.outcome, Failure) and bad.outcome.failure == "compile_error"
    assert "error" in bad.outcome.message and bad.build is None
    assert isinstance(slow.outcome, Timing)
    assert slow.outcome.median_us > good.outcome.median_us
    assert isinstance(wrong.outcome, Failure) and wrong.build is not None


def test_equal_binaries_are_measured_once(fresh: LocalMeasurer) -> None:
    asked = batch(RIGHT, RIGHT + "/* the same */", "usleep(1);" + RIGHT, first=10)
    first, second, third = fresh.finish(asked)  # start is optional
    assert [first.trial, second.trial, third.trial] == [10, 11, 12]
    assert first.outcome and third.outcome and second.outcome is None
    assert second.duplicate_of == 10 and second.build is not None
    assert first.build and first.build.binary == second.build.binary
    (again,) = fresh.finish(batch(RIGHT, first=20))
    assert again.outcome is None and again.duplicate_of == 10


def test_what_an_earlier_session_measured_is_known(fresh: LocalMeasurer) -> None:
    built = fresh.build_source(source(WORKLOAD))
    assert isinstance(built, Binary)
    fresh.know(str(WORKLOAD), built.facts.binary, 3)
    (found,) = fresh.finish(batch(RIGHT, first=50))
    assert found.duplicate_of == 3


def test_candidates_that_want_to_be_alone_run_last_but_own_their_binary(
    fresh: LocalMeasurer,
) -> None:
    plain = batch(RIGHT, SLEEP.format(us=2), RIGHT)
    alone = Candidate(0, plain.candidates[0].kernel, alone=True)
    asked = FrozenBatch(0, WORKLOAD, (alone, *plain.candidates[1:]), None)
    results = list(fresh.finish(asked))
    assert [r.trial for r in results] == [1, 0, 2]
    assert results[1].outcome is not None and results[2].duplicate_of == 0


def test_slow_candidates_are_cut_and_surprises_confirmed(measurer: LocalMeasurer) -> None:
    cut, best = measurer.finish(
        batch(SLEEP.format(us=3000), SLEEP.format(us=300), first=100, incumbent=1000.0)
    )
    assert isinstance(cut.outcome, Timing) and cut.outcome.censored
    assert cut.outcome.bound_us == 2000.0 and len(cut.outcome.us) == 2
    assert isinstance(best.outcome, Timing) and best.outcome.confirmed
    assert not best.outcome.censored and len(best.outcome.us) >= 6


@pytest.mark.parametrize("stage", ["build", "run"])
def test_at_the_deadline_the_rest_is_left_out(
    fresh: LocalMeasurer, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.prepare([WORKLOAD])
    asked = batch(RIGHT, "for (;;) launches++;", SLEEP.format(us=4), first=200)
    fresh.start(asked)
    if stage == "run":  # the hang is stopped by the deadline, not by its own limit of 5 s
        wait(fresh._builds.values())
        list(fresh.finish(batch(SLEEP.format(us=9), first=290)))  # the runner is up
    begin = time.monotonic()
    got = list(fresh.finish(asked, deadline=begin + (3.0 if stage == "run" else 0.0)))
    assert [r.trial for r in got] == ([200] if stage == "run" else [])
    assert time.monotonic() - begin < 20
    (after,) = fresh.finish(batch(SLEEP.format(us=5), first=300))
    assert isinstance(after.outcome, Timing)


def test_finals_interleave_sound_candidates(measurer: LocalMeasurer) -> None:
    bodies = (RIGHT, SLEEP.format(us=200), "return error;", RIGHT + "if (launches > 2) abort();")
    entries = measurer.finals(WORKLOAD, batch(*bodies, first=400).candidates)
    assert [e.trial for e in entries] == [400, 401, 402, 403, VENDOR]
    fast, slow, uncompiled, dying, vendor = entries
    assert len(vendor.us) == len(fast.us) and vendor.median_us > 0
    assert len(fast.us) == len(slow.us) >= 10 and fast.median_us < slow.median_us
    assert uncompiled.failure.startswith("compile_error") and not uncompiled.us
    assert dying.failure == "crash: SIGABRT"


def test_on_a_cpu_there_is_no_round_under_load(measurer: LocalMeasurer) -> None:
    assert measurer.qualify(WORKLOAD, batch(RIGHT, first=450).candidates) == []


def test_a_finalist_that_dies_while_compared_is_dropped(measurer: LocalMeasurer) -> None:
    # Outputs are NaN where results are checked, and zeros at first where launches are timed.
    bodies = ("if (c[0] == 0) _exit(5);" + RIGHT, SLEEP.format(us=6))
    dying, sound, _ = measurer.finals(WORKLOAD, batch(*bodies, first=500).candidates)
    assert dying.failure == "crash: exit code 5" and not sound.failure and sound.us


def test_an_emitted_kernel_is_verified_and_compared_with_numpy(measurer: LocalMeasurer) -> None:
    built = [measurer.build_source(source(WORKLOAD, body)) for body in (RIGHT, "c[0] = 0;")]
    right, wrong = (one for one in built if isinstance(one, Binary))
    verified = measurer.verify_binary(right, WORKLOAD, seeds=(0, 11, 12))
    assert not verified.failure and verified.launches >= 12 and verified.error < 1e-6
    assert measurer.verify_binary(wrong, WORKLOAD, seeds=(1,)).failure.startswith("wrong_result")
    compared = measurer.compare_binaries(WORKLOAD, [right, right], seconds=0.1, vendor=True)
    assert len(compared.us) == 3 and all(len(us) >= 3 for us in compared.us)
    assert not compared.failure


@pytest.mark.parametrize(
    "text",
    [
        "gemm 64x64x64 dtype=fp32",
        "gemm 33x17x65 batch=3 layout=tt epilogue=bias+gelu+residual+scale dtype=fp64",
        "gemm 33x17x65 layout=nt epilogue=relu+silu dtype=fp32",
    ],
)
def test_the_vendor_is_timed_with_its_epilogue(measurer: LocalMeasurer, text: str) -> None:
    us = measurer.vendor_us(gemm(text))
    assert us is not None and 0.1 < us < 1e6


def test_bounds_are_below_the_datasheet_and_above_the_absurd(measurer: LocalMeasurer) -> None:
    target = detect_cpu()
    bound = measurer.bound("fp64")
    assert 1e9 < bound.flops < target.peak["fp64"]
    assert 5e8 < bound.bandwidth < target.bandwidth


def test_the_environment_shows_that_caches_are_cold(measurer: LocalMeasurer) -> None:
    facts = measurer.environment()
    assert facts["cores"] == detect_cpu().cores and "-O3" in str(facts["compiler"])
    rates = {name: rate for name, rate in facts.items() if name.startswith("cold_")}
    always, flushed = {"cold_hot_gbps", "cold_rotated_gbps"}, {"cold_flushed_gbps", "cold_share"}
    assert set(rates) in (always, always | flushed)  # on a busy machine they have no order
    assert all(isinstance(rate, float) and rate > 0 for rate in rates.values())


def test_operands_that_do_not_fit_are_refused(fresh: LocalMeasurer) -> None:
    with pytest.raises(TargetError, match=r"needs .* GiB"):
        fresh.prepare([gemm("gemm 100000x100000x100000 dtype=fp32")])
    with pytest.raises(TargetError, match="bf16"):
        fresh.prepare([gemm("gemm 8x8x8 dtype=bf16")])


def test_other_targets_and_missing_compilers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="h200"):
        LocalMeasurer(CUDA_TARGETS["h200"], SETTINGS)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no-such-compiler"):
        LocalMeasurer(detect_cpu(), SETTINGS)


def test_close_leaves_no_process_no_file_and_no_thread() -> None:
    before, threads = descendants(os.getpid()), names_of_threads()
    measurer = LocalMeasurer(detect_cpu(), SETTINGS, builders=2)
    list(measurer.finish(batch(RIGHT, SLEEP.format(us=7))))
    children = descendants(os.getpid()) - before
    directory: Path = measurer._session.path
    assert len(children) >= 2 and directory.is_dir()
    measurer.start(batch(SLEEP.format(us=8), first=5))
    measurer.close()
    measurer.close()
    assert not wait_gone(children) and not directory.exists()
    assert names_of_threads() <= threads


def names_of_threads() -> set[str]:
    """Of those alive, without the one that starts workers and stays."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if not name.startswith("kt-start")}


def test_one_measurer_serves_two_runs(fresh: LocalMeasurer) -> None:
    fresh.prepare([WORKLOAD])
    first, twin = fresh.finish(batch(RIGHT, RIGHT + "/* the same */"))
    assert isinstance(first.outcome, Timing) and twin.duplicate_of == 0
    fresh.prepare([WORKLOAD])  # trials are numbered from 0 again, and every binary is new
    other, again = fresh.finish(batch(SLEEP.format(us=12), RIGHT))
    assert isinstance(other.outcome, Timing) and isinstance(again.outcome, Timing)
    assert (other.duplicate_of, again.duplicate_of) == (None, None)
