"""`direct`: convolution by the multiply-add units, for few channels a group (`direct.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kt.spaces.cuda import (
    VECTOR,
    Floats,
    alignment,
    early_knob,
    element_bytes,
    grid_rule,
    occupancy,
    output_bytes,
    register_limit,
    residency_rules,
    rule,
)
from kt.spaces.extents import ceil_div
from kt.spaces.family import Columns, Family, Rule, once
from kt.spaces.kernel import Kernel, Launch, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Conv2d, Workload

from .cuda import as_conv, conv_defines, group_channels, group_filters, refuses_cuda_conv

_TP = (1, 2, 3, 4, 7)
_TQ = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_CHUNKS = (1, 2, 4, 8, 16, 32, 64)
_THREADS_C = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 18, 20, 24, 30, 32, 48, 64)
_STRIPS = (4, 8, 16, 32, 64, 128, 256)
_BLOCKS = (1, 2, 3, 4, 6, 8)
_SPAN = 8
"""Taps of a filter row that are unrolled."""
_MOST_COLUMNS = 32
_MOST_UNROLLED = 2560
"""Multiply-adds of one thread that may be unrolled: more outgrow the instruction cache."""
_FEW_CHANNELS = 16
"""Of a group: with more, 16-bit types are the tensor cores' business."""
_ADDRESS_REGISTERS = 44
_ENOUGH_WARPS = 24  # on one SM
_LINE = 64  # bytes of neighbouring channels
_START_COST = 100  # instructions of a thread before its first load


class _Plan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, w: Conv2d, values: Mapping[str, Any]) -> None:
        self.w, self.v = w, values
        self.p, self.q = w.out_size
        self.depth = alignment(group_channels(w), 4)
        self.span = min(w.s, _SPAN, (_MOST_COLUMNS - 1) // w.dilation[1] + 1)

    @cached_property
    def threads(self) -> Any:
        return self.v["threads_c"] * self.v["strips"]

    @cached_property
    def block_c(self) -> Any:
        """Output channels of a CTA."""
        return self.v["threads_c"] * self.v["vector"]

    @cached_property
    def lanes(self) -> Any:
        """Groups that the output channels of a thread belong to."""
        return np.maximum(self.v["vector"] // group_filters(self.w), 1)

    @cached_property
    def rows(self) -> Any:
        """Rows of x that a thread's pixels see."""
        w = self.w
        return (self.v["tp"] - 1) * w.stride[0] + (w.r - 1) * w.dilation[0] + 1

    @cached_property
    def columns(self) -> Any:
        w = self.w
        return (self.v["tq"] - 1) * w.stride[1] + (self.span - 1) * w.dilation[1] + 1

    @cached_property
    def seen_columns(self) -> Any:
        return np.minimum(self.columns, self.v["tq"] * self.span)

    @cached_property
    def c_blocks(self) -> Any:
        return ceil_div(self.w.k, self.block_c)

    @cached_property
    def strips(self) -> Any:
        return self.w.n * ceil_div(self.p, self.v["tp"]) * ceil_div(self.q, self.v["tq"])

    @cached_property
    def blocks(self) -> Any:
        return ceil_div(self.strips, self.v["strips"]) * self.c_blocks

    @cached_property
    def shared_bytes(self) -> Any:
        return self.v["chunk"] * self.w.r * self.w.s * self.block_c * 4

    @cached_property
    def sums(self) -> Any:
        return self.v["tp"] * self.v["tq"] * self.v["vector"]

    @cached_property
    def registers(self) -> Any:
        """Estimate from above of what the compiler needs to keep everything in registers."""
        # Values of a row in single precision, and some of the next as they lie in memory.
        ahead = 1.5 if element_bytes(self.w) == 2 else 1.25
        row = self.seen_columns * self.lanes * self.depth * ahead
        return self.sums + row + 2 * self.v["vector"] + _ADDRESS_REGISTERS

    @cached_property
    def unrolled(self) -> Any:
        """Multiply-adds of one thread in the unrolled code."""
        rows = np.where(np.asarray(self.v["rows"]), self.w.r, 1)
        return self.sums * self.span * self.depth * rows


class Conv2dDirect(Family):
    """Strips of pixels in registers, x through L1, filters in shared memory."""

    name = "direct"
    empty: Mapping[str, str] = {
        "mem": "x reaches registers through L1, filters wait in shared memory; neither is buffered",
        "fusion": "the epilogue is always fused, and no sum is split",
    }

    def refuses(self, workload: Workload, target: Target) -> str | None:
        refused = refuses_cuda_conv(workload, target, ("fp16", "bf16", "fp32"), "computes in")
        if refused:
            return refused
        w = as_conv(workload)
        if element_bytes(w) == 2 and group_channels(w) > _FEW_CHANNELS:
            return f"more than {_FEW_CHANNELS} channels a group are for the tensor cores"
        least = 4 * w.r * w.s * alignment(group_channels(w), 4)
        if least > target.shared_bytes:
            return f"filters of {w.r}x{w.s} do not fit {target.shared_bytes} B of shared memory"
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w, (p, q) = as_conv(workload), as_conv(workload).out_size
        vectors = _vectors(w)
        depth, channels = alignment(group_channels(w), 4), group_channels(w)
        chunks = {n for n in _CHUNKS if n % depth == 0 and n < channels} | {channels}
        most_c = ceil_div(w.k, vectors[0])
        return [
            Ordinal("tile", "tp", tuple(n for n in _TP if n <= max(p, 1))),
            Ordinal("tile", "tq", tuple(n for n in _TQ if n <= max(q, 1))),
            Ordinal("tile", "vector", vectors),
            Ordinal("tile", "chunk", tuple(sorted(chunks))),
            Categorical("perm", "first", ("channels", "pixels")),
            Categorical("unroll", "rows", (False, True)),
            Ordinal("map", "threads_c", tuple(n for n in _THREADS_C if n <= most_c)),
            Ordinal("map", "strips", _STRIPS),
            Ordinal("map", "blocks", _BLOCKS),
            early_knob(target),
        ]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_conv(workload)

        @once
        def plan(v: Any) -> _Plan:
            return _Plan(w, v)

        return [
            rule(
                "threads-block",
                lambda v: (
                    (plan(v).threads % 32 == 0) & (plan(v).threads >= 64) & (plan(v).threads <= 512)
                ),
                lambda v: f"{plan(v).threads} threads are no 2 to 16 whole warps",
            ),
            rule(
                "channels",
                lambda v: plan(v).block_c < w.k + v["vector"],
                lambda v: f"{plan(v).block_c} channels of a CTA exceed {w.k}",
            ),
            rule(
                "first",
                lambda v: (plan(v).c_blocks > 1) | (np.asarray(v["first"]) == "channels"),
                "all channels are in one CTA: pixels have one order",
            ),
            rule(
                "columns",
                lambda v: plan(v).columns <= _MOST_COLUMNS,
                lambda v: f"{plan(v).columns} columns of x exceed {_MOST_COLUMNS}",
            ),
            rule(
                "unrolled",
                lambda v: ~np.asarray(v["rows"], dtype=bool) | (plan(v).unrolled <= _MOST_UNROLLED),
                lambda v: f"{plan(v).unrolled} unrolled multiply-adds exceed {_MOST_UNROLLED}",
            ),
            grid_rule(lambda v: plan(v).blocks),
            *residency_rules(target, plan),
        ]

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return _default(as_conv(workload), target, self)

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_conv(workload)
        p = _Plan(w, values)
        resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
        waves = p.blocks / (resident * target.cores)
        covered = p.strips * values["tp"] * values["tq"] * p.c_blocks * p.block_c
        found = {
            "threads": p.threads,
            "shared_bytes": p.shared_bytes,
            "registers": p.registers,
            "register_share": p.registers / register_limit(target, p.threads, values["blocks"]),
            "sums": p.sums,
            "resident_warps": resident * p.threads // 32,
            "waves": waves,
            "wave_efficiency": waves / np.ceil(waves),
            "padding": covered / (w.n * p.p * p.q * w.k),
            "row_bytes": p.block_c * element_bytes(w),
            "load_bytes": p.lanes * p.depth * element_bytes(w),
            "halo": p.rows * p.columns / (values["tp"] * values["tq"] * w.stride[0] * w.stride[1]),
            "adds_per_load": p.sums * w.r * w.s / (p.rows * p.seen_columns * p.lanes),
            "filter_reads": w.r * w.s / values["tq"],
            "unrolled": p.unrolled,
        }
        return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_conv(workload)
        v: dict[str, Any] = {name: value for _, name, value in theta.items()}
        p = _Plan(w, v)
        defines = {
            **conv_defines(w),
            "KT_TP": v["tp"], "KT_TQ": v["tq"], "KT_VECTOR": v["vector"], "KT_CHUNK": v["chunk"],
            "KT_CHANNELS_FIRST": int(v["first"] == "channels"), "KT_UNROLL_ROWS": int(v["rows"]),
            "KT_THREADS_C": v["threads_c"], "KT_STRIPS": v["strips"], "KT_BLOCKS": v["blocks"],
            "KT_EARLY": int(v["early"]), "KT_EXPECT_SHARED_BYTES": p.shared_bytes,
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("direct.cuh"))
        launch = Launch(
            "kt_kernel", (p.blocks, 1, 1), (p.threads, 1, 1), shared_bytes=p.shared_bytes,
            early=bool(v["early"]),
        )  # fmt: skip
        return Kernel(w, self.name, theta, "cuda", source, launches=(launch,))


def _vectors(w: Conv2d) -> tuple[int, ...]:
    """Output channels of a thread: one store, and of one group or of whole groups."""
    most, filters = alignment(w.k * output_bytes(w)) // output_bytes(w), group_filters(w)
    sizes = (1, 2, 4, VECTOR // 2)
    return tuple(n for n in sizes if n <= most and (filters % n == 0 or n % filters == 0))


def _default(w: Conv2d, target: Target, family: Conv2dDirect) -> Mapping[str, Value]:
    """The legal values with the least modelled time, pixels in order and CTAs as they fit."""
    knobs = {k.name: k.values for k in family.knobs(w, target)}
    knobs |= {name: knobs[name][:1] for name in ("first", "blocks")}
    knobs["early"] = knobs["early"][-1:]
    grid = np.meshgrid(*knobs.values(), indexing="ij")
    values: dict[str, Any] = {name: x.ravel() for name, x in zip(knobs, grid, strict=True)}
    for each in family.rules(w, target):
        kept = each.ok(values)
        values = {name: x[kept] for name, x in values.items()}
    assert len(values["tp"]), f"no default strip for '{w}' on {target.name}"
    time = _modelled_time(w, target, values)
    # Whole lines of channels, and enough threads that staging the filters is shared by many.
    p = _Plan(w, values)
    narrow = p.block_c * element_bytes(w) < min(_LINE, w.k * element_bytes(w))
    best = int(np.argmin(time * np.where(narrow, 2, 1) * np.where(p.threads < 128, 1.5, 1)))
    return {name: x[best].item() for name, x in values.items()}


def _modelled_time(w: Conv2d, target: Target, values: Columns) -> Floats:
    """Cycles of one SM for its warps: by instructions issued, or by vectors from L1 and shared."""
    p, size, channels = _Plan(w, values), element_bytes(w), group_channels(w)
    loads = p.rows * p.seen_columns * channels / p.depth * p.lanes ** (channels > 1)
    load_bytes = p.depth * p.lanes ** (channels == 1) * size
    filters = values["tp"] * w.r * w.s * channels * np.maximum(values["vector"] // 4, 1)
    filter_bytes = np.minimum(values["vector"], 4) * 4 * np.minimum(values["threads_c"], 32)
    adds = p.sums * w.r * w.s * channels + loads * load_bytes / size * (size == 2)
    issued = (adds + 3 * loads + filters + p.sums * 3 + _START_COST) / 4
    spread = np.maximum(1, 32 / (p.block_c * size))  # sectors that are only partly used
    vectors = loads * np.maximum(1, 32 * load_bytes / 128) * spread
    vectors = vectors + filters * np.maximum(1, filter_bytes / 128)
    resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
    warps = resident * p.threads // 32
    idle = np.maximum(1, _ENOUGH_WARPS / warps)
    rounds = ceil_div(p.blocks, target.cores * resident) * resident
    # Rows that are not unrolled compute which pixels they meet.
    slower = np.where(values["rows"], 1.0, 1.3)
    time: Floats = rounds * p.threads / 32 * np.maximum(issued, vectors) * idle * slower
    return time
