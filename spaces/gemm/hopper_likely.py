"""Likely θ of products on wgmma: tiles of every size, and ways to share k, by estimated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.cuda import legal
from kt.spaces.extents import round_up
from kt.spaces.family import Rule
from kt.spaces.theta import Value

from .cuda import GROUPS
from .hopper import PlanOf
from .hopper_default import GROUP, common_values, with_stages
from .hopper_plan import SWIZZLE, surely_at_once
from .hopper_time import estimated_cycles

MOST = 12
_CONSUMERS = {64: 1, 128: 2, 192: 3, 256: 2}
"""Warpgroups that share a tile of so many rows."""
_WIDE_BOX = 32
"""Columns of a box that the TMA stores fast; narrower ones only where the tile is narrow."""
_DEPTHS = (12, 8, 6, 4, 3, 2)
"""Stages that are tried for the ranking."""

_Columns = dict[str, NDArray[Any]]


def likely_values(
    plan: PlanOf, knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule]
) -> list[Mapping[str, Value]]:
    """The best θ of each tile and way to share k, by estimated cycles; at most `MOST`.

    They are ranked with few choices of stages, and then get as many as fit, and buffers.
    """
    columns = _grid(plan, knobs)
    time = _ranked(plan, columns, rules)
    found: dict[tuple[Any, ...], Mapping[str, Value]] = {}
    for i in np.argsort(time, kind="stable")[: int(np.isfinite(time).sum())].tolist():
        values = {name: column[i].item() for name, column in columns.items()}
        key = tuple(values[name] for name in ("bm", "bn", "split_k", "cluster_k", "pingpong"))
        if key not in found and (whole := with_stages(values, knobs, rules)):
            found[key] = whole
            if len(found) == MOST:
                break
    return list(found.values())


def _grid(plan: PlanOf, knobs: Mapping[str, Sequence[Any]]) -> _Columns:
    """All combinations; what is left of θ follows from them."""
    sizes = [(bm, bn) for bm in knobs["bm"] for bn in knobs["bn"]]
    shared = [(s, 1) for s in knobs["split_k"]] + [(1, c) for c in knobs["cluster_k"] if c > 1]
    copies = knobs.get("copy_a", ("",))
    turns = [(x, y) for x in knobs["persistent"] for y in knobs["pingpong"] if x or not y]
    blocks = [x for x in knobs["blocks"] if x <= 2]
    # Pairs of CTAs along m took as long as those along n, or less, in nearly all logged pairs of θ.
    axis = next((name for name in ("cluster_m", "cluster_n") if 2 in knobs[name]), None)
    rows = list(product(sizes, (1, 2) if axis else (1,), shared, turns, copies, blocks))
    bn = np.array([row[0][1] for row in rows])
    bm = np.array([row[0][0] for row in rows])
    pingpong = np.array([row[3][1] for row in rows], dtype=bool)
    columns: _Columns = {
        "bm": bm, "bn": bn,
        "consumers": np.where(pingpong, 2, np.array([_CONSUMERS[x] for x in bm.tolist()])),
        "split_k": np.array([row[2][0] for row in rows]),
        "cluster_k": np.array([row[2][1] for row in rows]),
        "persistent": np.array([row[3][0] for row in rows], dtype=bool),
        "pingpong": pingpong, "blocks": np.array([row[5] for row in rows]),
    }  # fmt: skip
    if axis:
        columns[axis] = np.array([row[1] for row in rows])
    fixed = common_values(knobs)
    columns |= {n: np.full(len(rows), v) for n, v in fixed.items() if n not in columns}
    if "copy_a" in knobs:
        columns["copy_a"] = np.array([row[4] for row in rows])
    p = plan(columns)
    if "swizzle_b" in knobs:  # slabs of 64 bytes where they hold fewer unused columns; 32 are slow
        half, whole = (round_up(bn, row // p.b.bytes) for row in (SWIZZLE // 2, SWIZZLE))
        columns["swizzle_b"] = np.where(half < whole, SWIZZLE // 2, SWIZZLE)
    wide = (p.box_n >= _WIDE_BOX) | (bn < 2 * _WIDE_BOX)
    if knobs["store"][-1] == "rows":
        wide |= ~p.persistent  # whole rows at once
    staged = p.fills_boxes & (columns["cluster_k"] == 1) & wide
    columns["store"] = np.where(staged, knobs["store"][-1], "direct")
    lines = np.minimum(p.m_clusters, p.n_clusters) == 1
    for group in sorted(g for g in GROUPS if g in knobs["group"] and g <= GROUP):
        fits = ~lines & (group < 2 * p.m_clusters)
        columns["group"] = np.where(fits, group, columns["group"])
    parts = columns["cluster_k"]
    resident = p.tiles * parts <= surely_at_once(p.target, p.blocks_sm, parts)
    kept = (parts == 1) | resident
    return {name: column[kept] for name, column in columns.items()}


def _ranked(plan: PlanOf, columns: _Columns, rules: Sequence[Rule]) -> NDArray[np.float64]:
    """Estimated cycles with as many stages as are legal; infinite where none is."""
    time = np.full(len(columns["bm"]), np.inf)
    for in_flight, stages in product((1, 0), _DEPTHS):
        left = np.flatnonzero(np.isinf(time))
        some = {name: column[left] for name, column in columns.items()}
        some |= {"in_flight": np.full(len(left), in_flight), "stages": np.full(len(left), stages)}
        ok = legal(rules, some, len(left))
        p = plan(some)
        found = np.broadcast_to(estimated_cycles(p.w, p.target, some, p), len(left))
        time[left[ok]] = found[ok]
    return time
