"""A batch being collected, and what strategies have in common."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kt.spaces.space import Points

from .state import State


class Strategy(Protocol):
    """Fills a batch with new legal points; it stays short only when the space ends."""

    def fill(self, picker: Picker, rng: np.random.Generator) -> None: ...


class Picker:
    """A batch being collected: distinct points, never proposed before, at most `size`."""

    def __init__(self, state: State, size: int) -> None:
        self.state, self.size = state, size
        self._points: list[int] = []
        self.sources: list[str] = []
        self._taken = set(state.proposed.tolist())

    @property
    def room(self) -> int:
        return self.size - len(self._points)

    @property
    def points(self) -> Points:
        return np.array(self._points, dtype=np.int64)

    @property
    def taken(self) -> Points:
        """Everything proposed before or collected here, ascending."""
        return np.array(sorted(self._taken), dtype=np.int64)

    def add(self, points: Points, source: str, most: int | None = None) -> None:
        """Collects the first new ones of `points`, `most` of them at most."""
        left = self.room if most is None else min(most, self.room)
        for point in points.tolist():
            if left <= 0:
                return
            if point not in self._taken:
                self._taken.add(point)
                self._points.append(point)
                self.sources.append(source)
                left -= 1

    def add_random(self, rng: np.random.Generator) -> None:
        """Fills the room with uniform legal points."""
        if self.room > 0:
            self.add(self.state.space.sample(rng, self.room, self.taken), "random")
