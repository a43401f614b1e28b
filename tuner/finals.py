"""Finalists: the best few, re-verified and re-measured interleaved with the default."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from kt.logs.record import FinalEntry, FinalRecord

from .measure import VENDOR, Candidate, Measurer
from .session import Session, now

LEAST_NOISE = 0.005
LEAST_SECONDS = 0.5
"""A final that has less time than this is not held."""
_MAD_TO_SIGMA, _MEDIAN_ERROR = 1.4826, 1.2533


def hold_finals(
    session: Session, measurer: Measurer, which: int, deadline: float | None = None
) -> FinalRecord | None:
    """Chooses a workload's winner and logs the record.

    None when nothing was measured, or when the deadline leaves no time for a comparison.
    """
    finalists = _finalists(session, which)
    if not finalists or (deadline is not None and deadline - time.monotonic() < LEAST_SECONDS):
        return None
    space = session.spaces[which]
    candidates = [Candidate(trial, space.kernel(point)) for trial, point in finalists]
    timed = measurer.finals(session.workloads[which], candidates, deadline)
    entries = [entry for entry in timed if entry.trial != VENDOR]
    vendor_us = next((entry.us for entry in timed if entry.trial == VENDOR), ())
    noise = _noise(entries)
    record = FinalRecord(
        run=session.header.run, workload=session.header.workloads[which], entries=tuple(entries),
        best=_winner(session, which, dict(finalists), entries, noise),
        default=session.default_trial(which), noise=noise, vendor_us=vendor_us, time=now(),
    )  # fmt: skip
    session.journal.append(record, durable=True)
    return record


def _finalists(session: Session, which: int) -> list[tuple[int, int]]:
    """(trial, point) of the default and the best trials with distinct binaries."""
    timed = session.timed(which)
    chosen = timed[: session.settings.finalists]
    default = session.default_trial(which)
    chosen += [item for item in timed if item[0] == default and item not in chosen]
    return chosen


def _noise(entries: Sequence[FinalEntry]) -> float:
    """Relative half-width in which two medians are ties: twice the larger standard error."""
    errors = [LEAST_NOISE / 2]
    for entry in entries:
        if len(entry.us) > 1 and not entry.failure:
            mad = statistics.median(abs(x - entry.median_us) for x in entry.us)
            error = _MEDIAN_ERROR * _MAD_TO_SIGMA * mad / len(entry.us) ** 0.5
            errors.append(error / entry.median_us)
    return round(2 * max(errors), 5)


def _winner(
    session: Session, which: int, points: dict[int, int], entries: Sequence[FinalEntry],
    noise: float,
) -> int:  # fmt: skip
    """Among those within the noise of the fastest, the one nearest to the default's knobs."""
    valid = [entry for entry in entries if not entry.failure]
    if not valid:
        return -1
    limit = min(entry.median_us for entry in valid) * (1 + noise)
    space = session.spaces[which]
    default = space.theta(int(space.defaults()[0])).flat().items()
    ties = [entry.trial for entry in valid if entry.median_us <= limit]
    return min(
        ties,
        key=lambda trial: (
            len(space.theta(points[trial]).flat().items() - default),
            points[trial],
        ),
    )
