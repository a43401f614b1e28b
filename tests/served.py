"""An object for `Worker` to serve in tests, and processes to look at."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from kt.spaces.errors import SettingsError
from kt.tuner.backend.serve import report


class Served:
    """Does what its caller asks, however unwise."""

    def __init__(self, value: int = 0) -> None:
        if value < 0:
            raise SettingsError("negative")
        self._value = value

    def value(self) -> int:
        self._value += 1
        return self._value

    def pid(self) -> int:
        return os.getpid()

    def leave(self, code: int) -> None:
        report("leaving")
        os._exit(code)

    def die(self, number: int) -> None:
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), number)

    def sleep(self, *stages: str) -> None:
        """A moment in each stage, and a minute in `b`."""
        for stage in stages:
            report(stage)
            time.sleep(60 if stage == "b" else 0.1)

    def refuse(self) -> None:
        raise SettingsError("no such thing")

    def bug(self) -> None:
        raise ZeroDivisionError("a bug")

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid

    def tease_sigint(self) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 1


def alive(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/task/*/children"):
        if int(path.parts[2]) == pid:
            for child in path.read_text().split():
                found |= {int(child)} | descendants(int(child))
    return found


def wait_gone(pids: set[int], seconds: float = 5.0) -> set[int]:
    """The processes that are still alive after at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(alive(pid) for pid in pids):
        time.sleep(0.02)
    return {pid for pid in pids if alive(pid)}
