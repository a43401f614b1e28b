"""Annealing on predicted scores."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from odd_families import SPACES, space

from kt.spaces.space import Points, Space
from kt.tuner.anneal import anneal

CHAINS, STEPS, TEMPERATURE = 256, 48, 0.08


def bowl(where: Space) -> NDArray[np.float64]:
    """A target spot in coordinates; the nearer, the better."""
    return where.coordinates(where.sample(np.random.default_rng(99), 1))[0]


def annealed(where: Space, chains: int = CHAINS, seed: int = 0):  # type: ignore[no-untyped-def]
    spot, calls = bowl(where), []

    def score(points: Points) -> NDArray[np.float64]:
        calls.append(points)
        return 1 - np.abs(where.coordinates(points) - spot).mean(axis=1)

    rng = np.random.default_rng(seed)
    starts = np.resize(where.sample(rng, chains), chains)
    return starts, anneal(where, score, starts, rng, STEPS, TEMPERATURE), score, calls


@pytest.mark.parametrize("name", SPACES)
def test_everything_seen_is_legal_distinct_scored_and_best_first(name: str) -> None:
    where = space(name)
    starts, found, score, calls = annealed(where, 64)
    assert where.legal(found.points).all() and where.legal(found.chains).all()
    assert len(np.unique(found.points)) == len(found.points)
    np.testing.assert_array_equal(found.scores, score(found.points))
    order = sorted(zip(-found.scores, found.points.tolist(), strict=True))
    assert [point for _, point in order] == found.points.tolist()
    assert set(found.points.tolist()) == set(np.concatenate(calls[: STEPS + 1]).tolist())
    assert found.chains.shape == starts.shape and np.isin(found.chains, found.points).all()


@pytest.mark.parametrize(("name", "margin"), [("fake", 0.1), ("holes", 0.1), ("huge", 0.03)])
def test_chains_climb_and_reach_what_sampling_does_not(name: str, margin: float) -> None:
    where = space(name)
    starts, found, score, _ = annealed(where)
    sampled = where.sample(np.random.default_rng(1), 256)
    assert score(found.chains).mean() > score(starts).mean() + margin
    assert found.scores[0] > score(sampled).max() or found.scores[0] == 1.0


def test_annealing_is_a_function_of_its_generator() -> None:
    a, b, c = (annealed(space("fake"), seed=seed)[1] for seed in (3, 3, 4))
    np.testing.assert_array_equal(a.points, b.points)
    np.testing.assert_array_equal(a.chains, b.chains)
    assert not np.array_equal(a.chains, c.chains)


def test_the_starts_are_not_changed() -> None:
    starts, _, _, _ = annealed(space("fake"))
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(starts, np.resize(space("fake").sample(rng, CHAINS), CHAINS))
