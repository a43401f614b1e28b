"""Every CUDA attention family for sm_80 on the device: random workloads and θ, against float64.

    PYTHONPATH=<folder with kt>:tests \\
        python3 -m pytest -q -s -m gpu tests/gpu/test_attention_kernels.py

The reference is the oracle's. A table is printed last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attention_cases
import numpy as np
import pytest
from device_kernels import Case, Judged, check, device_target, load_oracle

from kt.spaces.attention.mma import AttentionMma
from kt.spaces.attention.split_kv import AttentionSplitKv
from kt.spaces.space import Space
from kt.spaces.target import Target
from kt.spaces.workload import parse

pytestmark = pytest.mark.gpu

FAMILIES = {f.name: f for f in (AttentionMma(), AttentionSplitKv())}
DRAWS = {"mma": 160, "split_kv": 100}
POINTS_OF_EDGES = 4
EDGES = {
    "mma": (
        "1x2x100x64 kv-len=37 causal=true lse=true", "2x3x257x128 kv-len=129 causal=true lse=true",
        "1x4x200x64 scale=7.5 lse=true", "1x2x130x128 scale=5.3 causal=true",
        "1x2x65x64 kv-len=1 lse=true", "1x1x1x8", "1x1x1x2 kv-len=1 lse=true",
        "1x2x127x72 value-dim=40 window=1 lse=true", "1x2x300x80 window=64",
        "1x2x500x64 causal=true window=63 softcap=20", "1x6x129x96 kv-heads=2 layout=bhsd",
        "2x2x191x256 causal=true", "1x2x100x250 value-dim=6 lse=true",
        "4x16x1024x128 causal=true", "2x16x1024x64 lse=true", "1x8x2048x128 kv-heads=1",
    ),
    "split_kv": (
        "1x32x1x128 kv-heads=8 kv-len=1024", "2x32x1x128 kv-heads=8 kv-len=65536 lse=true",
        "64x32x1x128 kv-heads=8 kv-len=4096", "1x8x8x64 kv-heads=1 kv-len=5 causal=true lse=true",
        "3x4x1x64 kv-len=1 lse=true", "1x8x16x128 kv-heads=1 kv-len=1000 causal=true window=100",
        "2x2x1x96 kv-len=2049 scale=6.1 lse=true", "1x16x2x256 kv-heads=2 kv-len=777 softcap=30",
        "1x1x1x2 kv-len=3 lse=true", "2x14x5x42 kv-heads=2 kv-len=400 value-dim=250 layout=bhsd",
    ),
}  # fmt: skip


def _cases(family: str, target: Target) -> list[Case]:
    found = []
    edges = [e for e in EDGES[family] for _ in range(POINTS_OF_EDGES)]
    for i in range(DRAWS[family] + len(edges)):
        rng = np.random.default_rng([2027, i, len(family)])
        if i < DRAWS[family]:
            lengths, dims = attention_cases.LONGER, attention_cases.LARGER_DIMS
            w: Any = attention_cases.draw(rng, lengths, dims, few_queries=family == "split_kv")
        else:
            dtype = "bf16" if i % 2 else "fp16"
            w = parse(f"attention {edges[i - DRAWS[family]]} dtype={dtype}")
        space = Space(w, target, [FAMILIES[family]])
        default = i % 10 == 0 or (i >= DRAWS[family] and (i - DRAWS[family]) % POINTS_OF_EDGES == 0)
        point = int(space.defaults()[0]) if default else int(space.sample(rng, 1)[0])
        found.append(Case(space.kernel(point), i))
    return found


def cases(target: Target) -> list[Case]:
    """The kernels of all families, drawn and at edges."""
    return [case for family in FAMILIES for case in _cases(family, target)]


def test_random_kernels_agree_with_float64(tmp_path: Path) -> None:
    target = device_target()
    judge = Judged(load_oracle(target.arch, tmp_path), tmp_path)
    assert check(cases(target), target.arch, judge) >= 300
