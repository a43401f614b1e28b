"""`mma`: attention by mma.sync for sm_80 and later (source: `mma.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kt.spaces.cuda import (
    Floats,
    grid_rule,
    occupancy,
    register_limit,
    residency_rules,
    rule,
)
from kt.spaces.extents import until_covered
from kt.spaces.family import Columns, RankedFamily, Rule, once
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Workload

from .cuda import (
    MOST_COPIES,
    RESCALES,
    attention_defines,
    refuses_mma_attention,
    rescale_define,
    wide_rows,
)
from .mma_plan import Plan, likely_values
from .problem import as_attention

_BM = (16, 32, 48, 64, 96, 128, 192, 256)
_BN = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192)
_STAGES = (1, 2, 3, 4)
_WARPS = (1, 2, 4, 8)
_MOST_M_TILES = 4
_PREFETCH = (0, 128, 256)
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_STORES = ("staged", "direct")

_MOST_SPILL_BYTES = 160
"""A few words spilled around the loop over keys cost less than a smaller tile without."""


class AttentionMma(RankedFamily):
    """Queries in tiles, K and V through a ring of cp.async stages, probabilities in registers."""

    name = "mma"
    empty: Mapping[str, str] = {}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return refuses_mma_attention(workload, target)

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_attention(workload)
        bns = until_covered(_BN, w.kv_len)
        tiles = -(-w.kv_len // bns[0])
        heads = tuple(h for h in _HEADS if h == 1 or h < 2 * w.b * w.h)
        return [
            Ordinal("tile", "bm", until_covered(_BM, w.s)),
            Ordinal("tile", "bn", bns),
            Ordinal("mem", "stages", tuple(s for s in _STAGES if s <= 2 or s <= tiles)),
            Categorical("mem", "layout", ("swizzle", "padded")),
            Categorical("mem", "q", ("shared", "registers")),
            Ordinal("mem", "prefetch", _PREFETCH),
            Categorical("mem", "store", _STORES if wide_rows(w) else _STORES[1:]),
            Ordinal("perm", "heads", heads if w.s > _BM[0] else heads[:1]),
            Categorical("fusion", "rescale", RESCALES),
            Categorical("unroll", "overlap", (False, True)),
            Ordinal("map", "warps", _WARPS),
            Ordinal("map", "blocks", (1, 2, 3, 4)),
            Categorical("sync", "barriers", ("separate", "joint")),
        ]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_attention(workload)

        @once
        def plan(v: Any) -> Plan:
            return Plan(w, v)

        return [
            rule(
                "warp-tile",
                lambda v: v["bm"] % (16 * v["warps"]) == 0,
                lambda v: f"{v['warps']} warps do not divide {v['bm']} queries into tiles of 16",
            ),
            rule(
                "warp-rows",
                lambda v: plan(v).m_tiles <= _MOST_M_TILES,
                lambda v: f"{plan(v).m_tiles * 16} queries a warp exceed {_MOST_M_TILES * 16}",
            ),
            rule(
                "barriers",
                lambda v: (plan(v).joint == 0) | (v["stages"] >= 2),
                "joint barriers fill one stage while another is read: they need two",
            ),
            rule(
                "overlap",
                lambda v: (plan(v).overlap == 0) | (plan(v).joint == 1),
                "the next tile's logits need its keys before this tile's values: joint barriers",
            ),
            rule(
                "stages",
                lambda v: v["stages"] <= np.maximum(plan(v).key_tiles, 1 + plan(v).joint),
                lambda v: f"{v['stages']} stages for {plan(v).key_tiles} tiles of keys",
            ),
            rule(
                "copies",
                lambda v: plan(v).copies <= MOST_COPIES,
                lambda v: f"{int(plan(v).copies)} copies a thread exceed {MOST_COPIES}",
            ),
            rule(
                "heads",
                lambda v: (v["heads"] == 1) | (plan(v).m_blocks > 1),
                "with one tile of queries a head, heads are one line, which has one order",
            ),
            grid_rule(lambda v: plan(v).blocks),
            *residency_rules(target, plan),
        ]

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        choices = {knob.name: knob.choices for knob in self.knobs(workload, target)}
        return likely_values(as_attention(workload), target, choices, self.rules(workload, target))

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_attention(workload)
        p = Plan(w, values)
        resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
        waves = p.blocks / (resident * target.cores)
        found = {
            "threads": p.threads,
            "shared_bytes": p.shared_bytes,
            "registers": p.registers,
            "register_share": p.registers / register_limit(target, p.threads, values["blocks"]),
            "fragments": p.fragments,
            "resident_ctas": resident,
            "resident_warps": resident * p.threads // 32,
            "waves": waves,
            "wave_efficiency": waves / np.ceil(waves),
            "padding": p.computed / max(1.0, float(w.visible)),
            "masked_share": p.masked_share,
            "key_tiles": p.key_tiles,
            "warp_intensity": p.warp_intensity,
            "barriers_per_key": (2 - p.joint) / p.bn,
            "bytes_in_flight": resident * p.stage_bytes * (values["stages"] - p.joint / 2),
            "l2_bytes": p.blocks * p.mean_tiles * p.stage_bytes,
            "wave_l2": p.wave_kv_bytes(resident * target.cores) / target.l2_bytes,
        }
        return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_attention(workload)
        v: dict[str, Any] = {name: value for _, name, value in theta.items()}
        p = Plan(w, v)
        defines = {
            **attention_defines(w),
            "KT_BM": v["bm"], "KT_BN": v["bn"],
            "KT_STAGES": v["stages"], "KT_SWIZZLE": int(v["layout"] == "swizzle"),
            "KT_HOLD_Q": int(v["q"] == "registers"),
            "KT_PREFETCH": v["prefetch"], "KT_STORE": f"KT_STORE_{str(v['store']).upper()}",
            "KT_HEADS_TOGETHER": v["heads"], **rescale_define(v),
            "KT_OVERLAP": int(v["overlap"]),
            "KT_WARPS": v["warps"], "KT_BLOCKS": v["blocks"],
            "KT_JOINT": int(v["barriers"] == "joint"),
            "KT_EXPECT_SHARED_BYTES": int(p.shared_bytes),
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("mma.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source,
            launches=(p.launch(),), most_spill_bytes=_MOST_SPILL_BYTES,
        )  # fmt: skip
