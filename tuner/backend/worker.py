"""One child process that owns an object and calls its methods for us, one at a time.

The child may hang, crash, exit or blow its memory: the caller gets that as a value and the next
call starts a fresh child. Used instead of a process pool because a kernel's code runs in there: no
lock is shared with the child, a hang is ended by SIGKILL at once, exit code 0 is a death like any
other, the stage that the child had reached is known, and the parent's `__main__` is not imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from kt.spaces.errors import KtError

from .child import kill_group, signal_name

START_SECONDS = 60.0
_EXIT_GRACE_SECONDS = 1.0
_LOG_TAIL_BYTES = 2000
_COMMAND = "from kt.tuner.backend.serve import main; main()"
# Children die with the thread that started them, so one lasting thread starts all of them.
_starter = ThreadPoolExecutor(1, thread_name_prefix="kt-start")


class WorkerBug(RuntimeError):
    """A job raised something that is neither data nor a user's error; the text is its traceback."""


@dataclass(frozen=True)
class Done:
    """The call returned `value`."""

    value: Any


@dataclass(frozen=True)
class Died:
    """The child ended during the call. `code` is negative for a signal."""

    stage: str
    code: int
    log: str

    def __str__(self) -> str:
        return signal_name(-self.code) if self.code < 0 else f"exit code {self.code}"


@dataclass(frozen=True)
class TimedOut:
    """The child was killed because a stage took longer than its limit."""

    stage: str
    seconds: float
    log: str


@dataclass(frozen=True)
class Stopped:
    """The child was killed because the caller's deadline came."""


Ended = Done | Died | TimedOut | Stopped


class Worker:
    """A lazily started child that serves `factory(*args)`; respawned after a death.

    `log` receives what the child writes to stdout and stderr. After `max_calls` calls the child is
    replaced, so that leaks of its jobs do not add up (0: never). `told` is called with each stage
    that the child reports.
    """

    def __init__(
        self,
        factory: Callable[..., object],
        args: tuple[Any, ...],
        log: Path,
        max_calls: int = 0,
        told: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._factory, self._args, self._log, self._max_calls = factory, args, log, max_calls
        self._told = told
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._pidfd = -1
        self._calls = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def call(
        self,
        method: str,
        *args: object,
        limit: float,
        limits: Mapping[str, float] | None = None,
        deadline: float | None = None,
    ) -> Ended:
        """Calls `method` in the child, which has `limit` seconds.

        When the child reports a stage that `limits` names, that stage's seconds start anew. At
        `deadline` (of `time.monotonic`) the child is ended whatever its stage.
        Raises KtError when the job does, and WorkerBug for any other exception in it.
        """
        if self._ended() or (self._max_calls and self._calls >= self._max_calls):
            self.stop()
        if self._process is None:
            started = self._start()
            if started is not None:
                return started
        self._calls += 1
        self._clear_log()
        assert self._connection is not None
        try:
            self._connection.send((method, args))
        except OSError:
            return self._bury("start")
        try:
            return self._await("start", limit, limits or {}, deadline)
        except (KtError, WorkerBug):
            raise
        except BaseException:  # Ctrl-C: the answer under way must not become the next call's
            self.stop()
            raise

    def kill(self) -> None:
        """Ends the child from another thread; a call under way returns `Died`."""
        process = self._process
        if process is not None and process.returncode is None:
            kill_group(process.pid)

    def stop(self) -> None:
        """Kills the child and whatever shares its process group."""
        if self._process is not None:
            kill_group(self._process.pid)
            self._reap()

    def _start(self) -> Ended | None:
        """Starts the child; None when it serves, else how it ended."""
        ours, theirs = Pipe()
        with theirs, open(self._log, "ab") as log:
            paths = [path for path in sys.path if os.path.exists(path)]
            self._process = _starter.submit(
                subprocess.Popen,
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[theirs.fileno()], start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            ).result()  # fmt: skip
        self._connection, self._calls = ours, 0
        self._pidfd = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else -1
        ours.send((self._factory, self._args))
        try:
            ended = self._await("start", START_SECONDS, {}, None)
        except Exception:  # the constructor's own: there is nothing to serve
            self.stop()
            raise
        return None if isinstance(ended, Done) else ended

    def _ended(self) -> bool:
        """Whether the child has died since the last call, which then is nobody's fault."""
        return self._process is not None and self._process.poll() is not None

    def _await(
        self, stage: str, limit: float, limits: Mapping[str, float], stop: float | None
    ) -> Ended:
        """Reads the child's messages until the call has ended."""
        assert self._connection is not None
        sources: list[Any] = [self._connection] + ([self._pidfd] if self._pidfd >= 0 else [])
        deadline = time.monotonic() + limit
        while True:
            until = deadline if stop is None else min(deadline, stop)
            if not wait(sources, max(until - time.monotonic(), 0)):
                self.stop()
                log = self._log_tail()
                return TimedOut(stage, limit, log) if until == deadline else Stopped()
            try:
                if not self._connection.poll():
                    return self._bury(stage)
                kind, value = self._connection.recv()
            except Exception:  # end of file, or bytes that a stray kernel wrote into the pipe
                return self._bury(stage)
            if kind == "stage":
                stage = value
                self._told(stage)
                if stage in limits:
                    limit = limits[stage]
                    deadline = time.monotonic() + limit
            elif kind == "done":
                return Done(value)
            elif kind == "error":
                raise value
            else:
                raise WorkerBug(value)

    def _bury(self, stage: str) -> Died:
        """The end of a child that no longer answers."""
        assert self._process is not None
        if self._pidfd >= 0:
            wait([self._pidfd], _EXIT_GRACE_SECONDS)
        kill_group(self._process.pid)
        return Died(stage, self._reap(), self._log_tail())

    def _reap(self) -> int:
        """Exit code of the ended child."""
        assert self._process is not None and self._connection is not None
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self._process.pid, 0)[1])
        except ChildProcessError:  # reaped by somebody else in this process
            code = -signal.SIGKILL
        self._process.returncode = code
        self._connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._process, self._connection, self._pidfd = None, None, -1
        return code

    def _clear_log(self) -> None:
        with contextlib.suppress(OSError):
            os.truncate(self._log, 0)

    def _log_tail(self) -> str:
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
                return file.read(_LOG_TAIL_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""
