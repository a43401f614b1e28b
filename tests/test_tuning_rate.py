"""The tuning-rate benchmark's figures, read from a committed log."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from kt.logs.journal import read_log
from kt.logs.query import runs

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tuning_rate")


def test_a_run_s_pace_follows_from_its_log(script: Any) -> None:
    log = next(iter(sorted((BENCHMARKS / "logs").glob("gemm-tiny-*.jsonl.gz"))))
    run = runs(read_log(log).records)[-1]
    (text,) = run.header.workloads
    found = script.summary(run, text, 16)
    assert found["trials"] == len(run.trials) == sum(found["outcomes"].values())
    assert found["trials_per_second"] > 0 and 0 <= found["idle_share"] <= 1
    seconds, trials, speeds = zip(*found["curve"], strict=True)
    assert list(seconds) == sorted(seconds) and list(speeds) == sorted(speeds)
    assert set(trials) <= set(run.trials)
    assert found["best_tflops"] == pytest.approx(speeds[-1], rel=0.2)
    shown = script.line(1, found)
    assert f"{found['trials']} trials" in shown and "idle" in shown
