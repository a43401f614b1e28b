"""Presets: what a header names is what runs, and the constants of a revision never change."""

from __future__ import annotations

import hashlib
from collections import deque

import numpy as np
import pytest
from fakes import analytic_us
from numpy.typing import NDArray
from odd_families import space

from kt.logs.record import Settings
from kt.spaces.errors import SettingsError
from kt.spaces.families import space_of
from kt.spaces.space import Points, Space
from kt.spaces.target import CUDA_TARGETS, detect_cpu
from kt.spaces.workload import parse
from kt.tuner.anneal import anneal
from kt.tuner.api import effective_settings
from kt.tuner.preset import AUTOTVM, CUDA_REVISION, REVISION, REVISIONS, preset_of
from kt.tuner.search import Proposal, Search
from kt.tuner.state import Observation

NOTHING = np.empty(0, dtype=np.int64)


def time_of(where: Space, point: int) -> float:
    """Microseconds: the analytic formula where it applies, else by the coordinates."""
    theta = where.theta(point)
    if "bk" in theta.tile:
        return analytic_us(theta)
    return 100.0 + 10.0 * float(np.abs(where.coordinates(np.array([point])) - 0.3).sum())


def proposals(settings: Settings, trials: int, name: str = "fake", seed: int = 7) -> list[Proposal]:
    """A search of the fake space, observed `lag` batches late."""
    where = space(name)
    search = Search([where], [NOTHING], settings, seed)
    found: list[Proposal] = []
    window: deque[Proposal] = deque()
    while (spent := sum(len(p.points) for p in found)) < trials:
        while len(window) > settings.lag:
            done = window.popleft()
            seen = [Observation(p, time_of(where, p)) for p in done.points.tolist()]
            search.observe(done, seen)
        proposal = search.propose([trials - spent])
        if proposal is None:
            break
        found.append(proposal)
        window.append(proposal)
    return found


def test_settings_name_their_preset() -> None:
    assert preset_of(Settings()) is REVISIONS[1]  # a log from before revisions
    assert preset_of(Settings(revision=2)) is REVISIONS[2]
    assert preset_of(Settings(strategy="autotvm", revision=2)) is AUTOTVM
    with pytest.raises(SettingsError, match="search revision 99: accepts 1, 2, 3, 4, 5, 6"):
        preset_of(Settings(revision=99))


def test_new_runs_use_the_newest_revision() -> None:
    for target, newest in ((detect_cpu(), REVISION), (CUDA_TARGETS["h200"], CUDA_REVISION)):
        settings = effective_settings(target, {})
        assert settings.revision == newest and settings.epsilon == 0.25


@pytest.mark.parametrize(
    ("revision", "name", "digest"),
    [
        (1, "fake", "52ff5357f5ed79ef"), (1, "huge", "fc58f083fe2a9408"),
        (2, "fake", "80b9a03f5d523fbe"), (2, "huge", "fb213d38936eacb8"),
        (3, "fake", "e048f52fc648f750"), (3, "huge", "23b1513ca8b717b3"),
        (4, "fake", "e289f26c6b8122a8"), (4, "huge", "2b22eb867c101fce"),
        (5, "fake", "ebe3ceb8d2fcfd77"), (5, "huge", "6c17e634df1ae45b"),
        (6, "fake", "ebe3ceb8d2fcfd77"), (6, "huge", "6c17e634df1ae45b"),
    ],
)  # fmt: skip
def test_the_constants_of_a_revision_are_those_of_its_logs(
    revision: int, name: str, digest: str
) -> None:
    """Logs replay only while their revision proposes what it proposed: add one, never edit."""
    found = proposals(Settings(revision=revision, epsilon=0.1), 96, name)
    points = np.concatenate([p.points for p in found])
    assert hashlib.sha256(points.tobytes()).hexdigest()[:16] == digest


def test_batches_grow_from_small_ones_to_the_full_size() -> None:
    sizes = [len(p.points) for p in proposals(Settings(revision=2, epsilon=0.25), 180)]
    assert sizes[:7] == [8, 4, 4, 4, 4, 4, 4]
    assert set(sizes[7:19]) == {8} and sizes[-2] == 16
    for full in (1, 3):
        tiny = [len(p.points) for p in proposals(Settings(revision=2, batch_size=full), 9)]
        assert set(tiny) == {full}
    large = [len(p.points) for p in proposals(Settings(revision=2, batch_size=32), 180)]
    assert large[:2] == [8, 4] and large[-2] == 32  # a large batch begins small all the same
    gpu = [len(p.points) for p in proposals(Settings(revision=4, epsilon=0.25, lag=1), 96)]
    assert gpu == [8] + 6 * [4] + 4 * [8] + 2 * [16]
    plain = proposals(Settings(strategy="random", revision=2), 64)
    assert [len(p.points) for p in plain] == [16] * 4


@pytest.mark.parametrize("lag", [0, 1])
def test_only_the_first_batches_know_no_model(lag: int) -> None:
    found = proposals(Settings(revision=2, epsilon=0.25, lag=lag), 64)
    without = [p for p in found if set(p.predicted) == {None}]
    assert [p.number for p in without] == list(range(lag + 1))


def test_the_newest_revision_finds_the_optimum_sooner() -> None:
    where = space("fake")

    def bests(revision: int, epsilon: float) -> float:
        """Mean best after 48 trials over seeds, where 100 µs is the optimum."""
        found = []
        for seed in range(6):
            settings = Settings(revision=revision, epsilon=epsilon)
            order = np.concatenate([p.points for p in proposals(settings, 48, seed=seed)])
            found.append(min(analytic_us(where.theta(p)) for p in order.tolist()))
        return float(np.mean(found))

    assert bests(2, 0.25) < bests(1, 0.1) + 1.0


def test_climbing_reaches_better_points_than_annealing_alone() -> None:
    where = space("huge")
    spot = where.coordinates(where.sample(np.random.default_rng(99), 1))[0]

    def score(points: Points) -> NDArray[np.float64]:
        return 1 - np.abs(where.coordinates(points) - spot).mean(axis=1)

    starts = where.sample(np.random.default_rng(0), 64)
    ends = []
    for climbs in (0, 6):
        rng = np.random.default_rng(1)
        ends.append(anneal(where, score, starts, rng, 16, 0.03, climbs, at_once=True))
    assert ends[1].scores[0] > ends[0].scores[0]
    assert ends[1].chains.tolist() == ends[0].chains.tolist()
    assert (np.diff(ends[1].scores) <= 0).all()
    assert len(np.unique(ends[1].points)) == len(ends[1].points)


def test_the_fifth_revision_begins_with_what_heuristics_rank_high() -> None:
    where = space_of(parse("gemm 1024x1024x4096 dtype=bf16"), CUDA_TARGETS["h200"])
    search = Search([where], [NOTHING], Settings(revision=5, epsilon=0.25, lag=2), 0)
    first, second = search.propose([64]), search.propose([64])
    assert first is not None and second is not None
    defaults, likely = where.defaults().tolist(), where.likely(6).tolist()
    assert first.points[:2].tolist() == defaults
    assert first.points[2:5].tolist() == likely[:3] and first.sources[2:5] == ("likely",) * 3
    assert first.sources[5:] == ("near", "near", "filling")
    assert second.points[:2].tolist() == likely[3:5]
    spots = where.coordinates(np.array([*first.points[5:7], *defaults, *likely]))
    for near in spots[:2]:
        assert 1 <= (spots[2:] != near).sum(axis=1).min() <= 3
    assert where.legal(first.points).all() and where.legal(second.points).all()


def test_the_sixth_revision_measures_all_of_them_where_their_family_keeps_up() -> None:
    where = space_of(parse("gemm 1024x1024x4096 dtype=bf16"), CUDA_TARGETS["h200"])
    likely = set(where.likely(6).tolist())

    def measured(slow: str, trials: int) -> set[int]:
        """Likely points proposed in so many trials where family `slow` takes three times longer."""
        search = Search([where], [NOTHING], Settings(revision=6, epsilon=0.25), 0)
        found: set[int] = set()
        while len(found) < trials:
            proposal = search.propose([64])
            assert proposal is not None
            points = proposal.points.tolist()
            found.update(points)
            us = [300.0 if where.family_of(p) == slow else 100.0 for p in points]
            search.observe(proposal, [Observation(p, u) for p, u in zip(points, us, strict=True)])
        return found & likely

    assert measured("none", 64) == likely
    families = {p: where.family_of(p) for p in likely}
    assert {families[p] for p in likely - measured("mma", 64)} == {"mma"}
