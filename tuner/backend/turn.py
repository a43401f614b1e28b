"""One job at a time on a GPU: processes that measure on it wait for each other.

Kernels of two runs would share the device, and neither's times would mean anything. The turn is a
lock on a file that all users of a machine can open; it ends with its process, killed or not, and
with those that this one forked. Starting a process's context is no part of a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from .serve import report

WAITING, TAKEN = "wait for the device", "device"
"""Stages of a job: before its turn, when another process has the device, and from then on."""
FOLDER = Path("/tmp")  # not the user's TMPDIR: processes of all users meet here


class Turn:
    """A context manager that holds the device `name` alone; not to be nested.

    Where no lock can be had, for example in a read-only folder, nobody waits.
    """

    def __init__(self, name: str, folder: Path = FOLDER) -> None:
        self._path = folder / f"kt-device-{name}.lock"
        self._fd = _opened(self._path)

    def __enter__(self) -> None:
        with contextlib.suppress(OSError):  # of a file system without locks
            while self._fd >= 0 and not self._locked():
                os.close(self._fd)
                self._fd = _opened(self._path)

    def _locked(self) -> bool:
        """Waits for the lock; False when somebody removed its file, so that others lock another."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(WAITING)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            report(TAKEN)
        return os.fstat(self._fd).st_nlink > 0

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


def _opened(path: Path) -> int:
    """The lock's file, made where it is missing; -1 where that is not allowed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):  # it is there, or may not be made
        made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o444)
        os.fchmod(made, 0o444)  # whatever the umask took away
        return made
    # Without O_CREAT: Linux refuses that in /tmp for another user's file.
    with contextlib.suppress(OSError):
        return os.open(path, flags)
    return -1
