"""What the families' heuristics rank high, where a search begins."""

from __future__ import annotations

import numpy as np
import pytest

from kt.spaces.errors import SpaceError
from kt.spaces.families import space_of
from kt.spaces.gemm.cuda import as_gemm
from kt.spaces.gemm.hopper_plan import HopperPlan
from kt.spaces.gemm.hopper_time import estimated_cycles
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import parse

LIKELY = (
    "gemm 1536x1536x1536 dtype=bf16", "gemm 16x4096x4096 dtype=bf16",
    "gemm 300x5000x700 dtype=bf16", "gemm 1000x1000x1000 dtype=fp32",
    "gemm 1024x8192x4096 layout=nt dtype=fp8_e4m3", "gemm 1x1x1 dtype=fp16",
    "gemm 33x17x65 batch=512 layout=tt epilogue=bias+gelu dtype=bf16",
    "conv2d 32x28x28x128,128x3x3 pad=1 dtype=bf16", "conv2d 32x14x14x256,64x1x1 dtype=bf16",
    "attention 4x16x1024x128 causal=true dtype=bf16",
    "attention 1x32x1x128 kv-heads=8 kv-len=8192 dtype=bf16",
)  # fmt: skip


@pytest.mark.parametrize("text", LIKELY)
def test_what_heuristics_rank_high_is_legal_and_begins_with_the_default(text: str) -> None:
    for target in ("a100", "h200"):
        try:
            where = space_of(parse(text), CUDA_TARGETS[target])
        except SpaceError:
            assert "fp8" in text and target == "a100"
            continue
        for part in where.parts:
            assert part.likely[0] == part.default and part.legal(part.likely).all()
            assert len(np.unique(part.likely)) == len(part.likely)
        some = where.likely(4)
        families = [where.family_of(int(point)) for point in some]
        assert len(set(some.tolist()) - set(where.defaults().tolist())) == len(some)
        assert all(families.count(name) <= 4 for name in families)
        turns = [len(part.likely) > 1 for part in where.parts]
        first = [part.family.name for part, more in zip(where.parts, turns, strict=True) if more]
        assert families[: len(first)] == first  # the families take turns


def test_likely_tiles_fill_the_device_where_common_ones_do_not() -> None:
    where = space_of(parse("gemm 1536x1536x1536 dtype=bf16"), CUDA_TARGETS["h200"], "wgmma")
    part = where.parts[0]
    values = part.columns(part.indices(part.likely[:4]))
    features = part.family.derive(where.workload, where.target, values)
    assert features["waves"][0] < 0.75  # the default: 96 tiles of 128 x 192 on 132 SMs
    product, target = as_gemm(where.workload), where.target
    time = estimated_cycles(product, target, values, HopperPlan(product, target, values))
    assert (time[1:] < 0.95 * time[0]).all() and (features["waves"][1:] > 0.75).all()
    assert (192, 96) in [
        (theta.tile["bm"], theta.tile["bn"]) for theta in map(part.theta, part.likely[1:4].tolist())
    ]
