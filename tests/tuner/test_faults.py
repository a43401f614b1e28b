"""Every way a kernel can go wrong, provoked for real: one trial each, and the next one is clean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from c_kernels import FAULTS, RIGHT, fault, gemm, kernel
from served import descendants, wait_gone

from kt.logs.record import Failure, Outcome, Settings, Timing
from kt.spaces.kernel import Kernel
from kt.spaces.target import detect_cpu
from kt.tuner.measure import Candidate, FrozenBatch, Measured
from kt.tuner.pool import LocalMeasurer

WORKLOAD = gemm("gemm 48x40x64 dtype=fp32")
SETTINGS = Settings(run_timeout=5.0, sample_seconds=0.02)
TARGET = msgspec.structs.replace(detect_cpu(), memory_bytes=2**30)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def measurer(cache: None) -> Iterator[LocalMeasurer]:
    with LocalMeasurer(TARGET, SETTINGS) as made:
        made.prepare([WORKLOAD])
        yield made


@pytest.fixture(scope="module")
def hasty(cache: None) -> Iterator[LocalMeasurer]:
    """One that gives a kernel little time."""
    with LocalMeasurer(TARGET, msgspec.structs.replace(SETTINGS, run_timeout=0.6)) as made:
        made.prepare([WORKLOAD])
        yield made


_trials = iter(range(10**6))


def measure(measurer: LocalMeasurer, *kernels: Kernel) -> list[Measured]:
    candidates = tuple(Candidate(next(_trials), one) for one in kernels)
    batch = FrozenBatch(0, candidates[0].kernel.workload, candidates, None)
    measurer.start(batch)
    return list(measurer.finish(batch))


def outcome(measurer: LocalMeasurer, one: Kernel) -> Outcome:
    (measured,) = measure(measurer, one)
    assert measured.outcome is not None
    return measured.outcome


EXPECTED = {
    "segfault": ("crash", "check", "SIGSEGV"),
    "division": ("crash", "check", "SIGFPE"),
    "abort": ("crash", "check", "SIGABRT"),
    "exit": ("crash", "check", "exit code 3"),
    "exit_zero": ("crash", "check", "exit code 0"),
    "hang": ("run_timeout", "check", "no result within 0.68 s"),
    "hang_at_unload": ("run_timeout", "run", "no result within 0.68 s"),
    "huge_workspace": ("out_of_memory", "load", "1125899906842624 bytes"),
    "killed": ("out_of_memory", "check", "SIGKILL"),
    "wrong": ("wrong_result", "check", "1 of 1920 elements are wrong, e.g. C[24, 0]"),
    "drops_one": ("wrong_result", "check", "relative error 0.0988 exceeds"),
    "nan": ("wrong_result", "check", "relative error nan exceeds"),
    "idle": ("wrong_result", "check", "1920 of 1920 elements are wrong"),
    "past_output": ("wrong_result", "check", "wrote outside C, 5 bytes after its end"),
    "before_output": ("wrong_result", "check", "wrote outside C, 5 bytes before its start"),
    "past_workspace": ("wrong_result", "check", "wrote outside workspace, 1 bytes after its end"),
    "modifies_input": ("wrong_result", "check", "modified its input B"),
    "refuses": ("launch_error", "check", "kt_launch returned 7"),
    "refuses_later": ("launch_error", "run", "kt_launch returned 9"),
    "works_once": ("implausible", "run", "below the physical floor"),
    "wrong_later": ("wrong_result", "run", "after the timed launches: relative error"),
    "no_symbol": ("launch_error", "load", "kt_launch"),
    "constructor": ("crash", "load", "SIGILL"),
}


def test_every_fault_is_expected() -> None:
    assert {*EXPECTED, "memory"} == set(FAULTS)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_costs_one_trial(name: str, request: pytest.FixtureRequest) -> None:
    kind, stage, text = EXPECTED[name]
    measurer = request.getfixturevalue("hasty" if "0.68 s" in text else "measurer")
    found = outcome(measurer, fault(WORKLOAD, name))
    assert isinstance(found, Failure), found
    assert (found.failure, found.stage) == (kind, stage), found
    assert text in found.message and "\n" not in found.message


def test_after_every_fault_the_next_trial_is_clean(measurer: LocalMeasurer) -> None:
    after = ("segfault", "past_output", "modifies_input", "refuses_later", "exit_zero")
    kernels = []
    for i, name in enumerate(after):
        kernels += [
            kernel(WORKLOAD, FAULTS[name][1], f"int again{i};"),
            kernel(WORKLOAD, top=f"int clean{i} = 1;"),
        ]
    outcomes = [m.outcome for m in measure(measurer, *kernels)]
    assert all(isinstance(one, Failure) for one in outcomes[::2])
    assert all(isinstance(one, Timing) and one.us for one in outcomes[1::2]), outcomes


def test_a_kernel_that_takes_all_memory_fails_alone() -> None:
    target = msgspec.structs.replace(TARGET, memory_bytes=2**29)
    with LocalMeasurer(target, msgspec.structs.replace(SETTINGS, run_timeout=30.0)) as measurer:
        found = outcome(measurer, fault(WORKLOAD, "memory"))
        assert isinstance(found, Failure)
        assert (found.failure, found.stage) == ("crash", "check"), found  # malloc returned NULL
        assert isinstance(outcome(measurer, kernel(WORKLOAD)), Timing)


def test_stderr_tail_is_kept(measurer: LocalMeasurer) -> None:
    found = outcome(measurer, kernel(WORKLOAD, FAULTS["abort"][1], "int other;"))
    assert isinstance(found, Failure) and found.detail == "giving up"


def test_talkative_kernel_disturbs_nobody(
    measurer: LocalMeasurer, capfd: pytest.CaptureFixture[str]
) -> None:
    shout = """
    static char text[8000];
    memset(text, 'x', sizeof text);
    for (int i = 0; i < 500; i++) fwrite(text, 1, sizeof text, i % 2 ? stderr : stdout);
    """
    found = outcome(measurer, kernel(WORKLOAD, RIGHT + shout))
    assert isinstance(found, Timing)
    assert capfd.readouterr() == ("", "")


def test_lower_precision_is_wrong(measurer: LocalMeasurer) -> None:
    workload = gemm("gemm 16x16x4096 dtype=fp32")
    truncated = """
    for (int i = 0; i < M * N; i++) {
        float sum = 0;
        for (int k = 0; k < K; k++) {
            sum += a[i / N * K + k] * b[k * N + i % N];
            uint32_t bits; memcpy(&bits, &sum, 4); bits &= 0xffff0000u; memcpy(&sum, &bits, 4);
        }
        c[i] = sum;
    }"""
    tf32 = """
    for (int i = 0; i < M * N; i++) {
        float sum = 0;
        for (int k = 0; k < K; k++) {
            float x = a[i / N * K + k], y = b[k * N + i % N];
            uint32_t bits; memcpy(&bits, &x, 4);
            bits = (bits + 0x1000) & 0xffffe000u; memcpy(&x, &bits, 4);
            sum += x * y;
        }
        c[i] = sum;
    }"""
    for body in (truncated, tf32):
        found = outcome(measurer, kernel(workload, body))
        assert isinstance(found, Failure) and found.failure == "wrong_result", found
    double = gemm("gemm 16x16x1024 dtype=fp64")
    single = """
    for (int i = 0; i < M * N; i++) {
        float sum = 0;
        for (int k = 0; k < K; k++) sum += a[i / N * K + k] * b[k * N + i % N];
        c[i] = sum;
    }"""
    found = outcome(measurer, kernel(double, single))
    assert isinstance(found, Failure) and found.failure == "wrong_result", found


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_long_sums_in_sequence_are_right_and_one_dropped_product_is_not(
    measurer: LocalMeasurer, dtype: str
) -> None:
    workload = gemm(f"gemm 24x24x65536 dtype={dtype}")
    found = outcome(measurer, kernel(workload))
    assert isinstance(found, Timing), found
    dropped = outcome(measurer, kernel(workload, "product(a, b, c, K - 1);"))
    assert isinstance(dropped, Failure) and dropped.failure == "wrong_result"


def test_a_race_shows_in_the_finals(measurer: LocalMeasurer) -> None:
    flaky = kernel(WORKLOAD, "product(a, b, c, K); if (launches % 3 == 0) c[7] += 0.5f;")
    edge = kernel(WORKLOAD, "volatile real peek = b[K * N + 600]; (void)peek; product(a, b, c, K);")
    sound = kernel(WORKLOAD, top="int sound;")
    entries = measurer.finals(
        WORKLOAD, [Candidate(next(_trials), one) for one in (flaky, edge, sound)]
    )
    assert "race" in entries[0].failure and not entries[0].us
    assert entries[1].failure == "crash: SIGSEGV"
    assert not entries[2].failure and len(entries[2].us) >= 10 and entries[2].median_us > 0


def test_crashes_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = descendants(os.getpid())
    with LocalMeasurer(TARGET, SETTINGS) as made:
        for name in ("segfault", "abort", "constructor"):
            assert isinstance(outcome(made, fault(WORKLOAD, name)), Failure)
        assert descendants(os.getpid()) - before
        directory = made._session.path
        found = [path.name for path in directory.rglob("*") if path.is_file()]
        assert not [name for name in found if name.startswith("core")]
    assert list(tmp_path.iterdir()) == [] and not directory.exists()
    assert not wait_gone(descendants(os.getpid()) - before)
