"""What a kernel must compute: seeded inputs, a float64 reference, and how far off is wrong."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.workload import Gemm, Workload

NUMPY: Mapping[str, type[np.floating[Any]]] = {"fp32": np.float32, "fp64": np.float64}
"""Element types that the CPU measures."""
_BLOCK_BYTES = 256 * 2**20
_PROJECTION_ERROR = 1e-9

Float64 = NDArray[np.float64]


class Tolerance(msgspec.Struct, frozen=True):
    """Error bounds of a result with K products a sum, for inputs from N(0,1).

    Element-wise |out - ref| <= absolute * gain[column] + relative * |ref|, where `gain` is what the
    epilogue multiplies errors by; and ||out - ref|| <= norm * max(||ref||, typical).
    """

    absolute: float
    relative: float
    norm: float
    typical: float


def tolerance(workload: Workload, gain: Float64) -> Tolerance:
    """Bounds that a correct kernel keeps whatever its order of summation.

    With unit roundoff u, summing K products in sequence walks randomly: an element's error has a
    standard deviation of 0.22 u K (partial sums grow as sqrt(K)) and an exponential tail, the whole
    a relative error near 0.3 u sqrt(K). The bounds are 27 and 7 times that, plus a few roundings
    for short sums and the epilogue. One dropped product is off by 1/sqrt(K), an operand rounded to
    tf32 by 2e-4.
    """
    u = float(np.finfo(NUMPY[workload.out_dtype]).eps) / 2
    k = _sum_length(workload)
    out = workload.output()
    rows = out.elements // out.shape[-1]
    typical = float(np.sqrt(k * rows) * np.linalg.norm(gain))
    return Tolerance(u * (6 * k + 32), 16 * u, u * (2 * k**0.5 + 16), typical)


@dataclass(frozen=True)
class Dataset:
    """Inputs (argument order), reference and bounds of one workload and seed."""

    inputs: tuple[NDArray[Any], ...]
    reference: Float64
    gain: Float64
    tolerance: Tolerance


def needed_bytes(workload: Workload) -> int:
    """Memory that making and checking a workload takes: operands thrice, float64 copies."""
    copies = sum(8 * operand.elements for operand in (*workload.inputs()[:2], workload.output()))
    return 3 * workload.bytes + copies


def refuse_unmeasurable(workload: Workload, memory_bytes: int) -> None:
    """Raises TargetError, with the reason in numbers, for what the CPU here cannot measure."""
    if workload.dtype not in NUMPY:
        accepted = ", ".join(NUMPY)
        raise TargetError(f"the CPU measures {accepted}, not '{workload.dtype}' ({workload})")
    if type(workload) not in _REFERENCES:
        raise TargetError(f"no CPU reference for operator '{workload.OPERATOR}'")
    needed = needed_bytes(workload)
    if needed > memory_bytes:
        raise TargetError(
            f"'{workload}' needs {needed / 2**30:.1f} GiB to be checked and timed, "
            f"and {memory_bytes / 2**30:.1f} GiB may be used"
        )


def make_dataset(workload: Workload, seed: int, directory: Path) -> float:
    """Draws the inputs and computes the reference; saves both under `directory`.

    Returns the seconds that the reference took. Raises TargetError when the disk is full.
    """
    inputs = make_inputs(workload, seed)
    begin = time.monotonic()
    reference = epilogue(workload, _REFERENCES[type(workload)](workload, inputs), inputs)
    seconds = time.monotonic() - begin
    arrays = {**inputs, "reference": reference, "gain": _gain(workload, inputs)}
    try:
        directory.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(directory / f"{name}.npy", array)
    except OSError as error:
        why = error.strerror or error  # NumPy's own have no errno
        raise TargetError(f"no room for operands in {directory}: {why}") from None
    return seconds


def load_dataset(workload: Workload, directory: Path) -> Dataset:
    """Maps a saved dataset into memory."""
    names = [operand.name for operand in workload.inputs()]
    inputs = tuple(np.load(directory / f"{name}.npy", mmap_mode="r") for name in names)
    gain = np.load(directory / "gain.npy")
    reference = np.load(directory / "reference.npy", mmap_mode="r")
    return Dataset(inputs, reference, gain, tolerance(workload, gain))


def make_inputs(workload: Workload, seed: int) -> dict[str, NDArray[Any]]:
    """N(0,1) operands by name, a function of the seed, the workload and the operand alone."""
    inputs: dict[str, NDArray[Any]] = {}
    for i, operand in enumerate(workload.inputs()):
        key = np.random.SeedSequence([seed, zlib.crc32(str(workload).encode()), i])
        rng = np.random.Generator(np.random.Philox(key))
        dtype = NUMPY[operand.dtype]
        inputs[operand.name] = rng.standard_normal(operand.shape, dtype=dtype)
    return inputs


def _sum_length(workload: Workload) -> int:
    assert isinstance(workload, Gemm)
    return workload.k


def _gemm(workload: Workload, inputs: Mapping[str, NDArray[Any]]) -> Float64:
    """The product in float64, in blocks of rows, and checked without BLAS."""
    assert isinstance(workload, Gemm)
    a, b = inputs["A"], inputs["B"]
    a = np.swapaxes(a, -1, -2) if workload.layout[0] == "t" else a
    b = np.swapaxes(b, -1, -2) if workload.layout[1] == "t" else b
    a, b = a.reshape(-1, workload.m, workload.k), b.reshape(-1, workload.k, workload.n)
    out = np.empty((workload.batch, workload.m, workload.n))
    rows = max(1, _BLOCK_BYTES // (8 * workload.k))
    for i in range(workload.batch):
        right = b[i].astype(np.float64)
        for first in range(0, workload.m, rows):
            left = a[i, first : first + rows].astype(np.float64)
            np.matmul(left, right, out=out[i, first : first + rows])
        _check_product(a[i], right, out[i])
    return out.reshape(workload.output().shape)


def _check_product(a: NDArray[Any], b: Float64, product: Float64) -> None:
    """Compares product · x with a · (b · x) for a random x, summed without BLAS.

    So a float64 workload, whose opponent is that same BLAS, has an independent witness.
    """
    x = np.random.default_rng(0).choice([-1.0, 1.0], size=b.shape[1])
    through = np.einsum("mk,k->m", a, np.einsum("kn,n->k", b, x), dtype=np.float64)
    direct = np.einsum("mn,n->m", product, x)
    scale = np.sqrt(product.size * b.shape[0])
    if not float(np.linalg.norm(direct - through)) <= _PROJECTION_ERROR * float(scale):
        raise ToolchainError(
            "NumPy's matrix product is wrong on this machine: try OPENBLAS_CORETYPE=Haswell"
        )


_REFERENCES: Mapping[type[Workload], Callable[..., Float64]] = {Gemm: _gemm}


def epilogue(workload: Workload, x: Float64, inputs: Mapping[str, NDArray[Any]]) -> Float64:
    """The chain after the product, in the order of the workload, in float64."""
    for op in workload.epilogue:
        x = _apply(op, x, inputs)
    return x


def _apply(op: str, x: Float64, inputs: Mapping[str, NDArray[Any]]) -> Float64:
    match op:
        case "bias" | "residual":
            x = x + inputs[op]
        case "scale":
            x = x * inputs[op]
        case "relu":
            x = np.where(x < 0, 0.0, x)  # a NaN stays
        case "gelu":
            from scipy.special import ndtr  # (1 + erf(x / sqrt(2))) / 2 without cancellation

            x = x * ndtr(x)
        case "silu":
            from scipy.special import expit

            x = x * expit(x)
        case _:
            raise AssertionError(f"epilogue operation '{op}' has no reference")
    return x


def _gain(workload: Workload, inputs: Mapping[str, NDArray[Any]]) -> Float64:
    """By column, how much the epilogue can enlarge an error of the product."""
    gain = np.ones(workload.output().shape[-1])
    for op in workload.epilogue:
        if op == "scale":
            gain = gain * np.abs(inputs[op].astype(np.float64))
        elif op in ("gelu", "silu"):
            gain = gain * 1.13  # the largest slope of either
    return gain
