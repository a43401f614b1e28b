"""`kt apply --predict`: a kernel for a shape that was never tuned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Kt = Callable[..., Any]
TUNE = ("tune", "gemm", "64x64x64", "--strategy", "random", "--trials", "20")


def test_a_shape_that_is_not_in_the_log(kt: Kt, log: Path, tmp_path: Path) -> None:
    words = ("apply", log, "gemm", "64x64x128", "--predict")
    ran = kt(*words, "-o", tmp_path / "k.c")
    assert ran.code == 0 and "predicted" in ran.err and "1 other shapes" in ran.err
    text = (tmp_path / "k.c").read_text()
    assert "predicted from logs of other shapes, never measured" in text
    assert "gemm 64x64x128 dtype=fp32" in text and "in run" not in text.partition("*/")[0]
    record = json.loads(kt(*words, "--format", "json").out)
    assert record["median_us"] is None and record["record"]["source"] == "predicted"


def test_a_shape_that_the_log_has(kt: Kt, log: Path) -> None:
    assert kt("tune", "gemm", "64x64x128", *TUNE[3:], "--log", log).code == 0
    ran = kt("apply", log, "gemm", "64x64x64", "--predict")
    assert ran.code == 0 and "`kt apply` without --predict uses its measured schedule" in ran.err
    assert "measured schedule" not in kt("apply", log, "gemm", "64x64x32", "--predict").err


def test_what_cannot_be_predicted(kt: Kt, log: Path) -> None:
    words = ("apply", log, "--predict")
    assert kt(*words).refused("no workload: accepts gemm MxNxK")
    assert "--workloads" not in kt(*words).err
    assert kt(*words, "gemm", "64x64x128", "--trial", "1").refused("leave --trial out")
    assert kt(*words, "gemm", "8x8x8", "gemm", "9x9x9").refused("name one workload")
    assert kt(*words, "conv2d", "1x8x8x4,4x3x3").refused("no logged shape can teach")
