"""A recorded space: only measured points exist, and neighbours are the nearest of them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kt.spaces.space import Points, Space

NEAREST = 8
_BLOCK = 256


class RecordedSpace(Space):
    """`space` restricted to `points` (ascending), for searching without a device."""

    def __init__(self, space: Space, points: Points) -> None:
        super().__init__(space.workload, space.target, [part.family for part in space.parts])
        self._recorded = points

    @cached_property
    def listed(self) -> Points | None:
        return self._recorded

    def legal(self, points: Points) -> NDArray[np.bool_]:
        return np.isin(points, self._recorded)

    def defaults(self) -> Points:
        """The recorded points nearest to the defaults."""
        wanted = self.coordinates(super().defaults())
        spots = self.coordinates(self._recorded)
        nearest = [int(np.abs(spots - spot).sum(axis=1).argmin()) for spot in wanted]
        return self._recorded[sorted(set(nearest))]

    def neighbours(self, points: Points, rng: np.random.Generator, tries: int = 4) -> Points:
        near = self._near[np.searchsorted(self._recorded, points)]
        return near[np.arange(len(points)), rng.integers(near.shape[1], size=len(points))]

    def around(self, point: int) -> Points:
        near: Points = self._near[int(np.searchsorted(self._recorded, point))]
        return near

    @cached_property
    def _near(self) -> NDArray[np.int64]:
        """The nearest other points of each, shape [recorded, NEAREST]."""
        spots = self.coordinates(self._recorded)
        count = min(NEAREST, len(spots) - 1)
        rows = []
        for start in range(0, len(spots), _BLOCK):
            block = spots[start : start + _BLOCK]
            distance = np.abs(block[:, None, :] - spots[None, :, :]).sum(axis=2)
            distance[np.arange(len(block)), start + np.arange(len(block))] = np.inf
            rows.append(np.argsort(distance, axis=1, kind="stable")[:, :count])
        near: NDArray[np.int64] = self._recorded[np.concatenate(rows)]
        return near
