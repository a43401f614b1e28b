"""The CUDA GEMM families without a GPU: legality against the compiler, and results by emulation."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cuda_emulator
import gemm_cases
import msgspec
import numpy as np
import pytest
from explained import check_rules_and_features
from numpy.typing import NDArray
from nvrtc_limits import check_limits
from nvrtc_ptx import ptx_of

from kt.spaces.family import Family
from kt.spaces.gemm.mma import GemmMma
from kt.spaces.gemm.simt import GemmSimt
from kt.spaces.gemm.stream import GemmStream
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import DTYPE_BYTES, Gemm, parse
from kt.tuner.backend.reference import epilogue
from kt.tuner.backend.tolerance import tolerances

TARGETS = ("a100", "rtx3090", "rtx4090", "h200")
DTYPES = {
    "mma": ("bf16", "fp16", "tf32", "int8"),
    "simt": ("fp32", "fp64"),
    "stream": ("bf16", "fp16", "fp32"),
}
FAMILIES: dict[str, Family] = {f.name: f for f in (GemmMma(), GemmSimt(), GemmStream())}
DRAW: dict[str, Callable[..., Gemm]] = {
    "mma": gemm_cases.draw, "simt": gemm_cases.draw, "stream": gemm_cases.draw_thin,
}  # fmt: skip
LARGE = (1, 48, 72, 100, 128, 256, 333, 500, 1000, 1023, 1024, 2048, 4095, 4096)

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs NVRTC: pip install -e '.[cuda-build]'"
)
needs_compiler = pytest.mark.skipif(not cuda_emulator.available(), reason="needs g++")


def _draws(
    family: str, seed: int, count: int, extents: Sequence[int]
) -> Iterator[tuple[Space, int, np.random.Generator]]:
    """Spaces of random workloads and a legal point of each; every fourth is the default."""
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        w = DRAW[family](rng, DTYPES[family], extents)
        space = Space(w, CUDA_TARGETS[TARGETS[i % len(TARGETS)]], [FAMILIES[family]])
        default = int(space.defaults()[0])
        assert space.why_illegal(default) is None, f"{w}: {space.why_illegal(default)}"
        yield space, default if i % 4 == 3 else int(space.sample(rng, 1)[0]), rng


# -- legality -------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_legal_points_compile_within_the_limits(family: str, target: str, tmp_path: Path) -> None:
    t = CUDA_TARGETS[target]
    for i in range(4):
        rng = np.random.default_rng([7, i, TARGETS.index(target)])
        w = DRAW[family](rng, DTYPES[family], LARGE)
        space = Space(w, t, [FAMILIES[family]])
        point = int(space.sample(rng, 1)[0]) if i else int(space.defaults()[0])
        check_limits(space.kernel(point), t, tmp_path)


@needs_nvrtc
@pytest.mark.parametrize("family", FAMILIES)
def test_only_fp16_accumulation_accumulates_in_fp16(family: str) -> None:
    for acc in ("fp32", "fp16"):
        dtype = "fp16" if family != "simt" else "fp32"
        if acc == "fp16" and family != "mma":
            continue
        w = Gemm(dtype=dtype, m=16, n=512, k=512, acc=acc)
        space = Space(w, CUDA_TARGETS["a100"], [FAMILIES[family]])
        ptx = ptx_of(space.kernel(int(space.defaults()[0])).source, "compute_80")
        assert ("f16.f16.f16.f16" in ptx) == (acc == "fp16")
        assert ("mma.sync" in ptx) == (family != "simt")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_benchmark_shape_has_a_legal_default_everywhere(family: str) -> None:
    shapes = [
        "1x1x1", "1x4096x4096", "16x4096x14336", "128x128x65536", "64x64x16384", "4096x4096x4096",
        "8191x8191x8191", "9477x1152x588", "64x48x80", "4095x1x4097", "3x100000x7", "5x7x131072",
    ]  # fmt: skip
    for target in (*TARGETS, "l40s", "h100"):
        for dtype in DTYPES[family]:
            for shape in shapes:
                w = parse(f"gemm {shape} batch=2 layout=tn epilogue=bias+gelu dtype={dtype}")
                if FAMILIES[family].refuses(w, CUDA_TARGETS[target]):
                    continue
                space = Space(w, CUDA_TARGETS[target], [FAMILIES[family]])
                assert space.why_illegal(int(space.defaults()[0])) is None, f"{w} {target}"


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_explain_themselves_and_features_are_finite(family: str) -> None:
    rng = np.random.default_rng(5)
    for space, _, _ in _draws(family, 11, 6, LARGE):
        check_rules_and_features(space, rng)


def test_families_say_what_they_cannot_serve() -> None:
    h200 = CUDA_TARGETS["h200"]
    assert "not fp32" in str(GemmMma().refuses(parse("gemm 8x8x8 dtype=fp32"), h200))
    assert "not bf16" in str(GemmSimt().refuses(parse("gemm 8x8x8 dtype=bf16"), h200))
    assert "up to 16" in str(GemmStream().refuses(parse("gemm 17x17x8 dtype=bf16"), h200))
    turing = msgspec.structs.replace(h200, arch="sm_75")
    assert "sm_80" in str(GemmMma().refuses(parse("gemm 8x8x8 dtype=bf16"), turing))


def test_unaligned_operands_choose_how_they_are_copied() -> None:
    def choices(text: str, knob: str) -> tuple[object, ...]:
        space = Space(parse(text), CUDA_TARGETS["h200"], [GemmMma()])
        return next(k.choices for k in space.parts[0].knobs if k.name == knob)

    assert choices("gemm 64x64x64 dtype=bf16", "copy_a") == ("async16",)
    assert choices("gemm 64x64x588 dtype=bf16", "copy_a") == ("async8", "shift", "repack")
    assert choices("gemm 64x64x590 dtype=bf16", "copy_a") == ("async4", "shift", "repack")
    assert choices("gemm 64x63x64 dtype=bf16", "copy_b") == ("shift", "repack")
    assert choices("gemm 64x64x64 dtype=int8", "copy_b") == ("repack",)
    assert DTYPE_BYTES["int8"] == 1


# -- results, by emulation ------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_emulated_kernels_agree_with_the_reference(family: str, tmp_path: Path) -> None:
    for i, (space, point, rng) in enumerate(_draws(family, 3, 5, gemm_cases.EDGES)):
        w = space.workload
        assert isinstance(w, Gemm)
        kernel = space.kernel(point)
        inputs = gemm_cases.inputs(w, rng)
        reference = gemm_cases.reference(w, inputs)
        outs = cuda_emulator.run(kernel, inputs, gemm_cases.poison(w), tmp_path / str(i))
        for out in outs:
            assert reference.worst(w, out) <= 1, f"{w}: {kernel.theta}"


@needs_compiler
@pytest.mark.parametrize(
    ("family", "dtype"), [("mma", "int8"), ("simt", "fp64"), ("stream", "fp16")]
)
def test_a_scale_of_the_whole_tensor(family: str, dtype: str, tmp_path: Path) -> None:
    w = parse(f"gemm 9x40x70 epilogue=bias+tensor_scale+relu dtype={dtype}")
    assert isinstance(w, Gemm)
    space = Space(w, CUDA_TARGETS["h200"], [FAMILIES[family]])
    assert _is_right(w, space.kernel(int(space.defaults()[0])), tmp_path)


BUGS = {
    "a copy is not waited for": ("kt_copy_wait<STAGES - 2>();", "kt_copy_wait<STAGES - 1>();"),
    "a stage is refilled too early": ("__syncthreads();\n                }\n                at_a",
                                      "}\n                at_a"),
    "a tail along k is not cut": ("CHECK_K = KT_K % BK != 0", "CHECK_K = false"),
    "a tile is not cut at the last row": ("row >= KT_M || column", "column"),
    "half of the columns are swapped": ("8 * j + lane % 4 * 2", "8 * j + (3 - lane % 4) * 2"),
}  # fmt: skip


def _plain() -> tuple[Gemm, Kernel]:
    w = Gemm(dtype="bf16", m=70, n=72, k=200, layout="nt")
    space = Space(w, CUDA_TARGETS["h200"], [GemmMma()])
    values = {knob.path: knob.choices[0] for knob in space.parts[0].knobs}
    values |= {"tile.bm": 32, "tile.bn": 32, "tile.bk": 32, "mem.stages": 3, "mem.store": "staged",
               "unroll.fragments": 2, "map.warps_m": 2, "map.warps_n": 2}  # fmt: skip
    return w, space.kernel(space.parts[0].point(values))


@needs_compiler
def test_the_emulator_runs_the_kernel_without_planted_bugs(tmp_path: Path) -> None:
    w, kernel = _plain()
    assert _is_right(w, kernel, tmp_path)


@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_the_emulator_catches_planted_bugs(bug: str, tmp_path: Path) -> None:
    w, kernel = _plain()
    correct, wrong = BUGS[bug]
    planted = cuda_emulator.planted(kernel, correct, wrong)
    assert not _is_right(w, planted, tmp_path / "wrong")


def _spread(w: Gemm, spread: int, fragments: int) -> Kernel:
    space = Space(w, CUDA_TARGETS["h200"], [GemmSimt()])
    values = {knob.path: knob.choices[0] for knob in space.parts[0].knobs}
    values |= {"tile.tm": 8, "tile.tn": 8, "tile.bk": 8, "mem.stages": 3, "map.lanes_m": 8,
               "unroll.fragments": fragments, "sync.spread": spread}  # fmt: skip
    point = space.parts[0].point(values)
    assert space.why_illegal(point) is None
    return space.kernel(point)


@needs_compiler
@pytest.mark.parametrize("spread", [1, 2, 4])
def test_copies_of_a_tile_may_start_in_groups(spread: int, tmp_path: Path) -> None:
    w = Gemm(dtype="fp32", m=70, n=40, k=45)
    for fragments in (1, 2):
        assert _is_right(w, _spread(w, spread, fragments), tmp_path / str(fragments))


@needs_compiler
def test_the_emulator_misses_no_group_of_copies(tmp_path: Path) -> None:
    w = Gemm(dtype="fp32", m=70, n=40, k=45)
    kernel, correct = _spread(w, 4, 2), "if (k % GROUP_STEPS == 0)"
    assert correct in kernel.source
    wrong = kernel.source.replace(correct, "if (k % GROUP_STEPS == 0 && k != GROUP_STEPS)")
    assert not _is_right(w, dataclasses.replace(kernel, source=wrong), tmp_path)


TWICE = "if (PARTS % AT_ONCE == 0 || first + p < PARTS)", "if (true)"
"""Adds the last part as often as parts are read at once."""


def _four_or_two_at_once(v: Mapping[str, Any], dtype: str) -> bool:
    """Whether a thread has 16 or 32 words of a part: five parts are no whole rounds of those."""
    if "tm" in v:
        return bool(v["tm"] * v["tn"] * DTYPE_BYTES[dtype] // 4 in (16, 32))
    threads = 32 * v["warps_m"] * v["warps_n"]
    return bool(v["warps_k"] == 1 and v["bm"] * v["bn"] // threads in (16, 32))


@needs_compiler
@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp32", "fp64"])
def test_the_last_of_many_parts_of_k_adds_each_once(dtype: str, tmp_path: Path) -> None:
    w = Gemm(dtype=dtype, m=68, n=72, k=330)
    family = GemmSimt() if dtype in DTYPES["simt"] else GemmMma()
    space = Space(w, CUDA_TARGETS["h200"], [family])
    drawn = space.sample(np.random.default_rng(0), 4096).tolist()
    values = ({name: v for _, name, v in space.theta(point).items()} for point in drawn)
    point = next(
        point
        for point, v in zip(drawn, values, strict=True)
        if (v["split_k"], v["split_mode"]) == (5, "last") and _four_or_two_at_once(v, dtype)
    )
    kernel = space.kernel(point)
    assert _is_right(w, kernel, tmp_path / "right")
    assert not _is_right(w, cuda_emulator.planted(kernel, *TWICE), tmp_path / "wrong")


def test_more_groups_than_copies_are_refused() -> None:
    space = Space(parse("gemm 64x64x64 dtype=fp32 layout=tn"), CUDA_TARGETS["h200"], [GemmSimt()])
    values = {knob.path: knob.choices[0] for knob in space.parts[0].knobs}
    values |= {"map.lanes_m": 8, "map.warps_n": 2, "sync.spread": 4}
    assert "do not make 4 groups" in str(space.why_illegal(space.parts[0].point(values)))


def _is_right(w: Gemm, kernel: Kernel, directory: Path) -> bool:
    inputs = gemm_cases.inputs(w, np.random.default_rng(0))
    try:
        outs = cuda_emulator.run(kernel, inputs, gemm_cases.poison(w), directory)
    except AssertionError:
        return False
    return all(gemm_cases.reference(w, inputs).worst(w, out) <= 1 for out in outs)


@needs_compiler
def test_gelu_for_16_bit_outputs_is_close_over_the_whole_range(tmp_path: Path) -> None:
    from scipy.special import ndtr

    space = Space(parse("gemm 8x8x8 epilogue=gelu dtype=bf16"), CUDA_TARGETS["h200"], [GemmMma()])
    kernel = space.kernel(int(space.defaults()[0]))
    many = """
extern "C" void gelu_of_many(float *x, int count) {
    for (int i = 0; i < count; i++) x[i] = kt_gelu(x[i]);
}
"""
    with_many = dataclasses.replace(kernel, source=kernel.source + many)
    library = cuda_emulator.build(with_many, tmp_path)

    def gelu(x: Sequence[float]) -> NDArray[np.float32]:
        y = np.array(x, np.float32)
        library.gelu_of_many(ctypes.c_void_p(y.ctypes.data), y.size)
        return y

    x = np.linspace(-6, 20, 100_001, dtype=np.float32).astype(np.float64)
    np.testing.assert_allclose(gelu(x.tolist()), x * ndtr(x), rtol=2e-5)
    near = x[x < 2]
    np.testing.assert_allclose(gelu(near.tolist()), near * ndtr(near), atol=2.5e-7, rtol=0)
    far = gelu([-6.5, -100, -3e38, -np.inf])
    assert (np.abs(far) < 1e-8).all()
    assert gelu([0, np.inf, 3e38]).tolist() == [0, np.inf, np.float32(3e38)]
    assert np.isnan(gelu([np.nan])).all()


@needs_compiler
def test_a_gelu_that_a_residual_cancels_is_right_by_the_bounds_of_a_run(tmp_path: Path) -> None:
    w = parse("gemm 256x256x64 epilogue=scale+gelu+residual dtype=fp16")
    assert isinstance(w, Gemm)
    space = Space(w, CUDA_TARGETS["h200"], [GemmMma()])
    kernel = space.kernel(int(space.defaults()[0]))
    inputs = gemm_cases.inputs(w, np.random.default_rng(1))
    values = {
        operand.name: gemm_cases.from_bits(bits, operand.dtype)
        for operand, bits in zip(w.inputs(), inputs, strict=True)
    }
    (limit,) = tolerances(w)
    expected = epilogue(w, values["A"] @ values["B"], values)
    absolute = limit.absolute * np.abs(values["scale"]) * 1.13  # as steep as it gets
    bound = absolute + limit.relative * np.abs(expected)

    def worst(kernel: Kernel, directory: Path) -> float:
        (out, _) = cuda_emulator.run(kernel, inputs, gemm_cases.poison(w), directory)
        error = np.abs(gemm_cases.from_bits(out, w.out_dtype) - expected)
        return float((error / bound).max())

    assert worst(kernel, tmp_path / "right") < 1
    rough = cuda_emulator.planted(kernel, "-0.999983132f", "-0.99995f")  # by 2e-6 of the tail
    assert worst(rough, tmp_path / "rough") > 1
