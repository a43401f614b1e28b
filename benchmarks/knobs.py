"""The knobs that an ablation changes, and the table of what each was worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import HERE, ratio_interval

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


@dataclass(frozen=True)
class Win:
    """The best value of a knob that is not plain, against the best plain one."""

    workload: str
    value: Any
    plain: Any
    ratio: float
    """The plain value's time over the other's, with its interval."""
    low: float
    high: float


def win(path: str, knob: Mapping[str, Any], workload: str = "") -> Win | None:
    """None where only plain values ran, or only others. The tuned value is one of them."""
    plain = next(group.plain[path] for group in GROUPS if path in group.plain)
    ran = [one for one in ({**knob, "value": knob["tuned"]}, *knob["values"]) if "us" in one]
    ran.sort(key=lambda one: one["us"])
    best = next((one for one in ran if not plain(one["value"])), None)
    rival = next((one for one in ran if plain(one["value"])), None)
    if best is None or rival is None:
        return None
    ratio, low, high = ratio_interval(rival["samples"], best["samples"])
    return Win(workload, best["value"], rival["value"], ratio, low, high)


def compared(rows: list[dict[str, Any]], path: str) -> list[Win]:
    """Every θ in which plain values of a knob met others, the largest ratio first."""
    found = [
        one
        for row in rows
        for name, knob in row["knobs"].items()
        if name.split(" ")[1] == path and (one := win(path, knob, row["workload"]))
    ]
    return sorted(found, key=lambda one: -one.ratio)


def table(results: Path = RESULTS) -> str:
    """Markdown: for each knob the shapes on which it wins, the largest win, and over what."""
    if not results.exists():
        return "_Not measured yet._"
    rows = json.loads(results.read_text())["rows"]
    lines = [
        f"Of {len(rows)} shapes; the value shown is the best of those measured.",
        "",
        "| idea | knob | wins | largest win: best value over the best plain one |",
        "|---|---|---:|---|",
    ]
    for group in GROUPS:
        for path in group.plain:
            tried = compared(rows, path)
            found = [one for one in tried if one.low > 1 + NOISE]
            best = "none beyond the noise" if tried else "not compared yet"
            if found:
                one = found[0]
                best = (
                    f"`{one.workload}`: {one.value} over {one.plain}, {one.ratio:.2f} "
                    f"({one.low:.2f}–{one.high:.2f})"
                )
            lines.append(f"| {group.title} | `{path}` | {len(found)} of {len(tried)} | {best} |")
    return "\n".join(lines)
