"""Random convolutions, and a float64 reference; inputs and bounds are those of `gemm_cases`."""

from __future__ import annotations

from collections.abc import Sequence

import gemm_cases
import numpy as np
from gemm_cases import Array, Reference, from_bits
from numpy.typing import NDArray

from kt.spaces.errors import WorkloadError
from kt.spaces.workload import Conv2d

CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 20, 24, 32, 40, 48, 64, 72)
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 14, 16)
EDGES = (
    "conv2d 1x1x1x1,1x1x1", "conv2d 2x1x1x8,8x3x3 pad=1", "conv2d 1x3x3x16,24x3x3",
    "conv2d 1x2x3x8,16x5x7 pad=2x3", "conv2d 2x9x9x8,8x2x2 stride=5",
    "conv2d 1x7x8x3,8x1x1 stride=3",
    "conv2d 3x5x5x12,12x3x3 pad=1 groups=12", "conv2d 1x6x6x4,12x3x3 pad=2 dilation=2 groups=4",
    "conv2d 1x17x1x9,5x16x1 pad=8x0", "conv2d 1x40x2x4,4x33x2 pad=0x1",
    "conv2d 1x9x16x3,8x7x7 stride=2 pad=3", "conv2d 2x8x12x3,24x4x4 stride=4",
    "conv2d 1x4x50x2,4x2x9 dilation=1x5 groups=2", "conv2d 2x9x6x60,12x3x3 pad=1",
    "conv2d 1x6x6x100,20x3x3 pad=1",
    "conv2d 1x8x8x32,32x3x3 pad=1 groups=8",
)  # fmt: skip


def draw(
    rng: np.random.Generator, dtypes: Sequence[str], kind: str = "any", most: int = 60_000
) -> Conv2d:
    """A convolution of at most `most` outputs: `any`, `depthwise`, `grouped`, or `wide`."""
    while True:
        dtype = str(rng.choice(dtypes))
        per_group = int(rng.choice(CHANNELS))
        filters = int(rng.choice(CHANNELS))
        groups = int(rng.choice([1, 1, 1, 2, 3, 4]))
        if kind == "wide":
            per_group, groups = int(rng.choice([16, 32, 48, 64])), int(rng.choice([1, 1, 2]))
        if kind == "depthwise":
            per_group, groups, filters = 1, per_group, int(rng.choice([1, 1, 1, 2, 3, 4]))
        if kind == "grouped":
            per_group, groups = (
                int(rng.choice([1, 2, 4, 4, 8, 16, 24])),
                int(rng.choice([2, 4, 5, 8])),
            )
            filters = int(rng.choice([per_group, per_group, 8, 3]))
        epilogue = gemm_cases.EPILOGUES[rng.integers(len(gemm_cases.EPILOGUES))]
        if dtype == "int8" and {"gelu", "silu"} & set(epilogue):
            epilogue = ("bias", "relu")
        taps = int(rng.choice([1, 2, 3, 3, 3, 5, 7])), int(rng.choice([1, 2, 3, 3, 3, 4, 7]))
        two = rng.random() < 0.5
        try:
            w = Conv2d(
                dtype=dtype, epilogue=epilogue, n=int(rng.choice([1, 1, 2, 3])),
                h=int(rng.choice(SIZES)), w=int(rng.choice(SIZES)), c=per_group * groups,
                k=filters * groups, r=taps[0], s=taps[1] if two else taps[0],
                stride=_pair(rng, (1, 1, 1, 2, 3)), pad=_pair(rng, (0, 1, 1, 2, 3)),
                dilation=_pair(rng, (1, 1, 1, 2)), groups=groups,
                acc="fp16" if dtype == "fp16" and kind == "any" and rng.random() < 0.1 else "",
            )  # fmt: skip
        except WorkloadError:
            continue
        if w.flops <= 2 * most * 64 and w.output().elements <= most:
            return w


def _pair(rng: np.random.Generator, choices: Sequence[int]) -> tuple[int, int]:
    first, second = (int(x) for x in rng.choice(choices, 2))
    return (first, second) if rng.random() < 0.4 else (first, first)


def reference(w: Conv2d, stored: Sequence[Array]) -> Reference:
    """The convolution and its epilogue in float64, with bounds carried along."""
    operands = w.inputs()
    values = [from_bits(x, op.dtype) for x, op in zip(stored, operands, strict=True)]
    extra = {op.name: v for op, v in zip(operands[2:], values[2:], strict=True)}
    sums = convolve(w, values[0], values[1])
    sizes = convolve(w, np.abs(values[0]), np.abs(values[1]))
    return gemm_cases.finished(w, w.r * w.s * w.c // w.groups, sums, sizes, extra)


def convolve(
    w: Conv2d, x: NDArray[np.float64], filters: NDArray[np.float64]
) -> NDArray[np.float64]:
    """x [N, H, W, C] with filters [K, R, S, C / groups], tap by tap; [N, P, Q, K]."""
    (p, q), g = w.out_size, w.groups
    padded = np.pad(x, ((0, 0), (w.pad[0],) * 2, (w.pad[1],) * 2, (0, 0)))
    y = np.zeros((w.n, p, q, g, w.k // g))
    weights = filters.reshape(g, w.k // g, w.r, w.s, -1)
    for r in range(w.r):
        for s in range(w.s):
            h, v = r * w.dilation[0], s * w.dilation[1]
            seen = padded[:, h : h + p * w.stride[0] : w.stride[0]]
            seen = seen[:, :p, v : v + q * w.stride[1] : w.stride[1]][:, :, :q]
            seen = seen.reshape(w.n, p, q, g, -1)
            y += np.einsum("npqgc,gkc->npqgk", seen, weights[:, :, r, s], optimize=True)
    return y.reshape(w.n, p, q, w.k)
