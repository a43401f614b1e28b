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

from .preset import REVISION, REVISIONS, Preset
from .state import Observation, State
from .teacher import Teacher
from .transfer import Lesson

MINIMUM_ROWS = 8
RECENT = 2
"""Batches over which the model's rank correlation is averaged, where a preset judges by batch."""


class Surrogate:
    """One regression model over all workloads of a run. A function of what it observed."""

    def __init__(
        self,
        states: Sequence[State],
        kind: str,
        seed: int,
        threads: int,
        preset: Preset = REVISIONS[REVISION],
        lessons: Sequence[Lesson] = (),
    ) -> None:
        self._states, self._preset = states, preset
        spaces = [state.space for state in states] + [lesson.space for lesson in lessons]
        self._table = FeatureTable(spaces)
        taught = [
            self._table.encode(len(states) + i, lesson.points) for i, lesson in enumerate(lessons)
        ]
        self.teacher = Teacher(
            np.concatenate(taught), np.concatenate([lesson.scores for lesson in lessons]),
            lambda: MODELS[kind](seed, threads, preset.trees), preset.taught,
        ) if taught else None  # fmt: skip
        self._make: Callable[[], Model] = lambda: MODELS[kind](seed, threads, preset.trees)
        self._model: Model | None = None
        self._rows: list[list[Features]] = [[] for _ in states]
        self._count = 0
        self._columns: NDArray[np.int64] | None = None
        self._judged: list[float] = []
        self._pairs: list[tuple[float, float]] = []
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
        self._pairs += zip(guess.tolist(), actual.tolist(), strict=True)

    def learn(self, which: int, observed: Sequence[Observation]) -> None:
        """Adds a batch's outcomes to the data (the next `predict` may refit)."""
        points = np.array([o.point for o in observed], dtype=np.int64)
        if len(points):
            self._rows[which].append(self._table.encode(which, points))
            self._count += len(points)
        if self.teacher:
            self.teacher.judge(
                [np.concatenate(rows) for rows in self._rows if rows],
                [s.throughput for s, rows in zip(self._states, self._rows, strict=True) if rows],
            )

    def ready(self) -> bool:
        """Refits when the data grew enough; whether there is a model at all."""
        usable = any(state.best_us is not None for state in self._states)
        enough = max(MINIMUM_ROWS, self._preset.growth * self.fitted_on, self.fitted_on + 1)
        if self._count >= enough and usable:
            features = np.concatenate([block for rows in self._rows for block in rows])
            scores = np.concatenate([s.throughput for s in self._states])
            weights = None
            if self.teacher and self.teacher.weight > 0:
                weights = np.ones(len(scores) + len(self.teacher.scores), dtype=np.float32)
                weights[len(scores) :] = self.teacher.weight
                features = np.concatenate([features, self.teacher.features])
                scores = np.concatenate([scores, self.teacher.scores])
            if not self._preset.all_columns:
                self._columns = varying(features)
                features = features[:, self._columns]
            self._model = self._make()
            self._model.fit(features, scores, weights)
            self.fitted_on = self._count
        return self._model is not None

    def predict(self, which: int, points: Points) -> NDArray[np.float32]:
        """Predicted normalised throughput; `ready` must have said yes."""
        assert self._model is not None
        features = self._table.encode(which, points)
        return self._model.predict(
            features if self._columns is None else features[:, self._columns]
        )

    def taught(self, which: int, points: Points) -> NDArray[np.float32]:
        """Scores that earlier logs alone predict; there must be a teacher."""
        assert self.teacher is not None
        return self.teacher.predict(self._table.encode(which, points))

    @property
    def trusted(self) -> bool:
        """Whether recent predictions ranked well enough to be followed."""
        if count := self._preset.judged:
            pairs = np.array(self._pairs[-count:])
            if len(pairs) < count:
                return True
            return (rank_correlation(pairs[:, 0], pairs[:, 1]) or 0.0) >= self._preset.trusted
        recent = self._judged[-RECENT:]
        return not recent or sum(recent) / len(recent) >= self._preset.trusted

    def report(self, random_share: float) -> ModelReport:
        """What goes into the batch record."""
        return ModelReport(
            fitted_on=self.fitted_on,
            rank_correlation=_rounded(self.last_correlation),
            top_recall=self.last_recall,
            random_share=random_share,
            transfer_rows=len(self.teacher.scores) if self.teacher else 0,
            transfer_weight=round(self.teacher.weight, 4) if self.teacher else 0.0,
        )


def varying(features: Features) -> NDArray[np.int64]:
    """Columns with more than one value; all of them when there is none."""
    first = features[:1]
    same = (features == first) | (np.isnan(features) & np.isnan(first))
    found = np.flatnonzero(~same.all(axis=0))
    return found if len(found) else np.arange(features.shape[1])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
