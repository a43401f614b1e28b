"""The families on wgmma without a GPU: legality against the compiler, and results by emulation."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib.util
import itertools
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cuda_emulator
import gemm_cases
import hopper_emulator
import msgspec
import numpy as np
import pytest
import wgmma_cases
from wgmma_cases import H200

from kt.spaces.families import space_of
from kt.spaces.family import Family
from kt.spaces.gemm.hopper_plan import HopperPlan
from kt.spaces.gemm.wgmma import GemmWgmma
from kt.spaces.gemm.wgmma_swapped import GemmWgmmaSwapped, transposed
from kt.spaces.kernel import Kernel, TensorMap, maps_define
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import Gemm, parse
from kt.tuner.backend.tolerance import tolerances

LARGE = (1, 48, 72, 100, 128, 256, 333, 500, 1000, 1023, 1024, 2048, 4095, 4096)
WGMMA, SWAPPED = GemmWgmma(), GemmWgmmaSwapped()
SMALL_TARGET = msgspec.structs.replace(H200, cores=4)
"""Persistence and taking turns need more tiles than SMs, which the emulator would not survive."""

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs NVRTC: pip install -e '.[cuda-build]'"
)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_compiler = pytest.mark.skipif(not cuda_emulator.available(), reason="needs g++")


# -- legality -------------------------------------------------------------------------------


def _compiled(kernel: Kernel, directory: Path) -> Any:
    from kt.tuner.backend.nvrtc import find_nvrtc

    (directory / "kernel.cu").write_text(kernel.source)
    return find_nvrtc().compile(directory, H200.arch, 60.0)


def _check_build(kernel: Kernel, directory: Path) -> None:
    """No spills worth mentioning, no serialised wgmma, the resources that Python worked out."""
    from kt.logs.record import BuildFacts

    facts = _compiled(kernel, directory)
    where = f"{kernel.workload}: {kernel.theta}\n{facts}"
    assert isinstance(facts, BuildFacts), where
    assert facts.spill_bytes <= kernel.most_spill_bytes and not facts.warnings, where
    assert facts.shared_bytes == 0, where  # all of it is dynamic
    found = re.findall(r"^#define (\w+) (\d+)$", kernel.source, re.MULTILINE)
    stated = dict(reversed(found))  # those of the stub come first
    if stated["KT_PRODUCER_WARPS"] == "4":  # or consumers would wait for registers for ever
        groups = int(stated["KT_CONSUMERS"])
        taken = groups * int(stated["KT_CONSUMER_REGISTERS"])
        given = (groups + 1) * facts.registers
        assert int(stated["KT_PRODUCER_REGISTERS"]) + taken <= given, where
    for step in kernel.launches:
        assert step.shared_bytes <= H200.shared_bytes and step.grid[0] % step.cluster[0] == 0, where
        blocks = int(kernel.theta.map["blocks"]) if step.entry == "kt_kernel" else 1
        held = -(-step.block[0] // 128) * 128 * blocks  # an SM gives registers to four warps
        assert held * facts.registers <= H200.registers_sm, where


@needs_nvrtc
@pytest.mark.parametrize("seed", range(12))
def test_legal_points_compile_without_spills(seed: int, tmp_path: Path) -> None:
    _check_build(wgmma_cases.random_kernel(100 + seed, LARGE), tmp_path)


@needs_nvrtc
@pytest.mark.parametrize("seed", range(8))
def test_legal_swapped_points_compile_without_spills(seed: int, tmp_path: Path) -> None:
    _check_build(wgmma_cases.random_swapped_kernel(100 + seed, LARGE), tmp_path)


@needs_nvrtc
@pytest.mark.parametrize(
    "name",
    ["clusters of 4 x 2", "two instructions along n", "ping-pong", "8 classes of rows",
     "classes in clusters of 2 x 2", "classes in ping-pong", "rows in the stages",
     "rows in the stages, a residual", "swapped, clusters along n"],
)  # fmt: skip
def test_special_points_compile_without_spills(name: str, tmp_path: Path) -> None:
    _check_build(wgmma_cases.kernels_with(name, count=1)[0], tmp_path)


@needs_nvcc
@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("gemm 512x510x510 batch=2 epilogue=bias dtype=bf16", WGMMA),  # A strided, B repacked
        ("gemm 24x203x136 layout=nt epilogue=bias dtype=bf16", SWAPPED),
    ],
)
def test_nvcc_compiles_the_emitted_text_without_a_warning(
    text: str, family: Family, tmp_path: Path
) -> None:
    from kt.logs.record import BuildFacts
    from kt.tuner.backend.nvcc import find_nvcc

    space = Space(parse(text), H200, [family])
    (tmp_path / "kernel.cu").write_text(space.kernel(int(space.defaults()[0])).source)
    facts = find_nvcc().compile(tmp_path, H200.arch, 120.0)
    assert isinstance(facts, BuildFacts) and not facts.warnings, facts


def test_every_benchmark_shape_has_a_legal_default() -> None:
    shapes = [
        "1x1x1", "1x4096x4096", "16x4096x14336", "128x128x65536", "64x64x16384", "4096x4096x4096",
        "8191x8191x8191", "9477x1152x588", "64x48x80", "4095x1x4097", "3x100000x7", "5x7x131072",
        "2047x2049x2046", "300x5000x700", "512x512x512", "16384x16384x16384",
    ]  # fmt: skip
    for dtype, layout in (("bf16", "tn"), ("fp16", "tt"), ("bf16", "nn"), ("tf32", "nt"),
                          ("fp8_e4m3", "nt"), ("fp8_e5m2", "tn")):  # fmt: skip
        for shape in shapes:
            w = parse(f"gemm {shape} batch=2 layout={layout} epilogue=bias+gelu dtype={dtype}")
            space = Space(w, H200, [WGMMA])
            assert space.why_illegal(int(space.defaults()[0])) is None, f"{w}"


def test_every_product_with_few_rows_has_a_legal_default() -> None:
    family = SWAPPED
    for dtype, layout in (("bf16", "tn"), ("fp16", "tt"), ("bf16", "nn"), ("tf32", "nt"),
                          ("fp8_e4m3", "nt")):  # fmt: skip
        for shape in ("8x16x16", "8x4096x4096", "16x7168x1024", "128x2048x1024", "64x30000x64"):
            w = parse(f"gemm {shape} layout={layout} epilogue=bias+gelu dtype={dtype}")
            space = Space(w, H200, [family])
            assert space.why_illegal(int(space.defaults()[0])) is None, f"{w}"


@pytest.mark.parametrize("family", [WGMMA, SWAPPED], ids=lambda f: f.name)
def test_rules_explain_themselves_and_features_are_finite(family: Family) -> None:
    rng = np.random.default_rng(5)
    drawn = (wgmma_cases.draw(rng, LARGE) for _ in range(600))
    served = (w for w in drawn if family.refuses(w, H200) is None)
    for w in itertools.islice(served, 6):
        part = Space(w, H200, [family]).parts[0]
        points = part.draw(rng, 20000)
        legal = part.legal(points)
        reasons = {part.why_illegal(int(p)) for p in points[~legal][:300]}
        assert all(reason and len(reason) > 15 for reason in reasons)
        values = part.columns(part.indices(points[legal]))
        derived = part.family.derive(part.workload, part.target, values)
        assert all(np.isfinite(column).all() for column in derived.values())


def test_the_family_says_what_it_cannot_serve() -> None:
    family = WGMMA
    assert "not fp32" in str(family.refuses(parse("gemm 8x8x8 dtype=fp32"), H200))
    assert "layout nt" in str(family.refuses(parse("gemm 8x8x8 dtype=tf32"), H200))
    assert family.refuses(parse("gemm 8x8x8 layout=nt dtype=tf32"), H200) is None
    assert family.refuses(parse("gemm 8x8x8 layout=tn dtype=fp8_e5m2"), H200) is None
    bf16 = parse("gemm 8x8x8 dtype=bf16")
    assert "sm_90a" in str(family.refuses(bf16, CUDA_TARGETS["a100"]))


def test_swapped_operands_serve_few_rows_that_begin_at_16_bytes() -> None:
    family = SWAPPED
    assert family.refuses(parse("gemm 1x1000x72 dtype=bf16"), H200) is None
    assert family.refuses(parse("gemm 1x1001x72 layout=nt dtype=bf16"), H200) is None
    assert "16 bytes" in str(family.refuses(parse("gemm 1x1001x72 dtype=bf16"), H200))
    assert "128 rows" in str(family.refuses(parse("gemm 136x1000x72 dtype=bf16"), H200))
    assert "more columns" in str(family.refuses(parse("gemm 64x64x72 dtype=bf16"), H200))
    assert "one product" in str(family.refuses(parse("gemm 8x64x72 batch=2 dtype=bf16"), H200))
    assert "layout nt" in str(family.refuses(parse("gemm 8x64x72 dtype=tf32"), H200))
    assert "layout nt" in str(family.refuses(parse("gemm 8x64x80 dtype=fp8_e4m3"), H200))
    assert "16 bytes" in str(family.refuses(parse("gemm 8x64x72 layout=nt dtype=fp8_e4m3"), H200))
    assert family.refuses(parse("gemm 8x64x80 layout=nt dtype=fp8_e4m3"), H200) is None


def test_a_convolution_with_few_pixels_has_the_swapped_family() -> None:
    names = [
        part.family.name
        for part in space_of(parse("conv2d 1x7x7x64,256x1x1 dtype=bf16"), H200).parts
    ]
    assert "gemm_wgmma_swapped" in names


def test_the_transpose_has_the_same_operands_in_memory() -> None:
    w = parse("gemm 8x64x72 layout=nt epilogue=bias dtype=fp16 acc=fp16")
    assert str(transposed(w)) == "gemm 64x8x72 layout=nt epilogue=bias dtype=fp16 acc=fp16"
    assert transposed(transposed(w)) == w
    assert transposed(parse("gemm 8x64x72 layout=nn dtype=bf16")).layout == "tt"
    assert transposed(parse("gemm 8x64x72 layout=tn dtype=bf16")).layout == "tn"


def test_the_default_of_a_decoding_product_pads_no_row_and_fills_the_device() -> None:
    space = Space(parse("gemm 16x4096x4096 dtype=bf16"), H200, [SWAPPED])
    (main,) = space.kernel(int(space.defaults()[0])).launches
    assert space.theta(int(space.defaults()[0])).tile["bn"] == 16
    assert 0.75 * H200.cores < main.grid[0] <= H200.cores


def test_the_default_of_a_large_product_is_the_tile_that_vendors_use() -> None:
    space = Space(parse("gemm 4096x4096x4096 dtype=bf16"), H200, [WGMMA])
    theta = space.theta(int(space.defaults()[0]))
    assert (theta.tile["bm"], theta.tile["bn"], theta.tile["bk"]) == (128, 256, 64)
    assert theta.map["consumers"] == 2 and theta.map["persistent"] and theta.mem["store"] == "tma"


def test_promotion_is_a_knob_of_fp8_in_fp32_alone() -> None:
    def choices(options: str) -> tuple[Any, ...] | None:
        knobs = GemmWgmma().knobs(parse(f"gemm 512x512x512 layout=nt {options}"), H200)
        return next((knob.choices for knob in knobs if knob.name == "promote"), None)

    assert choices("dtype=fp8_e4m3") == (128, 256)
    assert choices("dtype=fp8_e4m3 acc=fp22") is None and choices("dtype=bf16") is None
    w = parse("gemm 4096x4096x4096 layout=nt dtype=fp8_e4m3")
    space = Space(w, H200, [GemmWgmma()])
    values = space.theta(int(space.defaults()[0])).flat()
    wide = {**values, "tile.bn": 256, "mem.stages": 4}
    for changed, why in (
        (wide, "256 of them sums"),
        ({**values, "tile.bk": 256, "mem.stages": 2}, "whole tiles"),
        ({**values, "unroll.in_flight": 1}, "no product is in flight"),
    ):
        assert why in str(space.why_illegal(space.parts[0].point(changed)))


# -- tensor maps ----------------------------------------------------------------------------


def test_maps_describe_the_operands() -> None:
    w = parse("gemm 104x200x72 batch=3 layout=tn dtype=bf16")
    space = Space(w, H200, [WGMMA])
    (main,) = space.kernel(int(space.defaults()[0])).launches
    a, b = main.maps[:2]
    assert (a.argument, a.extents, a.strides) == (0, (104, 72, 3), (208, 72 * 208))
    assert (b.argument, b.extents, b.strides) == (1, (200, 72, 3), (400, 72 * 400))
    assert all(m.box[0] * 2 <= m.swizzle and max(m.box) <= 256 for m in main.maps)


def test_maps_of_swapped_operands_trade_places() -> None:
    w = parse("gemm 24x200x72 epilogue=bias dtype=bf16")
    space = Space(w, H200, [SWAPPED])
    rng = np.random.default_rng(3)
    kernels = (space.kernel(point) for point in space.sample(rng, 200).tolist())
    kernel = next(k for k in kernels if k.theta.mem["store"] == "tma" and k.theta.tile["bn"] == 24)
    a, b, c = kernel.launches[0].maps
    assert (a.argument, a.extents, a.strides) == (1, (200, 72, 1), (400, 72 * 400))
    assert (b.argument, b.extents, b.strides) == (0, (72, 24, 1), (144, 24 * 144))
    assert (c.argument, c.extents, c.box, c.swizzle) == (3, (200, 24, 1), (64, 24, 1), 128)


def test_operands_without_classes_are_read_from_the_workspace() -> None:
    w = parse("gemm 64x63x64 dtype=bf16")
    space = Space(w, H200, [WGMMA])
    kernel = space.kernel(int(space.defaults()[0]))
    repack, main = kernel.launches[:2]
    assert repack.entry == "kt_repack" and kernel.theta.mem["store"] == "direct"
    a, b = main.maps
    assert (a.argument, b.argument) == (0, -1)
    assert b.offset + 64 * 64 * 2 <= kernel.workspace_bytes and b.strides[0] == 128


def _choices(text: str) -> dict[str, tuple[Any, ...]]:
    space = Space(parse(text), H200, [WGMMA])
    return {knob.name: tuple(knob.choices) for knob in space.parts[0].knobs}


@pytest.mark.parametrize(
    ("text", "maps_of_a"),
    [
        ("512x512x511 dtype=bf16", 8),
        ("512x510x510 dtype=fp16", 4),
        ("512x512x508 batch=2 dtype=bf16", 2),
        ("512x512x510 layout=nt dtype=fp16", 0),  # B would be read at k where rows do not begin
        ("512x512x511 layout=nt dtype=tf32", 0),
        ("512x512x511 dtype=fp8_e4m3", 0),  # B is turned along k
        ("512x512x512 dtype=bf16", 1),  # rows start where they should
        ("511x512x512 layout=tn dtype=bf16", 0),  # rows along m: repacked
        ("511x512x511 batch=2 dtype=bf16", 0),  # batches start differently
        ("7x512x511 dtype=bf16", 0),  # a class would be empty
    ],
)
def test_rows_that_start_anywhere_fall_into_classes(text: str, maps_of_a: int) -> None:
    choices = _choices(f"gemm {text}")
    assert choices.get("copy_a", ()) == (("strided", "repack") if maps_of_a > 1 else ())
    space = Space(parse(f"gemm {text}"), H200, [WGMMA])
    values = space.theta(int(space.defaults()[0])).flat()
    values |= {"mem.copy_a": "strided"} if maps_of_a > 1 else {}
    kernel = space.kernel(space.parts[0].point(values))
    assert f"#define KT_CLASSES_A {max(maps_of_a, 1)}\n" in kernel.source
    (main,) = [step for step in kernel.launches if step.entry == "kt_kernel"]
    assert [m.argument for m in main.maps].count(0) == maps_of_a


def test_only_strided_rows_add_to_the_ways_to_store() -> None:
    assert _choices("gemm 512x512x511 dtype=bf16")["store"] == ("direct", "rows", "tma")
    assert _choices("gemm 512x512x512 dtype=bf16")["store"] == ("direct", "tma")
    assert _choices("gemm 512x510x511 dtype=bf16")["store"] == ("direct", "rows")


def test_maps_of_classes_begin_at_rows_rounded_down() -> None:
    text = "gemm 102x64x77 dtype=bf16"  # rows of 154 bytes, 10 beyond a multiple of 16
    kernel = _one(text, lambda v: strided(v) and v["store"] == "tma" and v["cluster_n"] == 1)
    (main,) = kernel.launches
    classes, b, boxes = main.maps[:8], main.maps[8], main.maps[9:]
    assert b.argument == 1 and {m.argument for m in classes} == {0}
    for c, (m, box) in enumerate(zip(classes, boxes, strict=True)):
        shift, rows = c * 154 - m.offset, 13 if c < 6 else 12
        assert m.offset % 16 == 0 and 0 <= shift < 16
        assert m.extents == (77 + shift // 2, rows, 1)
        assert (m.strides[0], m.box[1]) == (8 * 154, kernel.theta.tile["bm"])
        assert (box.argument, box.offset, box.extents) == (2, c * 128, (64, rows, 1))
        assert box.strides[0] == 8 * 128


def test_padding_decides_between_strided_rows_and_a_copy() -> None:
    for text, chosen in (("1024x4096x4095", "strided"), ("72x20000x4095", "repack")):
        space = Space(parse(f"gemm {text} dtype=bf16"), H200, [WGMMA])
        assert space.theta(int(space.defaults()[0])).mem["copy_a"] == chosen, text


def test_classes_end_in_tiles_of_their_own() -> None:
    w = parse("gemm 300x136x77 dtype=bf16")  # eight classes of 38 or 37 rows
    for high, clusters in ((1, 8), (2, 0)):
        values = {"copy_a": "strided", "bm": 64, "cluster_m": high, "bk": 64}
        plan = HopperPlan(w, H200, values)
        assert int(plan.m_clusters) == 8 and (int(plan.m_blocks) >= high) == (clusters == 8)
        assert int(plan.k_tiles) == 2  # 77 and the largest shift, 7


def test_maps_become_an_initialiser() -> None:
    tensor = TensorMap(-1, 512, "bf16", (8, 4), (16,), (8, 4), 32)
    assert maps_define([tensor]) == "{{-1, 512ull, 9, 2, {8, 4}, {16}, {8, 4}, {1, 1}, 1}}"


# -- results, by emulation ------------------------------------------------------------------


def _is_right(kernel: Kernel, directory: Path, seed: int = 0) -> bool:
    w = kernel.workload
    assert isinstance(w, Gemm)
    inputs = gemm_cases.inputs(w, np.random.default_rng(seed))
    reference = gemm_cases.reference(w, inputs)
    outs = hopper_emulator.run(kernel, inputs, gemm_cases.poison(w), directory)
    return all(reference.worst(w, out) <= 1 for out in outs)


def _survives(kernel: Kernel, directory: Path) -> bool:
    """Whether a kernel that may end the process is right."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 2  # neither: it did not even run
        try:
            code = 0 if _is_right(kernel, directory) else 1
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended != 2
    return ended == 0


def _one(text: str, wanted: Callable[[Mapping[str, Any]], bool], family: Family = WGMMA) -> Kernel:
    """The first kernel found with a property that the emulator can hold."""
    space = Space(parse(text), SMALL_TARGET, [family])
    rng = np.random.default_rng(5)
    for _ in range(40):
        for point in space.sample(rng, 128).tolist():
            values = {name: value for _, name, value in space.theta(point).items()}
            if wanted(values) and hopper_emulator.fits(kernel := space.kernel(point)):
                return kernel
    raise AssertionError(f"no such kernel for {text}")


def strided(v: Mapping[str, Any]) -> bool:
    return bool(v["copy_a"] == "strided")


_TEXT = "gemm 300x200x200 batch=2 epilogue=bias+relu dtype=bf16"
PATHS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "ping-pong in clusters": (_TEXT, lambda v: v["pingpong"] and v["cluster_m"] == 2),
    "ping-pong with split-K": (
        "gemm 300x200x400 dtype=fp16", lambda v: v["pingpong"] and v["split_k"] > 1,
    ),
    "clusters of 2 x 2": (_TEXT, lambda v: v["cluster_m"] == v["cluster_n"] == 2),
    "a cluster of 4 along n": (
        "gemm 130x200x136 layout=nt dtype=bf16", lambda v: v["cluster_n"] == 4,
    ),
    "boxes of C in turns": (
        _TEXT, lambda v: v["store"] == "tma" and v["buffers"] == 2 and v["persistent"],
    ),
    "two instructions along n": (
        "gemm 200x300x100 layout=nt dtype=bf16", lambda v: v["consumers"] == 3 and v["bn"] > 208,
    ),
    "sums by a kernel": (_TEXT, lambda v: v["split_mode"] == "kernel" and v["cluster_m"] > 1),
    "repacked": (
        "gemm 130x131x77 batch=2 layout=tt epilogue=residual dtype=bf16", lambda v: v["persistent"],
    ),
    "8 classes": (
        "gemm 230x136x77 epilogue=bias+residual dtype=bf16",
        lambda v: strided(v) and v["store"] == "rows",
    ),
    "8 classes, boxes of C in turns": (
        "gemm 530x72x61 epilogue=bias+residual dtype=bf16",
        lambda v: strided(v) and v["store"] == "tma" and v["buffers"] == 2 and v["persistent"],
    ),
    "8 classes, stored directly": (
        "gemm 19x72x63 epilogue=silu dtype=bf16",
        lambda v: strided(v) and v["store"] == "direct" and v["bk"] == 64,
    ),
    "4 classes, k shorter than a tile": (
        "gemm 133x131x30 dtype=fp16", lambda v: strided(v) and v["store"] == "rows",
    ),
    "4 classes, the shift begins a tile": (
        "gemm 133x64x62 dtype=fp16", lambda v: strided(v) and v["bk"] == 64,
    ),
    "short rows of slabs": (
        "gemm 140x72x95 dtype=bf16", lambda v: strided(v) and v["bk"] == 32,
    ),
    "two slabs along k": (
        "gemm 140x72x255 dtype=bf16",
        lambda v: strided(v) and v["bk"] == 128 and v["consumers"] == 2,
    ),
    "2 classes in batches": (
        "gemm 132x72x100 batch=2 epilogue=bias+gelu dtype=bf16",
        lambda v: strided(v) and v["persistent"],
    ),
    "classes in clusters": (
        "gemm 600x136x78 dtype=bf16",
        lambda v: strided(v) and v["cluster_n"] == v["cluster_m"] == 2,
    ),
    "a cluster of 4 along n shares rows of a class": (
        "gemm 130x200x76 dtype=bf16", lambda v: strided(v) and v["cluster_n"] == 4,
    ),
    "classes in a cluster along k": (
        "gemm 100x72x601 epilogue=bias dtype=bf16", lambda v: strided(v) and v["cluster_k"] == 4,
    ),
    "classes with split-K": (
        "gemm 130x72x301 dtype=bf16",
        lambda v: strided(v) and v["split_k"] > 1 and v["split_mode"] == "last",
    ),
    "classes with sums by a kernel": (
        "gemm 130x72x302 epilogue=relu dtype=fp16",
        lambda v: strided(v) and v["split_mode"] == "kernel",
    ),
    "classes in ping-pong": (
        "gemm 300x200x78 dtype=bf16",
        lambda v: strided(v) and v["pingpong"] and v["store"] == "rows",
    ),
    "classes in ping-pong, boxes of C": (
        "gemm 300x200x135 dtype=bf16",
        lambda v: strided(v) and v["pingpong"] and v["store"] == "tma",
    ),
    "whole rows, repacked": (
        "gemm 130x136x77 dtype=bf16", lambda v: not strided(v) and v["store"] == "rows",
    ),
    "rows of odd length": (
        "gemm 130x131x72 batch=2 epilogue=bias+residual dtype=bf16",
        lambda v: v["store"] == "rows" and v["bm"] == 128 and v["consumers"] == 1,
    ),
    "boxes in the stages, three consumers, sums by the last": (
        "gemm 200x136x300 epilogue=bias dtype=bf16",
        lambda v: (
            v["store"] == "tma" and v["split_mode"] == "last" and v["split_k"] > 1
            and v["consumers"] == 3 and not v["persistent"]
        ),
    ),
    "rows in the stages, not a power of two": (
        "gemm 200x147x136 epilogue=bias dtype=bf16",
        lambda v: (
            v["store"] == "rows" and v["bn"] in (80, 112, 144) and v["consumers"] > 1
            and v["split_k"] == 1 and not v["persistent"]
        ),
    ),
    "two parts of k": (
        "gemm 200x136x300 epilogue=bias dtype=bf16",
        lambda v: v["split_k"] == 2 and v["split_mode"] == "last" and v["consumers"] == 2,
    ),
    "five parts of k, some read at once": (
        "gemm 72x100x330 epilogue=bias dtype=bf16",
        lambda v: (
            v["split_k"] == 5 and v["split_mode"] == "last" and 64 <= v["bn"] <= 96
            and v["bm"] == 64 * v["consumers"] and v["blocks"] == 1 and not v["pingpong"]
        ),
    ),
    "a cluster with fewer tiles along k than stages": (
        "gemm 300x200x64 dtype=bf16",
        lambda v: (
            v["cluster_m"] == 2 and v["stages"] == 2 and v["bk"] == 64 and not v["persistent"]
        ),
    ),
    "a cluster along k": (
        "gemm 100x72x600 epilogue=bias dtype=bf16", lambda v: v["cluster_k"] == 4,
    ),
    "a cluster along k that shares unevenly": (
        "gemm 100x75x600 epilogue=bias dtype=bf16",
        lambda v: v["cluster_k"] == 2 and v["bn"] == 40 and v["bm"] == 64,
    ),
    "tf32": ("gemm 100x72x100 layout=nt dtype=tf32", lambda v: v["split_k"] > 1),
    "fp8 promoted in turns": (
        "gemm 300x200x800 layout=nt epilogue=tensor_scale+bias dtype=fp8_e4m3",
        lambda v: v["pingpong"] and v["bk"] == 64,
    ),
    "fp8 promoted with products in flight": (
        "gemm 130x136x600 layout=nt dtype=fp8_e5m2",
        lambda v: v["in_flight"] and v["promote"] == 256 and v["cluster_m"] == 2,
    ),
    "fp8 transposed by the repack": (
        "gemm 130x131x176 batch=2 layout=tn epilogue=tensor_scale dtype=fp8_e5m2 acc=fp22",
        lambda v: v["cluster_n"] == 2,
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("path", PATHS)
def test_emulated_kernels_agree_with_the_reference(path: str, tmp_path: Path) -> None:
    kernel = _one(*PATHS[path])
    assert _is_right(kernel, tmp_path), f"{kernel.workload}: {kernel.theta}"


@needs_compiler
@pytest.mark.parametrize("worst", [np.inf, np.nan])
@pytest.mark.parametrize("cleared", [True, False])
def test_what_ends_a_row_of_a_stays_in_its_row(worst: float, cleared: bool, tmp_path: Path) -> None:
    kernel = _one(
        "gemm 150x72x77 dtype=bf16", lambda v: strided(v) and v["split_k"] > 1 and v["bk"] == 32
    )
    if not cleared:
        source = kernel.source.replace("if (KT_CLASSES_A > 1 && unit.row_class", "if (false")
        kernel = dataclasses.replace(kernel, source=source)
    w = kernel.workload
    assert isinstance(w, Gemm)
    a, b = gemm_cases.inputs(w, np.random.default_rng(1))
    kept = gemm_cases.reference(w, [a, b])
    spoilt = np.arange(w.m) % 3 == 1
    a[spoilt, -8:] = gemm_cases.to_bits(np.array(worst), w.dtype)
    for out in hopper_emulator.run(kernel, [a, b], gemm_cases.poison(w), tmp_path):
        error = np.abs(gemm_cases.from_bits(out, w.dtype) - kept.value)
        assert (error <= kept.allowed)[~spoilt].all() == cleared
        assert not np.isfinite(error[spoilt]).any()


@needs_compiler
def test_a_thread_repacks_several_vectors_of_large_operands(tmp_path: Path) -> None:
    kernel = _one(*PATHS["repacked"])
    few = "VECTORS >= 1 << 18"
    assert few in kernel.source
    source = kernel.source.replace(few, "VECTORS >= 1")
    source = re.sub("#define KT_EXPECT_REPACK_BLOCKS .*", "", source)
    assert _is_right(dataclasses.replace(kernel, source=source), tmp_path)


_EPILOGUE = "epilogue=bias+relu+scale+residual"
SWAPPED_PATHS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "one row": ("gemm 1x136x72 layout=nt dtype=bf16", lambda v: True),
    "boxes of C, every operand of an epilogue": (
        f"gemm 20x328x136 {_EPILOGUE} dtype=bf16", lambda v: v["store"] == "tma" and v["bn"] == 24,
    ),
    "boxes of C in turns": (
        "gemm 40x456x136 epilogue=shift+gelu dtype=fp16",
        lambda v: v["store"] == "tma" and v["bm"] == 128 and v["consumers"] == 1,
    ),
    "pairs": (
        f"gemm 72x328x136 layout=tt {_EPILOGUE} dtype=bf16",
        lambda v: v["store"] == "direct" and v["bm"] == 128 and v["consumers"] == 1,
    ),
    "rows of odd length": (
        f"gemm 24x203x136 layout=nt {_EPILOGUE} dtype=fp16",
        lambda v: v["consumers"] == 2,
    ),
    "any k": ("gemm 48x200x77 layout=tn epilogue=bias dtype=bf16", lambda v: v["cluster_m"] == 2),
    "sums by the last": (
        f"gemm 24x200x392 {_EPILOGUE} dtype=bf16",
        lambda v: v["split_k"] > 2 and v["split_mode"] == "last" and v["store"] == "tma",
    ),
    "sums by atomics": (
        f"gemm 9x200x392 {_EPILOGUE} dtype=bf16", lambda v: v["split_mode"] == "atomic",
    ),
    "sums by a kernel": (
        f"gemm 9x203x392 layout=nt {_EPILOGUE} dtype=bf16", lambda v: v["split_mode"] == "kernel",
    ),
    "a cluster along k": (
        f"gemm 24x203x592 layout=nt {_EPILOGUE} dtype=bf16",
        lambda v: v["cluster_k"] == 4 and v["bm"] == 128,
    ),
    "a cluster along k, one group of rows": (
        "gemm 3x72x592 epilogue=bias dtype=bf16", lambda v: v["cluster_k"] == 4,
    ),
    "clusters of 2 x 2": (
        "gemm 56x200x136 epilogue=bias dtype=bf16",
        lambda v: v["cluster_m"] == v["cluster_n"] == 2,
    ),
    "persistent": ("gemm 20x712x200 dtype=bf16", lambda v: v["persistent"]),
    "L2 warmed": (
        "gemm 56x200x264 dtype=bf16", lambda v: v["warm"] > 0 and v["cluster_n"] == 2,
    ),
    "tf32": (
        f"gemm 24x203x100 layout=nt {_EPILOGUE} dtype=tf32", lambda v: v["split_mode"] == "last",
    ),
    "promoted sums": (
        "gemm 24x328x592 layout=nt epilogue=tensor_scale+bias dtype=fp8_e4m3",
        lambda v: v["store"] == "tma" and v["promote"] > v["bk"],
    ),
    "promoted sums, split": (
        "gemm 9x203x1040 layout=nt epilogue=tensor_scale+residual dtype=fp8_e5m2",
        lambda v: v["split_k"] > 1 and v["in_flight"] == 1,
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("path", SWAPPED_PATHS)
def test_emulated_swapped_kernels_agree_with_the_reference(path: str, tmp_path: Path) -> None:
    kernel = _one(*SWAPPED_PATHS[path], SWAPPED)
    assert _is_right(kernel, tmp_path), f"{kernel.workload}: {kernel.theta}"


def _strictness(acc: str, directory: Path) -> float:
    """The largest error of a long product, in units of what acc=fp32 allows."""
    kernel = _one(
        f"gemm 64x16x4096 layout=nt dtype=fp8_e4m3 acc={acc}",
        lambda v: v["split_k"] * v["cluster_k"] == 1 and v["bk"] == 128,
    )
    judged = parse("gemm 64x16x4096 layout=nt dtype=fp8_e4m3")
    inputs = gemm_cases.inputs(judged, np.random.default_rng(1))
    a, b = (gemm_cases.from_bits(x, "fp8_e4m3") for x in inputs)
    out = hopper_emulator.run(kernel, inputs, gemm_cases.poison(judged), directory)[0]
    (bound,) = tolerances(judged)
    allowed = bound.absolute + bound.relative * np.abs(a @ b.T)
    return float((np.abs(gemm_cases.from_bits(out, "bf16") - a @ b.T) / allowed).max())


@needs_compiler
def test_sums_of_fp8_that_stay_in_the_tensor_cores_are_told_apart(tmp_path: Path) -> None:
    assert _strictness("fp32", tmp_path / "a") < 0.8
    assert _strictness("fp22", tmp_path / "b") > 1


BUGS = {
    "a stage is released too early": (
        "kt_wgmma_wait<KT_IN_FLIGHT>();", "kt_wgmma_wait<KT_IN_FLIGHT + 1>();",
    ),
    "a box of C is overwritten too early": (
        "kt_store_box_wait<KT_STORE_BUFFERS - 1>();", "kt_store_box_wait<KT_STORE_BUFFERS>();",
    ),
    "the second row of a thread is the first": ("+ 8 * h + lane() / 4", "+ lane() / 4"),
    "rows of classes are neighbours": ("row + i * KT_CLASSES_A", "row + i"),
    "classes start alike": ("k - unit.shift()", "k"),
    "classes end with k": ("KT_K + MOST_SHIFT", "KT_K"),
    "slabs are taken for rows": ("(u64)(8 * SWIZZLE >> 4) << 32", "(u64)(SWIZZLE >> 4) << 32"),
    "a CTA of a cluster ends too early": ("if (PARTNERS > 1) //", "if (false) //"),
    "a CTA of a cluster waits for another round": (
        "ring.next()) kt_barrier_wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);",
        "ring.next()) kt_barrier_wait(barriers.empty + 8 * ring.stage, ring.parity);",
    ),
    "two parts of k are the same": ("KEPT ? split ^ 1", "KEPT ? split"),
    "a part read at once is added twice": (
        "if (PARTS % AT_ONCE == 0 || first + p < PARTS)", "if (true)",
    ),
    "sums along k are read too late": ("if (KT_CLUSTER_K > 1) kt_cluster_sync(); // others", "//"),
}  # fmt: skip
_PLACES = {
    "ends too early": "ping-pong in clusters",
    "of a cluster": "a cluster with fewer tiles along k than stages",
    "two parts": "two parts of k", "along k": "a cluster along k",
    "read at once": "five parts of k, some read at once",
    "box": "boxes of C in turns", "classes": "8 classes, stored directly",
}  # fmt: skip
"""Where bugs named so show."""

SWAPPED_BUGS = {
    "pairs lie along columns": ("if constexpr (KT_SWAPPED) sums.turn_pairs(thread % 32);", ""),
    "a bias of the row": ("e.bias + column", "e.bias + column % C_ROWS"),
    "boxes are not swizzled": ("return offset ^ (", "return offset ^ 0 * ("),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("bug", SWAPPED_BUGS)
def test_the_emulator_catches_bugs_of_swapped_operands(bug: str, tmp_path: Path) -> None:
    kernel = _one(*SWAPPED_PATHS["boxes of C, every operand of an epilogue"], SWAPPED)
    correct, wrong = SWAPPED_BUGS[bug]
    assert kernel.source.count(correct) == 1
    planted = cuda_emulator.planted(kernel, correct, wrong)
    assert not _survives(planted, tmp_path)


@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_the_emulator_catches_planted_bugs(bug: str, tmp_path: Path) -> None:
    name = next((path for word, path in _PLACES.items() if word in bug), "repacked")
    kernel = _one(*PATHS[name])
    correct, wrong = BUGS[bug]
    planted = cuda_emulator.planted(kernel, correct, wrong)
    assert not _survives(planted, tmp_path)


@needs_compiler
@pytest.mark.parametrize("awaited", [True, False])
def test_c_goes_into_stages_that_all_consumers_have_read(awaited: bool, tmp_path: Path) -> None:
    space = Space(parse("gemm 256x144x64 dtype=bf16"), SMALL_TARGET, [WGMMA])
    values = space.theta(int(space.defaults()[0])).flat() | {
        "tile.bm": 192, "tile.bn": 96, "tile.bk": 64, "mem.stages": 2, "mem.swizzle_b": 128,
        "mem.store": "tma", "mem.buffers": 1, "perm.raster": "m", "perm.group": 1,
        "fusion.split_k": 1, "unroll.in_flight": 0, "map.consumers": 3,
        "map.producer": "warpgroup", "map.cluster_m": 1, "map.cluster_n": 1, "map.cluster_k": 1,
        "map.persistent": False, "map.blocks": 1, "sync.pingpong": False,
    }  # fmt: skip
    point = space.parts[0].point(values)
    assert space.why_illegal(point) is None
    kernel = space.kernel(point)
    if not awaited:
        correct = "if (STORE_IN_STAGES) kt_consumers_sync"
        kernel = cuda_emulator.planted(kernel, correct, "if (false) //")
    assert _survives(kernel, tmp_path) == awaited
