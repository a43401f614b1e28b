"""How the `kt` program runs and ends: every error becomes one line and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

import click

from kt.spaces.errors import KtError

from .text import printable

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # files report these by name


def run(command: click.Command, arguments: Sequence[str] | None) -> int:
    """Runs a command with these words (default: the process's) and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # θ and µ on a terminal that lacks them
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return int(command.main(words or ["--help"], prog_name="kt", standalone_mode=False) or 0)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "kt"
        _say(f"{error.format_message()} ({path} --help shows what is accepted)")
        return error.exit_code
    except click.ClickException as error:
        _say(error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except Exception as error:
        if os.environ.get("KT_DEBUG"):
            raise
        _complain(error)
        return 1


def end(code: int) -> int:
    """Flushes stdout while an error can still be reported; the exit code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered cannot fail again at exit
        if not code and not isinstance(error, BrokenPipeError):
            _complain(error)
        return code or 1
    return code


def _complain(error: Exception) -> None:
    match error:
        case KtError():
            _say(str(error))
        case OSError():
            place = error.filename or ("standard output" if error.errno in _FULL else "")
            _say(f"{place}: {error.strerror}" if place else str(error))
        case MemoryError():
            _say("out of memory")
        case _:
            kind = type(error).__name__
            _say(f"internal error, {kind}: {error} (KT_DEBUG=1 shows where)")


def _say(message: str) -> None:
    click.echo(f"kt: error: {printable(message)}", err=True)
