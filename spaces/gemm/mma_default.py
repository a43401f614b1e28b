"""The default θ of `mma`: a hand-written heuristic over tiles that people use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kt.spaces.cuda import acc_bytes, element_bytes, is_legal, output_bytes
from kt.spaces.extents import ceil_div
from kt.spaces.family import Rule
from kt.spaces.target import Target
from kt.spaces.theta import Value
from kt.spaces.workload import Gemm

from .cuda import GROUPS
from .mma_plan import Plan

# Cycles and bytes a cycle of one SM, roughly those of sm_90; they only rank default tiles.
_MULTIPLY_ADDS = 1024  # of 16-bit elements by mma.sync
_L2_BYTES = 32
_TILE_LATENCY = 150  # from one tile of k to the next, at least
_SPLIT_LATENCY = 3000
_LAUNCH = 2000

_SHAPES = (
    (128, 256, 2, 4), (256, 128, 4, 2), (128, 128, 2, 2), (128, 64, 2, 2), (64, 128, 2, 2),
    (64, 64, 2, 2), (32, 128, 1, 4), (128, 32, 4, 1), (32, 64, 1, 4), (64, 32, 2, 2),
    (16, 128, 1, 4), (16, 64, 1, 4), (128, 16, 4, 1), (64, 16, 4, 1), (32, 32, 2, 2),
    (16, 32, 1, 2), (32, 16, 2, 1), (16, 16, 1, 1),
)  # fmt: skip
TILES = tuple(
    dict(zip(("bm", "bn", "warps_m", "warps_n"), shape, strict=True)) for shape in _SHAPES
)
"""Tiles that people use, largest first."""

PlanOf = Callable[[Mapping[str, Any]], Plan]


def ranked_values(
    w: Gemm, target: Target, knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule],
    fixed: Mapping[str, Value], plan: PlanOf, shapes: Sequence[Mapping[str, int]] = TILES,
) -> list[Mapping[str, Value]]:  # fmt: skip
    """Tiles of `shapes` by modelled time, each with as many stages as shared memory holds.

    The first is the default. `knobs` holds the choices by short name, `fixed` the values of those
    that are not of the tile.
    """
    search = _Search(w, target, knobs, rules, fixed, plan)
    fitting = [t for t in shapes if all(n in knobs[name] for name, n in t.items())]
    found = [x for x in map(search.complete, fitting) if x]
    assert found, f"no default tile for '{w}' on {target.name}"
    return [values for _, values in sorted(found, key=lambda x: x[0])]


@dataclass(frozen=True)
class _Search:
    """What completing a tile looks at."""

    w: Gemm
    target: Target
    knobs: Mapping[str, Sequence[Any]]
    rules: Sequence[Rule]
    fixed: Mapping[str, Value]
    plan: PlanOf

    def complete(self, tile: Mapping[str, int]) -> tuple[float, dict[str, Value]] | None:
        """(modelled time, values) of a tile: split-K fills the SMs, stages fill shared memory."""
        w, cores, knobs = self.w, self.target.cores, self.knobs
        bk = max(b for b in knobs["bk"] if b * element_bytes(w) <= 128 or b == knobs["bk"][0])
        p = self.plan({**self.fixed, **tile, "bk": bk})
        if p.bm * p.bn >= 128 * 256:
            bk = min(bk, max(64 // element_bytes(w), knobs["bk"][0]))
        k_tiles = ceil_div(w.k, bk)
        wanted = min(cores // p.blocks, k_tiles // 4) if p.blocks < cores else 1
        splits = {1, max((s for s in knobs["split_k"] if s <= max(wanted, 1)), default=1)}
        found = [self._with_split({**tile, "bk": bk}, split) for split in splits]
        return min((x for x in found if x), key=lambda x: x[0], default=None)

    def _with_split(
        self, tile: Mapping[str, int], split: int
    ) -> tuple[float, dict[str, Value]] | None:
        knobs = self.knobs
        values: dict[str, Any] = {
            **self.fixed, **tile, "layout": knobs["layout"][0],
            "prefetch": 128, "store": "staged",
            "raster": "m", "group": 1, "split_k": split, "split_mode": "last",
            "fragments": 2, "k": 1, "warps_k": 1, "blocks": 1, "stagger": False,
            "early": knobs["early"][-1],
        }  # fmt: skip
        p = self.plan(values)
        if int(p.steps) < 2:
            values["fragments"] = 1
        values["group"] = max(
            g for g in GROUPS if g in knobs["group"] and (g == 1 or (g < 2 * p.m_blocks and g <= 8))
        )
        if min(p.m_blocks, p.n_blocks) == 1:
            values["group"] = 1
        for stages in sorted((s for s in knobs["stages"] if s <= 5), reverse=True):
            values["stages"] = stages
            if is_legal(self.rules, values):
                return _modelled_time(self.w, self.target, values, self.plan(values)), values
        return None


def _modelled_time(w: Gemm, target: Target, values: Mapping[str, Any], p: Plan) -> float:
    """Cycles of one SM for its tiles, by the slowest of tensor cores, shared memory and L2."""
    ctas = p.blocks * values["split_k"]
    depth, size = p.split_tiles * p.bk, p.a.bytes
    math = p.bm * p.bn * depth * size / 2 / _MULTIPLY_ADDS
    shared = (p.bm * values["warps_n"] + p.bn * values["warps_m"]) * depth * size / 128
    loaded = (p.fresh_rows + p.bn) * depth * size / _L2_BYTES
    filling = (values["stages"] + p.split_tiles) * _TILE_LATENCY
    cta = max(math, shared, loaded) + p.bm * p.bn * output_bytes(w) / _L2_BYTES
    if values["split_k"] > 1:
        cta += _SPLIT_LATENCY + (values["split_k"] + 1) * p.bm * p.bn * acc_bytes(w) / _L2_BYTES
    rounds = ceil_div(ctas, target.cores)
    return float(max(rounds * cta, filling) + _LAUNCH)
