"""A recorded space: only measured points exist; neighbours are one knob step away, or the nearest.

Where everything was recorded the neighbours are those of the space itself. Where little was, one
step of one knob seldom meets a recorded point: the nearest ones fill up to `NEAREST`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kt.spaces.space import Points, Space

NEAREST = 8
"""Neighbours of a recorded point at least, where so many were recorded."""


class RecordedSpace(Space):
    """`space` restricted to `points` (ascending), for searching without a device."""

    def __init__(self, space: Space, points: Points) -> None:
        super().__init__(space.workload, space.target, [part.family for part in space.parts])
        self._recorded = points

    @cached_property
    def listed(self) -> Points | None:
        return self._recorded

    def legal(self, points: Points) -> NDArray[np.bool_]:
        return self._index(points) >= 0

    def defaults(self) -> Points:
        """The recorded points nearest to the defaults."""
        return np.sort(self._nearest(super().defaults()))

    def likely(self, count: int) -> Points:
        """The recorded points nearest to those of the families' heuristics, best first."""
        return self._nearest(super().likely(count))

    def _nearest(self, wanted: Points) -> Points:
        """The recorded point nearest to each of some, once."""
        spots = self.coordinates(self._recorded)
        found = [
            int(np.abs(spots - spot).sum(axis=1).argmin()) for spot in self.coordinates(wanted)
        ]
        return self._recorded[list(dict.fromkeys(found))]

    def neighbours(self, points: Points, rng: np.random.Generator, tries: int = 4) -> Points:
        rows, counts = self._near
        row = self._index(points)
        pick = (rng.random(len(points)) * counts[row]).astype(np.int64)
        found = rows[row, pick]
        return np.where(counts[row] > 0, self._recorded[found], points)

    def moves(self, points: Points, rng: np.random.Generator, tries: int = 3) -> Points:
        return self.neighbours(points, rng)

    def around(self, point: int) -> Points:
        rows, counts = self._near
        row = int(self._index(np.array([point]))[0])
        near: Points = self._recorded[rows[row, : counts[row]]]
        return near

    def _index(self, points: Points) -> NDArray[np.int64]:
        """Position of each point among the recorded; -1 for one that was not."""
        place = np.searchsorted(self._recorded, points)
        place[place == len(self._recorded)] = 0
        found: NDArray[np.int64] = np.where(self._recorded[place] == points, place, -1)
        return found

    @cached_property
    def _near(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions of each point's neighbours, shape [recorded, most], and how many count."""
        steps = self._steps()
        counts = (steps >= 0).sum(axis=1)
        order = np.argsort(steps < 0, axis=1, kind="stable")
        rows = np.take_along_axis(steps, order, axis=1)
        want = min(NEAREST, len(self._recorded) - 1)
        if rows.shape[1] < want:
            rows = np.pad(rows, ((0, 0), (0, want - rows.shape[1])), constant_values=-1)
        few = np.flatnonzero(counts < want)
        if len(few):
            self._fill(rows, counts, few, want)
        return rows, counts

    def _steps(self) -> NDArray[np.int64]:
        """Recorded points one knob step away, by step; -1 where a step leaves the recording."""
        parts = zip(self.parts, self._offsets.tolist(), strict=False)
        moved = []
        for part, offset in parts:
            inside = (self._recorded >= offset) & (self._recorded < offset + part.size)
            local = np.where(inside, self._recorded - offset, 0)
            for targets in part.one_step(local):
                found = self._index(targets + offset)
                moved.append(np.where(inside & (targets >= 0), found, -1))
        return np.stack(moved, axis=1) if moved else np.full((len(self._recorded), 1), -1)

    def _fill(
        self, rows: NDArray[np.int64], counts: NDArray[np.int64], few: NDArray[np.int64], want: int
    ) -> None:
        """Adds the nearest other points to the neighbours of the points at positions `few`."""
        from scipy.spatial import KDTree

        spots = self.coordinates(self._recorded)
        _, nearest = KDTree(spots).query(spots[few], k=min(2 * want + 1, len(spots)), p=1)
        for row, near in zip(few.tolist(), nearest.tolist(), strict=True):
            known = {row, *rows[row, : counts[row]].tolist()}
            added = [i for i in near if i not in known][: want - counts[row]]
            rows[row, counts[row] : want] = added
            counts[row] = want
