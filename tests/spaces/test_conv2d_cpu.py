"""The CPU convolution families: every legal θ computes what it should, and touches nothing else."""

from __future__ import annotations

from pathlib import Path

import conv_cases
import msgspec
import numpy as np
import pytest
from cpu_kernels import (
    TARGETS,
    Fenced,
    Loaded,
    build,
    compile_alone,
    inputs_of,
    needs_compiler,
    output_of,
)

from kt.spaces.conv2d.cpu import Conv2dCpu
from kt.spaces.conv2d.cpu_direct import Conv2dCpuDirect
from kt.spaces.family import Family
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.workload import EPILOGUE_OPS, Conv2d, parse

CPU: tuple[Family, ...] = (Conv2dCpu(), Conv2dCpuDirect())
SOURCES = Path(Conv2dCpu.kernel.__code__.co_filename).parent
EDGES = (
    *conv_cases.EDGES,
    "conv2d 1x1x1x5,7x1x1", "conv2d 2x3x3x4,5x7x7 pad=2", "conv2d 1x1x2x17,3x3x4 pad=5x1",
    "conv2d 1x9x9x8,8x2x2 stride=4", "conv2d 1x8x5x6,13x1x1 stride=3x2 pad=1",
    "conv2d 1x12x12x3,5x3x3 dilation=4x3 pad=4", "conv2d 2x10x7x24,24x3x3 groups=24",
    "conv2d 2x10x9x24,24x3x3 pad=1 groups=24", "conv2d 1x9x9x20,60x3x3 stride=2 pad=1 groups=20",
    "conv2d 1x7x7x16,16x7x7 pad=3 groups=16", "conv2d 1x6x40x32,32x1x5 pad=0x2 groups=32",
    "conv2d 1x5x5x6,12x3x3 pad=3 stride=3 groups=3", "conv2d 1x11x13x37,37x5x3 pad=2x1 groups=37",
    "conv2d 1x4x4x18,36x3x3 pad=1 dilation=2 groups=18", "conv2d 3x4x4x17,17x1x1",
    "conv2d 1x3x3x8,8x3x3 pad=7 stride=6 groups=8", "conv2d 1x2x2x16,16x3x3 pad=1 groups=16",
)  # fmt: skip

LARGE = (
    "conv2d 1x224x224x3,64x7x7 stride=2 pad=3", "conv2d 8x7x7x512,512x3x3 pad=1",
    "conv2d 1x1x1x1,1x1x1 pad=1000", "conv2d 1x1x1x1,1x3x3 pad=32768 dilation=32768",
    "conv2d 1x9x4000x960,960x5x5 pad=2 groups=960", "conv2d 1x64x4000x480,960x3x3 groups=480",
    "conv2d 1x5x100000x64,64x3x3 groups=16", "conv2d 1x40000x1x512,512x31x1 groups=512",
    "conv2d 1x3x60000x16,16x3x99 groups=16", "conv2d 1x5x9000x8,8x3x99 groups=4 pad=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conv2d")


def served(workload: Conv2d, cores: int, target: int = 0) -> list[Space]:
    """One space for each family that serves the workload."""
    here = msgspec.structs.replace(TARGETS[target], cores=cores)
    return [Space(workload, here, [f]) for f in CPU if f.refuses(workload, here) is None]


def assert_computes(kernel: Kernel, folder: Path, rng: np.random.Generator, end: bool) -> None:
    """The kernel is right with each operand at the end (or start) of its own pages."""
    workload = kernel.workload
    assert isinstance(workload, Conv2d)
    inputs = inputs_of(workload, rng)
    loaded = Loaded(build(kernel, folder))
    with Fenced([*inputs, output_of(workload)], end=end) as fenced:
        loaded.launch(*fenced.arrays)
        got = fenced.arrays[-1].copy()
        assert fenced.intact()
        for before, after in zip(inputs, fenced.arrays, strict=False):
            np.testing.assert_array_equal(before, after)
    loaded.close()
    assert conv_cases.reference(workload, inputs).worst(workload, got) <= 1, str(workload)


def with_epilogue(workload: Conv2d, rng: np.random.Generator) -> Conv2d:
    """The workload with a random chain of up to three operations, most often none."""
    chain = rng.permutation(EPILOGUE_OPS)[: rng.integers(0, 4) * rng.integers(0, 2)]
    text = "+".join(map(str, chain))
    again = parse(f"{workload} epilogue={text}" if text else str(workload))
    assert isinstance(again, Conv2d)
    return again


@needs_compiler
@pytest.mark.parametrize("text", EDGES)
def test_edges(text: str, folder: Path) -> None:
    """Defaults and a random schedule of every family that serves the shape."""
    rng = np.random.default_rng(len(text))
    dtype = "fp64" if len(text) % 3 == 0 else "fp32"
    workload = parse(f"{text} dtype={dtype}")
    assert isinstance(workload, Conv2d)
    workload = with_epilogue(workload, rng)
    for space in served(workload, cores=2):
        for point in (space.defaults()[0], space.sample(rng, 1)[0]):
            assert_computes(space.kernel(int(point)), folder, rng, end=len(text) % 2 == 0)


@needs_compiler
@pytest.mark.parametrize("kind", ["any", "depthwise", "grouped"])
@pytest.mark.parametrize("seed", range(14))
def test_random_schedules_compute_the_convolution(seed: int, kind: str, folder: Path) -> None:
    """Points of spaces made for three cores, so that shares are uneven, and of narrower vectors."""
    rng = np.random.default_rng([seed, len(kind)])
    workload = conv_cases.draw(rng, ("fp32", "fp32", "fp64"), kind)
    workload = with_epilogue(bare(workload), rng)
    for space in served(workload, 3, int(rng.integers(len(TARGETS)))):
        assert_computes(space.kernel(int(space.sample(rng, 1)[0])), folder, rng, seed % 2 == 0)


def bare(workload: Conv2d) -> Conv2d:
    """The workload without its epilogue."""
    words = [word for word in str(workload).split() if not word.startswith("epilogue=")]
    plain = parse(" ".join(words))
    assert isinstance(plain, Conv2d)
    return plain


@needs_compiler
def test_special_values_reach_their_outputs_only(folder: Path) -> None:
    workload = parse("conv2d 1x6x6x20,20x3x3 pad=1 dtype=fp32")
    depthwise = parse("conv2d 1x6x6x20,20x3x3 pad=1 groups=20 dtype=fp32")
    for case, family in ((workload, CPU[0]), (depthwise, CPU[1])):
        assert isinstance(case, Conv2d)
        x, w = inputs_of(case, np.random.default_rng(1))
        x[0, 0, 5, 7] = np.inf
        space = Space(case, msgspec.structs.replace(TARGETS[0], cores=2), [family])
        loaded, output = (
            Loaded(build(space.kernel(int(space.defaults()[0])), folder)),
            output_of(case),
        )
        loaded.launch(x, w, output)
        loaded.close()
        seen = np.zeros((6, 6), bool)
        seen[:2, 4:] = True
        columns = np.arange(20) == 7 if case.groups > 1 else np.ones(20, bool)
        np.testing.assert_array_equal(~np.isfinite(output[0]), seen[:, :, None] & columns)


@needs_compiler
@pytest.mark.parametrize("name", ["cpu.c", "cpu_direct.c"])
def test_a_kernel_file_compiles_on_its_own(name: str, tmp_path: Path) -> None:
    compile_alone(SOURCES / name, tmp_path / "kernel.o")


@pytest.mark.parametrize("seed", range(20))
def test_defaults_are_legal_and_features_finite(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workload = conv_cases.draw(rng, ("fp32", "fp64"), ["any", "depthwise", "grouped"][seed % 3])
    for target in range(len(TARGETS)):
        for cores in (1, 2, 6, 64):
            for space in served(workload, cores, target):
                assert space.why_illegal(int(space.defaults()[0])) is None
                assert np.isfinite(space.encode(space.sample(rng, 64))).all()


@pytest.mark.parametrize("text", LARGE)
def test_large_shapes_have_defaults(text: str) -> None:
    workload = parse(f"{text} dtype=fp32")
    assert isinstance(workload, Conv2d)
    for target in range(len(TARGETS)):
        for space in served(workload, 4, target):
            assert space.why_illegal(int(space.defaults()[0])) is None
            assert np.isfinite(space.encode(space.sample(np.random.default_rng(0), 64))).all()


@pytest.mark.parametrize(("family", "groups"), [(CPU[0], 1), (CPU[1], 64)])
def test_rules_give_reasons(family: Family, groups: int) -> None:
    workload = parse(f"conv2d 1x56x56x64,64x3x3 pad=1 groups={groups} dtype=fp32")
    part, rng = Space(workload, TARGETS[0], [family]).parts[0], np.random.default_rng(0)
    reasons = {part.why_illegal(int(point)) for point in part.draw(rng, 400)} - {None}
    assert any("vector registers" in str(reason) for reason in reasons)


def test_the_direct_family_refuses_wide_groups() -> None:
    workload = parse("conv2d 1x8x8x128,128x3x3 groups=8 dtype=fp32")
    why = Conv2dCpuDirect().refuses(workload, TARGETS[0])
    assert why is not None and "groups" in why
