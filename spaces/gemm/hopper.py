"""Knobs, rules and features of products on wgmma, whatever fills their tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kt.spaces.cuda import CTA_SHARED_BYTES, early_launch, output_bytes, rule
from kt.spaces.extents import ceil_div, round_up, until_covered
from kt.spaces.family import Rule
from kt.spaces.kernel import maps_define
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.workload import Gemm

from .cuda import (
    most_splits,
    output_group,
    raster_defines,
    raster_knobs,
    raster_rules,
    split_defines,
    split_knobs,
    split_rules,
    split_waves_rule,
)
from .hopper_plan import (
    INSTRUCTION_REGISTERS,
    PROMOTIONS,
    SWIZZLE,
    HopperPlan,
    promotes,
    row_classes,
)
from .mma_plan import operands

_BLOCK_M = (64, 128, 192, 256)
_BLOCK_N = (
    8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256,
)  # fmt: skip
_BLOCK_K_BYTES = (64, 128, 256)
_STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12)
_CLUSTER, _CLUSTER_K = (1, 2, 4), (1, 2, 4, 8)
_FEW_TILES = 2
"""The compiler unrolls the loop over so few tiles of k, and serialises the instructions in it."""
_MOST_CTAS = 8
"""Of a cluster, on every device of the architecture."""

PlanOf = Callable[[Any], HopperPlan]


def hopper_stores(w: Gemm) -> tuple[str, ...]:
    """Ways from the accumulators to C."""
    if output_bytes(w) != 2:
        return ("direct",)
    by_boxes = output_group(w) * output_bytes(w) == 16
    rows = ("rows",) if row_classes(w) > 1 or not by_boxes else ()
    return ("direct", *rows, "tma") if by_boxes else ("direct", *rows)


def hopper_knobs(w: Gemm, target: Target, stores: Sequence[str]) -> list[Knob]:
    """`stores`: ways from the accumulators to C."""
    a, b = operands(w)
    classes = row_classes(w)
    bms, bns = until_covered(_BLOCK_M, w.m), until_covered(_BLOCK_N, w.n)
    bks = until_covered(tuple(x // a.bytes for x in _BLOCK_K_BYTES), w.k)
    m_tiles, n_tiles, k_tiles = ceil_div(w.m, bms[0]), ceil_div(w.n, bns[0]), ceil_div(w.k, bks[0])
    strips = classes * ceil_div(ceil_div(w.m, classes), bms[0])
    grid = ceil_div(w.m, bms[-1]) * ceil_div(w.n, bns[-1]) * w.batch
    splits = most_splits(k_tiles, grid, target)
    turns = (False, True) if strips * n_tiles * w.batch * splits > target.cores else (False,)
    return [
        Ordinal("tile", "bm", bms),
        Ordinal("tile", "bn", bns),
        Ordinal("tile", "bk", bks),
        Ordinal("mem", "stages", _STAGES),
        *([Categorical("mem", "copy_a", ("strided", "repack"))] if classes > 1 else []),
        *([] if b.along_k else [Ordinal("mem", "swizzle_b", (32, 64, 128))]),
        Categorical("mem", "store", tuple(stores)),
        Ordinal("mem", "buffers", (1, 2) if "tma" in stores else (1,)),
        *raster_knobs(strips, n_tiles),
        *split_knobs(splits),
        Ordinal("unroll", "in_flight", (0, 1)),
        *([Ordinal("unroll", "promote", until_covered(PROMOTIONS, w.k))] if promotes(w) else []),
        Ordinal("map", "consumers", (1, 2, 3)),
        Categorical("map", "producer", ("warp", "warpgroup")),
        Ordinal("map", "cluster_m", tuple(c for c in _CLUSTER if c <= m_tiles)),
        Ordinal("map", "cluster_n", tuple(c for c in _CLUSTER if c <= n_tiles)),
        Ordinal("map", "cluster_k", tuple(c for c in _CLUSTER_K if c <= splits)),
        Categorical("map", "persistent", turns),
        Ordinal("map", "blocks", (1, 2, 3, 4)),
        Categorical("sync", "pingpong", turns),
        Categorical("sync", "early", (False, True) if early_launch(target) else (False,)),
    ]


def hopper_rules(w: Gemm, target: Target, plan: PlanOf) -> list[Rule]:
    """Legality; `plan` says what knob values imply."""

    def shared_limit(v: Any) -> Any:
        each = target.shared_bytes_sm // v["blocks"] - CTA_SHARED_BYTES
        return np.minimum(each, target.shared_bytes)

    return [
        rule(
            "pingpong",
            lambda v: ~plan(v).pingpong | ((v["consumers"] == 2) & plan(v).persistent),
            "taking turns needs two consumers and CTAs that work on several tiles",
        ),
        rule(
            "persistent",
            lambda v: ~plan(v).persistent | (plan(v).units * plan(v).cluster > plan(v).at_once),
            lambda v: f"{int(plan(v).at_once)} CTAs hold all {int(plan(v).units)} units of work",
        ),
        rule(
            "consumer-rows",
            lambda v: v["bm"] % (64 * plan(v).readers) == 0,
            lambda v: (
                f"{v['bm']} rows are no multiple of 64 for each of {v['consumers']} consumers"
            ),
        ),
        rule(
            "threads",
            lambda v: plan(v).threads * v["blocks"] <= target.threads_sm,
            lambda v: (
                f"{int(plan(v).threads * v['blocks'])} threads exceed {target.threads_sm} an SM"
            ),
        ),
        rule(
            "registers",
            lambda v: plan(v).needed_registers <= plan(v).consumer_registers,
            lambda v: (
                f"about {int(plan(v).needed_registers)} registers, "
                f"{int(plan(v).all_accumulators)} of them sums, exceed "
                f"{int(plan(v).consumer_registers)} of a consumer"
            ),
        ),
        *_instruction_rules(w, plan),
        rule(
            "shared",
            lambda v: plan(v).shared_bytes <= shared_limit(v),
            lambda v: (
                f"shared memory {int(plan(v).shared_bytes)} B exceeds {int(shared_limit(v))} B of "
                f"{target.arch} with {v['blocks']} CTAs an SM"
            ),
        ),
        rule(
            "stages",
            lambda v: (v["stages"] == 2) | (v["stages"] <= plan(v).split_tiles * plan(v).turns),
            lambda v: (
                f"{v['stages']} stages for {int(plan(v).split_tiles * plan(v).turns)} tiles along k"
            ),
        ),
        rule(
            "in-flight",
            lambda v: (v["in_flight"] == 0) | (plan(v).split_tiles > _FEW_TILES),
            lambda v: (
                f"{int(plan(v).split_tiles)} tiles along k are unrolled, and what is between them "
                "would be in the way of products in flight"
            ),
        ),
        *(_promotion_rules() if promotes(w) else []),
        *_cluster_rules(w, plan),
        *_store_rules(plan),
        *raster_rules(lambda v: plan(v).m_clusters, lambda v: plan(v).n_clusters),
        *split_rules(lambda v: plan(v).tiles, lambda v: plan(v).k_tiles),
        split_waves_rule(target, lambda v: plan(v).tiles),
    ]


def _instruction_rules(w: Gemm, plan: PlanOf) -> list[Rule]:
    b = operands(w)[1]

    def width(v: Any) -> Any:
        """Columns of a slab, at whose start an instruction must begin."""
        return 8 if b.along_k else v["swizzle_b"] // b.bytes

    def narrower(v: Any) -> Any:
        """Whether the next wider slabs would hold more unused columns."""
        return round_up(v["bn"], width(v)) < round_up(v["bn"], 2 * width(v))

    found = [
        rule(
            "instruction",
            lambda v: (
                (plan(v).parts_n == 1)
                | (
                    (v["bn"] % (2 * width(v)) == 0)
                    & (v["bn"] // 4 + INSTRUCTION_REGISTERS <= plan(v).launch_registers)
                )
            ),
            lambda v: (
                f"{v['bn']} columns need {v['bn'] // 2 + INSTRUCTION_REGISTERS} registers at "
                f"launch, where {int(plan(v).launch_registers)} are, and halves do not fit either"
            ),
        )
    ]
    if not b.along_k:
        found.append(
            rule(
                "swizzle-b",
                lambda v: (v["swizzle_b"] == SWIZZLE) | narrower(v),
                lambda v: f"rows of {v['swizzle_b']} B save nothing for {v['bn']} columns",
            )
        )
    return found


def _promotion_rules() -> list[Rule]:
    return [
        rule(
            "promotion",
            lambda v: v["promote"] % v["bk"] == 0,
            lambda v: f"{v['promote']} elements are no whole tiles of {v['bk']} along k",
        ),
        rule(
            "promotion-in-flight",
            lambda v: (v["in_flight"] == 0) | (v["promote"] > v["bk"]),
            "no product is in flight where sums are promoted after every tile of k",
        ),
    ]


def _cluster_rules(w: Gemm, plan: PlanOf) -> list[Rule]:
    a, b = operands(w)

    def shares(v: Any) -> Any:
        rows_a, rows_b = v["bm"] if a.along_k else v["bk"], v["bn"] if b.along_k else v["bk"]
        return (rows_a % (8 * v["cluster_n"]) == 0) & (rows_b % (8 * v["cluster_m"]) == 0)

    return [
        rule(
            "cluster",
            lambda v: plan(v).cluster <= _MOST_CTAS,
            lambda v: f"{plan(v).cluster} CTAs exceed {_MOST_CTAS} of a cluster",
        ),
        rule(
            "cluster-k",
            lambda v: (
                (v["cluster_k"] == 1) | (plan(v).k_parts * plan(v).cluster == v["cluster_k"] ** 2)
            ),
            "a cluster along k has one tile of C and no split-K besides",
        ),
        rule(
            "cluster-k-store",
            lambda v: (
                (v["cluster_k"] == 1) | ((np.asarray(v["store"]) == "direct") & ~plan(v).persistent)
            ),
            "CTAs that share a tile of C store their parts directly, and work on no other",
        ),
        rule(
            "cluster-k-tiles",
            lambda v: plan(v).k_parts <= plan(v).k_tiles,
            lambda v: f"{plan(v).k_parts} parts of {plan(v).k_tiles} tiles along k",
        ),
        rule(
            "cluster-tiles",
            lambda v: (v["cluster_m"] <= plan(v).m_blocks) & (v["cluster_n"] <= plan(v).n_blocks),
            lambda v: (
                f"clusters of {v['cluster_m']} x {v['cluster_n']} tiles, where there are "
                f"{plan(v).m_blocks} x {plan(v).n_blocks}"
            ),
        ),
        rule(
            "cluster-shares",
            shares,
            lambda v: (
                f"{v['cluster_m']} x {v['cluster_n']} CTAs do not divide a stage into parts of "
                "eight rows"
            ),
        ),
    ]


def _store_rules(plan: PlanOf) -> list[Rule]:
    def by_boxes(v: Any) -> Any:
        return np.asarray(v["store"]) == "tma"

    return [
        rule(
            "store-columns",
            lambda v: (np.asarray(v["store"]) == "direct") | plan(v).fills_boxes,
            lambda v: f"stores through shared memory need multiples of 16 columns, not {v['bn']}",
        ),
        rule(
            "store-buffers",
            lambda v: (v["buffers"] == 1) | (by_boxes(v) & (plan(v).boxes * plan(v).turns > 1)),
            "a second buffer needs a second box of C",
        ),
        rule(
            "store-sums",
            lambda v: (
                (np.asarray(v["store"]) == "direct")
                | (v["split_k"] == 1)
                | (np.asarray(v["split_mode"]) != "kernel")
            ),
            "sums for another kernel are stored directly",
        ),
    ]


def hopper_defines(w: Gemm, v: Mapping[str, Any], p: HopperPlan) -> dict[str, int | str]:
    """The stub's lines for the knobs of `hopper_knobs`, and what the kernel must agree with."""
    return {
        "KT_BM": v["bm"], "KT_BN": v["bn"], "KT_BK": v["bk"], "KT_STAGES": v["stages"],
        "KT_SWIZZLE_B": int(p.swizzle_b), "KT_STORE": f"KT_STORE_{str(v['store']).upper()}",
        "KT_STORE_BUFFERS": v["buffers"],
        **raster_defines(v), **split_defines(v),
        "KT_REPACK_A": int(p.repacked[0] > 0), "KT_REPACK_B": int(p.repacked[1] > 0),
        "KT_CLASSES_A": int(p.classes),
        "KT_IN_FLIGHT": v["in_flight"], "KT_PARTS_N": int(p.parts_n),
        "KT_PROMOTE": v["promote"] if promotes(w) else 0,
        "KT_CONSUMERS": v["consumers"], "KT_PRODUCER_WARPS": int(p.producer_warps),
        "KT_PRODUCER_REGISTERS": int(p.producer_registers),
        "KT_CONSUMER_REGISTERS": int(p.consumer_registers),
        "KT_CLUSTER_M": v["cluster_m"], "KT_CLUSTER_N": v["cluster_n"],
        "KT_CLUSTER_K": v["cluster_k"], "KT_PERSISTENT": int(v["persistent"]),
        "KT_BLOCKS": v["blocks"], "KT_PINGPONG": int(v["pingpong"]), "KT_EARLY": int(v["early"]),
        "KT_GRID": int(p.ctas), "KT_TENSOR_MAPS": maps_define(p.maps()),
        "KT_EXPECT_SHARED_BYTES": int(p.shared_bytes), "KT_EXPECT_UNITS": int(p.units),
        "KT_EXPECT_THREADS": int(p.threads),
        "KT_EXPECT_REPACK_BLOCKS": p.repack.grid[0] if p.repack else 0,
        "KT_EXPECT_WORKSPACE_BYTES": p.workspace_bytes,
        "KT_EXPECT_ZEROED_BYTES": p.split.zeroed,
    }  # fmt: skip
