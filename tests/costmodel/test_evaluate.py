"""Judging models: ranks, correlation, recall, cross-validation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr

from kt.costmodel.evaluate import cross_validated, rank_correlation, ranks, top_recall
from kt.costmodel.model import MODELS, Matrix, Vector

NUMBERS = st.lists(st.integers(0, 9).map(float), min_size=3, max_size=30)


@given(NUMBERS)
def test_ranks_are_scipys_from_zero(values: list[float]) -> None:
    np.testing.assert_allclose(ranks(np.array(values)), rankdata(values) - 1)


@given(NUMBERS, st.randoms(use_true_random=False))
def test_the_rank_correlation_is_spearmans(values: list[float], random: object) -> None:
    other = [value + random.choice((-3, 0, 3)) for value in values]  # type: ignore[attr-defined]
    found = rank_correlation(np.array(values), np.array(other))
    if len(set(values)) == 1 or len(set(other)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(values, other).statistic)


def test_too_few_pairs_have_no_correlation_or_recall() -> None:
    two, four = np.arange(2.0), np.arange(4.0)
    assert rank_correlation(two, two) is None
    assert top_recall(four, four) is None


def test_the_recall_is_the_share_of_the_best_that_was_guessed() -> None:
    actual = np.array([9.0, 8, 7, 6, 1, 1, 1, 1])
    assert top_recall(actual, actual) == 1.0
    assert top_recall(-actual, actual) == 0.0
    assert top_recall(np.array([9.0, 8, 0, 0, 7, 6, 0, 0]), actual) == 0.5
    assert top_recall(np.array([0.0, 1, 2]), np.array([0.0, 1, 2]), k=1) == 1.0


def line(n: int) -> tuple[Matrix, Vector]:
    features = np.random.default_rng(0).random((n, 3)).astype(np.float32)
    return features, (features @ np.array([1, 2, 0])).astype(np.float32)


def test_cross_validation_sees_what_can_be_learnt() -> None:
    features, scores = line(120)
    noise = np.random.default_rng(1).permutation(scores)
    groups = np.arange(120) % 4
    for name in MODELS:
        make = lambda name=name: MODELS[name](0, 1)  # noqa: E731
        good = cross_validated(make, features, scores, groups)
        bad = cross_validated(make, features, noise, groups)
        assert good is not None and good > 0.8
        assert bad is None or bad < 0.4


def test_held_out_groups_are_whole_when_there_are_three() -> None:
    """A model that only memorises its group predicts nothing of a new one."""

    class Memory:
        def fit(self, features: Matrix, scores: Vector) -> None:
            self.known = dict(zip(features[:, 0].tolist(), scores.tolist(), strict=True))

        def predict(self, features: Matrix) -> Vector:
            return np.array([self.known.get(x, 0.0) for x in features[:, 0].tolist()], np.float32)

    groups = np.repeat(np.arange(12), 5)
    features = groups[:, None].astype(np.float32)
    scores = groups.astype(np.float32)
    assert cross_validated(Memory, features, scores, groups) is None  # constant: all unknown
    assert cross_validated(Memory, features, scores, groups // 6) == pytest.approx(1.0)  # 2 groups


def test_too_few_rows_are_not_validated() -> None:
    features, scores = line(9)
    groups = np.arange(9)
    assert cross_validated(lambda: MODELS["forest"](0, 1), features, scores, groups) is None
