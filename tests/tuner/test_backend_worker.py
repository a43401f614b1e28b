"""The process that owns an object: answers, deaths, limits, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, alive, descendants, wait_gone

from kt.spaces.errors import SettingsError
from kt.tuner.backend import session
from kt.tuner.backend.worker import Died, Done, Stopped, TimedOut, Worker, WorkerBug


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(Served, (0,), tmp_path / "log")
    yield made
    made.stop()


def test_calls_share_one_child_until_it_is_recycled(tmp_path: Path) -> None:
    worker = Worker(Served, (), tmp_path / "log", max_calls=2)
    assert [worker.call("value", limit=30) for _ in range(3)] == [Done(1), Done(2), Done(1)]
    worker.stop()


@pytest.mark.parametrize("code", [0, 3])
def test_exit_is_a_death_with_its_code_and_stage(worker: Worker, code: int) -> None:
    ended = worker.call("leave", code, limit=30)
    assert isinstance(ended, Died)
    assert (ended.code, ended.stage, str(ended)) == (code, "leaving", f"exit code {code}")
    assert worker.call("value", limit=30) == Done(1)


def test_a_signal_is_named_and_the_last_words_are_kept(worker: Worker) -> None:
    ended = worker.call("die", signal.SIGBUS, limit=30)
    assert isinstance(ended, Died) and str(ended) == "SIGBUS" and ended.log == "last words"


def test_a_stage_that_takes_too_long_ends_the_child_and_its_group(worker: Worker) -> None:
    fork = worker.call("fork", limit=30)
    assert isinstance(fork, Done)
    begin = time.monotonic()
    ended = worker.call("sleep", "a", "b", "c", limit=30, limits={"b": 0.1})
    assert ended == TimedOut("b", 0.1, "") and time.monotonic() - begin < 20
    assert not wait_gone({fork.value})


def test_a_deadline_ends_any_stage(worker: Worker) -> None:
    worker.call("value", limit=30)
    begin = time.monotonic()
    ended = worker.call("sleep", "a", "b", limit=30, deadline=begin + 0.05)
    assert ended == Stopped() and time.monotonic() - begin < 20


def test_a_child_that_died_between_calls_is_replaced(worker: Worker) -> None:
    pid = worker.call("pid", limit=30)
    assert isinstance(pid, Done)
    os.kill(pid.value, signal.SIGKILL)
    wait_gone({pid.value})
    assert worker.call("value", limit=30) == Done(1)


def test_a_users_error_is_raised_and_a_bug_carries_its_traceback(worker: Worker) -> None:
    with pytest.raises(SettingsError, match="no such thing"):
        worker.call("refuse", limit=30)
    with pytest.raises(WorkerBug, match="ZeroDivisionError: a bug"):
        worker.call("bug", limit=30)
    assert worker.call("value", limit=30) == Done(1)


def test_a_constructor_may_refuse(tmp_path: Path) -> None:
    worker = Worker(Served, (-1,), tmp_path / "log")
    for _ in range(2):
        with pytest.raises(SettingsError, match="negative"):
            worker.call("value", limit=30)
    assert worker.pid is None


def test_sigint_is_ignored(worker: Worker) -> None:
    assert worker.call("tease_sigint", limit=30) == Done(1)


def test_builders_import_nothing_heavy(tmp_path: Path) -> None:
    # What a builder has loaded once it unpickled its factory and a job's arguments.
    code = (
        "import sys, kt.tuner.backend.build, kt.tuner.backend.cc, kt.tuner.backend.nvrtc;"
        "print([m for m in ('numpy', 'xgboost', 'sklearn', 'scipy', 'cuda') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done
    worker = Worker(Served, (), tmp_path / "log")
    modules = worker.call("modules", limit=30)
    assert isinstance(modules, Done)
    assert not {"numpy", "xgboost", "pytest"} & set(modules.value)
    worker.stop()


_PARENT = """
import sys, threading, time
from kt.logs.record import Settings
from kt.spaces.target import detect_cpu
from kt.tuner.measure import Candidate, FrozenBatch
from kt.tuner.pool import LocalMeasurer
from c_kernels import RIGHT, gemm, kernel
workload = gemm("gemm 8x8x8 dtype=fp32")
measurer = LocalMeasurer(detect_cpu(), Settings(), builders=1)
measurer.prepare([workload])
slow_build = kernel(workload, top="SLOW")
hang = kernel(workload, "for (;;) launches++;")
batch = FrozenBatch(0, workload, (Candidate(0, hang),), None)
measurer.start(batch)
threading.Thread(target=lambda: list(measurer.finish(batch)), daemon=True).start()
end = time.monotonic() + 60
while 0 in measurer._builds and time.monotonic() < end:
    time.sleep(0.02)  # until it is built, and taken to be run
measurer.start(FrozenBatch(1, workload, (Candidate(1, slow_build),), None))
print(measurer._session.path, flush=True)
time.sleep(60)
"""
_SLOW_CC = """#!/bin/sh
case "$*" in *--version*) echo slow 1.0; exit;; esac
grep -q SLOW kernel.c && sleep 61
exec gcc "$@"
"""


def test_sigkill_of_the_parent_leaves_no_process_and_its_files_are_swept(tmp_path: Path) -> None:
    compiler = tmp_path / "slowcc"
    compiler.write_text(_SLOW_CC)
    compiler.chmod(0o755)
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {
        "CC": str(compiler), "KT_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": tests,
    }  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    directory = Path(parent.stdout.readline().strip())
    end = time.monotonic() + 60
    names: set[str] = set()
    while not any("sleep" in name for name in names) and time.monotonic() < end:
        time.sleep(0.05)
        children = descendants(parent.pid)
        names = {_name(pid) for pid in children}
    assert any("sleep" in name for name in names), names  # runner, builder, shell, compiler
    assert len(children) >= 5 and directory.is_dir()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not wait_gone(children), {_name(pid) for pid in children if alive(pid)}
    os.utime(directory / "owner.lock", (0, 0))  # a young one may be just being made
    session.sweep()
    assert not directory.exists()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
