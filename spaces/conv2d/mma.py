"""`mma`: convolution as a product on the tensor cores of sm_80 and later (source: `mma.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kt.spaces.cuda import Floats, element_bytes, rule
from kt.spaces.family import Columns, RankedFamily, Rule, once
from kt.spaces.gemm.cuda import problem_defines
from kt.spaces.gemm.mma_default import ranked_values
from kt.spaces.gemm.mma_plan import operands
from kt.spaces.gemm.mma_tiles import (
    LAYOUTS,
    MOST_SPILL_BYTES,
    tile_defines,
    tile_features,
    tile_knobs,
    tile_rules,
)
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Categorical, Knob
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Conv2d, Workload

from .cuda import (
    as_conv,
    conv_defines,
    group_channels,
    product_of,
    refuses_cuda_conv,
    with_product,
)
from .mma_plan import ConvPlan, gathers

_LEAST_CHANNELS = 4
CACHES = ("l2", "l1")
ORDERS = ("taps", "channels")


class Conv2dMma(RankedFamily):
    """Implicit GEMM by mma.sync, pixels gathered into a ring of cp.async stages."""

    name = "mma"
    empty: Mapping[str, str] = {}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        refused = refuses_cuda_conv(
            workload, target, ("fp16", "bf16", "tf32", "int8"), "the tensor cores multiply"
        )
        if refused:
            return refused
        w = as_conv(workload)
        if product_of(w) is None:
            return "the pixels times their taps are too many"
        if element_bytes(w) == 2 and w.groups > 1 and group_channels(w) < _LEAST_CHANNELS:
            return (
                f"fewer than {_LEAST_CHANNELS} channels a group are for families without a product"
            )
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w, product = with_product(workload)
        ways = gathers(w)
        widths = {g.width for g in ways}
        filters = operands(product)[1].copies
        filters = tuple(c for c in filters if c.startswith("async"))
        if any(g.repacked for g in ways) or filters != ("async16",):
            filters = (*filters, "repack")
        caches = CACHES if 16 in widths else CACHES[1:]
        if widths == {16}:
            several = w.r * w.s > 1
            caches = CACHES if several else CACHES[:1]
        copies = [
            Categorical("mem", "copy_a", tuple(g.name for g in ways)),
            Categorical("mem", "copy_b", filters),
            Categorical("mem", "cache", caches),
            Categorical("perm", "k_order", ORDERS if w.r * w.s > 1 else ORDERS[:1]),
        ]
        return tile_knobs(product, target, copies, LAYOUTS)

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w, product = with_product(workload)
        repacked = [g.name for g in gathers(w) if g.repacked]

        @once
        def plan(v: Columns) -> ConvPlan:
            return ConvPlan(w, product, v)

        return [
            rule(
                "filters",
                lambda v: ~np.isin(v["copy_a"], repacked) | (np.asarray(v["copy_b"]) == "repack"),
                lambda v: f"filters must be laid out along k as {v['copy_a']} walks x",
            ),
            rule(
                "cache",
                lambda v: (plan(v).width("a") == 16) | (np.asarray(v["cache"]) == "l1"),
                lambda v: f"copies of {int(plan(v).width('a'))} bytes always go through L1",
            ),
            rule(
                "k-order",
                lambda v: (
                    (np.asarray(v["k_order"]) == "taps")
                    | (plan(v).one_tap & (plan(v).run > plan(v).bk))
                ),
                lambda v: f"channels come {int(plan(v).run)} at a time, bk is {v['bk']}",
            ),
            rule(
                "columns",
                lambda v: plan(v).threads * plan(v).width("a") % (v["bk"] * plan(v).a.bytes) == 0,
                lambda v: f"{int(plan(v).threads)} threads copy no whole rows of bk {v['bk']}",
            ),
            *tile_rules(product, target, plan),
        ]

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        w, product = with_product(workload)
        knobs = {knob.name: knob.choices for knob in self.knobs(w, target)}
        rules = self.rules(w, target)
        way = _default_way(w)
        fixed: dict[str, Value] = {
            "copy_a": way, "copy_b": _default_filters(knobs["copy_b"], way),
            "cache": "l2" if way.endswith("16") or way == "repack" else "l1", "k_order": "taps",
        }  # fmt: skip
        return ranked_values(
            product, target, knobs, rules, fixed, lambda v: ConvPlan(w, product, v)
        )

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w, product = with_product(workload)
        p = ConvPlan(w, product, values)
        own = {
            "gather_bytes": p.width("a"),
            "run": p.run,
            "one_tap": p.one_tap,
            "fresh_pixels": np.full(len(values["bk"]), p.fresh_pixels),
        }
        found = tile_features(product, target, values, p)
        return found | {name: np.asarray(x, dtype=np.float64) for name, x in own.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w, product = with_product(workload)
        v = {name: value for _, name, value in theta.items()}
        p = ConvPlan(w, product, v)
        defines = {
            **problem_defines(product), **conv_defines(w), **tile_defines(product, v, p),
            "KT_K": int(p.k), "KT_BATCH_IN_ROWS": 1,
            "KT_JOIN_TAPS": int(p.way.joined), "KT_X_CHANNELS": p.way.channels,
            "KT_BY_L1": int(v["cache"] == "l1"),
            "KT_CHANNELS_FIRST": int(v["k_order"] == "channels"),
            "KT_REPACK_X": int(p.way.repacked), "KT_REPACK_W": int(p.filters_repacked),
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("mma.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source, launches=p.launches(),
            workspace_bytes=p.workspace_bytes, zeroed_bytes=p.split.zeroed,
            most_spill_bytes=MOST_SPILL_BYTES,
        )  # fmt: skip


def _default_way(w: Conv2d) -> str:
    """In place by copies of at least 8 bytes; else copied first, with its taps joined if it can."""
    ways = gathers(w)
    for way in (*(g for g in ways if g.joined), *ways):
        if way.width >= 8 and (way.joined or not way.repacked):
            return way.name
    return ways[-1].name


def _default_filters(copies: Sequence[Value], way: str) -> Value:
    return "repack" if way.startswith("repack") else copies[0]
