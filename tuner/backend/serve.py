"""The child's side of `worker.Worker`: serves one object's methods over a pipe."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from kt.spaces.errors import KtError

from .child import die_with_parent

_connection: Connection[Any, Any] | None = None


def report(stage: str) -> None:
    """Tells the parent which stage the current job has reached (outside a worker: nothing)."""
    if _connection is not None:
        _connection.send(("stage", stage))


def main() -> None:
    """Serves until the parent closes the pipe; arguments are the pipe's number and the parent."""
    global _connection
    die_with_parent()
    if os.getppid() != int(sys.argv[2]):
        return  # the parent died before it could be watched
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is data, not a core file
    _connection = Connection(int(sys.argv[1]))
    os.set_inheritable(_connection.fileno(), False)
    try:
        factory, args = _connection.recv()
        served = _answer(factory, args)
        while served is not None:
            method, args = _connection.recv()
            _answer(getattr(served, method), args)
    except EOFError:
        pass
    # Threads that a kernel left behind must not keep the process.
    os._exit(0)


def _answer(function: Any, args: tuple[Any, ...]) -> object | None:
    """Calls and sends the result; a constructor's result stays here."""
    assert _connection is not None
    try:
        value = function(*args)
    except KtError as error:
        _connection.send(("error", error))
    except Exception:
        _connection.send(("bug", traceback.format_exc()))
    else:
        _connection.send(("done", None if isinstance(function, type) else value))
        return value if isinstance(function, type) else None
    return None
