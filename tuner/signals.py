"""Ctrl-C, SIGTERM and SIGHUP: the first ends the run in good order, the second at once."""

from __future__ import annotations

import os
import signal
import stat
import sys
from types import FrameType, TracebackType
from typing import Any

_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """While open, a first signal raises KeyboardInterrupt; `code` tells which it was."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.caught = 0
        self._before: dict[int, Any] = {}

    @property
    def code(self) -> int:
        """Exit code of an interrupted command: 130, 143, 129 or 141."""
        return 128 + (self.caught or signal.SIGINT)

    def stdout_closed(self) -> None:
        """Ends the run because nobody reads its output any more."""
        self.caught = signal.SIGPIPE
        raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        for number in self.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and background jobs keep that
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            _die(number)
        self.caught = number
        if number == signal.SIGHUP:
            _leave_terminal()
        raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Sends to /dev/null what would go to a terminal that is gone, where each write fails."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # isatty is false for one that hung up
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


def _die(number: int) -> None:
    """Ends the process now; the processes it started go with it."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
