"""The CUDA convolution families without a GPU: legality against the compiler, and results by
emulation."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import conv_cases
import cuda_emulator
import gemm_cases
import msgspec
import numpy as np
import pytest
from explained import check_rules_and_features
from nvrtc_limits import check_limits
from nvrtc_ptx import ptx_of

from kt.spaces.conv2d.direct import Conv2dDirect
from kt.spaces.conv2d.grouped import Conv2dGrouped
from kt.spaces.conv2d.mma import Conv2dMma
from kt.spaces.conv2d.mma_plan import gathers
from kt.spaces.conv2d.patch import Conv2dPatch
from kt.spaces.conv2d.pointwise import Pointwise, plain_product
from kt.spaces.family import Family
from kt.spaces.gemm.mma import GemmMma
from kt.spaces.gemm.simt import GemmSimt
from kt.spaces.gemm.stream import GemmStream
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import Conv2d, parse

TARGETS = ("a100", "rtx3090", "rtx4090", "h200")
DTYPES = {
    "mma": ("bf16", "fp16", "tf32", "int8"),
    "patch": ("bf16", "fp16"),
    "grouped": ("bf16", "fp16"),
    "direct": ("bf16", "fp16", "fp32"),
}
KINDS = {
    "mma": ("any", "grouped"),
    "patch": ("wide",),
    "grouped": ("grouped",),
    "direct": ("depthwise", "grouped"),
}
FAMILIES: dict[str, Family] = {
    f.name: f for f in (Conv2dMma(), Conv2dPatch(), Conv2dGrouped(), Conv2dDirect())
}
POINTWISE: tuple[Family, ...] = tuple(Pointwise(f) for f in (GemmMma(), GemmSimt(), GemmStream()))
REALISTIC = {
    "mma": (
        "conv2d 32x56x56x64,64x3x3 pad=1", "conv2d 32x224x224x3,64x7x7 stride=2 pad=3",
        "conv2d 32x224x224x3,96x4x4 stride=4", "conv2d 32x56x56x60,60x3x3 pad=1",
        "conv2d 16x28x28x100,100x3x3 pad=1 epilogue=bias+silu", "conv2d 8x112x112x12,40x3x3 pad=1",
        "conv2d 32x7x7x512,512x3x3 pad=1 epilogue=bias+residual+relu",
        "conv2d 1x16x16x1280,1280x3x3 pad=1", "conv2d 4x56x56x256,64x1x1 stride=2",
        "conv2d 4x28x28x256,512x3x3 pad=2 dilation=2 groups=2",
        "conv2d 2x40x40x64,64x31x1 pad=15x0",
    ),
    "patch": (
        "conv2d 32x56x56x64,64x3x3 pad=1 epilogue=bias+relu", "conv2d 1x64x64x320,320x3x3 pad=1",
        "conv2d 32x56x56x128,128x3x3 stride=2 pad=1", "conv2d 32x14x14x256,256x3x3 pad=1",
        "conv2d 32x7x7x512,512x3x3 pad=1 epilogue=bias+residual+relu",
        "conv2d 4x28x28x128,96x3x3 pad=2 dilation=2 groups=2", "conv2d 2x40x40x48,40x7x1 pad=3x0",
    ),
    "grouped": (
        "conv2d 32x56x56x128,128x3x3 pad=1 groups=32",
        "conv2d 32x28x28x256,256x3x3 pad=1 groups=32",
        "conv2d 32x14x14x512,512x3x3 pad=1 groups=32 epilogue=bias+relu",
        "conv2d 8x56x56x128,256x3x3 stride=2 pad=1 groups=32",
    ),
    "direct": (
        "conv2d 32x112x112x32,32x3x3 pad=1 groups=32",
        "conv2d 32x56x56x144,144x3x3 stride=2 pad=1 groups=144 epilogue=bias+silu",
        "conv2d 32x28x28x240,240x5x5 pad=2 groups=240", "conv2d 32x56x56x96,96x7x7 pad=3 groups=96",
        "conv2d 32x14x14x384,384x7x7 pad=3 groups=384", "conv2d 4x15x15x32,64x3x3 pad=1 groups=32",
        "conv2d 4x15x15x30,30x31x31 pad=15 groups=30", "conv2d 4x28x28x64,64x3x3 pad=1 groups=16",
    ),
}  # fmt: skip

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs NVRTC: pip install -e '.[cuda-build]'"
)
needs_compiler = pytest.mark.skipif(not cuda_emulator.available(), reason="needs g++")


def _named(family: str, i: int, rng: np.random.Generator) -> Conv2d:
    dtype = DTYPES[family][int(rng.integers(len(DTYPES[family])))]
    text = REALISTIC[family][i % len(REALISTIC[family])]
    if dtype == "int8":
        text = text.replace("silu", "relu")
    w = parse(f"{text} dtype={dtype}")
    assert isinstance(w, Conv2d)
    return w


def _small(family: str, seed: int, count: int) -> Iterator[tuple[Conv2d, Target]]:
    """Random convolutions that the family serves."""
    i = found = 0
    while found < count:
        rng = np.random.default_rng([seed, i])
        kind = KINDS[family][i % len(KINDS[family])]
        w = conv_cases.draw(rng, DTYPES[family], kind, most=6000)
        target = CUDA_TARGETS[TARGETS[i % len(TARGETS)]]
        i += 1
        if FAMILIES[family].refuses(w, target) is None:
            found += 1
            yield w, target


# -- legality -------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_legal_points_compile_within_the_limits(family: str, target: str, tmp_path: Path) -> None:
    t = CUDA_TARGETS[target]
    for i in range(5):
        rng = np.random.default_rng([9, i, TARGETS.index(target)])
        w = _named(family, i + 3 * TARGETS.index(target), rng)
        space = Space(w, t, [FAMILIES[family]])
        point = int(space.sample(rng, 1)[0]) if i else int(space.defaults()[0])
        check_limits(space.kernel(point), t, tmp_path)


@needs_nvrtc
def test_only_fp16_accumulation_accumulates_in_fp16() -> None:
    for acc in ("fp32", "fp16"):
        w = Conv2d(dtype="fp16", n=2, h=14, w=14, c=64, k=64, r=3, s=3, pad=(1, 1), acc=acc)
        space = Space(w, CUDA_TARGETS["a100"], [Conv2dMma()])
        ptx = ptx_of(space.kernel(int(space.defaults()[0])).source, "compute_80")
        assert ("f16.f16.f16.f16" in ptx) == (acc == "fp16")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_realistic_shape_has_a_legal_default_everywhere(family: str) -> None:
    for target in (*TARGETS, "l40s", "h100"):
        for i in range(len(REALISTIC[family])):
            for dtype in DTYPES[family]:
                text = REALISTIC[family][i].replace("silu", "relu")
                w = parse(f"{text} dtype={dtype}")
                assert FAMILIES[family].refuses(w, CUDA_TARGETS[target]) is None, w
                space = Space(w, CUDA_TARGETS[target], [FAMILIES[family]])
                assert space.why_illegal(int(space.defaults()[0])) is None, f"{w} {target}"


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_explain_themselves_and_features_are_finite(family: str) -> None:
    rng = np.random.default_rng(5)
    for i in range(4):
        space = Space(_named(family, i, rng), CUDA_TARGETS["h200"], [FAMILIES[family]])
        derived = check_rules_and_features(space, rng)
        assert json.dumps({name: column.tolist()[:1] for name, column in derived.items()})


def test_families_say_what_they_cannot_serve() -> None:
    h200 = CUDA_TARGETS["h200"]

    def refused(family: Family, text: str) -> str:
        return str(family.refuses(parse(text), h200))

    dense = "conv2d 1x8x8x32,32x3x3"
    assert "not fp32" in refused(Conv2dMma(), f"{dense} dtype=fp32")
    assert "tensor cores" in refused(Conv2dDirect(), f"{dense} dtype=bf16")
    assert "several groups" in refused(Conv2dGrouped(), f"{dense} dtype=bf16")
    assert "not 12" in refused(Conv2dGrouped(), "conv2d 1x8x8x24,32x3x3 groups=2 dtype=bf16")
    assert "without padding" in refused(POINTWISE[0], f"{dense} dtype=bf16")
    assert "conv2d on CUDA" in refused(Conv2dMma(), "gemm 8x8x8 dtype=bf16")
    turing = msgspec.structs.replace(h200, arch="sm_75")
    assert "sm_80" in str(Conv2dMma().refuses(parse(f"{dense} dtype=bf16"), turing))


def test_channels_choose_how_x_is_read() -> None:
    def ways(text: str) -> tuple[str, ...]:
        w = parse(f"conv2d {text} dtype=bf16")
        assert isinstance(w, Conv2d)
        return tuple(g.name for g in gathers(w))

    assert ways("1x8x8x64,8x3x3 pad=1") == ("tap16",)
    assert ways("1x8x8x60,8x3x3 pad=1") == ("tap8", "repack")
    assert ways("1x8x8x10,8x3x3 pad=1") == ("tap4", "repack")
    assert ways("1x8x8x9,8x3x3 pad=1") == ("repack",)
    assert ways("1x224x224x3,96x4x4 stride=4") == ("row8", "repack_row16", "repack")
    assert ways("1x224x224x3,64x7x7 stride=2 pad=3") == ("repack_row16", "repack")


def test_plain_products_are_recognised() -> None:
    def product(text: str) -> str:
        w = parse(f"conv2d {text} dtype=bf16")
        assert isinstance(w, Conv2d)
        return str(plain_product(w))

    assert product("2x7x5x24,40x1x1") == "gemm 70x40x24 layout=nt dtype=bf16"
    assert product("6x3x4x8,16x3x4") == "gemm 6x16x96 layout=nt dtype=bf16"
    assert product("2x7x5x24,40x1x1 stride=2") == "None"
    assert product("2x7x5x24,40x1x1 pad=1") == "None"
    assert product("2x7x5x24,40x1x1 groups=2") == "None"


# -- results, by emulation ------------------------------------------------------------------


def _is_right(w: Conv2d, kernel: Kernel, directory: Path, seed: int = 0) -> bool:
    inputs = gemm_cases.inputs(w, np.random.default_rng(seed))
    try:
        outs = cuda_emulator.run(kernel, inputs, gemm_cases.poison(w), directory)
    except AssertionError:
        return False
    return all(conv_cases.reference(w, inputs).worst(w, out) <= 1 for out in outs)


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_emulated_kernels_agree_with_the_reference(family: str, tmp_path: Path) -> None:
    for i, (w, target) in enumerate(_small(family, 3, 6)):
        space, rng = Space(w, target, [FAMILIES[family]]), np.random.default_rng(i)
        point = int(space.sample(rng, 1)[0]) if i % 4 else int(space.defaults()[0])
        kernel = space.kernel(point)
        assert _is_right(w, kernel, tmp_path / str(i)), f"{w}: {kernel.theta}"


@needs_compiler
@pytest.mark.parametrize("i", range(len(conv_cases.EDGES)))
def test_edges_by_emulation(i: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(i)
    for family in FAMILIES:
        dtype = DTYPES[family][i % len(DTYPES[family])]
        w = parse(f"{conv_cases.EDGES[i]} dtype={dtype}")
        assert isinstance(w, Conv2d)
        if FAMILIES[family].refuses(w, CUDA_TARGETS["h200"]):
            continue
        space = Space(w, CUDA_TARGETS["h200"], [FAMILIES[family]])
        kernel = space.kernel(int(space.sample(rng, 1)[0]))
        assert _is_right(w, kernel, tmp_path / family), f"{w}: {kernel.theta}"


@needs_compiler
@pytest.mark.parametrize("text", ["conv2d 2x5x3x24,17x1x1", "conv2d 5x3x4x8,16x3x4"])
def test_plain_products_by_emulation(text: str, tmp_path: Path) -> None:
    w = parse(f"{text} epilogue=bias+relu+scale+shift+residual dtype=bf16")
    assert isinstance(w, Conv2d)
    space = Space(w, CUDA_TARGETS["h200"], POINTWISE)
    for i, point in enumerate(space.defaults()):
        kernel = space.kernel(int(point))
        assert kernel.workload == w and kernel.family.startswith("gemm_")
        assert _is_right(w, kernel, tmp_path / str(i)), f"{w}: {kernel.theta}"


BUGS = {
    "taps outside x are read": ("reads(i, at) ? valid : 0", "valid"),
    "copied columns are not shifted": (
        "(first / X_PITCH % X_W) - (PAD_COLUMNS ? KT_PAD_W : 0)", "(first / X_PITCH % X_W)",
    ),
    "the walk forgets a carry": ("c -= PADDED_RUN, s++", "c -= PADDED_RUN"),
    "groups share the first bias": ("kt_columns_from(epilogue, share.batch * KT_N)", "epilogue"),
}  # fmt: skip
_PLANTED = {
    "copied columns are not shifted": "conv2d 1x6x8x3,8x3x3 stride=2 pad=1 dtype=bf16",
    "groups share the first bias": "conv2d 1x6x6x16,16x3x3 pad=1 groups=2 epilogue=bias dtype=bf16",
}


@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_the_emulator_catches_planted_bugs(bug: str, tmp_path: Path) -> None:
    w = parse(_PLANTED.get(bug, "conv2d 1x6x6x24,16x3x3 pad=1 epilogue=bias dtype=bf16"))
    assert isinstance(w, Conv2d)
    space = Space(w, CUDA_TARGETS["h200"], [Conv2dMma()])
    kernel = space.kernel(int(space.defaults()[0]))
    assert _is_right(w, kernel, tmp_path / "right")
    correct, wrong = BUGS[bug]
    planted = cuda_emulator.planted(kernel, correct, wrong)
    assert not _is_right(w, planted, tmp_path / "wrong")
