"""The shared cost model of a run: refit as data grows, judged before it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kt.costmodel.evaluate import rank_correlation, top_recall
from kt.costmodel.features import FeatureTable
from kt.costmodel.model import MODELS, Model
from kt.logs.record import ModelReport
from kt.spaces.space import Features, Points

from .state import Observation, State

GROWTH = 1.1
"""Refit when there are this many times the rows of the last fit."""
MINIMUM_ROWS = 8
TRUSTED_CORRELATION = 0.25
RECENT = 2
"""Batches over which the model's rank correlation is averaged."""


class Surrogate:
    """One regression model over all workloads of a run. A function of what it observed."""

    def __init__(self, states: Sequence[State], kind: str, seed: int, threads: int) -> None:
        self._states = states
        self._table = FeatureTable([state.space for state in states])
        self._make: Callable[[], Model] = lambda: MODELS[kind](seed, threads)
        self._model: Model | None = None
        self._rows: list[list[Features]] = [[] for _ in states]
        self._count = 0
        self._judged: list[float] = []
        self.fitted_on = 0
        self.last_correlation: float | None = None
        self.last_recall: float | None = None

    def load(self) -> None:
        """Imports the model's library (a second or more) before anything waits for it."""
        self._make()

    def judge(
        self, which: int, predicted: Sequence[float | None], observed: Sequence[Observation]
    ) -> None:
        """Compares a batch's predictions with its outcomes, before `learn` sees them."""
        us = [o.us for o, p in zip(observed, predicted, strict=True) if p is not None]
        guess = np.array([p for p in predicted if p is not None])
        self.last_correlation = self.last_recall = None
        if not len(guess):
            return
        actual = self._states[which].normalised(np.array([np.nan if t is None else t for t in us]))
        self.last_correlation = rank_correlation(guess, actual)
        self.last_recall = top_recall(guess, actual)
        self._judged.append(self.last_correlation or 0.0)

    def learn(self, which: int, observed: Sequence[Observation]) -> None:
        """Adds a batch's outcomes to the data (the next `predict` may refit)."""
        points = np.array([o.point for o in observed], dtype=np.int64)
        if len(points):
            self._rows[which].append(self._table.encode(which, points))
            self._count += len(points)

    def ready(self) -> bool:
        """Refits when the data grew enough; whether there is a model at all."""
        usable = any(state.best_us is not None for state in self._states)
        if self._count >= max(MINIMUM_ROWS, GROWTH * self.fitted_on) and usable:
            features = np.concatenate([block for rows in self._rows for block in rows])
            scores = np.concatenate([s.throughput for s in self._states])
            self._model = self._make()
            self._model.fit(features, scores)
            self.fitted_on = self._count
        return self._model is not None

    def predict(self, which: int, points: Points) -> NDArray[np.float32]:
        """Predicted normalised throughput; `ready` must have said yes."""
        assert self._model is not None
        return self._model.predict(self._table.encode(which, points))

    @property
    def trusted(self) -> bool:
        """Whether recent predictions ranked well enough to be followed."""
        recent = self._judged[-RECENT:]
        return not recent or sum(recent) / len(recent) >= TRUSTED_CORRELATION

    def report(self, random_share: float) -> ModelReport:
        """What goes into the batch record."""
        return ModelReport(
            fitted_on=self.fitted_on,
            rank_correlation=_rounded(self.last_correlation),
            top_recall=self.last_recall,
            random_share=random_share,
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
