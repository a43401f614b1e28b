"""`split_kv`: attention of few queries, whose keys are dealt out (source: `split_kv.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kt.spaces.cuda import (
    Floats,
    early_launch,
    grid_rule,
    occupancy,
    register_limit,
    residency_rules,
    rule,
)
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
    copies,
    refuses_mma_attention,
    rescale_define,
)
from .problem import as_attention, group
from .split_kv_plan import ROW_TILE, SplitPlan, likely_values, packed_rows

_MOST_ROWS = 128
"""Queries times heads of a group: beyond, tiles of rows read K and V too often."""
_MOST_M_TILES = 2
_KEYS = (16, 32, 64)
_STAGES = (2, 3, 4, 6, 8)
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
_SPLIT_WAVES = 8
"""This many CTAs for each SM keep it busy without splits."""
_COMBINES = ("last", "kernel")
_COMBINE_SHARED = 48 * 1024
"""Shared memory that every kernel may use without asking."""


class AttentionSplitKv(RankedFamily):
    """Query heads of a group packed as rows; every warp streams its own keys."""

    name = "split_kv"
    empty: Mapping[str, str] = {"unroll": "a chunk of keys is small, and always unrolled"}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        why = refuses_mma_attention(workload, target)
        if why is not None:
            return why
        w = as_attention(workload)
        if packed_rows(w) > _MOST_ROWS:
            rows = f"{w.s} queries of {group(w)} heads"
            return f"serves up to {_MOST_ROWS} rows that share keys, not {rows}"
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_attention(workload)
        rows, early = packed_rows(w), (False, True) if early_launch(target) else (False,)
        m_tiles = tuple(m for m in range(1, _MOST_M_TILES + 1) if rows > ROW_TILE * (m - 1))
        chunks = -(-w.kv_len // _KEYS[0])
        splits = tuple(s for s in _SPLITS if s <= chunks)
        return [
            Ordinal("tile", "m_tiles", m_tiles),
            Ordinal("tile", "keys", tuple(k for k in _KEYS if k == _KEYS[0] or k < 2 * w.kv_len)),
            Ordinal("mem", "stages", tuple(s for s in _STAGES if s == 2 or s <= chunks + 1)),
            Categorical("mem", "q", ("registers", "shared")),
            Ordinal("mem", "prefetch", (0, 128, 256)),
            Categorical("mem", "warm", early),
            Categorical("perm", "order", ("splits", "heads") if len(splits) > 1 else ("splits",)),
            Ordinal("fusion", "splits", splits),
            Categorical("fusion", "combine", _COMBINES if len(splits) > 1 else _COMBINES[:1]),
            Categorical("fusion", "rescale", RESCALES),
            Ordinal("map", "warps", (1, 2, 4, 8)),
            Ordinal("map", "blocks", (1, 2, 3, 4, 6, 8)),
            Categorical("sync", "early", early),
        ]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_attention(workload)

        @once
        def plan(v: Any) -> SplitPlan:
            return SplitPlan(w, v)

        full = _SPLIT_WAVES * target.cores
        return [
            rule(
                "splits",
                lambda v: v["splits"] <= plan(v).chunks,
                lambda v: f"{v['splits']} splits of {plan(v).chunks} chunks of keys",
            ),
            rule(
                "split-waves",
                lambda v: (v["splits"] == 1) | (plan(v).tiles * (v["splits"] - 1) < full),
                lambda v: f"{plan(v).tiles} tiles fill {target.cores} SMs with fewer splits",
            ),
            rule(
                "combine",
                lambda v: (
                    (v["splits"] > 1)
                    | (
                        (np.asarray(v["combine"]) == _COMBINES[0])
                        & (np.asarray(v["order"]) == "splits")
                    )
                ),
                "without splits there is nothing to order or combine",
            ),
            rule(
                "combine-rows",
                lambda v: plan(v).shares_bytes <= _COMBINE_SHARED,
                lambda v: f"{v['splits']} splits of {plan(v).rows} rows are too many to combine",
            ),
            rule(
                "idle-warps",
                lambda v: v["warps"] <= np.maximum(plan(v).split_chunks, 1),
                lambda v: f"{v['warps']} warps for {plan(v).split_chunks} chunks of keys",
            ),
            rule(
                "stages",
                lambda v: (v["stages"] == 2) | (v["stages"] <= plan(v).warp_chunks + 1),
                lambda v: f"{v['stages']} stages for {plan(v).warp_chunks} chunks of a warp",
            ),
            rule(
                "copies",
                lambda v: copies(w, v["keys"], 32) <= MOST_COPIES,
                lambda v: f"{int(copies(w, v['keys'], 32))} copies a lane exceed {MOST_COPIES}",
            ),
            rule(
                "warm",
                lambda v: (np.asarray(v["warm"]) * 1 == 0) | (np.asarray(v["early"]) * 1 == 1),
                "only a kernel that starts early has time to warm L2",
            ),
            grid_rule(lambda v: plan(v).tiles * v["splits"]),
            *residency_rules(target, plan),
        ]

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        choices = {knob.name: knob.choices for knob in self.knobs(workload, target)}
        return likely_values(as_attention(workload), target, choices, self.rules(workload, target))

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_attention(workload)
        p = SplitPlan(w, values)
        resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
        ctas = p.tiles * values["splits"]
        waves = ctas / (resident * target.cores)
        at_once = np.minimum(resident, -(-ctas // target.cores))
        found = {
            "threads": p.threads,
            "shared_bytes": p.shared_bytes,
            "registers": p.registers,
            "register_share": p.registers / register_limit(target, p.threads, values["blocks"]),
            "resident_ctas": resident,
            "resident_warps": resident * values["warps"],
            "waves": waves,
            "wave_efficiency": waves / np.ceil(waves),
            "padding": p.row_tiles * p.bm / packed_rows(w),
            "chunks": p.warp_chunks,
            "idle_share": 1 - p.split_chunks / (p.warp_chunks * values["warps"]),
            "bytes_in_flight": at_once * p.ring_bytes * (values["stages"] - 1) / values["stages"],
            "intensity": p.rows * 2 / values["keys"] + p.rows / 2,
            "combine_bytes": p.combine_bytes * 2.0,
            "launches": 1.0 + (np.asarray(values["combine"]) == "kernel"),
        }
        return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_attention(workload)
        v: dict[str, Any] = {name: value for _, name, value in theta.items()}
        p = SplitPlan(w, v)
        defines = {
            **attention_defines(w),
            "KT_M_TILES": v["m_tiles"], "KT_KEYS": v["keys"],
            "KT_STAGES": v["stages"], "KT_HOLD_Q": int(v["q"] == "registers"),
            "KT_PREFETCH": v["prefetch"], "KT_WARM": int(v["warm"]),
            "KT_SPLITS_TOGETHER": int(v["order"] == "splits"),
            "KT_SPLITS": v["splits"], "KT_COMBINE": f"KT_COMBINE_{str(v['combine']).upper()}",
            **rescale_define(v),
            "KT_WARPS": v["warps"], "KT_BLOCKS": v["blocks"], "KT_EARLY": int(v["early"]),
            "KT_EXPECT_SHARED_BYTES": int(p.shared_bytes),
            "KT_EXPECT_WORKSPACE_BYTES": p.workspace_bytes,
            "KT_EXPECT_ZEROED_BYTES": p.counter_bytes,
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("split_kv.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source, launches=p.launches(),
            workspace_bytes=p.workspace_bytes, zeroed_bytes=p.counter_bytes,
        )  # fmt: skip
