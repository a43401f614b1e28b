"""Random GEMM workloads, their inputs as the kernels store them, and a float64 reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kt.spaces.workload import CHEAPER_ACC, Gemm, Workload

Array = NDArray[np.generic]

EDGES = (1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 63, 64, 65, 72, 95, 96, 97,
         104, 113, 127, 128, 129, 131)  # fmt: skip
EPILOGUES: tuple[tuple[str, ...], ...] = (
    (), (), ("bias",), ("relu",), ("bias", "gelu"), ("silu",), ("residual",), ("scale",),
    ("bias", "silu", "residual"), ("scale", "bias", "relu", "residual"),
    ("bias", "relu", "scale", "shift"),
)  # fmt: skip
_STORED = {"fp64": np.float64, "fp32": np.float32, "tf32": np.float32, "fp16": np.float16,
           "bf16": np.uint16, "int8": np.int8, "int32": np.int32, "fp8_e4m3": np.uint8,
           "fp8_e5m2": np.uint8}  # fmt: skip
_OUTPUT_ROUNDING = {"fp64": 2**-52, "fp32": 2**-23, "fp16": 2**-11, "bf16": 2**-8, "int32": 0.0}
_SUM_ROUNDING = {"fp64": 2**-48, "fp32": 2**-19, "tf32": 2**-9, "fp16": 2**-19, "bf16": 2**-19,
                 "int8": 0.0, "fp8_e4m3": 2**-13, "fp8_e5m2": 2**-13}  # fmt: skip
_MANTISSA = {"fp8_e4m3": 3, "fp8_e5m2": 2}


def draw(rng: np.random.Generator, dtypes: Sequence[str], extents: Sequence[int] = EDGES) -> Gemm:
    """A workload with extents at the edges of tiles."""
    m, n, k = (int(rng.choice(extents)) for _ in range(3))
    dtype = str(rng.choice(dtypes))
    epilogue = EPILOGUES[rng.integers(len(EPILOGUES))]
    if dtype == "int8" and {"gelu", "silu"} & set(epilogue):
        epilogue = ("bias", "relu")
    cheaper = CHEAPER_ACC.get(dtype, "")
    return Gemm(
        dtype=dtype, m=m, n=n, k=k, batch=int(rng.choice([1, 1, 2, 3])),
        layout=str(rng.choice(["nn", "nt", "tn", "tt"])), epilogue=epilogue,
        acc=cheaper if cheaper and rng.random() < 0.2 else "",
    )  # fmt: skip


def to_bits(x: NDArray[np.float64], dtype: str) -> Array:
    """`x` rounded to `dtype` as it is stored."""
    if dtype == "bf16":
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    if dtype in ("int8", "int32"):
        return np.rint(np.clip(x * 40, -127, 127)).astype(_STORED[dtype])
    if dtype in _MANTISSA:
        values = _finite_minifloats(dtype)
        middles = (values[1:] + values[:-1]) / 2
        found = np.searchsorted(middles, np.abs(x))
        return (found | np.signbit(x) << 7).astype(np.uint8)
    return x.astype(_STORED[dtype])


def _minifloats(dtype: str) -> NDArray[np.float64]:
    """Values of the 128 magnitudes of an 8-bit type, infinities and NaNs as finite numbers."""
    bits, mantissa = np.arange(128), _MANTISSA[dtype]
    exponent, fraction = bits >> mantissa, bits & (1 << mantissa) - 1
    bias = (1 << (6 - mantissa)) - 1
    significand = fraction + (np.minimum(exponent, 1) << mantissa)
    return np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa)


def _finite_minifloats(dtype: str) -> NDArray[np.float64]:
    return _minifloats(dtype)[: 0x7F if dtype == "fp8_e4m3" else 0x7C]


def from_bits(x: Array, dtype: str) -> NDArray[np.float64]:
    if dtype in _MANTISSA:
        return np.where(x & 0x80, -1, 1) * _minifloats(dtype)[x & 0x7F]
    if dtype == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def inputs(w: Workload, rng: np.random.Generator) -> list[Array]:
    """N(0, 1) operands in argument order, as they are stored."""
    return [to_bits(rng.standard_normal(op.shape), op.dtype) for op in w.inputs()]


def poison(w: Workload) -> Array:
    """What C holds before a launch: NaNs, or a value far from any result."""
    dtype = w.out_dtype
    if dtype == "bf16":
        return np.full(w.output().shape, 0x7FFF, np.uint16)
    if dtype == "int32":
        return np.full(w.output().shape, -(2**31) + 7, np.int32)
    return np.full(w.output().shape, np.nan, _STORED[dtype])


@dataclass(frozen=True)
class Reference:
    """C in float64, and how far each element may be off."""

    value: NDArray[np.float64]
    allowed: NDArray[np.float64]

    def worst(self, w: Workload, out: Array) -> float:
        """The largest error in units of what is allowed; NaN and infinities count as infinite."""
        error = np.abs(from_bits(out, w.out_dtype) - self.value)
        if not np.isfinite(error).all():
            return math.inf
        return float((error / np.maximum(self.allowed, 1e-300)).max()) if error.any() else 0.0


def reference(w: Gemm, stored: Sequence[Array]) -> Reference:
    """The product and its epilogue in float64, with bounds carried along."""
    operands = w.inputs()
    values = [from_bits(x, op.dtype) for x, op in zip(stored, operands, strict=True)]
    a = values[0].swapaxes(-1, -2) if w.layout[0] == "t" else values[0]
    b = values[1].swapaxes(-1, -2) if w.layout[1] == "t" else values[1]
    extra = {op.name: v for op, v in zip(operands[2:], values[2:], strict=True)}
    return finished(w, w.k, a @ b, np.abs(a) @ np.abs(b), extra)


def finished(
    w: Workload,
    k: int,
    x: NDArray[np.float64],
    size: NDArray[np.float64],
    extra: Mapping[str, NDArray[np.float64]],
) -> Reference:
    """The epilogue of sums `x` of `k` products, whose magnitudes add up to `size`."""
    rounding = _SUM_ROUNDING[w.dtype]
    if w.acc in ("fp16", "fp22"):
        rounding = 2**-10 * max(1.0, math.sqrt(k) / 4) if w.acc == "fp16" else 2**-11
    off = rounding * size
    erf = np.vectorize(math.erf, otypes=[np.float64])
    for op in w.epilogue:
        match op:
            case "bias" | "residual" | "shift":
                x = x + extra[op]
            case "scale" | "tensor_scale":
                x, off = x * extra[op], off * np.abs(extra[op])
            case "relu":
                x = np.maximum(x, 0)
            case "gelu":
                x, off = (
                    x * 0.5 * (1 + erf(x / math.sqrt(2))),
                    1.13 * off + 2e-6 * np.abs(x) * (w.dtype != "fp64"),
                )
            case _:
                x, off = x / (1 + np.exp(-x)), 1.1 * off + 2e-6 * np.abs(x) * (w.dtype != "fp64")
        off = off + (_SUM_ROUNDING[w.dtype] if w.dtype != "tf32" else 2**-19) * np.abs(x)
    allowed = _OUTPUT_ROUNDING[w.out_dtype] * np.abs(x) + off
    floor = {"int32": 0.5 if w.epilogue else 0.0, "fp16": 2**-24, "bf16": 1e-30}
    return Reference(x, allowed + floor.get(w.out_dtype, 0.0))


def draw_thin(
    rng: np.random.Generator, dtypes: Sequence[str], extents: Sequence[int] = EDGES
) -> Gemm:
    """Like `draw`, with M or N of at most 16."""
    w = draw(rng, dtypes, extents)
    tiny = int(rng.integers(1, 17))
    k = int(rng.choice([w.k, 3 * w.k + 1, 8 * w.k]))
    m, n = (tiny, w.n) if rng.random() < 0.6 else (w.m, tiny)
    return Gemm(dtype=w.dtype, acc=w.acc, m=m, n=n, k=k, batch=w.batch, layout=w.layout,
                epilogue=w.epilogue)  # fmt: skip
