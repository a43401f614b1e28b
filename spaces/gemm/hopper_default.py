"""The default θ of products on wgmma: the best of known tiles by estimated time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from kt.spaces.cuda import legal
from kt.spaces.family import Rule
from kt.spaces.theta import Value

from .cuda import GROUPS
from .hopper import PlanOf
from .hopper_plan import surely_at_once
from .hopper_time import estimated_cycles


class Shape(NamedTuple):
    """A tile, and how CTAs work on it."""

    bm: int
    bn: int
    consumers: int
    cluster_m: int
    persistent: bool
    blocks: int = 1


# Tiles that people use, largest first.
SHAPES = tuple(Shape(*values) for values in (
    (128, 256, 2, 2, True), (128, 256, 2, 1, True), (128, 192, 2, 2, True), (128, 192, 2, 1, True),
    (128, 128, 2, 2, True), (128, 256, 2, 1, False), (128, 192, 2, 1, False),
    (128, 128, 2, 2, False), (128, 128, 2, 1, False), (128, 64, 2, 1, False),
    (64, 256, 1, 1, False), (64, 128, 1, 1, False), (64, 64, 1, 1, False), (64, 32, 1, 1, False),
    (64, 16, 1, 1, False), (64, 8, 1, 1, False),
    # of many short products
    (128, 128, 2, 1, True), (128, 64, 2, 1, True), (64, 64, 1, 1, True, 2), (64, 32, 1, 1, True, 2),
))  # fmt: skip
GROUP = 8
"""Tiles in a group of the raster, at most."""
_STAGES = 12


def ranked_values(
    plan: PlanOf,
    knobs: Mapping[str, Sequence[Any]],
    rules: Sequence[Rule],
    shapes: Sequence[Shape] = SHAPES,
) -> list[Mapping[str, Value]]:
    """Values by estimated cycles; the first are the default.

    `knobs` holds the choices by short name; `plan` says what values imply.
    """
    found: list[tuple[float, dict[str, Value]]] = []
    for values in _candidates(plan, knobs, shapes):
        legal = with_stages(values, knobs, rules)
        if legal is None:
            continue
        p = plan(legal)
        found.append((float(estimated_cycles(p.w, p.target, legal, p)), legal))
    assert found, "no default tile is legal"
    return [values for _, values in sorted(found, key=lambda x: x[0])]


def _candidates(
    plan: PlanOf, knobs: Mapping[str, Sequence[Any]], shapes: Sequence[Shape]
) -> Iterator[dict[str, Any]]:
    """Values of every known tile but the stages: split-K fills the SMs."""
    copies = [{"copy_a": x} for x in knobs.get("copy_a", ())] or [{}]
    for shape, copy in product(shapes, copies):
        bm, bn, consumers, cluster_m, persistent, blocks = shape
        if bm not in knobs["bm"] or bn not in knobs["bn"] or cluster_m not in knobs["cluster_m"]:
            continue
        values: dict[str, Any] = {
            **common_values(knobs), "bm": bm, "bn": bn, **copy, "consumers": consumers,
            "cluster_m": cluster_m, "persistent": persistent, "blocks": blocks,
        }  # fmt: skip
        p = plan(values)
        if not p.fills_boxes:
            values["store"] = "direct"
        if min(p.m_clusters, p.n_clusters) > 1:
            fit = (g for g in GROUPS if g in knobs["group"] and g < 2 * p.m_clusters)
            values["group"] = max((g for g in fit if g <= GROUP), default=1)
        wanted = p.target.cores // int(p.tiles) if not persistent else 1
        splits = {1, max(s for s in knobs["split_k"] if s <= max(1, min(wanted, p.k_tiles // 4)))}
        for split in splits:
            yield {**values, "split_k": split}
        for parts in knobs["cluster_k"]:
            if (
                1 < parts <= min(wanted, p.k_tiles // 2)
                and cluster_m == 1
                and int(p.tiles) * parts <= surely_at_once(p.target, blocks, parts)
            ):
                yield {**values, "cluster_k": parts, "store": "direct"}


def common_values(knobs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """What all tiles have, where nothing else is said."""
    bk = max(x for x in knobs["bk"] if x <= knobs["bk"][0] * 2)
    values: dict[str, Any] = {
        "bk": bk, "store": knobs["store"][-1], "buffers": 1, "raster": "m", "group": 1,
        "split_k": 1, "split_mode": "last", "producer": "warpgroup", "cluster_m": 1,
        "cluster_n": 1, "cluster_k": 1, "persistent": False, "blocks": 1, "pingpong": False,
        "early": knobs["early"][-1],
    }  # fmt: skip
    if "swizzle_b" in knobs:
        values["swizzle_b"] = 128
    if "promote" in knobs:
        values["promote"] = max(bk, knobs["promote"][0])
    if "warm" in knobs:
        values["warm"] = 0
    return values


def with_stages(
    values: Mapping[str, Any], knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule]
) -> dict[str, Any] | None:
    """As many stages as shared memory holds; None where nothing is legal."""
    store_buffers = [b for b in reversed(knobs["buffers"]) if b == 1 or values["store"] == "tma"]
    stages = sorted((s for s in knobs["stages"] if s <= _STAGES), reverse=True)
    rows = list(product((1, 0), stages, store_buffers))
    in_flight, counts, buffers = map(np.array, zip(*rows, strict=True))
    found = {**values, "in_flight": in_flight, "stages": counts, "buffers": buffers}
    ok = legal(rules, found, len(rows))
    if not ok.any():
        return None
    best = rows[int(ok.argmax())]
    return {**values, **dict(zip(("in_flight", "stages", "buffers"), best, strict=True))}
