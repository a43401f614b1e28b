"""`simt`: matrix product in fp32 or fp64 by the multiply-add units (source: `simt.cuh`)."""

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
    is_legal,
    occupancy,
    register_limit,
    residency_rules,
    rule,
)
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.family import Columns, RankedFamily, Rule, once
from kt.spaces.kernel import Kernel, Launch, expand, stub
from kt.spaces.knob import Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Gemm, Workload

from .cuda import (
    GROUPS,
    SplitWorkspace,
    as_gemm,
    most_splits,
    problem_defines,
    raster_defines,
    raster_knobs,
    raster_rules,
    reduce_launch,
    refuses_cuda_gemm,
    split_defines,
    split_knobs,
    split_rules,
    split_traffic,
    split_waves_rule,
    split_workspace,
    wave_footprint,
)

_THREAD_TILE = (4, 8, 12, 16)
_BLOCK_K = (8, 16, 32)
_STAGES = (2, 3, 4, 5, 6)
_LANES_M = (2, 4, 8, 16)
_WARPS = (1, 2, 4, 8)
_MOST_WARPS = 8
_SPREADS = (1, 2, 4)
_SMALLEST, _LARGEST = 8, 256
_ALWAYS = 64
"""A warp's tile is at least this long one way."""
_ADDRESS_REGISTERS = 36
_MOST_COPIES = 32


class _Plan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, w: Gemm, values: Mapping[str, Any]) -> None:
        self.w, self.v, self.size = w, values, element_bytes(w)

    @cached_property
    def bm(self) -> Any:
        return self.v["warps_m"] * self.v["lanes_m"] * self.v["tm"]

    @cached_property
    def bn(self) -> Any:
        return self.v["warps_n"] * (32 // self.v["lanes_m"]) * self.v["tn"]

    @cached_property
    def threads(self) -> Any:
        return 32 * self.v["warps_m"] * self.v["warps_n"]

    @cached_property
    def m_blocks(self) -> Any:
        return ceil_div(self.w.m, self.bm)

    @cached_property
    def n_blocks(self) -> Any:
        return ceil_div(self.w.n, self.bn)

    @cached_property
    def blocks(self) -> Any:
        """Tiles of C over all batches."""
        return self.m_blocks * self.n_blocks * self.w.batch

    @cached_property
    def k_tiles(self) -> Any:
        return ceil_div(self.w.k, self.v["bk"])

    @cached_property
    def split_tiles(self) -> Any:
        """The most tiles of k that one CTA works on."""
        return ceil_div(self.k_tiles, self.v["split_k"])

    @cached_property
    def stage_bytes(self) -> Any:
        pads = VECTOR * (self.w.layout[0] == "n"), VECTOR * (self.w.layout[1] == "t")
        rows = (self.bm * self.size + pads[0], self.bn * self.size + pads[1])
        return sum(round_up(self.v["bk"] * row, 128) for row in rows)

    @cached_property
    def shared_bytes(self) -> Any:
        return self.v["stages"] * self.stage_bytes

    @cached_property
    def copies(self) -> Any:
        """Copies into shared memory that a thread starts for one tile of k."""
        w, elements = self.w, VECTOR // self.size
        wide_a = 1 if w.layout[0] == "n" else alignment(w.m, elements)
        wide_b = 1 if w.layout[1] == "t" else alignment(w.n, elements)
        bk = self.v["bk"]
        return ceil_div(self.bm * bk, wide_a * self.threads) + ceil_div(
            self.bn * bk, wide_b * self.threads
        )

    @cached_property
    def registers(self) -> Any:
        """Estimate from above of what the compiler needs to keep everything in registers."""
        tm, tn = self.v["tm"], self.v["tn"]
        words = self.size // 4
        functions = 16 * (words - 1) * bool({"gelu", "silu"} & set(self.w.epilogue))
        values = words * (tm * tn + (tm + tn) * self.v["fragments"])
        return values + functions + self.copies + _ADDRESS_REGISTERS

    @cached_property
    def split(self) -> SplitWorkspace:
        """Of one θ only."""
        v = self.v
        return split_workspace(
            self.w, self.blocks, self.bm * self.bn, v["split_k"], v["split_mode"]
        )

    def launches(self) -> tuple[Launch, ...]:
        """Of one θ only."""
        grid = (self.blocks * self.v["split_k"], 1, 1)
        early, block = bool(self.v["early"]), (self.threads, 1, 1)
        main = Launch("kt_kernel", grid, block, shared_bytes=self.shared_bytes, early=early)
        by_kernel = self.v["split_k"] > 1 and self.v["split_mode"] == "kernel"
        return (main, reduce_launch(self.w, early)) if by_kernel else (main,)


class GemmSimt(RankedFamily):
    """Tiles of C in registers, operands through a ring of cp.async stages."""

    name = "simt"
    empty: Mapping[str, str] = {}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return refuses_cuda_gemm(workload, target, ("fp32", "fp64"), "computes in")

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_gemm(workload)
        tiles = _THREAD_TILE if element_bytes(w) == 4 else _THREAD_TILE[:2]
        m_blocks, n_blocks = ceil_div(w.m, _SMALLEST), ceil_div(w.n, _SMALLEST)
        grid = ceil_div(w.m, _LARGEST) * ceil_div(w.n, _LARGEST) * w.batch
        bks = tuple(b for b in _BLOCK_K if b == _BLOCK_K[0] or b < 2 * w.k)
        k_tiles = ceil_div(w.k, bks[0])
        return [
            Ordinal("tile", "tm", tiles),
            Ordinal("tile", "tn", tiles),
            Ordinal("tile", "bk", bks),
            Ordinal("mem", "stages", tuple(s for s in _STAGES if s == 2 or s <= k_tiles + 1)),
            *raster_knobs(m_blocks, n_blocks),
            *split_knobs(most_splits(k_tiles, grid, target)),
            Ordinal("unroll", "fragments", (1, 2)),
            Ordinal("map", "lanes_m", _LANES_M),
            Ordinal("map", "warps_m", _WARPS),
            Ordinal("map", "warps_n", _WARPS),
            Ordinal("map", "blocks", (1, 2, 3, 4)),
            Ordinal("sync", "spread", _SPREADS),
            early_knob(target),
        ]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_gemm(workload)

        @once
        def plan(v: Any) -> _Plan:
            return _Plan(w, v)

        return [
            rule(
                "warps",
                lambda v: plan(v).threads <= 32 * _MOST_WARPS,
                lambda v: f"{plan(v).threads // 32} warps exceed {_MOST_WARPS}",
            ),
            rule(
                "block",
                lambda v: (plan(v).bm <= _fitting(w.m)) & (plan(v).bn <= _fitting(w.n)),
                lambda v: f"tiles of {plan(v).bm} x {plan(v).bn} for C of {w.m} x {w.n}",
            ),
            rule(
                "copies",
                lambda v: plan(v).copies <= _MOST_COPIES,
                lambda v: f"{plan(v).copies} copies a thread exceed {_MOST_COPIES}",
            ),
            rule(
                "spread",
                lambda v: v["spread"] <= plan(v).copies,
                lambda v: f"{plan(v).copies} copies a thread do not make {v['spread']} groups",
            ),
            rule(
                "stages",
                lambda v: (v["stages"] == 2) | (v["stages"] <= plan(v).split_tiles + 1),
                lambda v: f"{v['stages']} stages for {plan(v).split_tiles} tiles along k",
            ),
            *raster_rules(lambda v: plan(v).m_blocks, lambda v: plan(v).n_blocks),
            *split_rules(lambda v: plan(v).blocks, lambda v: plan(v).k_tiles),
            split_waves_rule(target, lambda v: plan(v).blocks),
            *residency_rules(target, plan),
        ]

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        return _ranked(as_gemm(workload), target, self)

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_gemm(workload)
        p = _Plan(w, values)
        resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
        ctas = p.blocks * values["split_k"]
        waves = ctas / (resident * target.cores)
        at_once = resident * target.cores
        loaded = (p.bm + p.bn) * values["bk"] * p.size
        footprint = wave_footprint(values, p.m_blocks, p.n_blocks, p.bm, p.bn, at_once)
        padded = p.m_blocks * p.bm * p.n_blocks * p.bn * round_up(w.k, values["bk"])
        tm, tn = values["tm"], values["tn"]
        found = {
            "bm": p.bm,
            "bn": p.bn,
            "threads": p.threads,
            "shared_bytes": p.shared_bytes,
            "registers": p.registers,
            "register_share": p.registers / register_limit(target, p.threads, values["blocks"]),
            "resident_ctas": resident,
            "resident_warps": resident * p.threads // 32,
            "waves": waves,
            "wave_efficiency": waves / np.ceil(waves),
            "padding": padded / (w.m * w.n * w.k),
            "intensity": p.bm * p.bn / ((p.bm + p.bn) * p.size),
            "thread_intensity": tm * tn / ((tm + tn) * p.size),
            "copies": p.copies,
            "bytes_in_flight": resident * (values["stages"] - 1) * loaded,
            "wave_bytes": footprint * w.k * p.size / values["split_k"],
            "l2_bytes": ctas * p.split_tiles * loaded,
            "split_bytes": split_traffic(w, values),
            "k_tiles": p.split_tiles,
        }
        return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_gemm(workload)
        v: dict[str, Any] = {name: value for _, name, value in theta.items()}
        p = _Plan(w, v)
        defines = {
            **problem_defines(w),
            "KT_TM": v["tm"], "KT_TN": v["tn"], "KT_BK": v["bk"], "KT_STAGES": v["stages"],
            **raster_defines(v), **split_defines(v),
            "KT_FRAGMENT_STAGES": v["fragments"], "KT_LANES_M": v["lanes_m"],
            "KT_WARPS_M": v["warps_m"], "KT_WARPS_N": v["warps_n"], "KT_BLOCKS": v["blocks"],
            "KT_SPREAD": v["spread"], "KT_EARLY": int(v["early"]),
            "KT_EXPECT_SHARED_BYTES": p.shared_bytes,
            "KT_EXPECT_WORKSPACE_BYTES": p.split.bytes,
            "KT_EXPECT_ZEROED_BYTES": p.split.zeroed,
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("simt.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source,
            launches=p.launches(), workspace_bytes=p.split.bytes, zeroed_bytes=p.split.zeroed,
        )  # fmt: skip


def _fitting(extent: int) -> int:
    """The largest tile worth trying for an extent: one more than covers it is only padding."""
    return min(_LARGEST, max(_ALWAYS, 1 << (extent - 1).bit_length()))


_ENOUGH_WARPS = 8  # on one SM
_SPLIT_COST = 500_000  # in multiply-adds
# tm, tn, lanes_m, warps_m, warps_n
_SHAPES = (
    (8, 16, 8, 1, 2), (8, 16, 8, 2, 2), (8, 8, 4, 4, 2), (8, 8, 4, 2, 2), (8, 8, 4, 2, 1),
    (8, 4, 4, 2, 2), (4, 4, 4, 2, 2), (4, 4, 2, 1, 1), (4, 4, 16, 1, 1), (4, 4, 4, 1, 1),
    (4, 4, 2, 1, 2), (4, 4, 16, 2, 1),
)  # fmt: skip


def _ranked(w: Gemm, target: Target, family: GemmSimt) -> list[Mapping[str, Value]]:
    """Tiles by modelled time, split along k where they leave SMs idle; the first is the default."""
    knobs: dict[str, Sequence[Any]] = {k.name: k.choices for k in family.knobs(w, target)}
    rules = family.rules(w, target)
    ranked: list[tuple[float, dict[str, Value]]] = []
    for tm, tn, lanes_m, warps_m, warps_n in _SHAPES:
        for bk in knobs["bk"][1::-1]:
            values: dict[str, Any] = {
                "tm": tm, "tn": tn, "bk": bk, "stages": min(3, knobs["stages"][-1]),
                "raster": "m", "group": 1, "split_k": 1, "split_mode": "last", "fragments": 2,
                "lanes_m": lanes_m, "warps_m": warps_m, "warps_n": warps_n, "blocks": 1,
                "early": False,
            }  # fmt: skip
            p = _Plan(w, values)
            values["spread"] = max(s for s in _SPREADS if s <= p.copies)
            if p.blocks < target.cores:
                wanted = min(target.cores // p.blocks, max(p.k_tiles // 8, 1))
                values["split_k"] = max(s for s in knobs["split_k"] if s <= wanted)
            if min(p.m_blocks, p.n_blocks) > 1:
                fits = [g for g in GROUPS if g in knobs["group"] and g < 2 * p.m_blocks and g <= 8]
                values["group"] = max(fits)
            values["stages"] = max(
                s
                for s in knobs["stages"]
                if s <= 3 and (s == 2 or s <= _Plan(w, values).split_tiles + 1)
            )
            if is_legal(rules, values):
                ranked.append((_modelled_time(w, target, values), values))
    assert ranked, f"no default tile for '{w}' on {target.name}"
    return [values for _, values in sorted(ranked, key=lambda x: x[0])]


def _modelled_time(w: Gemm, target: Target, values: Mapping[str, Any]) -> float:
    """Multiply-adds of one SM, more where vectors from shared memory or a few warps hold it up."""
    p = _Plan(w, values)
    rounds = ceil_div(p.blocks * values["split_k"], target.cores)
    depth = p.split_tiles * values["bk"]
    reads = 1 + 1.5 * (values["tm"] + values["tn"]) / (values["tm"] * values["tn"])
    resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
    warps = p.threads // 32 * min(rounds, int(resident))
    idle = max(1.0, _ENOUGH_WARPS / warps)
    split = _SPLIT_COST * (values["split_k"] > 1)
    return float(rounds * p.bm * p.bn * depth * reads * idle + split)
