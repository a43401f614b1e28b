"""Benchmark code that needs no device: classes, rows from samples, intervals, archives, tables."""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kt.logs.journal import read_log
from kt.logs.query import best_of, runs
from kt.spaces.families import space_of
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import parse
from kt.tuner.backend.cuda_vendor import OPPONENTS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
H200 = CUDA_TARGETS["h200"]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of benchmarks/, which is a folder of commands, not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_every_class_can_be_measured_and_shown(load: Any) -> None:
    for name, one in load("classes").CLASSES.items():
        assert one.floor <= one.goal and one.workloads, name
        for text in one.workloads:
            workload = parse(text)
            assert str(workload) == text
            if one.device == "nvidia-h200":
                assert set(one.opponents) <= set(OPPONENTS)
                assert len(space_of(workload, H200).defaults())
        assert load("tables").table(name)


def test_a_row_is_of_the_kernel_that_won_in_its_log() -> None:
    rows = [
        row
        for path in sorted((BENCHMARKS / "results").glob("*/*.json"))
        for row in json.loads(path.read_text())["rows"]
        if {"log", "theta", "family"} <= set(row)
    ]
    assert len(rows) > 200
    for row in rows:
        run = runs(read_log(BENCHMARKS.parent / row["log"]).records)[-1]
        best = best_of(run, row["workload"])
        assert best is not None, row["log"]
        assert (best.trial.family, best.trial.theta.flat()) == (row["family"], row["theta"]), row[
            "log"
        ]


def test_the_readme_shows_the_results_that_are_committed() -> None:
    command = [sys.executable, str(BENCHMARKS / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_readme_that_differs_from_the_results_is_noticed(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tables = load("tables")
    (tmp_path / "README.md").write_text(
        "# x\n<!-- table summary -->\n\nold\n<!-- end summary -->\n"
    )
    (tmp_path / "ARCHITECTURE.md").write_text("# y\n")
    for page in ("README", "ARCHITECTURE", "RESULTS"):
        monkeypatch.setattr(tables, page, tmp_path / f"{page}.md")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit, match="differs from"):
        tables.main()
    monkeypatch.setattr(sys, "argv", ["tables.py", "--chekc"])
    with pytest.raises(SystemExit):
        tables.main()
    assert "old" in (tmp_path / "README.md").read_text()
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    assert (
        "| [cpu-gemm](benchmarks/RESULTS.md#cpu-gemm) | 13 |"
        in (tmp_path / "README.md").read_text()
    )
    assert "`gemm 256x256x256 dtype=fp32`" in (tmp_path / "RESULTS.md").read_text()
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    tables.main()


def test_a_row_is_against_the_fastest_opponent(load: Any) -> None:
    ours, default = [2.0, 2.1, 1.9], [4.0, 4.0, 4.1]
    row = load("rows").versus(ours, default, {"slow": [9.0, 9.0, 9.0], "fast": [3.0, 3.1, 2.9]})
    assert (row["opponent"], row["opponent_us"], row["others"]) == ("fast", 3.0, {"slow": 9.0})
    assert (row["kt_us"], row["default_us"], row["ratio"]) == (2.0, 4.0, 1.5)
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert set(row["samples"]) == {"kt_us", "default_us", "opponent_us", "slow"}


def test_a_ratio_follows_from_the_samples_that_are_kept(load: Any) -> None:
    rows = load("rows")
    many = [2.0 + i % 7 / 100 for i in range(1234)]
    row = rows.versus(many, many, {"library": [2 * us for us in many]})
    kept = row["samples"]
    assert all(5 <= len(one) <= rows.MOST_SAMPLES for one in kept.values())
    ratio = statistics.median(kept["opponent_us"]) / statistics.median(kept["kt_us"])
    assert row["ratio"] == pytest.approx(ratio, rel=1e-3)


def test_an_interval_holds_the_ratio_and_narrows_with_samples(load: Any) -> None:
    interval = load("rows").ratio_interval
    few = [1.0, 1.2, 0.8, 1.1, 0.9]
    ratio, low, high = interval(few, few)
    assert low < ratio == 1.0 < high
    _, lower, higher = interval(few * 40, few * 40)
    assert low <= lower <= higher <= high


def test_results_and_logs_travel_in_one_archive(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = load("rows")
    monkeypatch.setattr(rows, "HERE", tmp_path / "benchmarks")
    results = rows.Results("nvidia-h200", "gemm-tiny", {"cores": 132}, ("numpy", "absent"), "abc")
    log = tmp_path / "benchmarks" / "logs" / "gemm-tiny-gemm-8x8x8-dtype-bf16.jsonl"
    row = {"workload": "gemm 8x8x8 dtype=bf16", "ratio": 1.0,
           "log": f"benchmarks/logs/{log.name}.gz"}  # fmt: skip
    results.add(row)
    log.parent.mkdir()
    log.write_text("{}\n")
    rows.compressed(log)
    with tarfile.open(rows.packed("gemm-tiny", "nvidia-h200", tmp_path)) as tar:
        tar.extractall(tmp_path / "copy", filter="data")
    copy = json.loads((tmp_path / "copy/results/nvidia-h200/gemm-tiny.json").read_text())
    assert copy["kt"] == "abc" and set(copy["libraries"]) == {"python", "numpy"}
    assert copy["rows"] == [{"class": "gemm-tiny", "kt": "abc", **row}]
    assert (tmp_path / "copy/logs/gemm-tiny-gemm-8x8x8-dtype-bf16.jsonl.gz").exists()
    again = rows.Results("nvidia-h200", "gemm-tiny", {}, (), "abc")
    assert list(again.rows) == ["gemm 8x8x8 dtype=bf16"]
