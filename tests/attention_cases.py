"""Random attention workloads for the CUDA families, and how far a result is from the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gemm_cases import Array, from_bits, to_bits

from kt.spaces.workload import Attention
from kt.tuner.backend.reference import Float64, Outputs, _attention
from kt.tuner.backend.tolerance import tolerances

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 79, 80, 81, 95, 97, 113)
LONGER = (*LENGTHS, 127, 128, 129, 160, 191, 192, 193, 255, 257, 300, 512, 700, 1000, 1025)
DIMS = (2, 8, 16, 24, 36, 40, 42, 64, 64, 72, 80, 96, 100, 128)
LARGER_DIMS = (*DIMS, 112, 128, 160, 192, 200, 256)


def draw(
    rng: np.random.Generator,
    lengths: Sequence[int] = LENGTHS,
    dims: Sequence[int] = DIMS,
    few_queries: bool = False,
) -> Attention:
    """A workload with lengths at the edges of tiles and every option now and then."""
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 1, 2, 4, 7]))
    s, kv_len = int(rng.choice(lengths)), int(rng.choice(lengths))
    if few_queries:
        s = int(rng.choice([1, 1, 1, 2, 3, 5, 9]))
    elif rng.random() < 0.5:
        kv_len = s
    d = int(rng.choice(dims))
    return Attention(
        dtype=str(rng.choice(["bf16", "fp16"])), b=int(rng.choice([1, 1, 2])), h=kv_heads * group,
        kv_heads=kv_heads, s=s, kv_len=kv_len, d=d,
        value_dim=d if rng.random() < 0.7 else int(rng.choice(dims)),
        causal=bool(rng.random() < 0.6),
        window=int(rng.choice([0, 0, 0, 1, 9, 33, 64, 200])),
        scale=float(rng.choice([0, 0, 0, 0.3, 2.0])),
        softcap=float(rng.choice([0, 0, 0, 3.0, 30.0])),
        lse=bool(rng.random() < 0.5), layout=str(rng.choice(["bshd", "bhsd"])),
    )  # fmt: skip


def inputs(w: Attention, rng: np.random.Generator) -> list[Array]:
    """N(0, 1) operands in argument order, as they are stored."""
    return [to_bits(rng.standard_normal(op.shape), op.dtype) for op in w.inputs()]


def poisons(w: Attention) -> list[Array]:
    """What the outputs hold before a launch: NaNs."""
    return [to_bits(np.full(op.shape, np.nan), op.dtype) for op in w.outputs()]


def reference(w: Attention, stored: Sequence[Array]) -> Outputs:
    """Value and gain of each output in float64."""
    operands = zip(w.inputs(), stored, strict=True)
    return _attention(w, {op.name: from_bits(x, op.dtype) for op, x in operands})


def worst(w: Attention, outputs: Sequence[Array], expected: Outputs) -> float:
    """The largest error over all outputs in units of what is allowed."""
    return max(
        _worst(from_bits(out, op.dtype), value, gain, bound.absolute, bound.relative)
        for out, op, (value, gain), bound in zip(
            outputs, w.outputs(), expected, tolerances(w), strict=True
        )
    )


def _worst(out: Float64, value: Float64, gain: Float64, absolute: float, relative: float) -> float:
    infinite = np.isinf(value)
    if not np.array_equal(out[infinite], value[infinite]) or not np.isfinite(out[~infinite]).all():
        return float("inf")
    value = np.where(infinite, 0.0, value)
    error = np.abs(np.where(infinite, 0.0, out) - value)
    allowed = absolute * (gain if gain.shape == value.shape else gain[0]) + relative * np.abs(value)
    return float((error / np.maximum(allowed, 1e-300)).max()) if error.any() else 0.0
