"""The shared cost model of a run."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import analytic_us
from odd_families import space

from kt.costmodel import model
from kt.tuner.preset import REVISIONS
from kt.tuner.state import Observation, State
from kt.tuner.surrogate import MINIMUM_ROWS, Surrogate, varying

NOTHING = np.empty(0, dtype=np.int64)


def outcomes(n: int, seed: int = 0) -> list[Observation]:
    where = space("fake")
    points = where.sample(np.random.default_rng(seed), n).tolist()
    return [Observation(p, analytic_us(where.theta(p))) for p in points]


def surrogate(states: int = 1, revision: int = 1) -> tuple[Surrogate, list[State]]:
    known = [State(space("fake"), NOTHING) for _ in range(states)]
    return Surrogate(known, "kt", 0, 2, REVISIONS[revision]), known


def tell(learner: Surrogate, known: list[State], which: int, seen: list[Observation]) -> None:
    known[which].observe(seen)
    learner.learn(which, seen)


def test_there_is_no_model_before_enough_rows_and_a_result() -> None:
    learner, known = surrogate()
    assert not learner.ready()
    tell(learner, known, 0, [Observation(p, None) for p in range(20)])
    assert not learner.ready()  # nothing but failures: no scale to learn on
    tell(learner, known, 0, outcomes(1))
    assert learner.ready() and learner.fitted_on == 21
    small, known = surrogate()
    tell(small, known, 0, outcomes(MINIMUM_ROWS - 1))
    assert not small.ready()


def test_it_is_refitted_when_the_data_grew_by_a_tenth() -> None:
    learner, known = surrogate()
    tell(learner, known, 0, outcomes(40))
    assert learner.ready() and learner.fitted_on == 40
    for rows, then in ((3, 40), (1, 44), (4, 44), (1, 49)):  # from 44 and 48.4 rows on
        tell(learner, known, 0, outcomes(rows, 1))
        assert learner.ready() and learner.fitted_on == then


def test_it_predicts_points_it_has_not_seen_and_failures_low() -> None:
    learner, known = surrogate()
    where = space("fake")
    bad = [p for p in where.sample(np.random.default_rng(7), 2000).tolist()
           if where.theta(p).unroll["ku"] == 8][:40]  # fmt: skip
    seen = [o for o in outcomes(150) if where.theta(o.point).unroll["ku"] != 8]
    tell(learner, known, 0, seen + [Observation(p, None) for p in bad[:20]])
    assert learner.ready()
    fresh = [o for o in outcomes(60, 5) if where.theta(o.point).unroll["ku"] != 8]
    learner.judge(0, learner.predict(0, np.array([o.point for o in fresh])).tolist(), fresh)
    assert learner.last_correlation is not None and learner.last_correlation > 0.7
    failing = learner.predict(0, np.array(bad[20:])).mean()
    working = learner.predict(0, np.array([o.point for o in fresh])).mean()
    assert failing < working - 0.1


def test_judging_uses_only_what_had_a_prediction_and_does_not_learn() -> None:
    learner, known = surrogate()
    seen = outcomes(6)
    known[0].observe(seen)
    ranked = [-(o.us or 0) for o in seen]
    learner.judge(0, [*ranked[:5], None], seen)
    assert learner.last_correlation == pytest.approx(1.0) and learner.last_recall == 1.0
    learner.judge(0, [-guess for guess in ranked], seen)
    assert learner.last_correlation == pytest.approx(-1.0)
    learner.judge(0, [None] * 6, seen)
    assert learner.last_correlation is None and learner.last_recall is None
    assert learner.fitted_on == 0 and not learner.ready()


def test_trust_follows_the_recent_judgements() -> None:
    learner, known = surrogate()
    seen = outcomes(6)
    known[0].observe(seen)
    good = [-(o.us or 0) for o in seen]
    assert learner.trusted  # not judged yet
    learner.judge(0, [-guess for guess in good], seen)
    assert not learner.trusted
    learner.judge(0, good, seen)
    assert not learner.trusted  # mean of -1 and 1
    learner.judge(0, good, seen)
    assert learner.trusted
    learner.judge(0, [1.0] * 6, seen)  # constant: says nothing
    learner.judge(0, [1.0] * 6, seen)
    assert not learner.trusted


def test_trust_follows_the_last_predictions_where_batches_are_small() -> None:
    learner, known = surrogate(revision=2)
    seen = outcomes(16)
    known[0].observe(seen)
    good = [-(o.us or 0) for o in seen]
    learner.judge(0, [-guess for guess in good], seen)
    assert learner.trusted  # too few to say
    learner.judge(0, [-guess for guess in good], seen)
    assert not learner.trusted
    for _ in range(2):
        learner.judge(0, good, seen)
    assert learner.trusted


def test_columns_that_never_change_are_kept_from_the_model() -> None:
    features = np.array([[1, 2, np.nan, 0], [1, 3, np.nan, np.nan]], dtype=np.float32)
    assert varying(features).tolist() == [1, 3]
    assert varying(features[:1]).tolist() == [0, 1, 2, 3]
    learner, known = surrogate(revision=2)
    tell(learner, known, 0, outcomes(40))
    assert learner.ready()
    fresh = outcomes(60, 5)
    learner.judge(0, learner.predict(0, np.array([o.point for o in fresh])).tolist(), fresh)
    assert learner.last_correlation is not None and learner.last_correlation > 0.7


def test_several_workloads_share_the_rows_each_on_its_own_scale() -> None:
    learner, known = surrogate(2)
    seen = outcomes(60)
    tell(learner, known, 0, seen)
    slow = [Observation(o.point, 1000 * (o.us or 0)) for o in seen[:20]]
    tell(learner, known, 1, slow)
    assert learner.ready() and learner.fitted_on == 80
    points = np.array([o.point for o in outcomes(40, 3)])
    np.testing.assert_allclose(learner.predict(0, points), learner.predict(1, points))
    assert learner.predict(1, points).max() > 0.5  # throughput, not microseconds


def test_features_match_their_scores_when_workloads_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted: list[tuple[np.ndarray, np.ndarray]] = []  # type: ignore[type-arg]

    class Spy(model.BoostedTrees):
        def fit(
            self,
            features: model.Matrix,
            scores: model.Vector,
            weights: model.Vector | None = None,
        ) -> None:
            fitted.append((features, scores))

    monkeypatch.setattr("kt.tuner.surrogate.MODELS", {"kt": Spy})
    learner, known = surrogate(2)
    batches = [outcomes(5, seed) for seed in range(4)]
    for i, batch in enumerate(batches):
        tell(learner, known, i % 2, batch)
    assert learner.ready()
    ((features, scores),) = fitted
    for which in (0, 1):
        mine = [o for i, batch in enumerate(batches) if i % 2 == which for o in batch]
        part = slice(10 * which, 10 * which + 10)
        np.testing.assert_array_equal(
            features[part], space("fake").encode(np.array([o.point for o in mine]))
        )
        best = min(o.us or 0 for o in mine)
        np.testing.assert_allclose(scores[part], [best / (o.us or 0) for o in mine], rtol=1e-6)


def test_the_report_is_rounded_and_names_the_rows() -> None:
    learner, known = surrogate()
    tell(learner, known, 0, outcomes(40))
    learner.ready()
    learner.judge(0, [0.123456789] * 2 + [0.2], outcomes(3))
    report = learner.report(0.25)
    assert report.fitted_on == 40 and report.random_share == 0.25
    assert report.rank_correlation == round(report.rank_correlation or 0, 4)
