"""What a kernel must compute: seeded inputs, a float64 reference, and how far off is wrong."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.workload import Attention, Conv2d, Gemm, Workload

from .tolerance import TINY_WEIGHT, Tolerance, tolerances

NUMPY: Mapping[str, type[np.floating[Any]]] = {"fp32": np.float32, "fp64": np.float64}
"""Element types that the CPU measures."""
_BLOCK_BYTES = 256 * 2**20
_PROJECTION_ERROR = 1e-9

Float64 = NDArray[np.float64]
Outputs = tuple[tuple[Float64, Float64], ...]
"""Value and gain of each output."""


@dataclass(frozen=True)
class Expected:
    """What one output must be: in float64, and what errors are multiplied by.

    `gain` has a value for each of the last `gain.size` elements, again and again.
    """

    name: str
    value: Float64
    gain: Float64
    tolerance: Tolerance


@dataclass(frozen=True)
class Dataset:
    """Inputs and expected outputs (argument order) of one workload and seed."""

    inputs: tuple[NDArray[Any], ...]
    expected: tuple[Expected, ...]


def needed_bytes(workload: Workload) -> int:
    """Memory that making and checking a workload takes: operands thrice, float64 copies."""
    gains = workload.output().elements if isinstance(workload, Attention) else 0
    copies = sum(operand.elements for operand in (*workload.inputs()[:2], workload.output()))
    return 3 * workload.bytes + 8 * (copies + gains)


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
    outputs = _REFERENCES[type(workload)](workload, inputs)
    seconds = time.monotonic() - begin
    arrays = dict(inputs)
    for operand, (value, gain) in zip(workload.outputs(), outputs, strict=True):
        arrays |= {operand.name: value, f"{operand.name}.gain": gain}
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
    expected = tuple(
        Expected(
            operand.name,
            np.load(directory / f"{operand.name}.npy", mmap_mode="r"),
            np.ascontiguousarray(np.load(directory / f"{operand.name}.gain.npy")),
            bound,
        )
        for operand, bound in zip(workload.outputs(), tolerances(workload), strict=True)
    )
    return Dataset(inputs, expected)


def make_inputs(workload: Workload, seed: int) -> dict[str, NDArray[Any]]:
    """N(0,1) operands by name, a function of the seed, the workload and the operand alone."""
    inputs: dict[str, NDArray[Any]] = {}
    for i, operand in enumerate(workload.inputs()):
        key = np.random.SeedSequence([seed, zlib.crc32(str(workload).encode()), i])
        rng = np.random.Generator(np.random.Philox(key))
        dtype = NUMPY[operand.dtype]
        inputs[operand.name] = rng.standard_normal(operand.shape, dtype=dtype)
    return inputs


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


def _conv2d(workload: Workload, inputs: Mapping[str, NDArray[Any]]) -> Float64:
    """The convolution in float64: one product a filter tap, image by image."""
    assert isinstance(workload, Conv2d)
    w, groups = workload, workload.groups
    p, q = w.out_size
    filters = inputs["w"].reshape(groups, w.k // groups, w.r, w.s, w.c // groups)
    # [tap row, tap column, group, channels, filters]
    filters = np.ascontiguousarray(filters.transpose(2, 3, 0, 4, 1), dtype=np.float64)
    out = np.empty((w.n, p, q, w.k))
    padding = ((w.pad[0],) * 2, (w.pad[1],) * 2, (0, 0))
    for i in range(w.n):
        image = np.pad(inputs["x"][i].astype(np.float64), padding)
        sums = np.zeros((groups, p * q, w.k // groups))
        for r in range(w.r):
            rows = slice(r * w.dilation[0], r * w.dilation[0] + (p - 1) * w.stride[0] + 1)
            for s in range(w.s):
                columns = slice(s * w.dilation[1], s * w.dilation[1] + (q - 1) * w.stride[1] + 1)
                seen = image[rows, columns][:: w.stride[0], :: w.stride[1]]
                seen = seen.reshape(p * q, groups, w.c // groups).transpose(1, 0, 2)
                product = np.matmul(seen, filters[r, s])
                if i == 0 and groups == 1:
                    _check_product(seen[0], filters[r, s, 0], product[0])
                sums += product
        out[i] = sums.transpose(1, 0, 2).reshape(p, q, w.k)
    return out


def _with_epilogue(product: Callable[..., Float64]) -> Callable[..., Outputs]:
    """The one output of an operator that is a product and an epilogue."""

    def outputs(workload: Workload, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        value = epilogue(workload, product(workload, inputs), inputs)
        return ((value, _gain(workload, inputs)),)

    return outputs


def _attention(workload: Workload, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
    """Output and log-sum-exp in float64, some rows of one head at a time."""
    assert isinstance(workload, Attention)
    w = workload
    q, k, v = (_by_head(w, inputs[name]) for name in "qkv")
    o, gain = np.empty((2, w.b, w.h, w.s, w.value_dim))
    lse = np.empty((w.b, w.h, w.s))
    rows = max(1, _BLOCK_BYTES // (8 * 4 * w.kv_len))
    for b, h in np.ndindex(w.b, w.h):
        keys, values = (x[b, h * w.kv_heads // w.h].astype(np.float64) for x in (k, v))
        for first in range(0, w.s, rows):
            part = slice(first, min(w.s, first + rows))
            logits = q[b, h, part].astype(np.float64) @ keys.T * (w.scale or w.d**-0.5)
            if w.softcap:
                logits = w.softcap * np.tanh(logits / w.softcap)
            o[b, h, part], gain[b, h, part], lse[b, h, part] = _softmax_rows(
                np.where(_visible(w, part), logits, -np.inf), values
            )
    outputs = ((_by_head(w, o), _by_head(w, gain)), (lse, np.ones(1)))
    return outputs[: len(w.outputs())]


def _by_head(w: Attention, x: NDArray[Any]) -> NDArray[Any]:
    """The operand with its sequence and head axes in the other order, if it is stored so."""
    return np.ascontiguousarray(x.swapaxes(1, 2)) if w.layout == "bshd" else x


def _visible(w: Attention, rows: slice) -> NDArray[np.bool_]:
    """[rows, kv_len]: which keys each query sees."""
    last = np.arange(rows.start, rows.stop)[:, None] + w.kv_len - w.s
    keys = np.arange(w.kv_len)[None, :]
    seen = keys <= last if w.causal else np.ones((len(last), w.kv_len), dtype=bool)
    return seen & (keys > last - w.window) if w.window else seen


def _softmax_rows(logits: Float64, values: Float64) -> tuple[Float64, Float64, Float64]:
    """Output, gain and log-sum-exp of rows of logits; a row that sees nothing is 0 and -inf.

    The gain counts, beside each weight, the spacing of fp16 numbers near zero: a weight may be
    rounded while the largest of its row is 1.
    """
    top = np.max(logits, axis=1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=1, keepdims=True)
    some = np.where(total > 0, total, 1.0)
    weights /= some
    tiny = np.where(np.isfinite(logits), weights + TINY_WEIGHT / some, 0.0)
    gain = np.sqrt(tiny**2 @ values**2)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isfinite(top), top + np.log(total), -np.inf)
    return weights @ values, gain, lse[:, 0]


_REFERENCES: Mapping[type[Workload], Callable[..., Outputs]] = {
    Gemm: _with_epilogue(_gemm), Conv2d: _with_epilogue(_conv2d), Attention: _attention,
}  # fmt: skip


def epilogue(workload: Workload, x: Float64, inputs: Mapping[str, NDArray[Any]]) -> Float64:
    """The chain after the product, in the order of the workload, in float64."""
    for op in workload.epilogue:
        x = _apply(op, x, inputs)
    return x


def _apply(op: str, x: Float64, inputs: Mapping[str, NDArray[Any]]) -> Float64:
    match op:
        case "bias" | "residual" | "shift":
            x = x + inputs[op]
        case "scale" | "tensor_scale":
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
        if op in ("scale", "tensor_scale"):
            gain = gain * np.abs(inputs[op].astype(np.float64))
        elif op in ("gelu", "silu"):
            gain = gain * 1.13  # the largest slope of either
    return gain
