"""The CUDA attention families without a GPU: legality against the compiler, and emulation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import attention_cases
import cuda_emulator
import msgspec
import numpy as np
import pytest
from explained import check_rules_and_features
from nvrtc_limits import check_limits
from nvrtc_ptx import ptx_of

from kt.spaces.attention.mma import AttentionMma
from kt.spaces.attention.mma_plan import Plan
from kt.spaces.attention.split_kv import AttentionSplitKv
from kt.spaces.cuda import register_limit
from kt.spaces.family import Family
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import Attention, parse

TARGETS = ("a100", "rtx3090", "rtx4090", "h200")
FAMILIES: dict[str, Family] = {f.name: f for f in (AttentionMma(), AttentionSplitKv())}
SHAPES = (
    "4x16x4096x128 causal=true", "8x32x2048x64", "2x8x4096x256", "4x16x2048x72 causal=true",
    "4x16x2048x192 lse=true", "1x16x8192x128 causal=true window=1024", "16x32x512x64",
    "1x32x1x128 kv-heads=8 kv-len=1024", "64x32x1x128 kv-heads=8 kv-len=4096",
    "32x64x1x128 kv-heads=8 kv-len=65536", "1x1x1x2", "3x4x9x256 kv-heads=1 kv-len=70 causal=true",
    "1x2x1x64 kv-len=1", "2x6x33x42 kv-len=7 value-dim=250 window=3 softcap=5 layout=bhsd",
)  # fmt: skip

_MAY_SPILL = 256

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs NVRTC: pip install -e '.[cuda-build]'"
)
needs_compiler = pytest.mark.skipif(not cuda_emulator.available(), reason="needs g++")


def _draws(
    family: str, seed: int, count: int, lengths: Sequence[int], dims: Sequence[int]
) -> Iterator[tuple[Space, int, np.random.Generator]]:
    """Spaces of random workloads and a legal point of each; every fourth is the default."""
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        w = attention_cases.draw(rng, lengths, dims, few_queries=family == "split_kv")
        space = Space(w, CUDA_TARGETS[TARGETS[i % len(TARGETS)]], [FAMILIES[family]])
        default = int(space.defaults()[0])
        assert space.why_illegal(default) is None, f"{w}: {space.why_illegal(default)}"
        yield space, default if i % 4 == 3 else int(space.sample(rng, 1)[0]), rng


# -- legality -------------------------------------------------------------------------------


def _may_spill(kernel: Kernel, target: Target) -> bool:
    """Whether the family says that the compiler may run out of registers by a few."""
    if kernel.family != "mma":
        return False
    plan = Plan(kernel.workload, {name: value for _, name, value in kernel.theta.items()})  # type: ignore[arg-type]
    limit = register_limit(target, plan.threads, plan.v["blocks"])
    return bool(plan.may_spill(limit))


@needs_nvrtc
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_legal_points_compile_within_the_limits(family: str, target: str, tmp_path: Path) -> None:
    t = CUDA_TARGETS[target]
    for i in range(3):
        rng = np.random.default_rng([8, i, TARGETS.index(target)])
        lengths, dims = attention_cases.LONGER, attention_cases.LARGER_DIMS
        w = attention_cases.draw(rng, lengths, dims, few_queries=family == "split_kv")
        space = Space(w, t, [FAMILIES[family]])
        point = int(space.sample(rng, 1)[0]) if i else int(space.defaults()[0])
        kernel = space.kernel(point)
        check_limits(kernel, t, tmp_path, _MAY_SPILL if _may_spill(kernel, t) else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_has_a_legal_default_everywhere(family: str) -> None:
    for target in (*TARGETS, "l40s", "h100"):
        for shape in SHAPES:
            for dtype in ("bf16", "fp16"):
                w = parse(f"attention {shape} dtype={dtype}")
                if FAMILIES[family].refuses(w, CUDA_TARGETS[target]):
                    continue
                space = Space(w, CUDA_TARGETS[target], [FAMILIES[family]])
                assert space.why_illegal(int(space.defaults()[0])) is None, f"{w} {target}"


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_explain_themselves_and_features_are_finite(family: str) -> None:
    rng = np.random.default_rng(5)
    lengths, dims = attention_cases.LONGER, attention_cases.LARGER_DIMS
    for space, _, _ in _draws(family, 11, 6, lengths, dims):
        check_rules_and_features(space, rng)


def test_families_say_what_they_cannot_serve() -> None:
    h200, mma, split = CUDA_TARGETS["h200"], AttentionMma(), AttentionSplitKv()

    def why(family: Family, text: str) -> str:
        return str(family.refuses(parse(f"attention {text}"), h200))

    assert "not fp32" in why(mma, "1x1x8x64 dtype=fp32")
    assert "D up to 256, not 264" in why(mma, "1x1x8x264 dtype=bf16")
    assert "value-dim up to 256" in why(mma, "1x1x8x64 value-dim=512 dtype=bf16")
    assert "D=65 is odd" in why(mma, "1x1x8x65 dtype=bf16")
    assert "fp32, not fp16" in why(mma, "1x1x8x64 dtype=fp16 acc=fp16")
    assert "65 queries of 2 heads" in why(split, "1x4x65x64 kv-heads=2 dtype=bf16")
    assert why(split, "1x8x16x64 kv-heads=1 dtype=bf16") == "None"
    turing = msgspec.structs.replace(h200, arch="sm_75")
    assert "sm_80" in str(mma.refuses(parse("attention 1x1x8x64 dtype=bf16"), turing))
    assert "attention" in str(mma.refuses(parse("gemm 8x8x8 dtype=bf16"), h200))


@needs_nvrtc
@pytest.mark.parametrize("family", FAMILIES)
def test_products_accumulate_in_fp32(family: str) -> None:
    w = parse("attention 2x8x1x128 kv-len=500 dtype=fp16")
    space = Space(w, CUDA_TARGETS["a100"], [FAMILIES[family]])
    ptx = ptx_of(space.kernel(int(space.defaults()[0])).source, "compute_80")
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx
    assert "ex2.approx.ftz.f32" in ptx and "f16.f16.f16.f16" not in ptx


# -- results, by emulation ------------------------------------------------------------------


def _worst(w: Attention, kernel: Kernel, directory: Path, seed: int = 0) -> float:
    inputs = attention_cases.inputs(w, np.random.default_rng(seed))
    expected = attention_cases.reference(w, inputs)
    outs = cuda_emulator.run_all(kernel, inputs, attention_cases.poisons(w), directory)
    return max(attention_cases.worst(w, out, expected) for out in outs)


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_emulated_kernels_agree_with_the_reference(family: str, tmp_path: Path) -> None:
    lengths, dims = attention_cases.LENGTHS, attention_cases.DIMS
    for i, (space, point, _) in enumerate(_draws(family, 3, 6, lengths, dims)):
        w = space.workload
        assert isinstance(w, Attention)
        kernel = space.kernel(point)
        assert _worst(w, kernel, tmp_path / str(i)) <= 1, f"{w}: {kernel.theta}"


NAMED = {
    "rows that see nothing": ("1x2x20x16 kv-len=5 causal=true lse=true", {}),
    "one key": ("1x2x3x16 kv-len=1 lse=true", {}),
    "huge logits": ("1x1x40x64 scale=7.5 lse=true", {}),
    "window without causal": ("1x1x50x16 kv-len=70 window=9 lse=true", {"tile.bn": 16}),
    "overlap": ("1x1x50x32 kv-len=90 causal=true lse=true",
                {"unroll.overlap": True, "sync.barriers": "joint", "mem.stages": 3,
                 "mem.q": "registers", "tile.bn": 16}),
    "two barriers": ("1x1x64x32 kv-len=200 causal=true",
                     {"sync.barriers": "separate", "mem.stages": 2, "mem.q": "registers",
                      "tile.bm": 64, "tile.bn": 16, "map.warps": 4}),
}  # fmt: skip


def _named(name: str) -> tuple[Attention, Kernel]:
    text, changes = NAMED[name]
    w = parse(f"attention {text} dtype=fp16")
    assert isinstance(w, Attention)
    space = Space(w, CUDA_TARGETS["h200"], [AttentionMma()])
    flat = {**space.theta(int(space.defaults()[0])).flat(), **changes}
    point = space.parts[0].point(flat)
    assert space.why_illegal(point) is None
    return w, space.kernel(point)


@needs_compiler
@pytest.mark.parametrize("name", NAMED)
def test_emulated_edges(name: str, tmp_path: Path) -> None:
    w, kernel = _named(name)
    assert _worst(w, kernel, tmp_path) <= 1


BUGS = {
    "keys are not waited for": ("overlap", "kt_copy_wait<kt_max(STAGES - 2, 0)>();",
                                "kt_copy_wait<kt_max(STAGES - 1, 0)>();"),
    "values are not waited for": (
        "two barriers",
        "kt_copy_wait<2 * (STAGES - 1)>();\n        __syncthreads(); // and all are done with the",
        "__syncthreads(); // and all are done with the"),
    "the diagonal is one off": ("two barriers", "query + (int)lane / 4 + DIAGONAL + 1",
                                "query + (int)lane / 4 + DIAGONAL"),
    "the last keys are not cut": (
        "window without causal", "8 * j + e < all_left;", "true;"),
    "a row without keys is not a number": (
        "rows that see nothing", "NOTHING = -1e30f", "NOTHING = -1e39f"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_the_emulator_catches_planted_bugs(bug: str, tmp_path: Path) -> None:
    name, correct, wrong = BUGS[bug]
    w, kernel = _named(name)
    planted = cuda_emulator.planted(kernel, correct, wrong)
    assert not _worst(w, planted, tmp_path) <= 1
