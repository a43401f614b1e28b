"""Processes that measure on one device wait for each other, and for nobody who has died."""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from taking_turns import Holder

from kt.logs.record import Settings
from kt.spaces.errors import TargetError
from kt.spaces.target import CUDA_TARGETS
from kt.tuner.backend import cuda
from kt.tuner.backend.cuda import CudaRunner
from kt.tuner.backend.cuda_host import CudaHost
from kt.tuner.backend.turn import Turn
from kt.tuner.backend.worker import Died, Done, TimedOut, Worker

Made = Callable[..., Worker]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    workers: list[Worker] = []

    def worker(name: str = "gpu") -> Worker:
        log = tmp_path / f"log{len(workers)}"
        workers.append(Worker(Holder, (str(tmp_path), name), log))
        workers[-1].call("hold", 0.0, 0, limit=30)  # has started
        return workers[-1]

    yield worker
    for one in workers:
        one.stop()


def beside(worker: Worker, *args: object) -> threading.Thread:
    """A job under way on another thread."""
    thread = threading.Thread(target=worker.call, args=args, kwargs={"limit": 30})
    thread.start()
    return thread


def test_jobs_of_two_processes_do_not_overlap(made: Made, tmp_path: Path) -> None:
    first, second = made(), made()
    thread = beside(first, "hold", 0.02, 10)
    assert second.call("hold", 0.02, 10, limit=30) == Done(None)
    thread.join()
    held = Holder(str(tmp_path)).held()
    assert len(held) == 20
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(held))


def test_other_devices_are_other_turns(made: Made, tmp_path: Path) -> None:
    first, second = made("a"), made("b")
    thread = beside(first, "hold", 1.5)
    time.sleep(0.2)
    assert second.call("hold", 0.0, limit=30) == Done(None) and thread.is_alive()
    thread.join()


def test_a_turn_ends_with_its_process(made: Made) -> None:
    first, second = made(), made()
    assert isinstance(first.call("die_holding", limit=30), Died)
    assert second.call("hold", 0.0, limit=30) == Done(None)


def test_who_waits_says_so(made: Made) -> None:
    first, second = made(), made()
    thread = beside(first, "hold", 1.0)
    time.sleep(0.2)
    ended = second.call("hold", 0.0, limit=0.3)
    assert isinstance(ended, TimedOut) and ended.stage == "wait for the device"
    thread.join()


def test_waiting_costs_no_trial_and_the_jobs_own_time_starts_after_it(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, notes = tmp_path / "oracle.cubin", list[str]()
    library.touch()
    own = (CUDA_TARGETS["h200"], Settings(), tmp_path, lambda source: library, 3, notes.append)
    host, first = CudaHost(*own), made()
    host._worker = Worker(Holder, (str(tmp_path),), tmp_path / "log", told=host._told)
    host._worker.call("hold", 0.0, 0, limit=30)
    monkeypatch.setattr(CudaHost, "PREPARE_SECONDS", 1.5)
    monkeypatch.setattr(CudaHost, "WAIT_SECONDS", 1.2)
    assert not notes
    thread = beside(first, "hold", 1.0)
    time.sleep(0.2)
    assert host._call("hold", 1.0) == Done(None)  # after 0.8 s of waiting
    thread.join()
    thread = beside(first, "hold", 2.0)
    time.sleep(0.2)
    with pytest.raises(TargetError, match=r"another run of kt has measured on GPU 3 for 1\.2 s"):
        host._call("hold", 0.0)
    thread.join()
    host.close()
    assert notes == ["another run of kt measures on GPU 3: the two take turns"]


def test_where_no_lock_can_be_had_nobody_waits(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with Turn("gpu", missing), Turn("gpu", missing):
        assert not missing.exists()


def test_the_locks_file_is_for_all_users(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        Turn("gpu", tmp_path)
    finally:
        os.umask(before)
    (lock,) = tmp_path.iterdir()
    assert lock.name == "kt-device-gpu.lock" and lock.stat().st_mode & 0o777 == 0o444


def test_no_link_is_followed_and_no_pipe_holds_anybody_up(tmp_path: Path) -> None:
    lock, elsewhere = tmp_path / "kt-device-gpu.lock", tmp_path / "elsewhere"
    elsewhere.touch()
    lock.symlink_to(elsewhere)
    with open(elsewhere) as file, Turn("gpu", tmp_path):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.unlink()
    os.mkfifo(lock)
    with Turn("gpu", tmp_path):
        pass


def test_who_finds_the_locks_file_removed_locks_its_successor(made: Made, tmp_path: Path) -> None:
    first, second = made(), made()
    (tmp_path / "kt-device-gpu.lock").unlink()
    thread = beside(first, "hold", 0.5)
    time.sleep(0.2)
    assert second.call("hold", 0.0, limit=30) == Done(None)
    thread.join()
    (one, other) = Holder(str(tmp_path)).held()
    assert one[1] <= other[0] and one[1] - one[0] > 0.4


def test_every_job_of_a_gpus_runner_takes_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {name for name, job in vars(CudaRunner).items() if callable(job) and name[0] != "_"}
    assert jobs == {"run", "verify", "compare", "vendor", "bound", "evidence"}
    seen: list[str] = []

    class Recorded:
        def __enter__(self) -> None:
            seen.append("taken")

        def __exit__(self, *_: object) -> None:
            seen.append("left")

    class Driver:
        def cuCtxSynchronize(self) -> tuple[int]:
            seen.append("waited")
            return (0,)

    monkeypatch.setattr(cuda, "driver", Driver)
    for name in jobs:
        runner = object.__new__(CudaRunner)
        runner.turn = Recorded()  # type: ignore[assignment]
        seen.clear()
        with pytest.raises(TypeError):
            getattr(runner, name)(no_such="argument")
        assert seen == ["taken", "waited", "left"]
