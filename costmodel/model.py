"""Regression models from features to normalised throughput (1 = the best known, 0 = failed)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    def fit(self, features: Matrix, scores: Vector, weights: Vector | None = None) -> None:
        """Learns `scores` of shape [n] from `features` of shape [n, columns]; NaN = absent.

        `weights` of shape [n] say how much each row counts; all the same without them.
        """

    def predict(self, features: Matrix) -> Vector:
        """Predicted scores, shape [n]."""


@dataclass(frozen=True)
class Trees:
    """Settings of boosted trees: how many, how deep, how far one goes, what each sees."""

    rounds: int = 120
    depth: int = 6
    eta: float = 0.1
    rows: float = 0.8
    columns: float = 0.8
    base: float = 0.5
    """The score of what nothing is known of; 1 believes the best of it."""


class BoostedTrees:
    """XGBoost regression: the model that guides the search."""

    PARAMETERS: Mapping[str, Any] = {
        "objective": "reg:squarederror", "tree_method": "hist", "min_child_weight": 1.0,
        "max_bin": 64, "verbosity": 0,
    }  # fmt: skip

    def __init__(self, seed: int, threads: int, trees: Trees | None = None) -> None:
        wait_passively()
        import xgboost

        self._xgboost, self._trees = xgboost, trees or Trees()
        self._parameters = {
            **self.PARAMETERS, "max_depth": self._trees.depth, "eta": self._trees.eta,
            "subsample": self._trees.rows, "colsample_bytree": self._trees.columns,
            "base_score": self._trees.base, "seed": seed % 2**31, "nthread": threads,
        }  # fmt: skip
        self._booster: Any = None

    def fit(self, features: Matrix, scores: Vector, weights: Vector | None = None) -> None:
        data = self._xgboost.QuantileDMatrix(
            features, label=scores, weight=weights, max_bin=self.PARAMETERS["max_bin"],
            nthread=self._parameters["nthread"],
        )  # fmt: skip
        self._booster = self._xgboost.train(
            self._parameters, data, num_boost_round=self._trees.rounds
        )

    def predict(self, features: Matrix) -> Vector:
        predicted: Vector = self._booster.inplace_predict(features)
        return predicted

    def contributions(self, features: Matrix) -> Matrix:
        """Shapley value of each column for each row's prediction, shape as `features`."""
        found: Matrix = self._booster.predict(
            self._xgboost.DMatrix(features, nthread=self._parameters["nthread"]),
            pred_contribs=True,
        )
        return found[:, :-1]


class Forest:
    """scikit-learn random forest: the selectable baseline."""

    ABSENT = -1.0

    def __init__(self, seed: int, threads: int, trees: Trees | None = None) -> None:
        wait_passively()
        from sklearn.ensemble import RandomForestRegressor

        del threads, trees  # one thread: starting workers costs more than these forests do
        self._forest = RandomForestRegressor(
            n_estimators=64, min_samples_leaf=2, max_features=0.5, random_state=seed % 2**31
        )

    def fit(self, features: Matrix, scores: Vector, weights: Vector | None = None) -> None:
        self._forest.fit(self._filled(features), scores, weights)

    def predict(self, features: Matrix) -> Vector:
        predicted: Vector = self._forest.predict(self._filled(features)).astype(np.float32)
        return predicted

    def _filled(self, features: Matrix) -> Matrix:
        return np.nan_to_num(features, nan=self.ABSENT)


MODELS: Mapping[str, Callable[..., Model]] = {"kt": BoostedTrees, "forest": Forest}
