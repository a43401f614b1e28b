"""Every way a kernel can go wrong on a GPU: one trial each, and the next one is clean.

    PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -m gpu tests/gpu/test_faults.py

Real kernels through the real pool: builders, one runner process, the device.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from cuda_kernels import FAULTS, fault, gemm

from kt.logs.record import Failure, Outcome, Settings, Timing
from kt.spaces.kernel import Kernel
from kt.spaces.target import Target
from kt.tuner.measure import Candidate, FrozenBatch, Measured
from kt.tuner.pool import LocalMeasurer

pytestmark = pytest.mark.gpu

WORKLOAD = gemm()
SETTINGS = Settings(run_timeout=20.0, sample_seconds=0.02)
HANGS = msgspec.structs.replace(SETTINGS, run_timeout=2.0)

# Kind, stage, what the message says, and whether the runner process is replaced.
EXPECTED: dict[str, tuple[str, str, str, bool]] = {
    "hang": ("run_timeout", "check", "no result within 2 s", True),
    "hang_later": ("run_timeout", "run", "no result within 2 s", True),
    "illegal_address": ("crash", "check", "CUDA_ERROR_ILLEGAL_ADDRESS", True),
    "illegal_address_later": ("crash", "run", "CUDA_ERROR_ILLEGAL_ADDRESS", True),
    "misaligned": ("crash", "check", "CUDA_ERROR_MISALIGNED_ADDRESS", True),
    "trap": ("crash", "check", "CUDA_ERROR_", True),
    "too_much_shared": ("launch_error", "check", "CUDA_ERROR_INVALID_VALUE", False),
    "too_many_threads": ("launch_error", "check", "CUDA_ERROR_INVALID_VALUE", False),
    "too_large_cluster": ("launch_error", "check", "CUDA_ERROR_INVALID_", False),
    "too_much_workspace": ("out_of_memory", "load", "CUDA_ERROR_OUT_OF_MEMORY", False),
    "no_entry": ("launch_error", "check", "CUDA_ERROR_NOT_FOUND", False),
    "wrong": ("wrong_result", "check", "relative error", False),
    "drops_one": ("wrong_result", "check", "relative error", False),
    "nan": ("wrong_result", "check", "relative error nan", False),
    "idle": ("wrong_result", "check", "relative error nan", False),
    "past_output": ("wrong_result", "check", "wrote 4 bytes outside C", False),
    "before_output": ("wrong_result", "check", "wrote 4 bytes outside C", False),
    "past_workspace": ("wrong_result", "check", "wrote 1 bytes outside workspace", False),
    "modifies_input": ("wrong_result", "check", "modified its input B", False),
    "works_once": ("implausible", "run", "below the physical floor", False),
}


@pytest.fixture(scope="module")
def target() -> Target:
    from kt.tuner.devices import detect_gpu

    return detect_gpu("the test")


@pytest.fixture(scope="module")
def measurer(target: Target) -> Iterator[LocalMeasurer]:
    with LocalMeasurer(target, SETTINGS) as made:
        made.prepare([WORKLOAD])
        yield made


@pytest.fixture(scope="module")
def hasty(target: Target) -> Iterator[LocalMeasurer]:
    """One that gives a kernel little time."""
    with LocalMeasurer(target, HANGS) as made:
        made.prepare([WORKLOAD])
        yield made


_trials = iter(range(10**6))


def measure(measurer: LocalMeasurer, *kernels: Kernel) -> list[Measured]:
    """Results in the order of the kernels."""
    candidates = tuple(Candidate(next(_trials), one) for one in kernels)
    batch = FrozenBatch(0, candidates[0].kernel.workload, candidates, None)
    measurer.start(batch)
    return sorted(measurer.finish(batch), key=lambda measured: measured.trial)


def outcome(measurer: LocalMeasurer, one: Kernel) -> Outcome:
    (measured,) = measure(measurer, one)
    assert measured.outcome is not None
    return measured.outcome


def clean(measurer: LocalMeasurer) -> None:
    """The next trial is right and timed."""
    found = outcome(measurer, fault(WORKLOAD, "right", next(_trials)))
    assert isinstance(found, Timing) and len(found.us) >= 5, found


def runner(measurer: LocalMeasurer) -> int | None:
    host: Any = measurer._host
    pid: int | None = host._worker.pid
    return pid


def test_every_fault_is_expected() -> None:
    assert {*EXPECTED, "right", "sometimes_wrong"} == set(FAULTS)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_costs_one_trial(name: str, request: pytest.FixtureRequest) -> None:
    kind, stage, text, replaced = EXPECTED[name]
    measurer = request.getfixturevalue("hasty" if "hang" in name else "measurer")
    clean(measurer)
    before, begin = runner(measurer), time.monotonic()
    workload = gemm("gemm 2048x2048x2048 dtype=fp32") if kind == "implausible" else WORKLOAD
    found = outcome(measurer, fault(workload, name))
    assert isinstance(found, Failure), found
    assert (found.failure, found.stage) == (kind, stage), found
    assert text in found.message and "\n" not in found.message, found
    assert time.monotonic() - begin < 15
    clean(measurer)
    assert (runner(measurer) != before) == replaced


def test_in_one_batch_exactly_the_faulty_trials_are_lost(measurer: LocalMeasurer) -> None:
    names = ("illegal_address", "wrong", "trap", "too_much_shared", "past_output", "misaligned")
    kernels = []
    for name in names:
        kernels += [fault(WORKLOAD, name, next(_trials)), fault(WORKLOAD, "right", next(_trials))]
    outcomes = [measured.outcome for measured in measure(measurer, *kernels)]
    kinds = [one.failure for one in outcomes[::2] if isinstance(one, Failure)]
    assert kinds == [EXPECTED[name][0] for name in names]
    assert all(isinstance(one, Timing) and one.us for one in outcomes[1::2]), outcomes


def test_a_runner_that_is_killed_costs_its_trial(measurer: LocalMeasurer) -> None:
    """What a machine short of memory, or an administrator, does to the process."""
    clean(measurer)
    before = runner(measurer)
    assert before is not None
    hangs = fault(WORKLOAD, "hang", next(_trials))
    measurer.build_source(hangs.source, "cuda")  # so that it runs at once
    timer = threading.Timer(1.0, os.kill, (before, signal.SIGKILL))
    timer.start()
    found = outcome(measurer, hangs)
    assert isinstance(found, Failure), found
    assert (found.failure, found.stage, found.message) == ("out_of_memory", "check", "SIGKILL")
    clean(measurer)
    assert runner(measurer) != before


def test_a_runner_that_died_between_trials_costs_none(measurer: LocalMeasurer) -> None:
    clean(measurer)
    before = runner(measurer)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    clean(measurer)
    assert runner(measurer) != before


def test_a_sticky_error_without_a_new_process_would_spoil_the_next_trial(target: Target) -> None:
    """Why the process is replaced: in the old one, nothing works any more."""
    from kt.tuner.backend.cuda import CudaRunner
    from kt.tuner.backend.cuda_host import _program
    from kt.tuner.backend.worker import Done, Worker

    with LocalMeasurer(target, SETTINGS) as measurer:
        host: Any = measurer._host
        worker = Worker(CudaRunner, host._worker._args, measurer._session.path / "x.log")
        found = []
        for name in ("illegal_address", "right"):
            kernel = fault(WORKLOAD, name, next(_trials))
            built: Any = measurer.build_source(kernel.source, "cuda")
            program = _program(built.started_by(kernel))
            try:
                ended = worker.call("run", program, str(WORKLOAD), 0, 0.02, None, limit=60)
            except Exception as error:  # whatever the driver says where no kernel is to blame
                found.append(str(error))
            else:
                assert isinstance(ended, Done)
                found.append(str(ended.value.outcome))
        worker.stop()
    assert all("CUDA_ERROR" in text for text in found), found


def test_a_race_shows_in_the_finals_and_a_crash_disqualifies(measurer: LocalMeasurer) -> None:
    names = ("sometimes_wrong", "illegal_address_later", "right")
    kernels = [fault(WORKLOAD, name, next(_trials)) for name in names]
    entries = measurer.finals(WORKLOAD, [Candidate(next(_trials), one) for one in kernels])
    flaky, dying, sound = entries[:3]
    assert flaky.failure.startswith("race: ") and not flaky.us
    assert dying.failure.startswith("crash: ") and not dying.us
    assert not sound.failure and len(sound.us) >= 10
