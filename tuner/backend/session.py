"""The session's temporary directory: locked while its owner lives, swept when the owner is dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

_LOCK = "owner.lock"
_YOUNG_SECONDS = 60.0  # one that nobody has locked may be just being made


class Session:
    """A temporary directory that `close` (or the interpreter's end) removes.

    After a SIGKILL it stays, unlocked, and the next session's `sweep` removes it.
    """

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_prefix()))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock)

    def close(self) -> None:
        """Removes the directory; a second call does nothing."""
        self._finalizer()


def sweep() -> None:
    """Removes the directories of this user's dead sessions."""
    for path in Path(tempfile.gettempdir()).glob(_prefix() + "*"):
        if _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _prefix() -> str:
    return f"kt-session-{os.getuid()}-"


def _abandoned(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return _old(path.stat())
        return False
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _old(os.fstat(lock))
    except OSError:
        return False
    finally:
        os.close(lock)


def _old(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > _YOUNG_SECONDS


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
