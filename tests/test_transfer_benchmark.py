"""The benchmark of transfer between recorded workloads."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_runs import tuned

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.usefixtures("fake_families")
def test_workloads_teach_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    transfer: Any = importlib.import_module("transfer")
    monkeypatch.setattr(transfer, "RESULT", tmp_path / "transfer.json")
    for i, n in enumerate((32, 64)):
        text = f"gemm 64x64x{n} dtype=fp32"
        tuned(tmp_path / f"{i}.jsonl", text, trials=150, strategy="random", seed=i)
    tuned(tmp_path / "few.jsonl", trials=20, strategy="random")
    logs = [str(tmp_path / name) for name in ("0.jsonl", "1.jsonl", "few.jsonl")]
    monkeypatch.setattr(sys, "argv", ["transfer.py", *logs, "--seeds", "2", "--teachers", *logs])
    transfer.main()
    rows = json.loads((tmp_path / "transfer.json").read_text())["rows"]
    assert [row["workload"] for row in rows] == [
        "gemm 64x64x32 dtype=fp32", "gemm 64x64x64 dtype=fp32",
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["cold_16"] <= row["cold_64"] <= 1
        assert row["taught_16"] > row["cold_16"] - 0.02  # one optimum for all shapes of the fake
        assert row["zero"] > 0.7 and row["teachers"] >= 1 and row["points"] == 150
    assert "few.jsonl: left out: only 20 points" in capsys.readouterr().out


@pytest.mark.usefixtures("fake_families")
def test_the_speed_of_refits_and_proposals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    speed: Any = importlib.import_module("speed")
    monkeypatch.setattr(speed, "RESULT", tmp_path / "speed.json")
    tuned(tmp_path / "log.jsonl", trials=100, strategy="random")
    monkeypatch.setattr(sys, "argv", ["speed.py", str(tmp_path / "log.jsonl"), "--threads", "1"])
    speed.main()
    for row in json.loads((tmp_path / "speed.json").read_text())["rows"]:
        assert row["records"] == 100 and row["refit_seconds"] > 0
        assert row["proposed_per_second"] == pytest.approx(
            row["scored"] / row["proposal_seconds"], rel=0.1
        )
        assert row["scored"] > 5000 and row["predicted_per_second"] > 0
