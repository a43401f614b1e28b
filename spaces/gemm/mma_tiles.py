"""Knobs, rules and features of tiles on mma.sync, whatever fills them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kt.spaces.cuda import (
    Floats,
    early_knob,
    element_bytes,
    occupancy,
    output_bytes,
    register_limit,
    residency_rules,
    rule,
)
from kt.spaces.extents import ceil_div, round_up, until_covered
from kt.spaces.family import Columns, Rule
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
    split_traffic,
    split_waves_rule,
    wave_footprint,
)
from .mma_plan import Plan

_BLOCK = (16, 32, 48, 64, 96, 128, 160, 192, 256)
_BLOCK_K_BYTES = (32, 64, 128, 256)
_STAGES = (2, 3, 4, 5, 6, 8, 10)
_WARPS = 8
_PREFETCH = (0, 128, 256)
LAYOUTS = ("swizzle", "padded")
"""How rows of a tile in shared memory avoid bank conflicts."""
_STORES = ("direct", "wide", "staged")
MOST_SPILL_BYTES = 16
"""A word or two that the compiler puts aside outside the loop over k."""
_MOST_PIECES = 32
"""Copies of one operand that a thread may start for a tile: more cost more than the math."""


def tile_knobs(
    w: Gemm,
    target: Target,
    copies: Sequence[Knob],
    layouts: tuple[str, ...],
    rows: Sequence[Knob] = (),
) -> list[Knob]:
    """`copies`: how operands reach shared memory; `layouts`: of their tiles there.

    `rows`: knobs for the rows of C in a tile, where they are no simple range.
    """
    bms, bns, bks = (
        until_covered(_BLOCK, w.m),
        until_covered(_BLOCK, w.n),
        until_covered(tuple(b // element_bytes(w) for b in _BLOCK_K_BYTES), w.k),
    )
    grid = ceil_div(w.m, bms[-1]) * ceil_div(w.n, bns[-1]) * w.batch
    k_tiles = ceil_div(w.k, bks[0])
    return [
        *(rows or [Ordinal("tile", "bm", bms)]),
        Ordinal("tile", "bn", bns),
        Ordinal("tile", "bk", bks),
        Ordinal("mem", "stages", tuple(s for s in _STAGES if s == 2 or s <= k_tiles + 1)),
        Categorical("mem", "layout", layouts),
        *copies,
        Ordinal("mem", "prefetch", _PREFETCH),
        Categorical("mem", "store", _stores(w)),
        *raster_knobs(ceil_div(w.m, bms[0]), ceil_div(w.n, bns[0])),
        *split_knobs(most_splits(k_tiles, grid, target)),
        Ordinal("unroll", "fragments", (1, 2)),
        Ordinal("unroll", "k", (1, 2, 4)),
        Ordinal("map", "warps_m", (1, 2, 4, 8)),
        Ordinal("map", "warps_n", (1, 2, 4, 8)),
        Ordinal("map", "warps_k", (1, 2, 4)),
        Ordinal("map", "blocks", (1, 2, 3, 4)),
        Categorical("sync", "stagger", (False, True)),
        early_knob(target),
    ]


def tile_rules(w: Gemm, target: Target, plan: Callable[[Any], Plan]) -> list[Rule]:
    """Legality of the tiles; `plan` says what knob values imply."""
    return [
        rule(
            "warps",
            lambda v: plan(v).threads <= 32 * _WARPS,
            lambda v: f"{plan(v).threads // 32} warps exceed {_WARPS}",
        ),
        rule(
            "warp-tile",
            lambda v: (plan(v).bm % (16 * v["warps_m"]) == 0) & (v["bn"] % (8 * v["warps_n"]) == 0),
            lambda v: (
                f"{v['warps_m']} x {v['warps_n']} warps do not divide {plan(v).bm} x {v['bn']} "
                "into tiles of 16 x 8"
            ),
        ),
        rule(
            "steps",
            lambda v: plan(v).steps >= 1,
            lambda v: f"bk {v['bk']} is too short for {v['warps_k']} warps along k",
        ),
        rule(
            "fragments",
            lambda v: (v["fragments"] == 1) | (plan(v).steps >= 2),
            "one step along k has no next fragments to load",
        ),
        rule(
            "stagger",
            lambda v: (
                ~v["stagger"] | (plan(v).steps >= 2)
                if isinstance(v["stagger"], np.ndarray)
                else not v["stagger"] or plan(v).steps >= 2
            ),
            "one step along k has no middle for the copies of B",
        ),
        rule(
            "stages",
            lambda v: (v["stages"] == 2) | (v["stages"] <= plan(v).split_tiles + 1),
            lambda v: f"{v['stages']} stages for {plan(v).split_tiles} tiles along k",
        ),
        rule(
            "unroll",
            lambda v: v["k"] <= plan(v).split_tiles,
            lambda v: f"unrolled {v['k']} times, {plan(v).split_tiles} tiles along k",
        ),
        rule(
            "copies",
            lambda v: plan(v).most_pieces <= _MOST_PIECES,
            lambda v: f"{int(plan(v).most_pieces)} copies a thread exceed {_MOST_PIECES}",
        ),
        rule(
            "wide-stores",
            lambda v: (v["store"] != "wide") | (v["bn"] // v["warps_n"] % _exchange(w) == 0),
            lambda v: (
                f"16-byte stores need warp tiles of {_exchange(w)} columns, "
                f"not {v['bn'] // v['warps_n']}"
            ),
        ),
        *raster_rules(lambda v: plan(v).m_blocks, lambda v: plan(v).n_blocks),
        *split_rules(lambda v: plan(v).blocks, lambda v: plan(v).k_tiles),
        split_waves_rule(target, lambda v: plan(v).blocks),
        *residency_rules(target, plan),
    ]


def tile_features(w: Gemm, target: Target, values: Columns, p: Plan) -> dict[str, Floats]:
    """What the tiles imply, by name."""
    resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
    ctas = p.blocks * values["split_k"]
    waves = ctas / (resident * target.cores)
    size = element_bytes(w)
    loaded = (p.fresh_rows + p.bn) * p.bk * size
    footprint = wave_footprint(values, p.m_blocks, p.n_blocks, p.bm, p.bn, resident * target.cores)
    padded = p.m_blocks * p.bm * p.n_blocks * p.bn * round_up(p.k, p.bk)
    found = {
        "threads": p.threads,
        "shared_bytes": p.shared_bytes,
        "registers": p.registers,
        "register_share": p.registers / register_limit(target, p.threads, values["blocks"]),
        "accumulators": p.accumulators,
        "resident_ctas": resident,
        "resident_warps": resident * p.threads // 32,
        "waves": waves,
        "wave_efficiency": waves / np.ceil(waves),
        "padding": padded / (w.m * w.n * w.k),
        "intensity": p.bm * p.bn / ((p.fresh_rows + p.bn) * size),
        "warp_intensity": p.warp_intensity,
        "bytes_in_flight": resident * (values["stages"] - 1) * loaded,
        "wave_bytes": footprint * p.k * size / values["split_k"],
        "wave_l2": footprint * p.bk * size * values["stages"] / target.l2_bytes,
        "l2_bytes": ctas * p.split_tiles * loaded,
        "split_bytes": split_traffic(w, values),
        "k_tiles": p.split_tiles,
    }
    return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}


def tile_defines(w: Gemm, v: Mapping[str, Any], p: Plan) -> dict[str, int | str]:
    """The stub's lines for the knobs of `tile_knobs`, and what the kernel must agree with."""
    return {
        "KT_ACC_HALF": int(w.acc == "fp16"),
        "KT_BM": p.bm, "KT_BN": v["bn"], "KT_BK": v["bk"],
        "KT_STAGES": v["stages"], "KT_SWIZZLE": int(v["layout"] == "swizzle"),
        "KT_COPY_A": p.width_or_zero("a"), "KT_COPY_B": p.width_or_zero("b"),
        "KT_PREFETCH": v["prefetch"], "KT_STORE": f"KT_STORE_{str(v['store']).upper()}",
        **raster_defines(v), **split_defines(v),
        "KT_FRAGMENT_STAGES": v["fragments"], "KT_UNROLL": v["k"],
        "KT_WARPS_M": v["warps_m"], "KT_WARPS_N": v["warps_n"], "KT_WARPS_K": v["warps_k"],
        "KT_BLOCKS": v["blocks"], "KT_STAGGER": int(v["stagger"]), "KT_EARLY": int(v["early"]),
        "KT_EXPECT_SHARED_BYTES": int(p.shared_bytes),
        "KT_EXPECT_WORKSPACE_BYTES": p.workspace_bytes,
        "KT_EXPECT_ZEROED_BYTES": p.split.zeroed,
    }  # fmt: skip


def _stores(w: Gemm) -> tuple[str, ...]:
    aligned = output_group(w) * output_bytes(w) == 16
    return _STORES if aligned else tuple(s for s in _STORES if s != "wide")


def _exchange(w: Gemm) -> int:
    """Columns of a warp's tile that are put together in one 16-byte store per lane."""
    return 32 if output_bytes(w) == 2 else 16
