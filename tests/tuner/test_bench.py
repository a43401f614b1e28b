"""`kt bench`: real kernels on the CPU, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import parse
from kt.tuner import bench, tune

REAL = "gemm 24x40x16 epilogue=bias+relu dtype=fp32"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "from kt.tuner.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "bench", *words], cwd=cwd, capture_output=True, text=True
    )


@needs_cc
def test_a_log(tmp_path: Path) -> None:
    tune(REAL, log=tmp_path / "log.jsonl", trials=2, strategy="random", finalists=1,
         sample_seconds=0.01)  # fmt: skip
    done = run(tmp_path, "log.jsonl", "--time", "0.1s", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (row,) = found["rows"]
    assert row["workload"] == REAL and row["opponent"] == "numpy" and not row["failure"]
    assert set(row["us"]) == set(row["samples"]) == {"tuned", "default", "numpy"}
    assert row["ratio"] == pytest.approx(row["us"]["numpy"] / row["us"]["tuned"])
    assert len({len(us) for us in row["samples"].values()}) == 1  # interleaved, round by round


@needs_cc
def test_a_workload(tmp_path: Path) -> None:
    done = run(tmp_path, "gemm", "24x40x16", "--target", "cpu", "--time", "0.1s")
    assert done.returncode == 0, done.stderr
    for text in ("gemm 24x40x16 dtype=fp32", "default", "numpy", "fastest library / ours"):
        assert text in done.stdout
    assert "tuned" not in done.stdout


def test_what_is_refused(kt: Any, log: Path) -> None:
    assert kt("bench").refused("no workload")
    assert kt("bench", "nothing.jsonl").refused(
        "nothing.jsonl: neither a log nor an operator: accepts gemm, conv2d, attention"
    )
    assert kt("bench", log, "gemm", "1x1x1").refused("has no 'gemm 1x1x1'")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[0]["target"]["processor"] = "Other CPU"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert kt("bench", log).refused("measured on Other CPU")


def test_rows() -> None:
    workload = parse(REAL)
    samples = {"tuned": (2.0, 2.1, 2.0), "default": (5.0,), "torch": (6.0,), "lt": (3.0,)}
    row = bench.Row(workload, CUDA_TARGETS["h200"], samples, {"lt": "cuBLASLt\x1b 13"})
    failed = bench.Row(workload, CUDA_TARGETS["h200"], failure="crash: SIGSEGV")
    assert (row.ours, row.opponent, row.ratio) == ("tuned", "lt", 1.5)
    untuned = bench.Row(workload, CUDA_TARGETS["h200"], {"default": (5.0,)})
    assert (untuned.ours, untuned.opponent, untuned.ratio) == ("default", "", None)
    lines = bench._table([row, failed, untuned], True)
    assert "NVIDIA H200 (sm_90a, 132 SMs); medians, interleaved in one process, rested" in lines[0]
    assert lines[1].split()[:5] == ["workload", "tuned", "default", "torch", "lt"]
    assert "1.50x" in lines[2] and len(lines) == 5 and "\x1b" not in "".join(lines)
    noisy = bench.Row(workload, CUDA_TARGETS["h200"], {**samples, "tuned": (2.0, 4.0, 2.0)})
    line = bench._table([noisy], True)[2]
    assert "unstable (2–4 µs)" in line and line.endswith("–")
    assert [r["failure"] for r in bench._json([row, failed], False)["rows"]] == [
        "", "crash: SIGSEGV",
    ]  # fmt: skip
