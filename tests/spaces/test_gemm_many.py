"""Files of many products: every tuned shape, any other, the guards, one workspace for all."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import cuda_emulator
import gemm_cases
import many_shapes
import numpy as np
import pytest
from cpu_kernels import TARGETS, compile_alone, needs_compiler
from cuda_emulator import Guarded
from many_shapes import Library

from kt.spaces.gemm import many
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import Gemm, parse

H200 = CUDA_TARGETS["h200"]
needs_emulator = pytest.mark.skipif(not cuda_emulator.available(), reason="needs g++")
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs the extra cuda-build"
)
OPTIONS = ["dtype=fp32", "layout=nt epilogue=bias+gelu dtype=fp32",
           "layout=tn epilogue=scale+silu+residual dtype=fp64",
           "layout=tt epilogue=bias+relu+scale+shift dtype=fp32"]  # fmt: skip
SHAPES = ["48x80x64", "1x70x50", "33x17x65 batch=3", "50x3x200", "129x65x31"]
CUDA_OPTIONS = [
    "dtype=bf16", "layout=nt epilogue=bias+gelu dtype=fp16", "layout=tt epilogue=relu dtype=tf32",
    "layout=tn epilogue=scale+silu+residual dtype=fp32", "epilogue=bias+relu dtype=int8",
    "layout=nt epilogue=bias+relu+scale+shift dtype=fp64",
]  # fmt: skip
CUDA_SHAPES = ["48x80x64", "3x70x150", "33x17x65 batch=3", "8x24x1030"]
EMULATED = ("mma", "simt", "stream")


def gemms(shapes: list[str], options: str) -> list[Gemm]:
    found = []
    for shape in shapes:
        workload = parse(f"gemm {shape} {options}")
        assert isinstance(workload, Gemm)
        found.append(workload)
    return found


def others(w: Gemm, rng: np.random.Generator, count: int) -> list[Gemm]:
    """Products that no file of these tests is tuned for, edges among them."""
    drawn = [
        tuple(int(x) for x in (*rng.choice(gemm_cases.EDGES, 3), rng.integers(1, 4)))
        for _ in range(count)
    ]
    edges = [(1, 1, 1, 1), (64, 65, 16, 1), (65, 63, 17, 2), *drawn]
    return [replace(w, m=m, n=n, k=k, batch=batch) for m, n, k, batch in edges]


# -- CPU ----------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("options", "target"),
    [*((o, TARGETS[0]) for o in OPTIONS), *((OPTIONS[1], t) for t in TARGETS[1:])],
    ids=lambda x: x.arch if isinstance(x, Target) else x,
)
def test_every_shape_on_the_cpu(options: str, target: Target, tmp_path: Path) -> None:
    tuned, rng = gemms(SHAPES, options), np.random.default_rng(1)
    kernels = many_shapes.sampled(tuned, target, 0, ("cpu", "cpu_skinny"))
    library = many_shapes.built_by_cc(many_shapes.source_of(kernels, target), tmp_path, "-O2")
    workspace = library.workspace(tuned)
    for w in [*tuned, *others(tuned[0], rng, 8), *reversed(tuned)]:
        library.check(w, workspace, rng)


@needs_compiler
def test_the_kernel_for_any_extents_compiles_alone(tmp_path: Path) -> None:
    compile_alone(Path(many.__file__).with_name("any.c"), tmp_path / "any.o")


@needs_compiler
def test_plain_c11_builds_it(tmp_path: Path) -> None:
    tuned = gemms(SHAPES[:2], OPTIONS[1])
    kernels = many_shapes.sampled(tuned, TARGETS[0], 0, ("cpu", "cpu_skinny"))
    source = many_shapes.source_of(kernels, TARGETS[0])
    many_shapes.built_by_cc(source, tmp_path, "-O3", "-std=c11")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Two shapes of fp64, the second of which has a batch."""
    tuned = gemms(["48x80x64", "33x17x65 batch=3"], "dtype=fp64")
    kernels = many_shapes.sampled(tuned, TARGETS[0], 0, ("cpu",))
    folder = tmp_path_factory.mktemp("many")
    return many_shapes.built_by_cc(many_shapes.source_of(kernels, TARGETS[0]), folder)


@needs_compiler
@pytest.mark.parametrize("extents", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, 2**31, 1), (1, 1, 1, 0)])
def test_extents_are_guarded(library: Library, extents: tuple[int, ...]) -> None:
    assert library.launch(extents, [256, 256, 256], 256) == -1
    assert library.workspace_bytes(*extents) == 0


@needs_compiler
@pytest.mark.parametrize("extents", [(48, 80, 64, 1), (5, 5, 5, 1)])
@pytest.mark.parametrize("wrong", [0, 4])
def test_pointers_are_guarded(library: Library, extents: tuple[int, ...], wrong: int) -> None:
    for i in range(3):
        addresses = [4096, 4096, 4096]
        addresses[i] = wrong
        assert library.launch(extents, addresses, 4096) == -2


@needs_compiler
def test_workspaces_are_guarded(library: Library) -> None:
    assert library.workspace_bytes(48, 80, 64, 1) > 0
    for wrong in (0, 128):
        assert library.launch((48, 80, 64, 1), [4096, 4096, 4096], wrong) == -3
    w = gemms(["5x6x7"], "dtype=fp64")[0]
    a, b, c = (Guarded(x) for x in (*gemm_cases.inputs(w, np.random.default_rng(0)),
                                    gemm_cases.poison(w)))  # fmt: skip
    assert library.launch((5, 6, 7, 1), [a.address, b.address, c.address], 0) == 0


# -- CUDA ---------------------------------------------------------------------------------------


@needs_emulator
@pytest.mark.parametrize("options", CUDA_OPTIONS)
def test_every_shape_by_emulation(options: str, tmp_path: Path) -> None:
    tuned, rng = gemms(CUDA_SHAPES, options), np.random.default_rng(1)
    kernels = many_shapes.sampled(tuned, H200, 3, EMULATED)
    library = many_shapes.emulated(many_shapes.source_of(kernels, H200), tmp_path)
    workspace = library.workspace(tuned)
    for w in [*tuned, *others(tuned[0], rng, 3), *reversed(tuned)]:
        library.check(w, workspace, rng)
        assert not workspace.array[: many.zeroed_bytes(kernels)].any(), str(w)


@needs_emulator
def test_kernels_share_a_workspace_without_meeting(tmp_path: Path) -> None:
    """One kernel's scratch is not where another expects zeros."""
    w = gemms(["16x16x512"], "dtype=bf16")[0]
    rng, kernels = np.random.default_rng(0), []
    shapes = [replace(w, k=512), replace(w, m=96, n=96), replace(w, m=130, n=200)]
    for shape, mode in zip(shapes, ("last", "atomic", "last"), strict=True):
        space = many_shapes.space_of(shape, H200)
        points = [p for p in space.sample(rng, 2000).tolist() if space.family_of(p) == "mma"]
        drawn = (space.kernel(p) for p in points)
        kernels.append(next(
            k for k in drawn
            if k.theta.fusion["split_k"] > 1 and k.theta.fusion["split_mode"] == mode
        ))  # fmt: skip
    assert len({kernel.zeroed_bytes for kernel in kernels}) > 1
    library = many_shapes.emulated(many_shapes.source_of(kernels, H200), tmp_path)
    workspace = library.workspace(shapes)
    for shape in [*shapes, *reversed(shapes)]:
        library.check(shape, workspace, rng)


@needs_emulator
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_any_extents_in_fp8_by_emulation(dtype: str, tmp_path: Path) -> None:
    """Beside a kernel that is never launched: the emulator lacks what Hopper's kernels need."""
    (w,) = gemms(["33x17x65"], f"layout=nt epilogue=tensor_scale dtype={dtype}")
    kernels = many_shapes.sampled(gemms(["9x9x9"], "epilogue=bias dtype=bf16"), H200, 0, ("mma",))
    library = many_shapes.emulated(many_shapes.source_of(kernels, H200, w), tmp_path)
    rng = np.random.default_rng(0)
    for other in others(w, rng, 3):
        library.check(other, Guarded(np.zeros(1, np.uint8)), rng)


@needs_emulator
def test_the_guards_of_a_cuda_file(tmp_path: Path) -> None:
    tuned = gemms(["48x80x64"], "dtype=bf16")
    kernels = many_shapes.sampled(tuned, H200, 0, ("mma",))
    library = many_shapes.emulated(many_shapes.source_of(kernels, H200), tmp_path)
    assert library.launch((48, 80, 0, 1), [4096] * 3, 4096) == -1
    assert library.launch((48, 80, 64, 1), [4096, 4096 + 8, 4096], 4096) == -2
    assert library.launch((3, 3, 3, 1), [4096, 4096, 0], 4096) == -2


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("h200", options) for options in CUDA_OPTIONS),
        ("a100", "dtype=bf16"),
        ("h200", "layout=nt epilogue=tensor_scale dtype=fp8_e4m3"),
    ],
)
def test_nvrtc_compiles_all_families_in_one_file(name: str, options: str, tmp_path: Path) -> None:
    from kt.logs.record import BuildFacts
    from kt.tuner.backend.nvrtc import find_nvrtc

    target = CUDA_TARGETS[name]
    kernels = []
    for w in gemms(["8x64x256", "128x64x256"], options):
        space = many_shapes.space_of(w, target)
        kernels += [space.kernel(p) for p in space.defaults().tolist()]
    (tmp_path / "kernel.cu").write_text(many_shapes.source_of(kernels, target))
    facts = find_nvrtc().compile(tmp_path, target.arch, 300.0)
    assert isinstance(facts, BuildFacts), facts
    assert not facts.warnings


@needs_nvrtc
@pytest.mark.parametrize("options", CUDA_OPTIONS)
def test_the_kernel_for_any_extents_spills_nothing(options: str, tmp_path: Path) -> None:
    from kt.logs.record import BuildFacts
    from kt.tuner.backend.nvrtc import find_nvrtc

    (w,) = gemms(["8x64x256"], options)
    (tmp_path / "kernel.cu").write_text(many.any_source(w, H200))
    facts = find_nvrtc().compile(tmp_path, H200.arch, 120.0)
    assert isinstance(facts, BuildFacts), facts
    assert facts.spill_bytes == 0 and facts.registers <= 128, facts
