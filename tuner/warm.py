"""Where a search begins: what heuristics rank high, and the bests of the nearest workloads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kt.logs.query import Best, best_trials
from kt.logs.record import BatchRecord, Heuristic, Record, WarmStart
from kt.spaces.errors import SpaceError, WorkloadError
from kt.spaces.space import Points, Space
from kt.spaces.target import Target
from kt.spaces.workload import Workload, parse

from .state import Starts

MOST = 4
_ALIKE = ({"fp16", "bf16"}, {"fp8_e4m3", "fp8_e5m2"})
"""Element types for which a schedule is as fast."""


def nearest(records: Sequence[Record], workload: Workload, target: Target) -> tuple[WarmStart, ...]:
    """Bests of the nearest workloads of the same operator and device, nearest first."""
    found = [
        (distance(workload, other), best.workload, best)
        for best in best_trials(records)
        if best.target.same_device(target) and (other := _readable(best.workload))
        if type(other) is type(workload)
    ]
    found.sort(key=lambda item: item[:2])
    return tuple(_warm_start(best) for _, _, best in found[:MOST])


def _readable(text: str) -> Workload | None:
    try:
        return parse(text)
    except WorkloadError:
        return None  # a log is untrusted, and may know more operators than this version


def _warm_start(best: Best) -> WarmStart:
    digest = hashlib.sha256(msgspec.json.encode(best.trial)).hexdigest()[:16]
    return WarmStart(
        best.trial.run, best.trial.trial, best.workload, best.trial.family, best.trial.theta,
        digest,
    )  # fmt: skip


def distance(a: Workload, b: Workload) -> float:
    """How unlike two workloads of one operator are: octaves of their numbers.

    Another element type counts 4, or 0.5 where the same instructions exist for both.
    """
    mine, theirs = a.descriptors(), b.descriptors()
    logs = (abs(math.log2(1 + v) - math.log2(1 + theirs.get(name, 0))) for name, v in mine.items())
    alike = any({a.dtype, b.dtype} <= types for types in _ALIKE)
    return round(sum(logs) + (0.5 if alike else 4.0) * (a.dtype != b.dtype), 6)


def heuristics(space: Space, most: int) -> tuple[Heuristic, ...]:
    """Each family's default, and up to `most` points of each that its heuristic ranks next."""
    defaults = space.defaults()
    points = [(p, True) for p in defaults[space.legal(defaults)].tolist()]
    points += [(p, False) for p in space.likely(most).tolist()]
    return tuple(Heuristic(space.family_of(p), space.theta(p), first) for p, first in points)


def logged_defaults(batches: Sequence[BatchRecord], workload: str) -> tuple[Heuristic, ...]:
    """The defaults that a log began with whose header does not name them."""
    return tuple(
        Heuristic(entry.family, entry.knobs, True)
        for batch in batches
        if batch.workload == workload
        for entry in batch.entries
        if entry.source == "default"
    )


def starts_of(space: Space, known: Sequence[Heuristic]) -> Starts:
    """The points of a header's heuristics, today's without any.

    Those that are no members of `space` are left out.
    """
    if not known:
        return Starts.of(space)
    points: dict[bool, list[int]] = {True: [], False: []}
    for one in known:
        try:
            points[one.default].append(space.check(one.family, one.knobs))
        except SpaceError:
            continue
    return Starts(np.array(points[True], dtype=np.int64), np.array(points[False], dtype=np.int64))


def warm_points(space: Space, starts: Sequence[WarmStart]) -> Points:
    """The points of starts to propose that are members of `space`; the others are left out."""
    points = []
    for start in (start for start in starts if start.score is None):
        try:
            points.append(space.check(start.family, start.knobs))
        except SpaceError:
            continue  # the neighbour's θ does not exist for this shape
    return np.array(points, dtype=np.int64)
