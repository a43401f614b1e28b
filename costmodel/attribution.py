"""Which decisions a model's predictions come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .model import BoostedTrees, Matrix, Trees, Vector

LEAST_ROWS = 16


def attributions(
    features: Matrix, scores: Vector, names: Sequence[str], seed: int = 0
) -> dict[str, float]:
    """Mean absolute effect of each column on the predicted score, largest first.

    Shapley values of boosted trees fitted to `scores` of shape [n]; empty below LEAST_ROWS rows.
    """
    if len(scores) < LEAST_ROWS:
        return {}
    model = BoostedTrees(seed, 1, Trees(rounds=80, eta=0.2, rows=1.0))
    model.fit(features, scores)
    effects: NDArray[np.float32] = np.abs(model.contributions(features)).mean(axis=0)
    order = np.argsort(-effects, kind="stable")
    return {names[i]: float(effects[i]) for i in order.tolist() if effects[i] > 0}
