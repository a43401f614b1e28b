"""The gate of transferred rows: a model of them alone, weighed by how well it ranks new results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kt.costmodel.evaluate import rank_correlation
from kt.costmodel.model import Model
from kt.spaces.space import Features

LEAST_JUDGED = 8
"""Results of a workload before they say anything of the teacher."""


class Teacher:
    """Rows of earlier logs. Their weight is 1 until results speak, then their correlation."""

    def __init__(
        self,
        features: Features,
        scores: NDArray[np.float32],
        make: Callable[[], Model],
        least: float,
    ) -> None:
        self.features, self.scores = features, scores
        self.weight = 1.0
        self._make, self._least = make, least
        self._model: Model | None = None

    def predict(self, features: Features) -> NDArray[np.float32]:
        """Scores of other points by these rows alone."""
        if self._model is None:
            self._model = self._make()
            self._model.fit(self.features, self.scores)
        return self._model.predict(features)

    def judge(self, features: Sequence[Features], scores: Sequence[NDArray[np.float32]]) -> None:
        """Weighs the rows by the results so far, one array a workload.

        The weight is the mean rank correlation over workloads; a poor one counts as none.
        """
        found = [
            rank_correlation(self.predict(rows), actual) or 0.0
            for rows, actual in zip(features, scores, strict=True)
            if len(actual) >= LEAST_JUDGED
        ]
        if found:
            mean = sum(found) / len(found)
            self.weight = mean if mean >= self._least else 0.0
