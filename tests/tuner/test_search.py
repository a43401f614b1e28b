"""The search of a run: legal, never repeated, deterministic, better than chance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
import pytest
from fakes import analytic_outcome
from odd_families import CPU, GEMM, HUGE_EMPTY, SPACES, OddFamily, rule, space
from scipy.stats import spearmanr

from kt.logs.record import Settings, Timing
from kt.spaces.errors import SettingsError, SpaceError
from kt.spaces.knob import Ordinal
from kt.spaces.space import Space
from kt.spaces.theta import Theta
from kt.tuner.search import Proposal, Search
from kt.tuner.state import Observation
from kt.tuner.strategy import STRATEGIES

NOTHING = np.empty(0, dtype=np.int64)
ENDLESS = 10**9


def outcome(theta: Theta) -> float | None:
    """Microseconds: the analytic formula where it applies, else from the knobs' sum."""
    if "bk" in theta.tile:
        found = analytic_outcome(theta)
        return found.median_us if isinstance(found, Timing) else None
    numbers = [v if isinstance(v, int) else len(v) for v in theta.flat().values()]
    return None if sum(numbers) % 7 == 3 else 100.0 + sum(numbers)


def search_of(
    spaces: Sequence[Space], strategy: str = "kt", seed: int = 0, **more: float
) -> Search:
    settings = Settings(strategy=strategy, **more)  # type: ignore[arg-type]
    return Search(spaces, [NOTHING] * len(spaces), settings, seed)


def drive(search: Search, budget: int = ENDLESS, lag: int = 0) -> Iterator[Proposal]:
    """Proposals up to `budget` points a workload, observed `lag` batches late."""
    window: deque[Proposal] = deque()
    room = [budget] * len(search.states)
    while True:
        while len(window) > lag:
            done = window.popleft()
            where = search.states[done.which].space
            points = done.points.tolist()
            search.observe(done, [Observation(p, outcome(where.theta(p))) for p in points])
        proposal = search.propose(room)
        if proposal is None:
            return
        room[proposal.which] -= len(proposal.points)
        window.append(proposal)
        yield proposal


def points(proposals: Sequence[Proposal]) -> list[int]:
    return [point for proposal in proposals for point in proposal.points.tolist()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["one", "two", "one_knob", "holes"])
def test_a_small_space_is_proposed_completely_and_once(name: str, strategy: str) -> None:
    where = space(name)
    batches = list(drive(search_of([where], strategy, batch_size=48 if name == "holes" else 2)))
    assert where.listed is not None
    assert sorted(points(batches)) == where.listed.tolist()
    assert batches[0].points[0] == where.defaults()[0] and batches[0].sources[0] == "default"
    assert all(len(b.points) == len(b.sources) == len(b.predicted) for b in batches)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["fake", "huge_union"])
def test_proposals_are_legal_and_never_repeated(name: str, strategy: str) -> None:
    where = space(name)
    batches = list(drive(search_of([where], strategy, seed=5), 80))
    proposed = points(batches)
    assert [len(b.points) for b in batches] == [16] * 5
    assert [b.number for b in batches] == list(range(5))
    assert len(set(proposed)) == 80 and where.legal(np.array(proposed)).all()


@pytest.mark.parametrize(
    ("strategy", "lag"),
    [("kt", 0), ("kt", 1), ("kt", 2), ("forest", 0), ("anneal", 1), ("random", 2), ("grid", 0)],
)
def test_batches_are_a_function_of_seed_and_outcomes(strategy: str, lag: int) -> None:
    def run(seed: int) -> list[Proposal]:
        return list(drive(search_of([space("fake")], strategy, seed), 64, lag))

    a, b = run(3), run(3)
    for x, y in zip(a, b, strict=True):
        assert x.points.tolist() == y.points.tolist()
        assert (x.sources, x.predicted, x.report) == (y.sources, y.predicted, y.report)
        assert x.incumbent_us == y.incumbent_us
    if strategy == "random":
        assert points(a) != points(run(4))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_first_batches_use_no_model_and_the_default_comes_first(lag: int) -> None:
    batches = list(drive(search_of([space("fake")], batch_size=12), 72, lag))
    assert batches[0].sources == ("default",) + ("filling",) * 11
    for proposal in batches[: lag + 1]:
        assert set(proposal.predicted) == {None} and proposal.incumbent_us is None
    later = batches[lag + 1]
    assert None not in later.predicted and "model" in later.sources
    first = [outcome(space("fake").theta(p)) for p in batches[0].points.tolist()]
    assert later.incumbent_us == min(us for us in first if us is not None)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_model_is_judged_on_a_batch_before_it_learns_from_it(lag: int) -> None:
    where = space("fake")
    batches = list(drive(search_of([where]), 80, lag))
    compared = 0
    for proposal in batches:
        before = proposal.number - 1 - lag  # the last batch that this proposal knew
        if before < 0 or None in batches[before].predicted:
            assert proposal.report.rank_correlation is None
            continue
        times = [outcome(where.theta(p)) for p in batches[before].points.tolist()]
        actual = [0.0 if us is None else 1 / us for us in times]
        expected = spearmanr(batches[before].predicted, actual).statistic
        assert proposal.report.rank_correlation == pytest.approx(expected, abs=1e-3)
        assert proposal.report.fitted_on <= 16 * (before + 1)
        compared += 1
    assert compared >= (3, 1)[lag]


def test_kt_beats_random_with_a_margin() -> None:
    where = space("fake")

    def bests(strategy: str, seed: int) -> tuple[float, float]:
        batches = list(drive(search_of([where], strategy, seed), 96))
        times = [outcome(where.theta(p)) for p in points(batches)]

        timed = [np.inf if us is None else us for us in times]
        return min(timed[:48]), min(timed)

    kt = [bests("kt", seed) for seed in range(5)]
    random = [bests("random", seed) for seed in range(5)]
    optimum = min(us for p in where.listed.tolist() if (us := outcome(where.theta(p))))  # type: ignore[union-attr]
    assert optimum == pytest.approx(100.0)
    for budget, share in ((0, 0.5), (1, 0.2)):  # of random's distance from the optimum
        mine = median(best[budget] for best in kt) - optimum
        theirs = median(best[budget] for best in random) - optimum
        assert theirs > 10  # the comparison means something
        assert mine < share * theirs
    assert median(best[1] for best in kt) < 1.04 * optimum


def test_several_workloads_take_turns_and_share_the_model() -> None:
    spaces = [space("fake"), space("fake")]
    batches = list(drive(search_of(spaces, batch_size=8), 24))
    assert [b.which for b in batches] == [0, 1, 0, 1, 0, 1]
    assert [b.sources[0] for b in batches[:2]] == ["default", "default"]
    assert batches[1].predicted[0] is not None  # the first workload taught the model
    for which in (0, 1):
        mine = points([b for b in batches if b.which == which])
        assert len(set(mine)) == 24


def test_an_ended_workload_drops_out_and_the_others_go_on() -> None:
    search = search_of([space("one_knob"), space("fake"), space("two")], "random", batch_size=4)
    batches = list(drive(search, 16))
    assert [b.which for b in batches] == [0, 1, 2, 0, 1, 1, 1]
    sizes = [sum(len(b.points) for b in batches if b.which == i) for i in range(3)]
    assert sizes == [5, 16, 2]
    assert search.turn() == 1


def test_a_workload_without_room_ends_the_proposals() -> None:
    search = search_of([space("fake"), space("fake")], "random", batch_size=8)
    assert search.propose([0, 8]) is None
    first = search.propose([3, 8])
    assert first is not None and first.which == 0 and len(first.points) == 3
    assert search.states[0].proposed.tolist() == first.points.tolist()
    assert search.turn() == 1


def test_points_that_room_cut_off_may_be_proposed_again() -> None:
    where = space("one_knob")
    search = search_of([where], "grid", batch_size=4)
    cut = search.propose([1])
    assert cut is not None and len(cut.points) == len(cut.sources) == len(cut.predicted) == 1
    assert where.listed is not None
    assert sorted(points([cut, *drive(search)])) == where.listed.tolist()


def test_warm_starts_come_after_the_default_and_fill_half_a_batch_at_most() -> None:
    where = space("fake")
    warm = where.sample(np.random.default_rng(9), 12)
    illegal = np.array([where.point("fake", Theta(**_tile(256, 256)))])
    search = Search([where], [np.concatenate([illegal, warm])], Settings(), 0)
    first = search.propose([16])
    assert first is not None
    assert first.sources == ("default",) + ("warm",) * 8 + ("filling",) * 7
    assert first.points[1:9].tolist() == warm[:8].tolist()


def _tile(bm: int, bn: int) -> dict[str, dict[str, bool | int | str]]:
    flat = {"tile": {"bm": bm, "bn": bn, "bk": 1}, "mem": {"pack": "a"}, "unroll": {"ku": 1}}
    return {**flat, "fusion": {"fused": True}}  # type: ignore[dict-item]


def test_unfinished_entries_are_left_out_of_what_is_learnt() -> None:
    search = search_of([space("fake")])
    first = search.propose([16])
    assert first is not None
    search.observe(first, [Observation(int(p), 100.0 + i) for i, p in enumerate(first.points[:10])])
    assert search.states[0].measured.tolist() == first.points[:10].tolist()
    second = search.propose([16])
    assert second is not None and second.report.fitted_on == 10


@pytest.mark.parametrize("family", [HUGE_EMPTY, OddFamily(
    Ordinal("tile", "a", (1, 2)), rules=[rule("never", lambda v: v["a"] > 5)]
)], ids=["huge", "small"])  # fmt: skip
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_space_is_an_error_and_its_default_is_not_proposed(
    family: OddFamily, strategy: str
) -> None:
    with pytest.raises(SpaceError, match="has no legal point"):
        search_of([Space(GEMM, CPU, [family])], strategy).propose([16])


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError) as caught:
        search_of([space("fake")], "genetic")
    assert all(name in str(caught.value) for name in ("'genetic'", *STRATEGIES))


@pytest.mark.parametrize("name", SPACES)
def test_a_batch_of_one_works(name: str) -> None:
    batches = list(drive(search_of([space(name)], batch_size=1), 12))
    assert all(len(b.points) == 1 for b in batches)
    assert len(set(points(batches))) == len(batches) == min(12, space(name).size)
