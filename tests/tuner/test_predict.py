"""Zero-trial prediction from logs of other shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_runs import CPU, GEMM, tuned
from fakes import analytic_us
from odd_families import space

from kt.logs.journal import read_log
from kt.logs.query import runs
from kt.logs.record import Record
from kt.spaces.errors import LogError
from kt.spaces.workload import parse
from kt.tuner.predict import predict, predicted_choice

pytestmark = pytest.mark.usefixtures("fake_families")


def logged(tmp_path: Path, *texts: str) -> list[Record]:
    for i, text in enumerate(texts):
        tuned(tmp_path / f"{i}.jsonl", text, trials=48, seed=i)
    return [r for i in range(len(texts)) for r in read_log(tmp_path / f"{i}.jsonl").records]


def test_a_shape_never_tuned_gets_a_schedule_that_ran_well_elsewhere(tmp_path: Path) -> None:
    records = logged(tmp_path, "gemm 64x64x128 dtype=fp32", "gemm 128x64x64 dtype=fp32")
    found = predict(records, parse(GEMM), CPU)
    assert found.space.legal(found.space.defaults()[:1]).all()
    assert analytic_us(found.space.theta(found.point)) < 120  # the optimum is 100, the default 180
    assert found.workloads == ("gemm 128x64x64 dtype=fp32", "gemm 64x64x128 dtype=fp32")
    assert found.score > found.default_score and found.candidates > 2
    assert "a logged schedule" in found.reason and "2 other shapes" in found.reason
    again = predict(records, parse(GEMM), CPU)
    assert (again.point, again.score) == (found.point, found.score)


def test_where_no_shape_teaches_it_says_so(tmp_path: Path) -> None:
    records = logged(tmp_path, "gemm 64x64x128 dtype=fp32")
    with pytest.raises(LogError, match="no logged shape can teach 'conv2d"):
        predict(records, parse("conv2d 1x8x8x4,4x3x3 dtype=fp32"), CPU)
    with pytest.raises(LogError, match="16 trials or more"):
        predict([], parse(GEMM), CPU)


def test_a_choice_for_apply_says_that_nothing_was_measured(tmp_path: Path) -> None:
    records = logged(tmp_path, "gemm 64x64x128 dtype=fp32")
    chosen, why = predicted_choice(runs(records), parse(GEMM), CPU)
    assert str(chosen.workload) == chosen.best.workload == GEMM
    assert chosen.best.trial.source == "predicted" and not chosen.best.us
    assert chosen.kernel.theta == chosen.best.trial.theta
    assert "never measured" in chosen.best.trial.outcome.message  # type: ignore[union-attr]
    assert "predicted" in why
    assert chosen.default.theta == space("fake").theta(int(space("fake").defaults()[0]))
