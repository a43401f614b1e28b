"""The child's side of `worker.Worker`: serves one object's methods over a pipe."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
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
    with contextlib.suppress(EOFError, OSError):  # the parent closed the pipe
        _serve(_connection)
    # Threads that a kernel left behind must not keep the process.
    os._exit(0)


def _serve(connection: Connection[Any, Any]) -> None:
    factory, args = connection.recv()
    kind, served = _attempt(factory, args)
    connection.send((kind, None if kind == "done" else served))
    while kind == "done":
        method, args = connection.recv()
        connection.send(_attempt(getattr(served, method), args))


def _attempt(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """("done", result), ("error", the user's error) or ("bug", traceback)."""
    try:
        return "done", function(*args)
    except KtError as error:
        return "error", error
    except Exception:
        return "bug", traceback.format_exc()
