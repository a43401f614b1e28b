"""The opponent on the CPU: what a NumPy user would write, on the same rotating sets."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.workload import Gemm, Workload

from .buffers import RotatingSets
from .reference import NUMPY
from .timing import Order

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
    """`np.matmul(out=)` and the epilogue in place; a `timing.Launcher`."""

    def __init__(self, workload: Gemm, sets: RotatingSets) -> None:
        self._workload = workload
        operands = (*workload.inputs(), workload.output())
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
        a, b, c = arrays[0], arrays[1], arrays[-1]
        a = a.swapaxes(-1, -2) if self._workload.layout[0] == "t" else a
        b = b.swapaxes(-1, -2) if self._workload.layout[1] == "t" else b
        np.matmul(a, b, out=c)
        for op in self._workload.epilogue:
            _in_place(op, c, dict(zip(self._names, arrays, strict=True)))


def serves(workload: Workload) -> bool:
    """Whether NumPy has this operator."""
    return isinstance(workload, Gemm) and workload.dtype in NUMPY


def _in_place(op: str, c: NDArray[Any], named: dict[str, NDArray[Any]]) -> None:
    match op:
        case "bias" | "residual":
            np.add(c, named[op], out=c)
        case "scale":
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
