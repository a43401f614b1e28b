"""A recorded space: only measured points exist."""

from __future__ import annotations

import numpy as np
from odd_families import space

from kt.spaces.space import Points
from kt.tuner.recorded import NEAREST, RecordedSpace

BASE = space("union")


def recorded(n: int = 100, seed: int = 0) -> tuple[RecordedSpace, Points]:
    points = np.sort(BASE.sample(np.random.default_rng(seed), n))
    return RecordedSpace(BASE, points), points


def test_exactly_the_recorded_points_are_legal_and_listed() -> None:
    where, points = recorded()
    others = BASE.sample(np.random.default_rng(1), 200, points)
    assert where.legal(points).all() and not where.legal(others).any()
    np.testing.assert_array_equal(where.listed, points)
    rng = np.random.default_rng(0)
    assert sorted(where.sample(rng, 1000).tolist()) == points.tolist()
    assert not np.isin(where.sample(rng, 20, points[:60]), points[:60]).any()


def test_points_mean_what_they_meant() -> None:
    where, points = recorded()
    assert [where.theta(p) for p in points.tolist()] == [BASE.theta(p) for p in points.tolist()]
    assert where.feature_names == BASE.feature_names
    np.testing.assert_array_equal(where.encode(points), BASE.encode(points))


def test_neighbours_are_one_step_away_where_those_were_recorded() -> None:
    whole = space("holes")
    assert whole.listed is not None
    where = RecordedSpace(whole, whole.listed)
    for point in whole.listed[::17].tolist():
        steps = set(whole.around(point).tolist())
        around = where.around(point).tolist()
        assert steps <= set(around) and len(around) == max(NEAREST, len(steps))


def test_the_nearest_recorded_points_fill_up_sparse_neighbourhoods() -> None:
    where, points = recorded()
    spots = BASE.coordinates(points)
    for i in range(0, 100, 7):
        distance = np.abs(spots - spots[i]).sum(axis=1)
        around = where.around(int(points[i]))
        assert len(set(around.tolist())) >= NEAREST and points[i] not in around
        far = np.sort(np.delete(distance, i))[NEAREST - 1]
        steps = set(BASE.around(int(points[i])).tolist())
        assert all(
            p in steps or distance[np.searchsorted(points, p)] <= far + 1e-9
            for p in around.tolist()
        )
    rng = np.random.default_rng(0)
    steps_taken = [where.neighbours(points, rng) for _ in range(30)]
    moved = np.stack(steps_taken + [where.moves(points, rng) for _ in range(30)])
    for i, point in enumerate(points.tolist()):
        assert set(moved[:, i].tolist()) <= set(where.around(point).tolist())
        assert len(set(moved[:, i].tolist())) > 1


def test_few_recorded_points_are_all_neighbours() -> None:
    where, points = recorded(3)
    assert sorted(where.around(int(points[0])).tolist()) == points[1:].tolist()


def test_the_default_is_the_recorded_point_nearest_to_it() -> None:
    where, points = recorded()
    assert np.isin(where.defaults(), points).all() and len(where.defaults()) >= 1
    full = RecordedSpace(BASE, np.sort(np.concatenate([points, BASE.defaults()])))
    assert sorted(full.defaults().tolist()) == sorted(BASE.defaults().tolist())
