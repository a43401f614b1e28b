"""Feature tables over several spaces: one set of named columns, so that one model serves many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kt.spaces.space import Features, Points, Space

VERSION = 1
"""Changes with the meaning of a column; logged, so that a model never reads other columns."""


class FeatureTable:
    """Encodes the points of several spaces into shared columns; a column one lacks is NaN."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self._spaces = spaces
        names = dict.fromkeys(name for space in spaces for name in space.feature_names)
        self.names: tuple[str, ...] = tuple(names)
        position = {name: i for i, name in enumerate(self.names)}
        self._columns = [
            np.array([position[name] for name in space.feature_names]) for space in spaces
        ]

    def encode(self, which: int, points: Points) -> Features:
        """Features of points of space `which`, shape [len(points), len(names)]."""
        rows = self._spaces[which].encode(points)
        if len(self._spaces) == 1:
            return rows
        out = np.full((len(points), len(self.names)), np.nan, dtype=np.float32)
        out[:, self._columns[which]] = rows
        return out
