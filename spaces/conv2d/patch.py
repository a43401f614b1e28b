"""`patch`: convolution on the tensor cores, x brought to an SM about once (source: `patch.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kt.spaces.cuda import VECTOR, Floats, alignment, element_bytes, rule
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.family import Columns, RankedFamily, Rule, once
from kt.spaces.gemm.cuda import problem_defines
from kt.spaces.gemm.mma_default import ranked_values
from kt.spaces.gemm.mma_plan import Operand, Plan
from kt.spaces.gemm.mma_tiles import LAYOUTS, tile_defines, tile_features, tile_knobs, tile_rules
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Conv2d, Gemm, Workload

from .cuda import (
    as_conv,
    conv_defines,
    group_channels,
    patch_pixels,
    product_of,
    refuses_cuda_conv,
    up_to,
    with_product,
)

_BP = (1, 2, 4, 7, 8, 14, 16, 28, 32)
_BQ = (4, 7, 8, 14, 16, 28, 32, 56, 64)
_MOST_PIXELS = 256
_LEAST_CHANNELS = 16
# bp, bq, bn, warps_m, warps_n of default tiles
_SHAPES = (
    (8, 28, 128, 2, 4), (16, 16, 128, 4, 2), (8, 16, 256, 2, 4), (8, 28, 64, 2, 2),
    (16, 16, 64, 4, 2), (8, 16, 128, 2, 2), (16, 8, 128, 2, 2), (8, 16, 64, 2, 2),
    (16, 8, 64, 2, 2), (4, 28, 128, 1, 4), (8, 14, 128, 1, 4), (4, 28, 64, 1, 4),
    (8, 14, 64, 1, 4), (7, 7, 128, 1, 4), (7, 7, 64, 1, 4), (8, 8, 128, 2, 2), (8, 8, 64, 2, 2),
    (8, 8, 32, 2, 2), (7, 7, 32, 1, 4), (4, 8, 64, 2, 2), (4, 8, 32, 2, 2), (4, 8, 16, 2, 1),
    (1, 16, 64, 1, 4), (2, 8, 64, 1, 4), (1, 16, 16, 1, 1), (4, 4, 16, 1, 1), (8, 4, 16, 1, 1),
    (16, 4, 16, 1, 1), (1, 4, 16, 1, 1), (2, 4, 16, 1, 1), (1, 8, 16, 1, 1),
)  # fmt: skip


class _PatchPlan(Plan):
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, conv: Conv2d, product: Gemm, values: Mapping[str, Any]) -> None:
        super().__init__(product, values)
        self.conv = conv
        self.p, self.q = conv.out_size

    @cached_property
    def bm(self) -> Any:
        return round_up(self.v["bp"] * self.v["bq"], 16)

    @cached_property
    def m_blocks(self) -> Any:
        return self.conv.n * ceil_div(self.p, self.v["bp"]) * ceil_div(self.q, self.v["bq"])

    @cached_property
    def pixels(self) -> Any:
        """Pixels of x that a tile sees."""
        rows, columns = patch_pixels(self.conv, self.v["bp"], self.v["bq"])
        return rows * columns

    @property
    def fresh_rows(self) -> Any:
        return self.pixels / (self.conv.r * self.conv.s)

    @cached_property
    def stage_bytes(self) -> Any:
        return self._tile_bytes(self.b, self.bn)

    @cached_property
    def resident_bytes(self) -> Any:
        """Of the patches."""
        conv, stride = self.conv, self.conv.stride[1]
        rows, columns = patch_pixels(conv, self.v["bp"], self.v["bq"])
        chunks = self.bk * self.a.bytes // VECTOR
        patch = round_up(rows * (ceil_div(columns, stride) * stride) * (chunks | 1) * VECTOR, 128)
        return patch * np.where(group_channels(conv) > self.bk, 2, 1)

    def pieces(self, operand: Operand, name: str, rows: Any) -> Any:
        if name == "b":
            return super().pieces(operand, name, rows)
        return ceil_div(self.pixels * self.bk * operand.bytes, VECTOR * self.threads)

    def width(self, name: str) -> Any:
        return VECTOR if name == "a" else super().width(name)

    def width_or_zero(self, name: str) -> int:
        return VECTOR if name == "a" else super().width_or_zero(name)

    def copy_registers(self, operand: Operand, name: str, rows: Any) -> Any:
        """Of x: the address of each fragment, and the place of the next copy."""
        if name == "b":
            return super().copy_registers(operand, name, rows)
        return self.bm // self.v["warps_m"] // 16 + 16

    @cached_property
    def repacked_parts(self) -> tuple[int, ...]:
        return ()


class Conv2dPatch(RankedFamily):
    """Patches of x in shared memory for all taps, filters through a ring of cp.async stages."""

    name = "patch"
    empty: Mapping[str, str] = {}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        refused = refuses_cuda_conv(workload, target, ("fp16", "bf16"), "the tensor cores multiply")
        if refused:
            return refused
        w = as_conv(workload)
        if product_of(w) is None:
            return "the pixels times their taps are too many"
        if w.r * w.s == 1:
            return "one tap has no pixels to share"
        if group_channels(w) % _LEAST_CHANNELS:
            return f"channels come {_LEAST_CHANNELS} at a time, a group has {group_channels(w)}"
        if not any(self._fits(w, target, shape) for shape in _shapes(w)):
            return "no patch of x fits shared memory"
        return None

    def _fits(self, w: Conv2d, target: Target, shape: Mapping[str, int]) -> bool:
        """Whether a default tile can be completed."""
        try:
            self._completed(w, target, [shape])
        except AssertionError:
            return False
        return True

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w, product = with_product(workload)
        p, q = w.out_size
        rows = [
            Ordinal("tile", "bp", up_to(_BP, p)),
            Ordinal("tile", "bq", up_to(_BQ, q)),
        ]
        copies = [Categorical("mem", "copy_b", (f"async{_filter_width(w)}",))]
        return tile_knobs(product, target, copies, LAYOUTS, rows)

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w, product = with_product(workload)
        channels, taps = group_channels(w), w.r * w.s

        @once
        def plan(v: Columns) -> _PatchPlan:
            return _PatchPlan(w, product, v)

        return [
            rule(
                "pixels",
                lambda v: plan(v).bm <= _MOST_PIXELS,
                lambda v: f"{v['bp']} x {v['bq']} output pixels exceed {_MOST_PIXELS}",
            ),
            rule(
                "chunk",
                lambda v: channels % v["bk"] == 0,
                lambda v: f"bk {v['bk']} does not divide {channels} channels",
            ),
            rule(
                "ring",
                lambda v: (channels == v["bk"]) | (v["stages"] <= taps + 1),
                lambda v: f"{v['stages']} stages of filters refill a patch that {taps} taps use",
            ),
            rule(
                "small-fragments",
                # The compiler would keep them in local memory (seen with ptxas 13.0).
                lambda v: (v["fragments"] == 1) | (plan(v).accumulators > 4),
                "one instruction's tile a warp has no use for two buffers of fragments",
            ),
            *tile_rules(product, target, plan),
        ]

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        w = as_conv(workload)
        return self._completed(w, target, _shapes(w))

    def _completed(
        self, w: Conv2d, target: Target, shapes: Sequence[Mapping[str, int]]
    ) -> Sequence[Mapping[str, Value]]:
        product = with_product(w)[1]
        knobs = {knob.name: knob.choices for knob in self.knobs(w, target)}
        channels = group_channels(w)
        knobs["bk"] = tuple(b for b in knobs["bk"] if channels % int(b) == 0)
        fixed: dict[str, Value] = {"copy_b": knobs["copy_b"][0]}
        return ranked_values(
            product, target, knobs, self.rules(w, target), fixed,
            lambda v: _PatchPlan(w, product, v), shapes,
        )  # fmt: skip

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w, product = with_product(workload)
        p = _PatchPlan(w, product, values)
        own = {
            "halo": p.pixels / (values["bp"] * values["bq"] * w.stride[0] * w.stride[1]),
            "patch_bytes": p.resident_bytes,
            "tile_padding": p.bm / (values["bp"] * values["bq"]),
        }
        found = tile_features(product, target, values, p)
        return found | {name: np.asarray(x, dtype=np.float64) for name, x in own.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w, product = with_product(workload)
        v = {name: value for _, name, value in theta.items()}
        p = _PatchPlan(w, product, v)
        defines = {
            **problem_defines(product), **conv_defines(w), **tile_defines(product, v, p),
            "KT_BATCH_IN_ROWS": 1, "KT_BP": v["bp"], "KT_BQ": v["bq"],
            "KT_M_BLOCKS": p.m_blocks,
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("patch.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source, launches=p.launches(),
            workspace_bytes=p.workspace_bytes, zeroed_bytes=p.split.zeroed,
        )  # fmt: skip


def _filter_width(w: Conv2d) -> int:
    return alignment(group_channels(w) * element_bytes(w))


def _shapes(w: Conv2d) -> list[Mapping[str, int]]:
    names = ("bp", "bq", "bn", "warps_m", "warps_n")
    return [dict(zip(names, shape, strict=True)) for shape in _SHAPES]
