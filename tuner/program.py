"""How the `kt` program runs and ends: every error becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

import click

from kt.spaces.errors import KtError

from .text import one_line, printable

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # files report these by name


def run(command: click.Command, arguments: Sequence[str] | None) -> int:
    """Runs a command with these words (default: the process's) and returns its exit code."""
    _open_standard_files()
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


def _open_standard_files() -> None:
    """Stands /dev/null in for what the caller closed (`kt show >&-`).

    Else the next file opened gets that number, and with it what others write to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


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
            kind, text = type(error).__name__, str(error).strip()
            if text.startswith("Traceback"):  # a worker's bug; the last line says what it was
                text = text.splitlines()[-1]
            _say(f"internal error, {kind}: {one_line(text)} (KT_DEBUG=1 shows where)")


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # nowhere is left to report that stderr fails
        click.echo(f"kt: error: {printable(message)}", err=True)
