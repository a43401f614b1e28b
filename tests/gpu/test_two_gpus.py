"""Two GPUs take trials from one queue; what is proposed does not depend on how many there are.

    PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -m gpu tests/gpu/test_two_gpus.py

Skipped with fewer than two devices of one kind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_kernels import fault, gemm
from fake_runs import read_run

from kt.logs.record import Failure, Settings, Timing
from kt.spaces.target import Target
from kt.tuner.api import tune
from kt.tuner.measure import Candidate, FrozenBatch
from kt.tuner.pool import LocalMeasurer
from kt.tuner.replay import check_identity

pytestmark = pytest.mark.gpu

WORKLOAD = gemm()
TUNED = "gemm 1024x1024x1024 dtype=bf16"


@pytest.fixture(scope="module")
def target() -> Target:
    from kt.tuner.devices import chosen_gpus, detect_gpu

    found = detect_gpu("the test")
    if len(chosen_gpus(found, None)) < 2:
        pytest.skip("needs two GPUs of one kind")
    return found


@pytest.fixture
def measurer(target: Target) -> Iterator[LocalMeasurer]:
    with LocalMeasurer(target, Settings(run_timeout=5.0), gpus=(0, 1)) as made:
        made.prepare([WORKLOAD])
        yield made


def batch(*names: str, first: int = 0) -> FrozenBatch:
    kernels = [fault(WORKLOAD, name, first + i) for i, name in enumerate(names)]
    candidates = tuple(Candidate(first + i, kernel) for i, kernel in enumerate(kernels))
    return FrozenBatch(first, WORKLOAD, candidates, None)


def watched(measurer: LocalMeasurer) -> list[list[str]]:
    """Fills with the binaries that each GPU was given."""
    hosts: list[Any] = measurer._hosts
    given: list[list[str]] = [[] for _ in hosts]
    for host, mine in zip(hosts, given, strict=True):

        def run(binary: Any, *rest: Any, real: Any = host.run, mine: list[str] = mine) -> Any:
            mine.append(binary.facts.binary)
            return real(binary, *rest)

        host.run = run
    return given


def test_both_take_from_one_queue_and_each_binary_runs_once(measurer: LocalMeasurer) -> None:
    given = watched(measurer)
    results = list(measurer.finish(batch(*["right"] * 32)))
    assert len(results) == 32 and all(isinstance(r.outcome, Timing) for r in results)
    assert len({*given[0], *given[1]}) == len(given[0]) + len(given[1]) == 32
    assert min(map(len, given)) >= 4


def test_a_hang_on_one_does_not_hold_up_the_other(measurer: LocalMeasurer) -> None:
    list(measurer.finish(batch(*["right"] * 8)))  # both runners are up
    begin, came = time.monotonic(), {}
    for measured in measurer.finish(batch("hang", *["right"] * 12, first=100)):
        came[measured.trial] = (measured.outcome, time.monotonic() - begin)
    hung, rest = came.pop(100), came.values()
    assert isinstance(hung[0], Failure) and hung[0].failure == "run_timeout"
    assert all(isinstance(one, Timing) and seconds < hung[1] for one, seconds in rest)


def test_a_runner_that_is_killed_costs_one_trial_of_its_gpu(measurer: LocalMeasurer) -> None:
    list(measurer.finish(batch(*["right"] * 8)))
    hosts: list[Any] = measurer._hosts
    hang = batch("hang", "right", "right", first=200)
    for candidate in hang.candidates:
        measurer.build_source(candidate.kernel.source, "cuda")
    timers = [threading.Timer(1.5, os.kill, (h._worker.pid, signal.SIGKILL)) for h in hosts]
    for timer in timers:
        timer.start()
    results = {r.trial: r.outcome for r in measurer.finish(hang)}
    assert isinstance(results[200], Failure) and results[200].message == "SIGKILL"
    assert isinstance(results[201], Timing) and isinstance(results[202], Timing)
    assert len(list(measurer.finish(batch(*["right"] * 8, first=300)))) == 8


def test_proposals_do_not_depend_on_the_number_of_gpus(target: Target, tmp_path: Path) -> None:
    """Each log's proposals follow from its own outcomes; until outcomes are seen they are equal."""
    logs = {}
    for gpus in ((0,), (1,), (0, 1)):
        path = tmp_path / f"{len(logs)}.jsonl"
        result = tune(TUNED, target=target, log=path, trials=64, gpus=gpus)
        assert result.trials == 64
        logs[gpus] = read_run(path)
    for run in logs.values():
        assert check_identity(run).exit_code == 0
    one, other, both = logs.values()
    unseen = 1 + one.header.settings.lag
    assert [b.entries for b in both.batches[:unseen]] == [b.entries for b in one.batches[:unseen]]
    assert [b.entries for b in both.batches[:unseen]] == [b.entries for b in other.batches[:unseen]]


def test_gpus_1_uses_the_second_alone(target: Target) -> None:
    with LocalMeasurer(target, Settings(), gpus=(1,)) as measurer:
        measurer.prepare([WORKLOAD])
        (result,) = measurer.finish(batch("right", first=400))
        assert isinstance(result.outcome, Timing)
        (host,) = measurer._hosts
        worker: Any = getattr(host, "_worker", None)
        assert worker._args[1] == 1 and _uses(worker.pid, 1)


def _uses(pid: int, index: int) -> bool:
    """Whether the driver lists the process on the GPU; true where it lists none (containers)."""
    import subprocess

    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", "-i"]
    listed = [
        subprocess.run([*command, str(i)], capture_output=True, text=True).stdout.split()
        for i in (0, 1)
    ]
    return not any(listed) or str(pid) in listed[index] or not listed[1 - index]
