"""Processes that measure on one device wait for each other, and for nobody who has died."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from taking_turns import Holder

from kt.logs.record import Settings
from kt.spaces.errors import TargetError
from kt.spaces.target import CUDA_TARGETS
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
    thread = beside(first, "hold", 3.0)
    time.sleep(0.2)
    assert second.call("hold", 0.0, limit=2.5) == Done(None) and thread.is_alive()
    thread.join()


def test_a_turn_ends_with_its_process(made: Made) -> None:
    first, second = made(), made()
    assert isinstance(first.call("die_holding", limit=30), Died)
    assert second.call("hold", 0.0, limit=30) == Done(None)


def test_who_waits_says_so(made: Made) -> None:
    first, second = made(), made()
    thread = beside(first, "hold", 2.0)
    time.sleep(0.2)
    ended = second.call("hold", 0.0, limit=0.5)
    assert isinstance(ended, TimedOut) and ended.stage == "wait for the device"
    thread.join()


def test_waiting_costs_no_trial_and_the_jobs_own_time_starts_after_it(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "oracle.cubin"
    library.touch()
    host = CudaHost(CUDA_TARGETS["h200"], Settings(), tmp_path, lambda source: library, 3)
    first, host._worker = made(), made()
    monkeypatch.setattr(CudaHost, "PREPARE_SECONDS", 1.5)
    thread = beside(first, "hold", 1.0)
    time.sleep(0.2)
    assert host._call("hold", 1.0) == Done(None)  # after 0.8 s of waiting
    thread.join()
    thread = beside(first, "hold", 3.0)
    time.sleep(0.2)
    with pytest.raises(TargetError, match=r"another run of kt has measured on GPU 3 for 1\.5 s"):
        host._call("hold", 0.0)
    thread.join()
    host.close()


def test_where_no_lock_can_be_had_nobody_waits(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with Turn("gpu", missing), Turn("gpu", missing):
        assert not missing.exists()


def test_the_locks_file_is_for_all_users_and_no_link_is_followed(tmp_path: Path) -> None:
    with Turn("gpu", tmp_path):
        pass
    (lock,) = tmp_path.iterdir()
    assert lock.name == "kt-device-gpu.lock" and lock.stat().st_mode & 0o777 == 0o444
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with Turn("gpu", tmp_path):
        assert not (tmp_path / "elsewhere").exists()
