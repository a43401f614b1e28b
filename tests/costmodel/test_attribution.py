"""Attributions: the columns that decide come first."""

from __future__ import annotations

import numpy as np

from kt.costmodel.attribution import LEAST_ROWS, attributions


def test_attributions_name_the_columns_that_matter() -> None:
    features = np.random.default_rng(0).random((200, 4)).astype(np.float32)
    scores = (3 * features[:, 2] + features[:, 0]).astype(np.float32)
    found = attributions(features, scores, ["a", "b", "c", "d"])
    assert list(found)[:2] == ["c", "a"] and found["c"] > 2 * found["a"]
    assert found["a"] > 5 * found.get("b", 0.0)
    assert attributions(features[: LEAST_ROWS - 1], scores[: LEAST_ROWS - 1], ["a"]) == {}
