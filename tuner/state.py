"""What a search knows of one workload: a function of the final events it was told, in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kt.spaces.space import Points, Space


@dataclass(frozen=True)
class Observation:
    """One final event. `us` is None for a failure; a censored time is a lower bound."""

    point: int
    us: float | None
    censored: bool = False


@dataclass(frozen=True)
class Starts:
    """What the families' heuristics rank high: their defaults, and what comes after those."""

    defaults: Points
    likely: Points

    @staticmethod
    def of(space: Space, most: int = 0) -> Starts:
        """Today's, with `most` likely points of each family."""
        return Starts(space.defaults(), space.likely(most))


class State:
    """Measured and proposed points of one workload.

    `warm` are the best of other workloads; without `starts` the space is asked for them.
    """

    def __init__(self, space: Space, warm: Points, starts: Starts | None = None) -> None:
        self.space, self.warm = space, warm
        self.starts = starts or Starts.of(space)
        self._proposed: list[int] = []
        self._points: list[int] = []
        self._us: list[float] = []
        self._bests: list[float] = []
        self.best_point: int | None = None
        self.best_us: float | None = None
        self.stale = 0
        """Observed batches since the best improved."""
        self.batches = 0
        """Batches proposed."""

    def propose(self, points: Points) -> None:
        self._proposed.extend(points.tolist())
        self.batches += 1

    def observe(self, observations: list[Observation]) -> None:
        before = self.best_us
        for seen in observations:
            self._points.append(seen.point)
            self._us.append(np.nan if seen.us is None else seen.us)
            better = self.best_us is None or (seen.us is not None and seen.us < self.best_us)
            if seen.us is not None and not seen.censored and better:
                self.best_us, self.best_point = seen.us, seen.point
        self.stale = 0 if self.best_us != before else self.stale + 1
        if self.best_us is not None:
            self._bests.append(self.best_us)

    def saved_us(self, batches: int) -> float:
        """What each of the last observed `batches` took off the best time in the mean, µs."""
        recent = self._bests[-batches - 1 :]
        return (recent[0] - recent[-1]) / (len(recent) - 1) if len(recent) > 1 else 0.0

    def variations(self, around: int) -> Points:
        """Points never proposed that differ in one knob from one of the best few, ascending."""
        found = [self.space.around(int(point)) for point in self.best_measured(around)]
        points = np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)
        return points[~np.isin(points, self.proposed)]

    @property
    def proposed(self) -> Points:
        """Every point proposed so far; none is proposed again."""
        return np.array(self._proposed, dtype=np.int64)

    @property
    def measured(self) -> Points:
        """Points with a final event, in (batch, index) order."""
        return np.array(self._points, dtype=np.int64)

    @property
    def throughput(self) -> NDArray[np.float32]:
        """Normalised throughput of `measured`: 1 = the best known, 0 = failed."""
        return self.normalised(np.array(self._us))

    def normalised(self, us: NDArray[np.float64]) -> NDArray[np.float32]:
        """Throughput of times `us` (NaN = failed) relative to the best known."""
        if self.best_us is None:
            return np.zeros(len(us), dtype=np.float32)
        return np.nan_to_num(self.best_us / us, nan=0.0).astype(np.float32)

    def best_measured(self, n: int) -> Points:
        """The `n` best measured points that did not fail, best first."""
        points, score = self.measured, self.throughput
        order = np.lexsort((points, -score))
        return points[order][score[order] > 0][:n]
