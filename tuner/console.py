"""The views of a run for people: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kt.logs.record import FinalRecord, StopRecord, TrialRecord

from . import text
from .events import BaseView, JsonView
from .progress import Lane
from .session import Planned, Session
from .summary import heading, summary

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEARTBEAT_SECONDS = 30.0
_LEAST_CURVE, _MOST_CURVE = 8, 32
"""Columns of a curve."""
_RATE = 2
"""Where the throughput is among a lane's numbers."""
_OTHER_LINES = 6
"""Of the live panel, below the workloads."""


class QuietView(BaseView):
    """Only the summary."""

    def write(self, line: str) -> None:
        super().write(text.one_line(line))  # a resumed log is somebody's text

    def stopped(self, session: Session, record: StopRecord) -> None:
        for line in summary(self.progress, session.journal.path, record):
            self.write(line)


class PlainView(QuietView):
    """A line for each improvement, a heartbeat for each batch or half minute, the summary."""

    def __init__(self, closed: Callable[[], None]) -> None:
        super().__init__(closed)
        self._written = 0.0

    def __enter__(self) -> BaseView:
        self.write("preparing inputs and references, measuring the machine's limits")
        return self

    def write(self, line: str) -> None:
        self._written = time.monotonic()
        super().write(line)

    def started(self, session: Session) -> None:
        super().started(session)
        for line in heading(self.progress):
            self.write(line)

    def planned(self, session: Session, planned: Planned) -> None:
        super().planned(session, planned)
        count = len(planned.frozen.candidates)
        self.write(f"batch {planned.proposal.number}: {count} trials of {planned.workload}")
        if self.progress.measured:
            self.write(f"  {self.progress.status()}")

    def trial(self, session: Session, record: TrialRecord) -> None:
        if self.progress.trial(record):
            lane = self.progress.lane(record.workload)
            facts = "  ".join(lane.facts())
            self.write(f"  trial {record.trial}: {lane.name}: {facts}  ({record.source})")
        elif time.monotonic() - self._written > _HEARTBEAT_SECONDS:
            self.write(f"  {self.progress.status()}")

    def final(self, session: Session, record: FinalRecord) -> None:
        super().final(session, record)
        checked = len(record.entries)
        self.write(f"final of {record.workload}: {checked} verified again and re-measured")


class LiveView(QuietView):
    """A panel that rich redraws; the summary replaces it."""

    def __init__(self, closed: Callable[[], None]) -> None:
        super().__init__(closed)
        self._stage, self._left = "preparing inputs and references", 0
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console, get_renderable=self._panel, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> BaseView:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def started(self, session: Session) -> None:
        super().started(session)
        for line in heading(self.progress):
            self._console.print(text.one_line(line))

    def planned(self, session: Session, planned: Planned) -> None:
        super().planned(session, planned)
        self._left = count = len(planned.frozen.candidates)
        self._stage = f"batch {planned.proposal.number}: {count} trials of {planned.workload}"

    def trial(self, session: Session, record: TrialRecord) -> None:
        super().trial(session, record)
        self._left -= 1
        if self.progress.done >= self.progress.total:
            self._stage = "verifying the finalists and measuring them against each other"
        elif self._left <= 0:
            self._stage = "learning, and choosing the next batch"

    def stopped(self, session: Session, record: StopRecord) -> None:
        self._live.stop()
        super().stopped(session, record)

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        if self._progress is None:
            return Text(self._stage, style="dim")
        width, height = self._console.size
        lanes = self._progress.lanes[: max(1, (height - _OTHER_LINES) // 2)]
        lines: list[RenderableType] = []
        each = self._progress.each
        for lane, (numbers, curve) in zip(lanes, lane_lines(lanes, each, width), strict=True):
            name = text.one_line(lane.name)
            lines.append(Text(name, style="bold", no_wrap=True, overflow="ellipsis"))
            lines.append(Text.assemble(numbers, (curve, "cyan")))
        if more := len(self._progress.lanes) - len(lanes):
            lines.append(Text(f"and {more} more workloads", style="dim"))
        return Group(*lines, Text(self._progress.status()), Text(self._stage, style="dim"))


def lane_lines(lanes: Sequence[Lane], trials: int, width: int) -> list[tuple[str, str]]:
    """(numbers, curve) of each lane in `width` columns, the numbers aligned.

    Each lane has `trials`; 0 when they share a budget. The curve takes what the numbers leave;
    where that is too little, the throughput goes first.
    """
    limit = f"/{trials}" if trials else ""
    rows = [[f"{lane.done}{limit}", *lane.facts()] for lane in lanes]
    count = max(map(len, rows), default=0)
    rows = [row + [""] * (count - len(row)) for row in rows]
    numbers, room = _aligned(rows, width)
    if room < _LEAST_CURVE:
        numbers, room = _aligned([row[:_RATE] + row[_RATE + 1 :] for row in rows], width)
    most = min(room, _MOST_CURVE)
    curves = (text.sparkline(lane.curve, most) if room >= _LEAST_CURVE else "" for lane in lanes)
    return list(zip(numbers, curves, strict=True))


def _aligned(rows: Sequence[Sequence[str]], width: int) -> tuple[list[str], int]:
    """Lines of flush-right cells, and the columns that they leave."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "".join(f"  {cell:>{wide}}" for cell, wide in zip(row, widths, strict=True)) + "  "
        for row in rows
    ]
    return lines, width - sum(widths) - 2 * len(widths) - 2


def view_of(as_json: bool, plain: bool, quiet: bool, closed: Callable[[], None]) -> BaseView:
    """The view that the options and the terminal ask for."""
    if as_json:
        return JsonView(closed)
    if quiet:
        return QuietView(closed)
    if plain or not sys.stdout.isatty() or _dumb():
        return PlainView(closed)
    return LiveView(closed)


def _dumb() -> bool:
    return os.environ.get("TERM", "dumb").lower() in ("", "dumb", "unknown")
