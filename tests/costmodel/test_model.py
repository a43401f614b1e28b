"""Models: deterministic, tolerant of absent features, better than chance."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kt.costmodel.evaluate import rank_correlation
from kt.costmodel.model import MODELS, Matrix, Vector


def data(n: int, seed: int) -> tuple[Matrix, Vector]:
    """A bowl in two of six features; the fourth is absent in half of the rows."""
    features = np.random.default_rng(seed).random((n, 6)).astype(np.float32)
    scores = 1 - (features[:, 0] - 0.3) ** 2 - (features[:, 1] - 0.6) ** 2
    features[::2, 3] = np.nan
    return features, scores.astype(np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_ranks_points_it_has_not_seen(name: str) -> None:
    model = MODELS[name](0, 2)
    model.fit(*data(200, 0))
    features, scores = data(200, 1)
    predicted = model.predict(features)
    assert predicted.shape == (200,) and predicted.dtype == np.float32
    correlation = rank_correlation(predicted, scores)
    assert correlation is not None and correlation > 0.85


@pytest.mark.parametrize("name", MODELS)
def test_a_fit_is_a_function_of_data_and_seed(name: str) -> None:
    features, _ = data(300, 1)

    def predictions(seed: int) -> Vector:
        model = MODELS[name](seed, 2)
        model.fit(*data(100, 0))
        return model.predict(features)

    np.testing.assert_array_equal(predictions(3), predictions(3))
    assert (predictions(3) != predictions(4)).any()


@pytest.mark.parametrize("name", MODELS)
def test_a_large_seed_and_constant_scores_are_fine(name: str) -> None:
    model = MODELS[name](2**62 + 1, 1)
    features, _ = data(20, 0)
    model.fit(features, np.ones(20, dtype=np.float32))
    assert np.allclose(model.predict(features), 1.0, atol=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_importing_the_models_loads_no_library_and_fitting_does_not_spin(name: str) -> None:
    code = f"""
import os, sys
import kt.costmodel.model as model
assert not {{"xgboost", "sklearn"}} & set(sys.modules)
model.MODELS["{name}"](0, 1)
assert {{"xgboost", "sklearn"}} & set(sys.modules)
print(os.environ["OMP_WAIT_POLICY"])
"""
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout == "passive\n"
