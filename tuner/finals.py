"""Finalists: the best few, re-verified and re-measured interleaved with the default.

On a GPU a trial is timed after a pause, or a short time under load; in a second of load clocks
fall by up to a sixth, and not every kernel slows down alike. Therefore a qualifying round times
more than the finalists in turn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

from kt.logs.record import FinalEntry, FinalRecord
from kt.spaces.space import Space

from .measure import VENDOR, Candidate, Measurer
from .session import Session, now

LEAST_NOISE, MOST_NOISE = 0.005, 0.1
"""Bounds of the relative difference within which two times are a tie."""
CLOSE = 1.08
"""Trials that take up to so many times as long as the best may yet win."""
QUALIFIERS, MOST_QUALIFIERS = 3, 36
"""Trials in the qualifying round: for each finalist, and at most unless more are finalists."""
SLOW_US = 2000.0
"""Kernels that take so long are under load in their own trials: no qualifying round."""
BUSY = 1.5
"""A final this many times slower than its trials is held once more."""
LEAST_SECONDS = 0.5
"""A final that has less time than this is not held."""
_MAD_TO_SIGMA, _MEDIAN_ERROR = 1.4826, 1.2533


def hold_finals(
    session: Session, measurer: Measurer, which: int, deadline: float | None = None
) -> FinalRecord | None:
    """Chooses a workload's winner and logs the record.

    None when nothing was measured, or when the deadline leaves no time for a comparison.
    """
    most, workload = session.settings.finalists, session.workloads[which]
    contenders = _contenders(session, which, max(most, min(QUALIFIERS * most, MOST_QUALIFIERS)))
    if not contenders or _too_late(deadline):
        return None
    space = session.spaces[which]

    def kernels(points: dict[int, int]) -> list[Candidate]:
        return [Candidate(trial, space.kernel(point)) for trial, point in points.items()]

    qualifying: list[FinalEntry] = []
    if len(contenders) > most and session.timed(which)[0][0] < SLOW_US:
        qualifying = measurer.qualify(workload, kernels(contenders), deadline)
        if _too_late(deadline):
            return None
    fastest_first = sorted(
        (entry for entry in qualifying if entry.sound), key=lambda entry: entry.median_us
    )
    chosen = [entry.trial for entry in fastest_first] or list(contenders)
    finalists = {trial: contenders[trial] for trial in chosen[:most]} | _always(session, which)
    candidates = kernels(finalists)
    timed = measurer.finals(workload, candidates, deadline)
    if deadline is None and _disturbed(session, which, timed):
        timed = measurer.finals(workload, candidates)
    entries = [entry for entry in timed if entry.trial != VENDOR]
    vendor_us = next((entry.us for entry in timed if entry.trial == VENDOR), ())
    fastest = _fastest(entries)
    record = FinalRecord(
        run=session.header.run, workload=session.header.workloads[which], entries=tuple(entries),
        best=_winner(session, which, finalists, entries), qualifying=tuple(qualifying),
        default=session.default_trial(which), vendor_us=vendor_us, time=now(),
        noise=round(_tie(fastest, fastest), 5) if fastest else 0.0,
    )  # fmt: skip
    session.journal.append(record, durable=True)
    return record


def _too_late(deadline: float | None) -> bool:
    return deadline is not None and deadline - time.monotonic() < LEAST_SECONDS


def _contenders(session: Session, which: int, count: int) -> dict[int, int]:
    """Points of up to `count` of the best trials with distinct binaries, by trial.

    The first is the fastest. Of three places one is for the best with a tile that none before has,
    one for the best of another structure, where those are close to the fastest: what slows down
    under load differs most between tiles.
    """
    space = session.spaces[which]
    left = session.timed(which)
    close = CLOSE * left[0][0] if left else 0.0
    places = (None, _tile, _structure)
    chosen: dict[int, int] = {}
    while left and len(chosen) < count:
        item = left[0]
        if kind := places[len(chosen) % len(places)]:
            seen = {kind(space, point) for point in chosen.values()}
            unlike = (x for x in left if x[0] <= close and kind(space, x[2]) not in seen)
            item = next(unlike, item)
        left.remove(item)
        chosen[item[1]] = item[2]
    return chosen


def _always(session: Session, which: int) -> dict[int, int]:
    """Points of the default and of an earlier final's winner by their trials, where timed."""
    winner = session.winners.get(session.header.workloads[which], -1)
    wanted = (session.default_trial(which), winner)
    return {trial: point for _, trial, point in session.timed(which) if trial in wanted}


def _tile(space: Space, point: int) -> object:
    """A kernel's family and tile."""
    return space.family_of(point), tuple(space.theta(point).tile.items())


def _structure(space: Space, point: int) -> object:
    """The same with its thread mapping and synchronisation."""
    theta = space.theta(point)
    parts = (theta.map, theta.sync)
    return _tile(space, point), *(tuple(part.items()) for part in parts)


def _disturbed(session: Session, which: int, timed: Sequence[FinalEntry]) -> bool:
    """Whether the finalists are much slower than in their trials: the machine was busy."""
    fastest = _fastest([entry for entry in timed if entry.trial != VENDOR])
    alone = session.best.get(which)
    return fastest is not None and alone is not None and fastest.median_us > BUSY * alone[1]


def _fastest(entries: Sequence[FinalEntry]) -> FinalEntry | None:
    sound = [entry for entry in entries if entry.sound]
    return min(sound, key=lambda entry: entry.median_us, default=None)


def _error(entry: FinalEntry) -> float:
    """Standard error of an entry's median, microseconds."""
    mad = statistics.median(abs(us - entry.median_us) for us in entry.us)
    return _MEDIAN_ERROR * _MAD_TO_SIGMA * mad / math.sqrt(len(entry.us))


def _tie(a: FinalEntry, b: FinalEntry) -> float:
    """How far apart, relative to `a`, two medians may be and still be a tie."""
    apart = 2 * math.hypot(_error(a), _error(b)) / a.median_us
    return min(max(apart, LEAST_NOISE), MOST_NOISE)


def _winner(
    session: Session, which: int, points: dict[int, int], entries: Sequence[FinalEntry]
) -> int:
    """Of those that tie with the fastest, the one nearest to the default's knobs."""
    fastest = _fastest(entries)
    if fastest is None:
        return -1
    space = session.spaces[which]
    default = space.theta(int(space.defaults()[0])).flat().items()
    ties = [
        entry.trial
        for entry in entries
        if entry.sound and entry.median_us <= fastest.median_us * (1 + _tie(fastest, entry))
    ]
    return min(
        ties,
        key=lambda trial: (
            len(space.theta(points[trial]).flat().items() - default),
            points[trial],
        ),
    )
