"""Transfer: what earlier logs teach the model before a run has measured anything itself.

Rows are chosen when a run begins and kept in its header, so that a replay needs no other log. How
much they count follows from how well they rank what the run measures; a poor teacher is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kt.logs.query import Run, runs, timed
from kt.logs.record import Record, TrialRecord, WarmStart
from kt.spaces.errors import KtError, SpaceError, WorkloadError
from kt.spaces.families import space_of
from kt.spaces.space import Points, Space
from kt.spaces.target import Target
from kt.spaces.workload import Workload, parse

from .warm import distance

NEAREST = 4
"""Workloads that teach, at most."""
ROWS, BEST = 48, 12
"""Rows of each, at most; so many are its best, the others are spread over its ranks."""
LEAST_ROWS = 16
"""Measured points below which a workload teaches nothing."""


def lessons(
    records: Sequence[Record],
    workload: Workload,
    target: Target,
    most: int = NEAREST,
    count: int = ROWS,
) -> tuple[WarmStart, ...]:
    """Scored rows of the nearest workloads of the same operator and architecture.

    At most `count` rows of each of `most` workloads, nearest first.
    """
    found: list[tuple[float, str, Run]] = []
    for run in runs(records):
        theirs = run.header.target
        if (theirs.kind, theirs.arch) != (target.kind, target.arch):
            continue
        for text in run.workloads:
            other = _readable(text)
            if type(other) is type(workload) and len(run.of(text)) >= LEAST_ROWS:
                assert other is not None
                far = 2.0 * (not theirs.same_device(target))
                found.append((distance(workload, other) + far, text, run))
    found.sort(key=lambda item: (item[0], item[1], item[2].header.time))
    rows: list[WarmStart] = []
    taught: set[str] = set()
    for _, text, run in found:
        if text not in taught and len(taught) < most:
            taught.add(text)
            rows += _rows(run, text, count)
    return tuple(rows)


def _readable(text: str) -> Workload | None:
    try:
        return parse(text)
    except WorkloadError:
        return None


def _rows(run: Run, text: str, count: int) -> list[WarmStart]:
    """The best trials of a workload, and others evenly over the ranks; scores by the best."""
    scored = [(timed(trial), trial) for trial in run.of(text)]
    best = min((us for us, _ in scored if us is not None), default=None)
    if best is None:
        return []
    ranked = sorted(
        ((0.0 if us is None else best / us, trial) for us, trial in scored),
        key=lambda item: (-item[0], item[1].trial),
    )
    rest = ranked[BEST:]
    spread = np.unique(np.linspace(0, len(rest) - 1, count - BEST).round().astype(int))
    chosen = ranked[:BEST] + [rest[i] for i in spread.tolist() if rest]
    return [_row(trial, round(score, 4)) for score, trial in chosen]


def _row(trial: TrialRecord, score: float) -> WarmStart:
    digest = hashlib.sha256(msgspec.json.encode(trial)).hexdigest()[:16]
    return WarmStart(
        trial.run, trial.trial, trial.workload, trial.family, trial.theta, digest, score
    )


@dataclass(frozen=True)
class Lesson:
    """Points of one other workload with their scores: 1 = the best of its run, 0 = failed."""

    space: Space
    points: Points
    scores: NDArray[np.float32]


def lessons_of(
    warm: Mapping[str, Sequence[WarmStart]], target: Target, family: str = "all"
) -> tuple[Lesson, ...]:
    """The lessons in a header's warm starts; rows that mean nothing here are left out.

    Features are those of the other workload on *this* device.
    """
    rows: dict[str, dict[tuple[str, str], WarmStart]] = {}
    for start in (start for starts in warm.values() for start in starts):
        if start.score is not None:
            known = rows.setdefault(start.workload, {})
            known.setdefault((start.family, start.knobs.key()), start)
    found = [_lesson(text, list(starts.values()), target, family) for text, starts in rows.items()]
    return tuple(lesson for lesson in found if lesson is not None)


def _lesson(text: str, starts: Sequence[WarmStart], target: Target, family: str) -> Lesson | None:
    try:
        space = space_of(parse(text), target, family)
    except KtError:
        return None
    scored: dict[int, float] = {}
    for start in starts:
        try:
            scored[space.check(start.family, start.knobs)] = min(1.0, max(0.0, start.score or 0.0))
        except SpaceError:
            continue
    if not scored:
        return None
    points = np.array(list(scored), dtype=np.int64)
    return Lesson(space, points, np.array(list(scored.values()), dtype=np.float32))
