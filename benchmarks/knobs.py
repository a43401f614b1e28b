"""The knobs that an ablation changes, and the table of what each was worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import HERE

RESULTS = HERE / "results" / "nvidia-h200" / "ablation.json"
NOISE = 0.01
"""A win must be larger than this, with its whole interval."""


@dataclass(frozen=True)
class Group:
    """Knobs of one idea, by path, each with whether a value of it is the plain one."""

    title: str
    plain: Mapping[str, Callable[[Any], bool]]


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


GROUPS = (
    Group(
        "tiles that do not divide the problem, padding",
        {
            "tile.bm": _power_of_two, "tile.bn": _power_of_two,
            "mem.copy_a": _is("async16", "async8", "async4", "shift"),
            "mem.copy_b": _is("async16", "async8", "async4", "shift"),
        },
    ),
    Group("prefetch beyond one stage", {"mem.stages": _is(2), "mem.prefetch": _is(0)}),
    Group("stores: direct, 128-bit, staged, TMA", {"mem.store": _is("direct")}),
    Group("fragment double buffering", {"unroll.fragments": _is(1), "unroll.in_flight": _is(0)}),
    Group("staggered A and B", {"sync.stagger": _is(False), "sync.pingpong": _is(False)}),
    Group(
        "CTA order by shape",
        {"perm.raster": _is("m"), "perm.group": _is(1), "map.cluster_m": _is(1),
         "map.cluster_n": _is(1), "map.persistent": _is(False)},
    ),
    Group("split-K", {"fusion.split_k": _is(1), "fusion.split_mode": _is("last")}),
    Group("shared memory layout", {"mem.layout": _is("padded"), "mem.swizzle_b": _is(32, 64)}),
    Group("overlapping launches", {"sync.early": _is(False)}),
)  # fmt: skip
PATHS = tuple(path for group in GROUPS for path in group.plain)


def verdict(path: str, knob: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The plain value that does best against the tuned one; None where the tuned one is plain."""
    plain = next(group.plain[path] for group in GROUPS if path in group.plain)
    if plain(knob["tuned"]):
        return None
    rivals = [v for v in knob["values"] if plain(v["value"]) and "ratio" in v]
    return min(rivals, key=lambda v: v["ratio"], default=None)


def wins(rows: list[dict[str, Any]], path: str) -> list[tuple[Mapping[str, Any], str, Any]]:
    """(the best plain value, workload, tuned value) where a knob's tuned value wins, best first."""
    found = []
    for row in rows:
        for name, knob in row["knobs"].items():
            if name.split(" ")[1] != path:
                continue
            rival = verdict(path, knob)
            if rival and rival["ratio_low"] > 1 + NOISE:
                found.append((rival, row["workload"], knob["tuned"]))
    return sorted(found, key=lambda one: -one[0]["ratio"])


def table(results: Path = RESULTS) -> str:
    """Markdown: for each knob the shapes on which it wins, the largest win, and over what."""
    if not results.exists():
        return "_Not measured yet._"
    rows = json.loads(results.read_text())["rows"]
    lines = [
        "| idea | knob | wins | largest win: tuned value over the best plain one |",
        "|---|---|---:|---|",
    ]
    for group in GROUPS:
        for path in group.plain:
            tried = sum(name.split(" ")[1] == path for row in rows for name in row["knobs"])
            if not tried:
                continue
            found, best = wins(rows, path), "none beyond the noise"
            if found:
                rival, workload, tuned = found[0]
                best = (
                    f"`{workload}`: {tuned} over {rival['value']}, {rival['ratio']:.2f} "
                    f"({rival['ratio_low']:.2f}–{rival['ratio_high']:.2f})"
                )
            lines.append(f"| {group.title} | `{path}` | {len(found)} of {tried} | {best} |")
    return "\n".join(lines)
