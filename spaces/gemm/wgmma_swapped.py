"""`wgmma_swapped`: products with few rows on wgmma, as the transpose of C (source: `wgmma.cuh`).

The instruction multiplies 64 rows, so a C with 16 rows would be three quarters padding. Of its
transpose, B^T A^T, the many columns of C take the side of 64 and its rows that of 8, 16, ... The
knobs are those of the product that is computed: `tile.bm` and `cluster_m` are along C's columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from kt.spaces.cuda import VECTOR, output_bytes, rule
from kt.spaces.family import Rule, once
from kt.spaces.knob import Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Value
from kt.spaces.workload import Gemm, Workload

from .cuda import as_gemm
from .hopper import hopper_rules, hopper_stores
from .hopper_default import Shape
from .hopper_plan import HopperPlan, surely_at_once, unaligned
from .mma_plan import operands
from .wgmma import GemmWgmma

_MOST_ROWS = 128
_KEPT: Mapping[str, tuple[Value, ...]] = {
    "buffers": (1,), "raster": ("m",), "group": (1,), "cluster_m": (1, 2), "cluster_n": (1, 2),
    "pingpong": (False,),
}  # fmt: skip
"""Choices of `wgmma` that matter where there is little to multiply and to store."""
_WARM = (0, 4, 8, 16, 32)
"""Tiles of the long operand that a CTA asks L2 for while the kernel before it ends."""
_SHAPES = ((64, 1), (128, 2), (256, 2))
"""bm and consumers of default tiles."""
_BESIDE = 2
"""CTAs an SM in default tiles: there is room for the next kernel's, which starts early."""
_FEWER_ROWS = 32
"""The fewest rows of C in a tile that leaves some to other tiles: each reads all columns."""
_MOST_GROUP = 128
"""Rows of a consumer: with more, an epilogue unrolled over all spills."""
_RING_BYTES = 32768
"""Of the long operand, of an SM: fewer in flight do not keep memory busy."""
_SPLIT_WAVES, _SPLIT_TURNS = 4, 16
"""CTAs an SM that split-K may make, and units of persistent CTAs: more do not balance better."""
_BOX = 64
"""Columns of a box of C, 128 bytes."""


def transposed(w: Gemm) -> Gemm:
    """The product whose C is the transpose of that of `w`, from the same operands in memory."""
    turned = {"n": "t", "t": "n"}
    return Gemm(
        dtype=w.dtype, acc=w.acc, epilogue=w.epilogue, m=w.n, n=w.m, k=w.k, batch=w.batch,
        layout=turned[w.layout[1]] + turned[w.layout[0]],
    )  # fmt: skip


def _narrowed(knob: Knob) -> Knob:
    kept: tuple[Value, ...]
    if knob.name == "bn":
        kept = tuple(x for x in knob.integers if x >= _FEWER_ROWS) or knob.choices[-1:]
    else:
        kept = tuple(x for x in knob.choices if x in _KEPT.get(knob.name, knob.choices))
    return dataclasses.replace(knob, choices=kept)


class SwappedPlan(HopperPlan):
    """What knob values imply for the transpose of `stored`'s C."""

    arguments = (1, 0)
    streams = True
    held_columns = 4
    fills_boxes = True

    def __init__(self, stored: Gemm, target: Target, values: Mapping[str, Any]) -> None:
        super().__init__(transposed(stored), target, values)
        self._stored = stored

    @property
    def stored(self) -> Gemm:
        return self._stored

    @cached_property
    def at_once(self) -> Any:
        return surely_at_once(self.target, self.blocks_sm, self.cluster)

    @cached_property
    def ring_bytes(self) -> Any:
        """Of the long operand in all stages of an SM."""
        return self.blocks_sm * self.v["stages"] * self.bm * self.bk * self.a.bytes

    @cached_property
    def box_n(self) -> Any:
        return self.bn

    @property
    def box_row(self) -> Any:
        return _BOX * output_bytes(self.w)

    @property
    def box(self) -> tuple[int, int]:
        return _BOX, int(self.bn)


class GemmWgmmaSwapped(GemmWgmma):
    """Tiles of the transpose of a C with few rows."""

    name = "wgmma_swapped"

    def refuses(self, workload: Workload, target: Target) -> str | None:
        if why := super().refuses(workload, target):
            return why
        w = as_gemm(workload)
        if w.m > _MOST_ROWS or w.n <= w.m or w.batch > 1:
            return f"serves one product with at most {_MOST_ROWS} rows and more columns"
        if any(x.transposed_by_repack for x in operands(w)):
            return f"multiplies {w.dtype} in layout nt only"
        if any(unaligned(x) for x in operands(w)):
            return f"reads operands whose rows begin at multiples of {VECTOR} bytes"
        return None

    def product(self, w: Gemm) -> Gemm:
        return transposed(w)

    def plan(self, w: Gemm, target: Target, values: Mapping[str, Any]) -> HopperPlan:
        return SwappedPlan(w, target, values)

    def shapes(self, knobs: Mapping[str, Sequence[Any]]) -> Sequence[Shape]:
        return [
            Shape(bm, bn, consumers, 1, persistent, _BESIDE)
            for persistent in (False, True)
            for bn in reversed(knobs["bn"])
            for bm, consumers in _SHAPES
        ]

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        return self.ranked(as_gemm(workload), target)  # its common tiles are of every size

    def stores(self, w: Gemm) -> Sequence[str]:
        return tuple(store for store in hopper_stores(w) if store != "rows")

    def own_defines(self, values: Mapping[str, Any]) -> dict[str, int | str]:
        return {"KT_SWAPPED": 1, "KT_WARM": values["warm"]}

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        shared = super().knobs(workload, target)
        return [*(_narrowed(knob) for knob in shared), Ordinal("mem", "warm", _WARM)]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_gemm(workload)
        plan = once(lambda v: SwappedPlan(w, target, v))

        def most_units(v: Any) -> Any:
            return target.cores * np.where(plan(v).persistent, _SPLIT_TURNS, _SPLIT_WAVES)

        return [
            *hopper_rules(self.product(w), target, plan),
            rule(
                "warm",
                lambda v: (v["warm"] == 0) | np.asarray(v["early"]),
                "only a kernel that starts early has time to warm L2",
            ),
            rule(
                "warm-tiles",
                lambda v: v["warm"] <= plan(v).split_tiles,
                lambda v: f"{int(plan(v).split_tiles)} tiles along k cannot warm {v['warm']}",
            ),
            rule(
                "consumer-most",
                lambda v: plan(v).group_m <= _MOST_GROUP,
                lambda v: f"{int(plan(v).group_m)} rows of a consumer exceed {_MOST_GROUP}",
            ),
            rule(
                "ring",
                lambda v: (
                    (plan(v).ring_bytes >= _RING_BYTES) | (v["stages"] >= plan(v).split_tiles)
                ),
                lambda v: f"{int(plan(v).ring_bytes)} B in flight an SM do not keep memory busy",
            ),
            rule(
                "split-units",
                lambda v: (
                    (plan(v).k_parts == 1) | (plan(v).units * plan(v).cluster <= most_units(v))
                ),
                lambda v: (
                    f"{int(plan(v).units * plan(v).cluster)} CTAs with parts of k on "
                    f"{target.cores} SMs"
                ),
            ),
        ]
