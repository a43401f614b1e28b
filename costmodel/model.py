"""Regression models from features to normalised throughput (1 = the best known, 0 = failed)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Vector = NDArray[np.float32]


def wait_passively() -> None:
    """To be called before a library with OpenMP is imported: the first one sets it for all.

    Spinning workers would take the cores from the kernels under measurement, and from each other.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


class Model(Protocol):
    """Fit once, predict often. Deterministic for given data, seed and thread count."""

    def fit(self, features: Matrix, scores: Vector) -> None:
        """Learns `scores` of shape [n] from `features` of shape [n, columns]; NaN = absent."""

    def predict(self, features: Matrix) -> Vector:
        """Predicted scores, shape [n]."""


class BoostedTrees:
    """XGBoost regression: the model that guides the search."""

    ROUNDS = 120
    PARAMETERS: Mapping[str, Any] = {
        "objective": "reg:squarederror", "tree_method": "hist", "max_depth": 6, "eta": 0.1,
        "min_child_weight": 1.0, "subsample": 0.8, "colsample_bytree": 0.8, "max_bin": 64,
        "base_score": 0.5, "verbosity": 0,
    }  # fmt: skip

    def __init__(self, seed: int, threads: int) -> None:
        wait_passively()
        import xgboost

        self._xgboost = xgboost
        self._parameters = {**self.PARAMETERS, "seed": seed % 2**31, "nthread": threads}
        self._booster: Any = None

    def fit(self, features: Matrix, scores: Vector) -> None:
        data = self._xgboost.QuantileDMatrix(
            features, label=scores, max_bin=self.PARAMETERS["max_bin"],
            nthread=self._parameters["nthread"],
        )  # fmt: skip
        self._booster = self._xgboost.train(self._parameters, data, num_boost_round=self.ROUNDS)

    def predict(self, features: Matrix) -> Vector:
        predicted: Vector = self._booster.inplace_predict(features)
        return predicted


class Forest:
    """scikit-learn random forest: the selectable baseline."""

    ABSENT = -1.0

    def __init__(self, seed: int, threads: int) -> None:
        wait_passively()
        from sklearn.ensemble import RandomForestRegressor

        del threads  # one thread: starting workers costs more than these small forests do
        self._forest = RandomForestRegressor(
            n_estimators=64, min_samples_leaf=2, max_features=0.5, random_state=seed % 2**31
        )

    def fit(self, features: Matrix, scores: Vector) -> None:
        self._forest.fit(self._filled(features), scores)

    def predict(self, features: Matrix) -> Vector:
        predicted: Vector = self._forest.predict(self._filled(features)).astype(np.float32)
        return predicted

    def _filled(self, features: Matrix) -> Matrix:
        return np.nan_to_num(features, nan=self.ABSENT)


MODELS: Mapping[str, Callable[[int, int], Model]] = {"kt": BoostedTrees, "forest": Forest}
