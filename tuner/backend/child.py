"""Child processes that cannot outlive us: death with the parent, bounded output, group kill."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here: no lock of the loader may be taken after a fork
_HEAD_BYTES = 256 * 1024
_TAIL_BYTES = 16 * 1024
# A compiler driver starts further processes, which no death signal reaches. This shell leads their
# group: SIGTERM (which it gets when its own parent dies) ends all of them.
_GROUP_LEADER = 'trap "kill -9 0" TERM; "$@" & wait $!'


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process `signum` when its parent ends (Linux; else nothing).

    The "parent" is the thread that started this process, so that thread has to live on.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def _lead_group(parent: int) -> None:
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before it could be watched


@dataclass(frozen=True)
class Finished:
    """How a child ended: `code` is None after a timeout, negative for a signal."""

    code: int | None
    output: str
    seconds: float


def run_child(
    command: Sequence[str],
    directory: Path,
    timeout: float,
    env: Mapping[str, str],
    stderr: int = subprocess.STDOUT,
) -> Finished:
    """Runs `command` in its own process group, killed as a whole after `timeout` seconds.

    stdout and, unless sent elsewhere, stderr come back together: the first 256 KiB and the last
    16 KiB of them, however much the child writes. Raises OSError when the command cannot be
    started.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        ["/bin/sh", "-c", _GROUP_LEADER, "sh", *command],
        cwd=directory, env=dict(env), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=stderr,
        start_new_session=True, preexec_fn=functools.partial(_lead_group, os.getpid()),
    )  # fmt: skip
    try:
        output, ended = _drain(process, begin + timeout)
        code = _exit_code(process) if ended else None
    finally:
        kill_group(process.pid)
        process.wait()
        if process.stdout:
            process.stdout.close()
    return Finished(code, output, time.monotonic() - begin)


def kill_group(pid: int) -> None:
    """SIGKILL to the process group that `pid` leads; a group that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _drain(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, bool]:
    """Reads output until the group leader ends or the deadline passes."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    head, tail, skipped, open_ = bytearray(), bytearray(), 0, True
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while open_:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return _text(head, tail, skipped), False
            chunk = os.read(descriptor, 65536)
            open_ = bool(chunk)
            room = _HEAD_BYTES - len(head)
            head += chunk[: max(room, 0)]
            tail += chunk[max(room, 0) :]
            if len(tail) > 2 * _TAIL_BYTES:
                skipped += len(tail) - _TAIL_BYTES
                del tail[:-_TAIL_BYTES]
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return _text(head, tail, skipped), False
    return _text(head, tail, skipped), True


def _text(head: bytearray, tail: bytearray, skipped: int) -> str:
    gap = f"\n[{skipped} bytes left out]\n".encode() if skipped else b""
    return (bytes(head) + gap + bytes(tail)).decode(errors="replace")


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """The command's own code: the leading shell reports a signal n as 128 + n."""
    code = process.returncode
    return 128 - code if code > 128 else code


def signal_name(number: int) -> str:
    """`SIGSEGV` for 11; a real-time signal by its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
