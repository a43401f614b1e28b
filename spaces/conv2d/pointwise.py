"""Convolutions that are matrix products as they lie: the GEMM families, unchanged.

A filter of 1 x 1 that steps over every pixel multiplies [N·H·W, C] by the transpose of [K, C]; a
filter as large as its image, without padding, multiplies [N, H·W·C] by that of [K, H·W·C].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from kt.spaces.cuda import Floats
from kt.spaces.errors import WorkloadError
from kt.spaces.family import Columns, Family, Rule
from kt.spaces.kernel import Kernel
from kt.spaces.knob import Knob
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Conv2d, Gemm, Workload

from .cuda import as_conv, refuses_cuda_conv


def plain_product(w: Conv2d) -> Gemm | None:
    """The product of operands in place that computes `w`, or None."""
    if w.groups != 1 or w.pad != (0, 0):
        return None
    if (w.r, w.s) == (1, 1) and w.stride == (1, 1):
        m, k = w.n * w.h * w.w, w.c
    elif (w.r, w.s) == (w.h, w.w) and w.dilation == (1, 1):
        m, k = w.n, w.h * w.w * w.c
    else:
        return None
    try:
        return Gemm(dtype=w.dtype, acc=w.acc, epilogue=w.epilogue, m=m, n=w.k, k=k, layout="nt")
    except WorkloadError:
        return None


class Pointwise(Family):
    """A GEMM family for convolutions that are plain products; its knobs, rules and kernels."""

    def __init__(self, gemm: Family) -> None:
        self.gemm = gemm
        self.name = f"gemm_{gemm.name}"
        self.empty: Mapping[str, str] = gemm.empty

    def refuses(self, workload: Workload, target: Target) -> str | None:
        refused = refuses_cuda_conv(workload, target, (workload.dtype,), "")
        if refused:
            return refused
        product = plain_product(as_conv(workload))
        if product is None:
            return "serves filters of 1 x 1 with stride 1, or of the image's size, without padding"
        return self.gemm.refuses(product, target)

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        return self.gemm.knobs(_product(workload), target)

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        return self.gemm.rules(_product(workload), target)

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return self.gemm.default(_product(workload), target)

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        return self.gemm.likely(_product(workload), target)

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        return self.gemm.derive(_product(workload), target, values)

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        kernel = self.gemm.kernel(_product(workload), target, theta)
        return dataclasses.replace(kernel, workload=workload, family=self.name)


def _product(workload: Workload) -> Gemm:
    """Of a workload that was not refused."""
    product = plain_product(as_conv(workload))
    assert product is not None
    return product
