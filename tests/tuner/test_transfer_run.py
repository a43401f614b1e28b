"""Transfer through whole runs: used, logged, replayed from the header alone, resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_runs import GEMM, read_run, tuned

from kt.logs.journal import read_log
from kt.logs.query import runs
from kt.tuner.replay import check_identity

pytestmark = pytest.mark.usefixtures("fake_families")
NEAR = "gemm 64x64x128 dtype=fp32"


def test_a_run_learns_from_the_log_and_replays_without_it(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    tuned(log, NEAR, trials=48, revision=2, epsilon=0.25)
    tuned(log, trials=32, revision=2, epsilon=0.25)
    text = log.read_bytes()
    (tmp_path / "alone.jsonl").write_bytes(text[text.rindex(b'{"type":"run"') :])
    run = read_run(tmp_path / "alone.jsonl")
    assert run.batches[0].model.transfer_rows == 48
    assert "transfer" in [entry.source for entry in run.batches[0].entries]
    assert run.batches[-1].model.transfer_weight > 0.2
    assert check_identity(run).exit_code == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_resumed_run_has_the_lessons_of_its_beginning(tmp_path: Path, lag: int) -> None:
    log = tmp_path / "a.jsonl"
    common = {"revision": 2, "epsilon": 0.25, "lag": lag}
    tuned(log, NEAR, trials=48, **common)
    tuned(log, trials=24, **common)
    tuned(log, trials=48, resume=True, **common)
    first, second = runs(read_log(log).records)
    assert len(second.of(GEMM)) == 48 and check_identity(second).exit_code == 0
    assert check_identity(first).exit_code == 0
