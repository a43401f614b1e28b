"""Transfer from earlier logs: chosen by distance, kept in the header, dropped when poor."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fake_runs import CPU, GEMM, header, proposed, trial, tuned
from fakes import analytic_us
from odd_families import space

from kt.logs.journal import read_log
from kt.logs.record import Failure, Record, Settings, WarmStart
from kt.spaces.theta import Theta
from kt.spaces.workload import parse
from kt.tuner.search import Proposal, Search
from kt.tuner.state import Observation
from kt.tuner.store import open_store
from kt.tuner.teacher import LEAST_JUDGED, Teacher
from kt.tuner.transfer import BEST, LEAST_ROWS, NEAREST, ROWS, Lesson, lessons, lessons_of
from kt.tuner.warm import warm_points

NOTHING = np.empty(0, dtype=np.int64)
WHERE = space("fake")
NEAR = "gemm 64x64x128 dtype=fp32"


def thetas(n: int, seed: int = 0) -> list[Theta]:
    points = WHERE.sample(np.random.default_rng(seed), n)
    return [WHERE.theta(p) for p in points.tolist()]


def logged(text: str, n: int = 64, **fields: object) -> list[Record]:
    """A run of `n` analytic trials, the third one a failure; `text` is also the run's name."""
    trials = [
        trial(i, analytic_us(theta), text, workload=text, theta=theta)
        for i, theta in enumerate(thetas(n))
    ]
    if n > 2:
        failure = Failure("crash", "run", "signal 11")
        trials[2] = msgspec.structs.replace(trials[2], outcome=failure)
    return proposed(header(text, workloads=(text,), **fields), *trials)


def test_rows_are_the_best_and_a_spread_of_the_rest_with_their_scores() -> None:
    rows = lessons(logged(NEAR, 100), parse(GEMM), CPU)
    assert len(rows) == ROWS and {row.workload for row in rows} == {NEAR}
    scores = [row.score for row in rows]
    assert scores[0] == 1.0 and scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert scores[-1] == 0.0  # the failure
    us = sorted(analytic_us(row.knobs) for row in rows[:BEST])
    known = sorted(analytic_us(t) for i, t in enumerate(thetas(100)) if i != 2)
    assert us == known[:BEST]
    assert rows[5].score == pytest.approx(us[0] / analytic_us(rows[5].knobs), abs=1e-4)


def test_the_nearest_workloads_of_the_operator_and_architecture_teach() -> None:
    far = [f"gemm {2**i}x64x64 dtype=fp32" for i in range(7, 13)]
    records = [r for text in [*reversed(far), GEMM, "conv2d 1x8x8x4,4x3x3 dtype=fp32"]
               for r in logged(text, 20)]  # fmt: skip
    taught = list(dict.fromkeys(row.workload for row in lessons(records, parse(GEMM), CPU)))
    assert taught == [GEMM, *far[: NEAREST - 1]]
    assert not lessons(logged(NEAR, LEAST_ROWS - 1), parse(GEMM), CPU)
    other = msgspec.structs.replace(CPU, arch="neon")
    assert not lessons(logged(NEAR, target=other), parse(GEMM), CPU)
    relative = msgspec.structs.replace(CPU, processor="another", cores=CPU.cores + 1)
    assert lessons(logged(NEAR, target=relative), parse(GEMM), CPU)


@pytest.mark.usefixtures("fake_families")
def test_a_header_holds_all_that_the_lessons_need() -> None:
    rows = lessons(logged(NEAR), parse(GEMM), CPU)
    odd = WarmStart("r", 0, NEAR, "absent", Theta(), "", 0.5)
    unknown = WarmStart("r", 0, "winograd 3x3", "fake", rows[0].knobs, "", 0.5)
    proposal = WarmStart("r", 0, NEAR, "fake", rows[0].knobs, "")
    warm = {GEMM: (proposal, *rows, odd, unknown), "other": rows[:3]}
    (lesson,) = lessons_of(warm, CPU)
    assert str(lesson.space.workload) == NEAR
    assert len(lesson.points) == len(lesson.scores) == len(rows)
    assert lesson.scores[0] == 1.0
    # Rows that teach are not proposed.
    assert warm_points(WHERE, warm[GEMM]).tolist() == [WHERE.point("fake", rows[0].knobs)]


def lesson(n: int = 120, flip: bool = False) -> Lesson:
    """What another shape with the same optimum teaches, or the opposite of it."""
    points = WHERE.sample(np.random.default_rng(5), n)
    us = np.array([analytic_us(WHERE.theta(p)) for p in points.tolist()])
    scores = us.min() / us
    return Lesson(WHERE, points, (1.3 - scores if flip else scores).astype(np.float32))


def searched(
    given: tuple[Lesson, ...], trials: int, seed: int = 0
) -> tuple[Search, list[Proposal]]:
    settings = Settings(revision=2, epsilon=0.25)
    search = Search([WHERE], [NOTHING], settings, seed, None, given)
    found: list[Proposal] = []
    window: deque[Proposal] = deque()
    while sum(len(p.points) for p in found) < trials:
        proposal = search.propose([trials])
        assert proposal is not None
        found.append(proposal)
        window.append(proposal)
        us = [Observation(p, analytic_us(WHERE.theta(p))) for p in proposal.points.tolist()]
        search.observe(proposal, us)
    return search, found


def best_of(proposals: list[Proposal]) -> float:
    return min(analytic_us(WHERE.theta(p)) for q in proposals for p in q.points.tolist())


def test_a_good_teacher_is_followed_from_the_first_batch_mixed_with_cold_points() -> None:
    search, found = searched((lesson(),), 16)
    assert found[0].sources == ("default",) + ("transfer",) * 3 + ("filling",) * 4
    assert found[0].report.transfer_rows == 120 and found[0].report.transfer_weight == 1.0
    assert found[-1].report.transfer_weight > 0.4
    cold = [best_of(searched((), 16, seed)[1]) for seed in range(4)]
    warm = [best_of(searched((lesson(),), 16, seed)[1]) for seed in range(4)]
    assert np.mean(warm) < np.mean(cold) - 10
    assert search._surrogate.teacher is not None


def test_a_poor_teacher_is_dropped_after_the_first_results() -> None:
    _, found = searched((lesson(flip=True),), 24)
    assert found[0].report.transfer_weight == 1.0
    assert {p.report.transfer_weight for p in found[1:]} == {0.0}


def test_the_first_revision_and_other_strategies_learn_nothing_from_lessons() -> None:
    for settings in (Settings(), Settings(strategy="random", revision=2)):
        search = Search([WHERE], [NOTHING], settings, 0, None, (lesson(),))
        first = search.propose([16])
        assert first is not None and "transfer" not in first.sources
        assert first.report.transfer_rows == 0


def test_the_weight_is_the_correlation_with_what_was_measured() -> None:
    class Known:
        def fit(self, features: object, scores: object, weights: object = None) -> None:
            pass

        def predict(self, features: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
            return features[:, 0]

    rows = np.arange(12, dtype=np.float32)[:, None]
    teacher = Teacher(rows, rows[:, 0], Known, 0.2)
    teacher.judge([rows[: LEAST_JUDGED - 1]], [-rows[: LEAST_JUDGED - 1, 0]])
    assert teacher.weight == 1.0  # too few to say
    teacher.judge([rows], [rows[:, 0]])
    assert teacher.weight == pytest.approx(1.0)
    mixed = np.array([0, 1, 2, 3, 4, 5, 11, 10, 9, 8, 7, 6], dtype=np.float32)
    teacher.judge([rows], [mixed])
    assert 0.5 < teacher.weight < 0.9
    teacher.judge([rows, rows], [mixed, -mixed])
    assert teacher.weight == 0.0


@pytest.mark.usefixtures("fake_families")
def test_a_new_run_finds_its_lessons_in_the_log(tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", NEAR, trials=32, strategy="random")
    settings = Settings(revision=2)
    store = open_store(tmp_path / "a.jsonl", [parse(GEMM)], CPU, settings, 0, False)
    starts = store.warm[GEMM]
    assert starts[0].score is None and sum(s.score is not None for s in starts) == 32
    for other in (Settings(), Settings(strategy="random", revision=2)):
        plain = open_store(tmp_path / "a.jsonl", [parse(GEMM)], CPU, other, 0, False)
        assert [s.score for s in plain.warm[GEMM]] == [None]
    assert len(read_log(tmp_path / "a.jsonl").records) > 32
