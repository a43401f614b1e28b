"""Spaces: legality, sampling, neighbours, encoding, counts; on the fake and on odd families."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_families import CPU, EMPTY, GEMM, HUGE_EMPTY, NEVER, SPACES, TWO, OddFamily, rule, space

from kt.spaces.errors import SpaceError
from kt.spaces.knob import Ordinal
from kt.spaces.space import ENUMERABLE, FamilySpace, Points, RuleCount, Space, round_significant
from kt.spaces.theta import Theta, Value, theta_from_flat
from kt.spaces.workload import parse

SEEDS = st.integers(0, 2**32 - 1)


def brute_force(part: FamilySpace) -> tuple[list[dict[str, Value]], dict[str, int]]:
    """Legal values by path and points removed by rule, from plain loops over the choices."""
    legal, removed = [], {r.name: 0 for r in part.rules}
    for values in itertools.product(*(knob.choices for knob in part.knobs)):
        named = {k.name: np.array([v]) for k, v in zip(part.knobs, values, strict=True)}
        broken = [r.name for r in part.rules if not r.ok(named)[0]]
        for name in broken:
            removed[name] += 1
        if not broken:
            legal.append({k.path: v for k, v in zip(part.knobs, values, strict=True)})
    return legal, removed


def differing(space: Space, a: int, b: int) -> int:
    """Knobs in which two points of one family differ; -1 between families."""
    if space.family_of(a) != space.family_of(b):
        return -1
    mine, theirs = space.theta(a).flat(), space.theta(b).flat()
    return sum(mine[path] != theirs[path] for path in mine)


@pytest.mark.parametrize("name", SPACES)
@settings(max_examples=15)
@given(SEEDS, st.integers(1, 400))
def test_samples_are_legal_distinct_and_never_excluded(name: str, seed: int, n: int) -> None:
    where = space(name)
    rng = np.random.default_rng(seed)
    exclude = where.sample(rng, n // 2) if n > 1 else np.empty(0, dtype=np.int64)
    points = where.sample(rng, n, exclude)
    assert where.legal(points).all()
    assert len(np.unique(points)) == len(points) <= n
    assert not np.isin(points, exclude).any()
    if where.listed is not None:
        assert len(points) == min(n, len(where.listed) - len(exclude))
    else:
        assert len(points) == n


@pytest.mark.parametrize("name", SPACES)
@settings(max_examples=10)
@given(SEEDS)
def test_neighbours_are_legal_and_one_knob_away(name: str, seed: int) -> None:
    where = space(name)
    rng = np.random.default_rng(seed)
    points = where.sample(rng, 60)
    for step in (where.neighbours, where.moves):
        moved = step(points, rng)
        assert moved.shape == points.shape and where.legal(moved).all()
        for a, b in zip(points.tolist(), moved.tolist(), strict=True):
            assert differing(where, a, b) == (a != b)
            assert a == b or b in where.around(a)


def test_neighbours_leave_a_point_alone_only_when_they_find_none() -> None:
    rng = np.random.default_rng(0)
    points = np.repeat(space("fake").defaults(), 500)
    for where, one in ((space("fake").neighbours, space("one").neighbours),
                       (space("fake").moves, space("one").moves)):  # fmt: skip
        assert (where(points, rng) != points).mean() > 0.95
        assert (one(np.array([0]), rng) == [0]).all()


@pytest.mark.parametrize("name", ["fake", "one", "two", "one_knob", "holes", "union"])
def test_around_is_every_legal_point_one_step_away(name: str) -> None:
    where = space(name)
    everything = where.listed
    assert everything is not None
    for point in np.random.default_rng(1).permutation(everything)[:60].tolist():
        part, local = where._part(point)
        others = everything[
            (everything >= point - local) & (everything < point - local + part.size)
        ]
        mine = part.indices(np.array([local]))[0]
        theirs = part.indices(others - (point - local))
        expected = []
        for i in np.flatnonzero((theirs != mine).sum(axis=1) == 1).tolist():
            knob = int(np.flatnonzero(theirs[i] != mine)[0])
            if int(theirs[i, knob]) in part.knobs[knob].neighbours(int(mine[knob])):
                expected.append(int(others[i]))
        assert sorted(where.around(point).tolist()) == expected


def test_around_works_where_the_space_is_too_large_to_list() -> None:
    where = space("huge")
    assert where.listed is None and where.size == 10**15
    point = int(where.defaults()[0]) + 5 * 10**14  # k0 = 5: legal, with one illegal neighbour
    assert where.legal(np.array([point])).all()
    around = where.around(point)
    assert where.legal(around).all()
    assert len(around) == 15  # one way up in each of 15 knobs; down is 4 < 5 or below 0


@pytest.mark.parametrize("name", SPACES)
def test_points_and_thetas_are_one_to_one(name: str) -> None:
    where = space(name)
    points = where.sample(np.random.default_rng(3), 300)
    for point in points.tolist():
        family, theta = where.family_of(point), where.theta(point)
        assert where.point(family, theta) == where.check(family, theta) == point
    thetas = {(where.family_of(p), where.theta(p).key()) for p in points.tolist()}
    assert len(thetas) == len(points)


def test_the_listed_points_are_the_legal_ones_in_canonical_order() -> None:
    where = space("union")
    expected = [
        where.point(part.family.name, theta_from_flat(values))
        for part in where.parts
        for values in brute_force(part)[0]
    ]
    assert where.listed is not None
    assert where.listed.tolist() == expected == sorted(expected)


@pytest.mark.parametrize("name", ["fake", "one", "two", "holes", "union"])
def test_the_census_counts_what_each_rule_removes(name: str) -> None:
    where = space(name)
    census = where.census()
    counted = [(part.family.name, *brute_force(part)) for part in where.parts]
    assert census.exact and census.points == where.size
    assert census.legal == sum(len(legal) for _, legal, _ in counted)
    assert census.rules == tuple(
        RuleCount(family, name, n) for family, _, removed in counted for name, n in removed.items()
    )


def test_the_census_of_a_huge_space_is_a_seeded_estimate() -> None:
    census = space("huge").census()
    assert not census.exact and census == space("huge").census()
    assert census.points == 10**15
    assert census.legal == pytest.approx(5e14, rel=0.02)
    assert census.rules[0].removed == pytest.approx(5e14, rel=0.02)


@pytest.mark.parametrize("family", [EMPTY, HUGE_EMPTY], ids=["small", "huge"])
def test_an_empty_space_is_reported_quickly_with_counts_by_rule(family: OddFamily) -> None:
    where = Space(GEMM, CPU, [family])
    started = time.process_time()
    with pytest.raises(SpaceError) as caught:
        where.sample(np.random.default_rng(0), 16)
    assert time.process_time() - started < 5
    message = str(caught.value)
    assert f"no legal point among {where.size}" in message
    assert f"{family.name}/never {where.size}" in message
    assert "'gemm 64x64x64 dtype=fp32'" in message and "\n" not in message


def test_no_points_are_asked_for_or_left() -> None:
    rng = np.random.default_rng(0)
    for name in ("fake", "huge"):
        assert len(space(name).sample(rng, 0)) == 0
    assert len(space("two").sample(rng, 5, np.array([0, 1]))) == 0


def test_sparse_legal_points_of_a_large_space_are_found() -> None:
    sparse = OddFamily(
        *(Ordinal("tile", n, tuple(range(100))) for n in "abcd"),
        rules=[rule("rare", lambda v: (v["a"] == 3) & (v["b"] == 5))], name="sparse",
    )  # fmt: skip
    where = Space(GEMM, CPU, [sparse])
    assert where.size > ENUMERABLE
    points = where.sample(np.random.default_rng(0), 16)  # one in 10 000 is legal
    assert len(points) == 16 and where.legal(points).all()


def test_families_of_a_large_union_come_in_equal_shares() -> None:
    where = space("huge_union")
    points = where.sample(np.random.default_rng(0), 4)
    assert [where.family_of(p) for p in points.tolist()].count("two") >= 1


@pytest.mark.parametrize("name", SPACES)
def test_features_have_stable_names_shapes_and_no_stray_nan(name: str) -> None:
    where = space(name)
    points = where.sample(np.random.default_rng(5), 64)
    features = where.encode(points)
    names = where.feature_names
    assert features.shape == (len(points), len(names)) and features.dtype == np.float32
    assert len(set(names)) == len(names)
    assert names == space(name).feature_names
    for row, point in zip(features, points.tolist(), strict=True):
        part, _ = where._part(point)
        own = {c for knob in part.knobs for c in knob.columns}
        for column, value in zip(names, row.tolist(), strict=True):
            if column.startswith(("workload.", "target.")) or column in own:
                assert np.isfinite(value), column
            elif column.startswith("family="):
                assert value == float(column == f"family={part.family.name}")
    assert where.encode(points[:0]).shape == (0, len(names))


def test_knobs_of_other_families_are_nan_and_own_values_are_exact() -> None:
    where = space("union")
    column = {name: i for i, name in enumerate(where.feature_names)}
    fake = where.encode(where.defaults()[:1])[0]
    holes = where.encode(where.defaults()[1:2])[0]
    assert np.isnan(fake[column["mem.b"]]) and np.isnan(holes[column["tile.bm"]])
    assert np.isnan(fake[column["derived.odd"]]) and np.isnan(holes[column["derived.tile"]])
    assert fake[column["tile.bm"]] == 8 and fake[column["derived.tile"]] == 64
    assert fake[column["mem.pack=none"]] == 1 and fake[column["mem.pack=both"]] == 0
    assert fake[column["workload.m"]] == 64 and fake[column["workload.flops"]] == 2 * 64**3
    assert holes[column["derived.odd"]] == round_significant(np.array([0.3]))[0] != 0.3


@given(st.floats(-1e30, 1e30).filter(lambda x: x == 0 or abs(x) > 1e-30))
def test_rounding_keeps_twelve_bits_and_absorbs_the_last_ones(x: float) -> None:
    rounded = float(round_significant(np.array([x]))[0])
    assert abs(rounded - x) <= abs(x) * 2.0**-12
    assert float(round_significant(np.array([rounded]))[0]) == rounded
    # Half a float32 ulp away from a kept value, as another instruction set would compute it:
    nudged = rounded * (1 + 2.0**-24)
    assert float(round_significant(np.array([nudged]))[0]) == rounded


def test_rounding_keeps_what_is_not_finite_and_small_whole_numbers() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0, -3.0, 4096.0, 4095.0])
    np.testing.assert_array_equal(round_significant(values), values.astype(np.float32))


def test_check_says_why_a_theta_is_not_accepted() -> None:
    where = space("fake")
    good = where.theta(int(where.defaults()[0])).flat()
    changes: list[tuple[dict[str, Value], str]] = [
        (good | {"tile.bm": 256, "tile.bn": 256}, "tile 256x256 exceeds 4096 elements"),
        (good | {"tile.bm": 3}, "tile.bm=3: accepts 1, 2, 4"),
        (good | {"fusion.fused": 1}, "fusion.fused=1: accepts false, true"),
        (good | {"tile.bm": "8"}, "tile.bm=8: accepts 1, 2"),
        (good | {"map.threads": 2}, "family fake has no knob map.threads"),
        ({k: v for k, v in good.items() if k != "unroll.ku"}, "needs a value for knob unroll.ku"),
        ({}, "needs a value for knob tile.bm"),
    ]
    for values, reason in changes:
        with pytest.raises(SpaceError) as caught:
            where.check("fake", theta_from_flat(values))
        assert reason in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(SpaceError, match=r"no family 'other' for .* accepts fake"):
        where.check("other", Theta())
    illegal = where.point("fake", theta_from_flat(changes[0][0]))  # a member, though not legal
    assert not where.legal(np.array([illegal]))[0]
    assert where.why_illegal(illegal) == "tile 256x256 exceeds 4096 elements"
    assert where.why_illegal(int(where.defaults()[0])) is None


@pytest.mark.parametrize("name", ["fake", "one", "two", "one_knob", "holes", "union"])
def test_defaults_are_legal_and_one_a_family(name: str) -> None:
    where = space(name)
    defaults = where.defaults()
    assert where.legal(defaults).all()
    assert [where.family_of(p) for p in defaults.tolist()] == [f.name for f in SPACES[name]]


def test_families_that_refuse_are_left_out_with_their_reasons() -> None:
    no = OddFamily(Ordinal("tile", "a", (1,)), name="no", why="M is not 1")
    where = Space(GEMM, CPU, [no, TWO])
    assert [part.family.name for part in where.parts] == ["two"] and where.size == 2
    assert where.refused == {"no": "M is not 1"}
    with pytest.raises(SpaceError, match=r"no kernel family serves .* on cpu \(no: M is not 1\)"):
        Space(GEMM, CPU, [no])
    with pytest.raises(SpaceError, match="no kernel family serves 'gemm 64x64x64 dtype=fp32'"):
        Space(GEMM, CPU, [])


def test_coordinates_scale_indices_and_put_the_family_first() -> None:
    where = space("union")
    spots = where.coordinates(np.concatenate([where.defaults(), [where.size - 1]]))
    assert spots.shape == (4, 7)
    assert spots[:, 0].tolist() == [0, 1, 2, 2]
    assert spots[2].tolist() == [2, 0, -1, -1, -1, -1, -1]
    legal = where.coordinates(where.sample(np.random.default_rng(0), 100))
    assert ((legal[:, 1:] == -1) | ((legal[:, 1:] >= 0) & (legal[:, 1:] <= 1))).all()


def test_the_digest_follows_knobs_choices_and_rule_names() -> None:
    knob, other = Ordinal("tile", "a", (1, 2)), Ordinal("tile", "a", (1, 3))
    variants = [
        [OddFamily(knob)], [OddFamily(other)], [OddFamily(Ordinal("mem", "a", (1, 2)))],
        [OddFamily(knob, rules=[NEVER])], [OddFamily(knob, name="x")], [OddFamily(knob), TWO],
    ]  # fmt: skip
    digests = [Space(GEMM, CPU, families).digest for families in variants]
    assert len(set(digests)) == len(digests)
    assert Space(parse("gemm 1x2x3"), CPU, variants[0]).digest == digests[0]


def test_what_does_not_fit_an_int64_or_repeats_a_name_is_a_bug() -> None:
    with pytest.raises(ValueError, match="do not fit an int64"):
        Space(GEMM, CPU, [OddFamily(*(Ordinal("tile", f"k{i}", (1, 2)) for i in range(62)))])
    with pytest.raises(ValueError, match="short knob names repeat"):
        Space(GEMM, CPU, [OddFamily(Ordinal("tile", "a", (1,)), Ordinal("mem", "a", (1,)))])


def test_scoring_is_fast_enough_for_the_search() -> None:
    where = space("fake")
    points: Points = where.sample(np.random.default_rng(0), 5000)
    where.encode(points)
    started = time.process_time()
    where.encode(points)
    where.neighbours(points, np.random.default_rng(0))
    assert time.process_time() - started < 1  # 5 000 points; 10⁵ a second would be 0.05 s
