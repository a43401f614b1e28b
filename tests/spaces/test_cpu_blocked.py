"""The blocked product: schedules for any product, whatever it stands for."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kt.spaces.conv2d.cpu import Conv2dCpu
from kt.spaces.cpu_blocked import Blocked
from kt.spaces.gemm.cpu import GemmCpu
from kt.spaces.space import Space
from kt.spaces.target import Target, detect_cpu
from kt.spaces.theta import Value
from kt.spaces.workload import parse

HERE: Target = msgspec.structs.replace(
    detect_cpu(), arch="avx512", simd_bytes=64, vector_registers=32, cores=2,
    l1_bytes=2**15, l2_bytes=2**20, l3_bytes=2**25,
)  # fmt: skip


def default(text: str, family: Blocked) -> dict[str, Value]:
    space = Space(parse(text), HERE, [family])
    return space.theta(int(space.defaults()[0])).flat()


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("conv2d 1x56x56x64,64x3x3 pad=1 dtype=fp32", "m"),  # many pixels: filters packed twice
        ("conv2d 1x7x7x512,512x3x3 pad=1 dtype=fp32", "n"),  # many filters: pixels gathered twice
        ("conv2d 1x19x19x64,64x3x3 groups=2 dtype=fp32", "batch"),
    ],
)
def test_threads_share_out_what_saves_packing(text: str, shared: str) -> None:
    theta = default(text, Conv2dCpu())
    parts = {axis: theta[f"map.grid_{axis}"] for axis in ("m", "n", "k", "batch")}
    assert parts == {axis: 2 if axis == shared else 1 for axis in parts}


def test_operands_stay_in_place_where_that_is_possible() -> None:
    assert default("conv2d 1x56x56x64,256x1x1 dtype=fp32", Conv2dCpu())["mem.pack_a"] == "none"
    assert default("conv2d 1x56x56x64,256x3x3 dtype=fp32", Conv2dCpu())["mem.pack_a"] == "rows"
    assert default("gemm 64x64x64 layout=nn dtype=fp32", GemmCpu())["mem.pack_b"] == "none"
    assert default("gemm 64x64x64 layout=nt dtype=fp32", GemmCpu())["mem.pack_b"] == "panel"


def test_the_stub_numbers_the_ways_as_the_source_does() -> None:
    space = Space(parse("gemm 64x64x64 dtype=fp32"), HERE, [GemmCpu()])
    theta = space.theta(int(space.defaults()[0]))
    numbers = {"none": 0, "panel": 1, "rows": 2}
    for way, number in numbers.items():
        changed = msgspec.structs.replace(theta, mem=theta.mem | {"pack_a": way})
        assert GemmCpu().blocking_defines(changed)["KT_PACK_A"] == number


def test_features_count_what_is_packed() -> None:
    """64 pixels in five tiles of 14 and 32 filters in one panel, of 9 taps and 16 channels each."""
    alone = msgspec.structs.replace(HERE, cores=1)
    space = Space(parse("conv2d 1x8x8x16,32x3x3 pad=1 dtype=fp32"), alone, [Conv2dCpu()])
    theta = space.theta(int(space.defaults()[0]))
    theta = msgspec.structs.replace(theta, tile=theta.tile | {"mr": 14, "nv": 2})
    column = space.feature_names.index("derived.packed_bytes")
    (value,) = space.encode(np.array([space.check("cpu", theta)]))[:, column]
    assert value == pytest.approx(4 * 144 * (5 * 14 + 32), rel=1e-3)
