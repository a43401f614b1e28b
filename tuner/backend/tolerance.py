"""How far off a result may be: bounds that hold for any order of summation, of every operator."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kt.spaces.workload import MOST_UNPROMOTED, Attention, Conv2d, Gemm, Workload

ROUNDOFF: Mapping[str, float] = {
    "fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8,
    "int32": 0.0, "fp22": 2.0**-14,
}  # fmt: skip
"""Half a unit in the last place, relative."""
_CUT_AFTER: Mapping[str, int] = {"fp16": 8, "bf16": 8, "tf32": 4}
"""Products after which a tensor core cuts its fp32 sum."""
TINY_WEIGHT = 2.0**-14
"""Below it fp16 numbers are equally spaced: a weight's error stops falling."""
_SIGMAS = 6.0
"""Logits of N(0,1) operands beyond this many standard deviations do not matter to a softmax."""


class Tolerance(msgspec.Struct, frozen=True):
    """Error bounds of one output, for inputs from N(0,1).

    Element-wise |out - ref| <= absolute * gain + relative * |ref|, where `gain` is what errors are
    multiplied by; and ||out - ref|| <= norm * max(||ref||, typical * ||gain||), so that a result
    made tiny by cancellation is not held to its own size.
    """

    absolute: float
    relative: float
    norm: float
    typical: float


def tolerances(workload: Workload) -> tuple[Tolerance, ...]:
    """The bounds of each output, in the order of `workload.outputs()`."""
    if isinstance(workload, Attention):
        return _attention(workload)[: len(workload.outputs())]
    return (_product(workload, sum_length(workload)),)


def sum_length(workload: Workload) -> int:
    """Products in one sum of a GEMM or convolution."""
    if isinstance(workload, Conv2d):
        return workload.r * workload.s * (workload.c // workload.groups)
    assert isinstance(workload, Gemm)
    return workload.k


def _product(workload: Workload, k: int) -> Tolerance:
    """Bounds of sums of k products and an epilogue.

    With unit roundoff u, summing k products in sequence walks randomly: an element's error has a
    standard deviation of 0.22 u k (partial sums grow as sqrt(k)) and an exponential tail, the whole
    a relative error near 0.3 u sqrt(k). The bounds are 27 and 7 times that, plus a few roundings
    for short sums and the epilogue. One dropped product is off by 1/sqrt(k), an operand rounded to
    tf32 by 2e-4.

    Tensor cores do not round: they cut the sum toward zero after every few products (16 bytes of an
    operand at least), by less than u of its size on average (0.7 u). Such errors add up: a walk is
    0.5 sqrt(k) from zero on average, one of 10^9 walks 3.5 sqrt(k), for each cut.

    With acc=fp32, products of fp8 may first meet in fp22, `MOST_UNPROMOTED` at a time: by the same
    walk, an element is off by 0.2 u sqrt(k MOST_UNPROMOTED), of which the bound is 20 times. A
    kernel that stays in fp22 exceeds it from k = 4096 on.
    """
    out, acc = ROUNDOFF[workload.out_dtype], ROUNDOFF[workload.acc]
    typical = math.sqrt(k)
    if workload.dtype == "int8":
        return Tolerance(0.5, 0.0, 1e-9, typical)
    absolute, norm = acc * (6 * k + 32), acc * (2 * k**0.5 + 16) + out
    if workload.dtype in _CUT_AFTER and workload.acc == "fp32":
        cuts = k / _CUT_AFTER[workload.dtype]
        absolute, norm = absolute + acc * 3.5 * k**0.5 * cuts, norm + acc * cuts
    if workload.dtype == "tf32":
        # Both operands are rounded: each product is off by about 2^-11 of itself.
        absolute += ROUNDOFF["tf32"] * 8 * k**0.5
        norm += 2 * ROUNDOFF["tf32"]
    if workload.dtype in ("fp8_e4m3", "fp8_e5m2") and workload.acc == "fp32":
        absolute += ROUNDOFF["fp22"] * 4 * (k * min(k, MOST_UNPROMOTED)) ** 0.5
        norm += ROUNDOFF["fp22"] * 2 * MOST_UNPROMOTED**0.5
    return Tolerance(absolute, 1.02 * out + 16 * acc, norm, typical)


def _attention(w: Attention) -> tuple[Tolerance, Tolerance]:
    """Bounds of the output and of the log-sum-exp.

    The output is a mean of values under weights p; its gain is sqrt(sum p² v²), by which errors of
    p that are independent add up. Weights are off by their rounding to a 16-bit type before the
    second product, and by the error of their logits: the sum of D products, and the rounding of the
    scaled logit itself, which grows with its size.
    """
    u = ROUNDOFF["fp64" if w.dtype == "fp64" else "fp32"]
    weight = ROUNDOFF[w.dtype] if w.dtype in ("fp16", "bf16") else 0.0
    out = ROUNDOFF[w.out_dtype]
    scale = w.scale or w.d**-0.5
    spread = scale * w.d**0.5  # standard deviation of the logits
    if w.softcap:
        spread = min(spread, w.softcap / _SIGMAS)
    logit = u * (16 + 8 * _SIGMAS * spread + 2 * scale * w.d)
    o = Tolerance(
        absolute=8 * (weight + logit), relative=1.02 * out + 64 * u,
        norm=0.75 * (weight + out) + 4 * logit, typical=1.0,
    )  # fmt: skip
    single = ROUNDOFF["fp32"]  # what the log-sum-exp is stored in
    lse = Tolerance(
        absolute=4 * (logit + single), relative=4 * single, norm=4 * (logit + single), typical=1.0
    )
    return o, lse
