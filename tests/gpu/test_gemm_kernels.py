"""Every CUDA GEMM family on the device: random workloads and θ at every edge, against float64.

    PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -s -m gpu tests/gpu/test_gemm_kernels.py

A table is printed last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import gemm_cases
import numpy as np
import pytest
from device_kernels import Case, check, compile_source, device_target, judge_gemm

from kt.spaces.gemm.mma import GemmMma
from kt.spaces.gemm.simt import GemmSimt
from kt.spaces.gemm.stream import GemmStream
from kt.spaces.space import Space
from kt.spaces.target import Target
from kt.spaces.workload import Gemm, parse

pytestmark = pytest.mark.gpu

FAMILIES = {f.name: f for f in (GemmMma(), GemmSimt(), GemmStream())}
DRAWS = {"mma": 200, "simt": 70, "stream": 110}
DTYPES = {
    "mma": ("bf16", "fp16", "tf32", "int8"), "simt": ("fp32", "fp64"),
    "stream": ("bf16", "fp16", "fp32"),
}  # fmt: skip
LARGER = (*gemm_cases.EDGES, 191, 193, 255, 256, 257, 300, 509, 511, 513, 588, 700)
NAMED = {
    "mma": (
        "gemm 1000x1000x1000 dtype=bf16", "gemm 64x64x16384 dtype=bf16",
        "gemm 511x509x8192 dtype=fp16", "gemm 300x5000x700 epilogue=bias+gelu dtype=bf16",
        "gemm 64x48x80 batch=300 dtype=bf16", "gemm 1x1x1 dtype=int8",
        "gemm 200x264x300 epilogue=tensor_scale+bias+relu dtype=int8",
    ),
    "simt": ("gemm 1000x1000x1000 dtype=fp32", "gemm 257x129x2049 layout=tt dtype=fp64",
             "gemm 70x90x110 epilogue=bias+tensor_scale dtype=fp64"),
    "stream": (
        "gemm 1x4096x4096 dtype=bf16", "gemm 16x1024x14336 dtype=bf16",
        "gemm 4097x3x1025 layout=tn dtype=fp16", "gemm 5x2048x2048 layout=nt dtype=fp32",
    ),
}  # fmt: skip


def _cases(
    family: str,
    target: Target,
    draws: Mapping[str, int],
    named: Mapping[str, Sequence[str]],
    larger: Sequence[int],
) -> list[Case]:
    cases = []
    count = draws[family]
    for i in range(count + 3 * len(named[family])):
        rng = np.random.default_rng([2026, i, len(family)])
        if i < count:
            draw = gemm_cases.draw_thin if family == "stream" else gemm_cases.draw
            w: Any = draw(rng, DTYPES[family], larger if i % 3 == 0 else gemm_cases.EDGES)
        else:
            w = parse(named[family][(i - count) // 3])
        space = Space(w, target, [FAMILIES[family]])
        default = int(space.defaults()[0])
        point = default if i % 10 == 0 else int(space.sample(rng, 1)[0])
        cases.append(Case(space.kernel(point), i))
    return cases


def run_draws(
    directory: Path,
    draws: Mapping[str, int] = DRAWS,
    named: Mapping[str, Sequence[str]] = NAMED,
    larger: Sequence[int] = LARGER,
    pool: Executor | None = None,
) -> int:
    """Checks the kernels drawn for every family and those of `named`; returns how many ran."""
    target = device_target()
    cases = [c for family in FAMILIES for c in _cases(family, target, draws, named, larger)]
    return check(cases, target.arch, partial(judge_gemm, directory=directory), pool)


def test_random_kernels_agree_with_float64(tmp_path: Path) -> None:
    assert run_draws(tmp_path) >= 300


def test_fp16_accumulation_is_told_apart(tmp_path: Path) -> None:
    """A kernel that accumulates in fp16 must fail where the workload asks for fp32."""
    target = device_target()
    wanted = Gemm(dtype="fp16", m=128, n=128, k=8192)
    cheap = Gemm(dtype="fp16", m=128, n=128, k=8192, acc="fp16")
    worst = {}
    for w in (wanted, cheap):
        space = Space(w, target, [GemmMma()])
        point = space.parts[0].point(
            {**space.theta(int(space.defaults()[0])).flat(), "fusion.split_k": 1}
        )
        kernel = space.kernel(point)
        image = compile_source(kernel.source, target.arch)
        assert isinstance(image, bytes), image
        judged = dataclasses.replace(kernel, workload=wanted)
        worst[w.acc], _ = judge_gemm(Case(judged, 5), image, tmp_path)
    assert worst["fp32"] <= 1 < worst["fp16"], worst
