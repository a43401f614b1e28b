"""Search strategies and the batch they fill."""

from __future__ import annotations

import numpy as np
import pytest
from odd_families import SPACES, space

from kt.tuner import guided, strategy
from kt.tuner.picker import Picker
from kt.tuner.preset import REVISIONS, Preset
from kt.tuner.state import Observation, State
from kt.tuner.strategy import STRATEGIES
from kt.tuner.surrogate import Surrogate

NOTHING = np.empty(0, dtype=np.int64)
FIRST, NEW = REVISIONS[1], REVISIONS[2]
PRESETS = pytest.mark.parametrize("preset", REVISIONS.values(), ids=map(str, REVISIONS))


def picker(name: str = "fake", size: int = 16) -> Picker:
    return Picker(State(space(name), NOTHING), size)


def test_a_picker_takes_new_points_up_to_its_size() -> None:
    state = State(space("fake"), NOTHING)
    state.propose(np.array([1, 2]))
    chosen = Picker(state, 4)
    chosen.add(np.array([2, 3, 3, 1]), "a")
    assert chosen.points.tolist() == [3] and chosen.room == 3
    chosen.add(np.array([4, 5, 6]), "b", 2)
    chosen.add(np.array([7, 8]), "c", 0)
    chosen.add(np.array([9, 10]), "d")
    assert chosen.points.tolist() == [3, 4, 5, 9]
    assert chosen.sources == ["a", "b", "b", "d"] and chosen.room == 0
    assert chosen.taken.tolist() == [1, 2, 3, 4, 5, 9]


def test_diverse_points_differ_pairwise_in_two_knobs_and_none_is_lost() -> None:
    where = space("fake")
    points = where.around(int(where.defaults()[0]))
    points = np.concatenate([points, where.sample(np.random.default_rng(0), 20, points)])
    spots = where.coordinates(points)
    ordered = guided.diverse(points, spots, 8)
    assert sorted(ordered.tolist()) == sorted(points.tolist())
    assert ordered[0] == points[0]  # the best predicted stays first
    head = where.coordinates(ordered[:8])
    for i in range(8):
        for j in range(i):
            assert (head[i] != head[j]).sum() >= 2
    assert len(guided.diverse(NOTHING, where.coordinates(NOTHING), 4)) == 0


def test_space_filling_points_are_farther_apart_than_random_ones() -> None:
    def nearest(points: np.ndarray) -> float:  # type: ignore[type-arg]
        spots = space("fake").coordinates(points)
        distance = np.abs(spots[:, None] - spots[None]).sum(axis=2)
        np.fill_diagonal(distance, np.inf)
        return float(distance.min(axis=1).mean())

    for seed in range(3):
        rng = np.random.default_rng(seed)
        chosen = picker()
        chosen.add(space("fake").defaults(), "default")
        filling = guided.space_filling(chosen, rng)
        assert len(filling) == 15 and len(np.unique(filling)) == 15
        assert not np.isin(filling, chosen.taken).any()
        assert nearest(filling) > 1.3 * nearest(space("fake").sample(rng, 15))
    assert len(guided.space_filling(picker("two"), rng)) == 2


def test_the_grid_spreads_over_the_whole_space_in_halving_distances() -> None:
    sequence = [strategy._van_der_corput(i) for i in range(8)]
    assert sequence == [0, 0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]
    for name in ("fake", "huge"):
        chosen = picker(name)
        strategy.Grid().fill(chosen, np.random.default_rng(0))
        where = space(name)
        assert len(chosen.points) == 16 and where.legal(chosen.points).all()
        shares = np.sort(chosen.points) / where.size
        assert np.diff(shares).max() < 0.6  # half of the huge one is illegal
    assert chosen.sources.count("grid") >= 8


@PRESETS
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_full_batch_leaves_no_room_and_an_ended_space_stays_short(
    name: str, preset: Preset
) -> None:
    for where, count in (("fake", 16), ("one_knob", 5), ("one", 1), ("two", 2)):
        state = State(space(where), NOTHING)
        made = STRATEGIES[name](Surrogate([state], "kt", 0, 1, preset), 0, 0.1, preset)
        chosen = Picker(state, 16)
        made.fill(chosen, np.random.default_rng(0))
        assert len(chosen.points) == len(set(chosen.points.tolist())) == count
        assert len(chosen.sources) == count
        state.propose(chosen.points)
        if count < 16:
            again = Picker(state, 16)
            made.fill(again, np.random.default_rng(1))
            assert not len(again.points)


def learnt(
    us: object, n: int = 64, name: str = "fake", preset: Preset = FIRST
) -> tuple[State, Surrogate]:
    """A state and a model of `n` observed points."""
    state = State(space(name), NOTHING)
    points = state.space.sample(np.random.default_rng(0), n)
    seen = [Observation(p, us(p)) for p in points.tolist()]  # type: ignore[operator]
    state.propose(points)
    state.observe(seen)
    surrogate = Surrogate([state], "kt", 0, 2, preset)
    surrogate.learn(0, seen)
    return state, surrogate


def tile(state: State) -> object:
    return lambda p: 100.0 + float(state.space.theta(p).tile["bm"])


def test_guided_batches_mix_the_model_with_random_points() -> None:
    state, surrogate = learnt(tile(State(space("fake"), NOTHING)))
    for epsilon, random in ((0.1, 2), (0.5, 8), (0.0, 0)):
        chosen = Picker(state, 16)
        STRATEGIES["kt"](surrogate, 0, epsilon, FIRST).fill(chosen, np.random.default_rng(0))
        assert chosen.sources == ["model"] * (16 - random) + ["random"] * random
        guided = [state.space.theta(p).tile["bm"] for p in chosen.points[: 16 - random].tolist()]
        assert np.median(np.array(guided, dtype=int)) <= 4  # small tiles are fast here


def test_a_model_that_does_not_predict_is_mixed_with_more_random_points() -> None:
    state, surrogate = learnt(tile(State(space("fake"), NOTHING)))
    points = state.measured[:16].tolist()
    seen = [Observation(p, float(i + 1)) for i, p in enumerate(points)]
    surrogate.judge(0, [float(i) for i in range(16)], seen)
    assert not surrogate.trusted
    chosen = Picker(state, 16)
    STRATEGIES["kt"](surrogate, 0, 0.1, FIRST).fill(chosen, np.random.default_rng(0))
    assert chosen.sources.count("random") == 8


def test_when_nothing_improves_part_of_the_batch_sweeps_around_the_best() -> None:
    state, surrogate = learnt(tile(State(space("fake"), NOTHING)))
    state.stale = FIRST.patience
    chosen = Picker(state, 16)
    STRATEGIES["kt"](surrogate, 0, 0.1, FIRST).fill(chosen, np.random.default_rng(0))
    assert chosen.sources.count("sweep") == 7 and chosen.sources.count("model") == 7
    near = np.concatenate([state.space.around(int(p)) for p in state.best_measured(3)])
    swept = [p for p, s in zip(chosen.points.tolist(), chosen.sources, strict=True) if s == "sweep"]
    assert np.isin(swept, near).all()


def test_trials_that_explore_go_to_levels_that_the_best_point_lacks() -> None:
    state, surrogate = learnt(tile(State(space("fake"), NOTHING)), preset=NEW)
    where = state.space
    best = where.coordinates(np.array([state.best_point]))[0]
    sources: list[str] = []
    for seed in range(12):
        chosen = Picker(state, 16)
        STRATEGIES["kt"](surrogate, 0, 0.5, NEW).fill(chosen, np.random.default_rng(seed))
        sources += chosen.sources
        for point, source in zip(chosen.points, chosen.sources, strict=True):
            if source == "level":
                assert (where.coordinates(np.array([point]))[0] != best).any()
    explored = sources.count("level") + sources.count("random")
    assert explored == 8 * 12
    assert 0.1 < sources.count("random") / explored < 0.5  # a share of them stays uniform


def test_small_batches_explore_now_and_then() -> None:
    state, surrogate = learnt(tile(State(space("fake"), NOTHING)), preset=NEW)
    counts = []
    for seed in range(40):
        chosen = Picker(state, 2)
        STRATEGIES["kt"](surrogate, 0, 0.25, NEW).fill(chosen, np.random.default_rng(seed))
        counts.append(2 - chosen.sources.count("model"))
    assert set(counts) == {0, 1} and 10 <= sum(counts) <= 30


def test_a_small_space_is_scored_completely() -> None:
    state, surrogate = learnt(lambda p: 100.0 + p % 97, name="holes", preset=NEW)
    made = guided.Guided(surrogate, 0, 0.0, NEW)
    assert surrogate.ready()
    found = made._candidates(state, np.random.default_rng(0))
    left = np.setdiff1d(state.space.listed, state.proposed)  # type: ignore[arg-type]
    assert sorted(found.tolist()) == left.tolist()
    predicted = surrogate.predict(0, found)
    assert (np.diff(predicted) <= 0).all()


@PRESETS
@pytest.mark.parametrize("name", SPACES)
def test_guided_search_does_not_stumble_where_everything_failed(name: str, preset: Preset) -> None:
    """One workload has no result while another one of the run taught the model."""
    other, _ = learnt(tile(State(space("fake"), NOTHING)), preset=preset)
    failed = State(space(name), NOTHING)
    points = failed.space.sample(np.random.default_rng(1), 20)
    failed.propose(points)
    failed.observe([Observation(p, None) for p in points.tolist()])
    surrogate = Surrogate([other, failed], "kt", 0, 2, preset)
    surrogate.learn(0, [Observation(p, 1.0) for p in other.measured.tolist()])
    surrogate.learn(1, [Observation(p, None) for p in points.tolist()])
    chosen = Picker(failed, 16)
    made = STRATEGIES["kt"](surrogate, 1, 0.1, preset)
    for seed in range(2):
        made.fill(chosen, np.random.default_rng(seed))
    left = None if failed.space.listed is None else len(failed.space.listed) - len(points)
    assert len(chosen.points) == (16 if left is None else min(16, left))
    assert failed.space.legal(chosen.points).all()


def test_measured_annealing_walks_from_what_it_accepted() -> None:
    state = State(space("fake"), NOTHING)
    made = strategy.Anneal()
    rng = np.random.default_rng(0)
    time_of = tile(state)
    for _ in range(8):
        chosen = Picker(state, 8)
        made.fill(chosen, rng)
        state.propose(chosen.points)
        state.observe([Observation(p, time_of(p)) for p in chosen.points.tolist()])  # type: ignore[operator]
        assert all(point in state.measured for point in made._chains) or not made._chains
    assert chosen.sources.count("anneal") >= 6
    tiles = [int(state.space.theta(p).tile["bm"]) for p in made._chains]
    assert np.mean(tiles) < np.mean([2**i for i in range(9)])
