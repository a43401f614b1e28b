"""The opponent on the CPU: what a NumPy user would write, on the same rotating sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.workload import Attention, Conv2d, Gemm, Workload

from .buffers import RotatingSets
from .reference import NUMPY
from .timing import Order
from .vendor_attention import attention

Array = NDArray[Any]
Operator = Callable[[Sequence[Array]], None]
"""Computes the product of the first operands into the last one."""

_SETTLE_STEP, _SETTLE_MOST = 0.005, 0.5


def settle() -> None:
    """Waits until this process is idle.

    After a BLAS call its threads spin for a while (OpenBLAS: 2^28 cycles, 0.1 s), and whoever is
    timed next would share a core with them.
    """
    for _ in range(round(_SETTLE_MOST / _SETTLE_STEP)):
        before = time.process_time()
        time.sleep(_SETTLE_STEP)
        if time.process_time() - before < _SETTLE_STEP / 5:
            return


class NumpyLauncher:
    """The product by `np.matmul(out=)` and the epilogue in place; a `timing.Launcher`."""

    def __init__(self, workload: Workload, sets: RotatingSets) -> None:
        self._workload = workload
        self._operator = _OPERATORS[type(workload)](workload)
        operands = workload.operands()
        self._names = [operand.name for operand in operands]
        like = [(operand.shape, NUMPY[operand.dtype]) for operand in operands]
        self._sets = sets.arrays(like)
        self._next = 0

    def __call__(self, order: Order) -> list[float]:
        begin = time.perf_counter_ns()
        samples: list[float] = []
        while len(samples) < order.most:
            start = time.perf_counter_ns()
            for _ in range(order.group):
                self._launch()
            end = time.perf_counter_ns()
            samples.append((end - start) / 1e3 / order.group)
            if order.cut_us and len(samples) >= 2 and min(samples) > order.cut_us:
                break
            if len(samples) >= order.least and (end - begin) / 1e3 > order.budget_us:
                break
        return samples

    def _launch(self) -> None:
        arrays = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        self._operator(arrays)
        for op in self._workload.epilogue:
            _in_place(op, arrays[-1], dict(zip(self._names, arrays, strict=True)))


def serves(workload: Workload) -> bool:
    """Whether NumPy has this operator."""
    return type(workload) in _OPERATORS and workload.dtype in NUMPY


def _gemm(workload: Workload) -> Operator:
    assert isinstance(workload, Gemm)
    layout = workload.layout

    def launch(arrays: Sequence[Array]) -> None:
        a, b = arrays[0], arrays[1]
        a = a.swapaxes(-1, -2) if layout[0] == "t" else a
        b = b.swapaxes(-1, -2) if layout[1] == "t" else b
        np.matmul(a, b, out=arrays[-1])

    return launch


def _conv2d(workload: Workload) -> Operator:
    """im2col and one matrix product a group, both into memory that is kept between launches.

    A 1x1 filter at stride 1 needs no copy of x. Taps of a filter's row that are neighbours in x
    are copied as one run: much faster than channel by channel where these are few.
    """
    assert isinstance(workload, Conv2d)
    w, (p, q), groups, dtype = workload, workload.out_size, workload.groups, NUMPY[workload.dtype]
    pixels, channels, filters = w.n * p * q, w.c // groups, w.k // groups
    plain = w.r == w.s == 1 and w.stride == (1, 1)
    padded = np.zeros((w.n, w.h + 2 * w.pad[0], w.w + 2 * w.pad[1], w.c), dtype)
    inside = padded[:, w.pad[0] : w.pad[0] + w.h, w.pad[1] : w.pad[1] + w.w]
    joined = groups == 1 and w.dilation[1] == 1
    run = (w.s * w.c,) if joined else (w.s, channels)
    columns = np.empty((groups, w.n, p, q, w.r, *run), dtype)
    sums = np.empty((groups, pixels, filters), dtype)

    def view(x: Array) -> Array:
        """x as [groups, N, P, Q, R, S, C / groups], S and C as one axis where they are joined."""
        n, h, v, c = x.strides
        taps = (c,) if joined else (v * w.dilation[1], c)
        steps = (channels * c, n, h * w.stride[0], v * w.stride[1], h * w.dilation[0], *taps)
        return np.lib.stride_tricks.as_strided(x, columns.shape, steps, writeable=False)

    def launch(arrays: Sequence[Array]) -> None:
        x, y = arrays[0], arrays[-1].reshape(pixels, w.k)
        if w.pad != (0, 0):
            inside[...] = x
            x = padded
        if plain and groups == 1:
            left = x.reshape(1, pixels, w.c)
        else:
            np.copyto(columns, view(x))
            left = columns.reshape(groups, pixels, -1)
        right = arrays[1].reshape(groups, filters, -1).swapaxes(-1, -2)
        if groups == 1:
            np.matmul(left[0], right[0], out=y)
        else:
            np.matmul(left, right, out=sums)
            y.reshape(pixels, groups, filters)[...] = sums.swapaxes(0, 1)

    return launch


_OPERATORS: Mapping[type[Workload], Callable[[Workload], Operator]] = {
    Gemm: _gemm, Conv2d: _conv2d, Attention: attention,
}  # fmt: skip


def _in_place(op: str, c: Array, named: dict[str, Array]) -> None:
    match op:
        case "bias" | "residual" | "shift":
            np.add(c, named[op], out=c)
        case "scale" | "tensor_scale":
            np.multiply(c, named[op], out=c)
        case "relu":
            np.maximum(c, 0, out=c)
        case "gelu":
            from scipy.special import ndtr

            np.multiply(c, ndtr(c), out=c)
        case "silu":
            from scipy.special import expit

            np.multiply(c, expit(c), out=c)
        case _:
            raise AssertionError(f"epilogue operation '{op}' has no NumPy form")
