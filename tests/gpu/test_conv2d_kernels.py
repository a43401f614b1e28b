"""Every CUDA convolution family on the device: random shapes, options and θ, against float64.

    PYTHONPATH=<folder with kt>:tests python3 -m pytest -qs -m gpu tests/gpu/test_conv2d_kernels.py

The reference is the oracle's. A table is printed last.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import conv_cases
import numpy as np
import pytest
from device_kernels import Case, Judged, check, device_target, load_oracle

from kt.spaces.conv2d.direct import Conv2dDirect
from kt.spaces.conv2d.grouped import Conv2dGrouped
from kt.spaces.conv2d.mma import Conv2dMma
from kt.spaces.conv2d.patch import Conv2dPatch
from kt.spaces.conv2d.pointwise import Pointwise
from kt.spaces.family import Family
from kt.spaces.gemm.mma import GemmMma
from kt.spaces.space import Space
from kt.spaces.target import Target
from kt.spaces.workload import Conv2d, parse

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (Conv2dMma(), Conv2dPatch(), Conv2dGrouped(), Conv2dDirect(), Pointwise(GemmMma()))
}
DTYPES = {
    "mma": ("bf16", "fp16", "tf32", "int8"), "patch": ("bf16", "fp16"),
    "grouped": ("bf16", "fp16"), "direct": ("bf16", "fp16", "fp32"), "gemm_mma": ("bf16",),
}  # fmt: skip
DRAWS = {"mma": 160, "patch": 110, "grouped": 70, "direct": 90, "gemm_mma": 0}
KINDS = {"mma": ("any", "any", "grouped"), "patch": ("wide",), "grouped": ("grouped",),
         "direct": ("depthwise", "grouped")}  # fmt: skip
NAMED = (
    "conv2d 8x56x56x64,64x3x3 pad=1 epilogue=bias+relu", "conv2d 4x28x28x512,128x1x1",
    "conv2d 8x56x56x128,128x3x3 stride=2 pad=1 epilogue=bias+residual+relu",
    "conv2d 32x7x7x512,512x3x3 pad=1 epilogue=bias+relu+scale+shift",
    "conv2d 1x64x64x320,320x3x3 pad=1 epilogue=bias+silu", "conv2d 1x16x16x1280,640x3x3 pad=1",
    "conv2d 4x224x224x3,64x7x7 stride=2 pad=3", "conv2d 4x224x224x3,96x4x4 stride=4",
    "conv2d 8x56x56x60,60x3x3 pad=1", "conv2d 2x112x112x12,40x3x3 pad=1",
    "conv2d 4x28x28x100,100x3x3 pad=1", "conv2d 8x112x112x32,32x3x3 pad=1 groups=32",
    "conv2d 8x56x56x144,144x3x3 stride=2 pad=1 groups=144",
    "conv2d 8x28x28x240,240x5x5 pad=2 groups=240", "conv2d 8x56x56x96,96x7x7 pad=3 groups=96",
    "conv2d 8x56x56x128,128x3x3 pad=1 groups=32", "conv2d 8x28x28x256,256x3x3 pad=1 groups=32",
    "conv2d 8x14x14x512,512x3x3 pad=1 groups=32",
)  # fmt: skip
POINTS_OF_NAMED = 4
LARGEST = 4_000_000


def _texts(family: str) -> Iterator[tuple[Conv2d, int]]:
    """Convolutions for a family, and how many points of each are run."""
    for i in range(DRAWS[family]):
        rng = np.random.default_rng([2027, i, len(family)])
        kind = KINDS[family][i % len(KINDS[family])]
        most = LARGEST if i % 4 == 0 else 60_000
        yield conv_cases.draw(rng, DTYPES[family], kind, most), 1
    for i, text in enumerate((*conv_cases.EDGES, *NAMED)):
        w = parse(f"{text} dtype={DTYPES[family][i % len(DTYPES[family])]}")
        assert isinstance(w, Conv2d)
        yield w, POINTS_OF_NAMED if text in NAMED else 2


def cases(target: Target) -> list[Case]:
    """All kernels; the first of a named convolution, and every tenth drawn, is the default."""
    found = []
    for name, family in FAMILIES.items():
        for i, (w, count) in enumerate(_texts(name)):
            if family.refuses(w, target):
                continue
            space, rng = Space(w, target, [family]), np.random.default_rng([i, len(name)])
            points = [int(p) for p in space.sample(rng, count)]
            if count > 1 or i % 10 == 0:
                points[0] = int(space.defaults()[0])
            found += [Case(space.kernel(p), i) for p in points]
    return found


def test_random_kernels_agree_with_float64(tmp_path: Path) -> None:
    target = device_target()
    judge = Judged(load_oracle(target.arch, tmp_path), tmp_path)
    assert check(cases(target), target.arch, judge) >= 300
