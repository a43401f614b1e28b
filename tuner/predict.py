"""Zero-trial prediction: a schedule for a shape that was never tuned, from logs of other shapes.

Candidates are the defaults and what was best for the nearest logged shapes, as far as it is legal
here: schedules that ran well somewhere. Models of all logged shapes choose among them. A search
logs few poor schedules, so they are also told that what nobody measured is mediocre.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kt.costmodel.features import FeatureTable
from kt.costmodel.model import BoostedTrees, Trees, Vector
from kt.logs.query import Best, Run
from kt.logs.record import Failure, Record, Seconds, TrialRecord
from kt.spaces.errors import LogError, SpaceError
from kt.spaces.families import space_of
from kt.spaces.space import Points, Space
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .chosen import Chosen
from .transfer import BEST, NEAREST, Lesson, lessons, lessons_of
from .warm import distance

GOOD = 0.9
"""A logged schedule is a candidate when it reached this share of its workload's best."""
WORKLOADS, ROWS = 32, 256
"""Workloads that the model learns from, at most, and rows of each."""
FADING = 4.0
"""Distance over which a workload's rows come to count 1/e."""
UNMEASURED, MEDIOCRE, DOUBT = 64, 0.2, 0.5
"""Random points added for each workload, their score, and the weight of each."""
MODELS, TREES = 8, Trees(rounds=60, eta=0.2, rows=0.5, columns=0.5)
"""The mean of so many models decides: one alone likes what it happens to know little of."""


@dataclass(frozen=True)
class Prediction:
    """The chosen point, its predicted throughput relative to the best, and what it rests on."""

    space: Space
    point: int
    score: float
    default_score: float
    """The best prediction among the defaults."""
    candidates: int
    rows: int
    workloads: tuple[str, ...]

    @property
    def reason(self) -> str:
        """One line for people."""
        source = "a default" if self.point in self.space.defaults() else "a logged schedule"
        return (
            f"{source}, predicted {100 * self.score:.0f} % of the best (the default "
            f"{100 * self.default_score:.0f} %), chosen among {self.candidates} by models of "
            f"{self.rows} trials of {len(self.workloads)} other shapes"
        )


def predict(
    records: Sequence[Record], workload: Workload, target: Target, family: str = "all"
) -> Prediction:
    """The schedule that the logs promise most of. Raises LogError when they have no such shape."""
    taught = teaching(records, workload, target)
    if not taught:
        raise LogError(
            f"no logged shape can teach '{workload}' on {target.arch}: log a few of the same "
            "operator, 16 trials or more each"
        )
    space = space_of(workload, target, family)
    points = _candidates(space, taught[:NEAREST])
    scores = predicted_scores(space, taught, points)
    best = int(np.lexsort((points, -scores))[0])
    defaults = np.isin(points, space.defaults())
    return Prediction(
        space, int(points[best]), float(scores[best]), float(scores[defaults].max()), len(points),
        sum(len(lesson.points) for lesson in taught),
        tuple(str(lesson.space.workload) for lesson in taught),
    )  # fmt: skip


def teaching(records: Sequence[Record], workload: Workload, target: Target) -> tuple[Lesson, ...]:
    """What logs of other shapes teach about this one, nearest first."""
    rows = lessons(records, workload, target, WORKLOADS, ROWS)
    return lessons_of({str(workload): rows}, target)


def _candidates(space: Space, taught: Sequence[Lesson]) -> Points:
    """Legal defaults, then each lesson's good points that are legal here."""
    found = dict.fromkeys(space.defaults().tolist())
    for lesson in taught:
        order = np.lexsort((lesson.points, -lesson.scores))[:BEST]
        for i in order.tolist():
            point = int(lesson.points[i])
            if lesson.scores[i] < GOOD:
                continue
            try:
                theirs = lesson.space.family_of(point), lesson.space.theta(point)
                found.setdefault(space.check(*theirs))
            except SpaceError:
                continue
    points = np.array(list(found), dtype=np.int64)
    return points[space.legal(points)]


def predicted_scores(space: Space, taught: Sequence[Lesson], points: Points) -> Vector:
    """Predicted scores of points by models of the lessons, near ones counting more."""
    table = FeatureTable([space, *(lesson.space for lesson in taught)])
    features, scores, weights = [], [], []
    for i, lesson in enumerate(taught):
        near = math.exp(-distance(space.workload, lesson.space.workload) / FADING)
        other = lesson.space.sample(np.random.default_rng(0), UNMEASURED, np.sort(lesson.points))
        features += [table.encode(1 + i, lesson.points), table.encode(1 + i, other)]
        scores += [lesson.scores, np.full(len(other), MEDIOCRE, dtype=np.float32)]
        weights += [np.full(len(lesson.points), near), np.full(len(other), DOUBT * near)]
    rows, total = np.concatenate(features), np.concatenate(weights).astype(np.float32)
    wanted, found = table.encode(0, points), []
    for seed in range(MODELS):
        model = BoostedTrees(seed, 1, TREES)
        model.fit(rows, np.concatenate(scores), total)
        found.append(model.predict(wanted))
    mean: Vector = np.mean(found, axis=0)
    return mean


def predicted_choice(
    found: Sequence[Run], workload: Workload, target: Target
) -> tuple[Chosen, str]:
    """The predicted schedule as `kt apply` takes it, and why it was chosen.

    Its record has the source `predicted` and no time: nothing of it was measured.
    """
    records: list[Record] = []
    for run in found:
        records += [run.header, *run.batches, *run.trials.values()]
    made = predict(records, workload, target)
    theta, family = made.space.theta(made.point), made.space.family_of(made.point)
    run = next(r for r in found if set(made.workloads) & r.workloads)
    trial = TrialRecord(
        run=run.header.run, trial=0, batch=0, workload=str(workload), family=family, theta=theta,
        outcome=Failure("interrupted", "run", "predicted from other shapes, never measured"),
        seconds=Seconds(), source="predicted", predicted=made.score,
    )  # fmt: skip
    best = Best(str(workload), target, trial, 0.0, None, None)
    chosen = Chosen(best, run, workload, made.space, made.space.kernel(made.point))
    return chosen, made.reason
