"""How good a model is: on a batch it has not learnt from, and by cross-validation over a log."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .model import Matrix, Model, Vector, wait_passively

TOP = 4
"""How many of a batch's best count for `top_recall`."""


def ranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Ranks from 0, ties averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means = ends - (counts + 1) / 2.0
    return np.asarray(means[inverse], dtype=np.float64)


def rank_correlation(predicted: NDArray[np.floating], actual: NDArray[np.floating]) -> float | None:
    """Spearman's coefficient; None for fewer than three pairs or a constant side."""
    if len(predicted) < 3:
        return None
    a, b = ranks(predicted), ranks(actual)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / scale) if scale > 0 else None


def top_recall(
    predicted: NDArray[np.floating], actual: NDArray[np.floating], k: int = TOP
) -> float | None:
    """Share of the actual best `k` among the predicted best `k`; None with `k` or fewer pairs."""
    if len(predicted) <= k:
        return None
    best, guess = np.argsort(-actual, kind="stable")[:k], np.argsort(-predicted, kind="stable")[:k]
    return len(set(best.tolist()) & set(guess.tolist())) / k


def cross_validated(
    make: Callable[[], Model], features: Matrix, scores: Vector, groups: NDArray[np.int64]
) -> float | None:
    """Mean rank correlation on held-out data: whole groups when there are three or more."""
    wait_passively()
    from sklearn.model_selection import GroupKFold, KFold

    if len(scores) < 10:
        return None
    distinct = len(np.unique(groups))
    if distinct >= 3:
        splits = GroupKFold(min(5, distinct)).split(features, scores, groups)
    else:
        splits = KFold(5, shuffle=True, random_state=0).split(features)
    found = []
    for train, test in splits:
        model = make()
        model.fit(features[train], scores[train])
        value = rank_correlation(model.predict(features[test]), scores[test])
        if value is not None:
            found.append(value)
    return float(np.mean(found)) if found else None
