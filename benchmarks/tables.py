"""Writes RESULTS.md, and the tables of README.md and ARCHITECTURE.md, from benchmarks/results/.

    python benchmarks/tables.py [--check]

With --check it only compares.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import knobs
import numpy as np
from classes import CLASSES, GRID

HERE = Path(__file__).resolve().parent
README, ARCHITECTURE = HERE.parent / "README.md", HERE.parent / "ARCHITECTURE.md"
RESULTS = HERE / "RESULTS.md"
_SHOWN = ("kt gpu", "kt left out")
_DEVICES = {"cpu": "CPU", "nvidia-h200": "NVIDIA H200"}
_ROOFLINE = (("below 5 µs", 0, 5), ("5–20 µs", 5, 20), ("20–100 µs", 20, 100),
             ("from 100 µs", 100, math.inf))  # fmt: skip


@functools.cache
def _committed(device: str) -> list[dict[str, Any]]:
    """The rows of all classes of a device; read once, they are many megabytes."""
    paths = sorted((HERE / "results" / device).glob("*.json"))
    return [row for path in paths for row in json.loads(path.read_text())["rows"]]


def rows_of(name: str) -> list[dict[str, Any]]:
    """The committed rows of a class in the order of its workloads."""
    found = [row for row in _committed(CLASSES[name].device) if row["class"] == name]
    order = {workload: i for i, workload in enumerate(CLASSES[name].workloads)}
    return sorted(found, key=lambda row: order[row["workload"]])


def geometric_mean(values: list[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(statistics.fmean(map(math.log, values)))


def shown(us: float) -> str:
    """Microseconds with the digits that a measurement has."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}"


def table(name: str) -> str:
    """A class as Markdown: a row a workload, losses as plain as wins, and the mean."""
    rows = rows_of(name)
    if not rows:
        return "_Not measured yet._"
    lines = [
        "| workload | kt µs | default µs | opponent | opponent µs | opponent / kt | default / kt "
        "| % of bound |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| `{row['workload']}` | {shown(row['kt_us'])} | {shown(row['default_us'])} "
            f"| {row['opponent']} | {shown(row['opponent_us'])} "
            f"| {row['ratio']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f}) "
            f"| {row['default_us'] / row['kt_us']:.2f} "
            f"| {100 * row['bound_us'] / row['kt_us']:.0f} |"
        )
    mean = geometric_mean([row["ratio"] for row in rows])
    tuned = geometric_mean([row["default_us"] / row["kt_us"] for row in rows])
    losses = sum(row["ratio"] < 1 for row in rows)
    lines.append(f"| **geometric mean** | | | | | **{mean:.2f}** | {tuned:.2f} | |")
    lines.append(f"\n{losses} of {len(rows)} lost. Floor {CLASSES[name].floor:.2f}, goal ")
    lines[-1] += f"{CLASSES[name].goal:.2f}."
    return "\n".join(lines)


def by_roofline(rows: list[dict[str, Any]]) -> str:
    """Rows counted by the time that the device's measured limits allow, microseconds."""
    lines = [
        "| roofline | shapes | opponent / kt | worst | quartiles | best | lost | default / kt |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for label, low, high in _ROOFLINE:
        mine = [row for row in rows if low <= row["bound_us"] < high]
        if not mine:
            continue
        ratios = sorted(row["ratio"] for row in mine)
        tuned = geometric_mean([row["default_us"] / row["kt_us"] for row in mine])
        first, third = np.percentile(ratios, [25, 75])
        lines.append(
            f"| {label} | {len(mine)} | **{geometric_mean(ratios):.2f}** | {ratios[0]:.2f} "
            f"| {first:.2f}–{third:.2f} | {ratios[-1]:.2f} | {sum(r < 1 for r in ratios)} "
            f"| {tuned:.2f} |"
        )
    return "\n".join(lines)


def summary() -> str:
    """A row a class that was measured: its mean ratio, its worst, and what was asked for."""
    lines = [
        "| device | class | shapes | opponent / kt | worst | lost | floor | goal | default / kt |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in CLASSES.items():
        if not (rows := rows_of(name)):
            continue
        ratios = [row["ratio"] for row in rows]
        tuned = geometric_mean([row["default_us"] / row["kt_us"] for row in rows])
        count = str(len(rows)) + ("" if len(rows) == len(one.workloads) else " (not all)")
        lines.append(
            f"| {_DEVICES[one.device]} | [{name}](benchmarks/RESULTS.md#{name}) | {count} "
            f"| **{geometric_mean(ratios):.2f}** | {min(ratios):.2f} "
            f"| {sum(ratio < 1 for ratio in ratios)} | {one.floor:.2f} | {one.goal:.2f} "
            f"| {tuned:.2f} |"
        )
    left = [f"`{name}`" for name in CLASSES if not rows_of(name)]
    if left:
        lines += ["", f"Not measured yet: {', '.join(left)}."]
    return "\n".join(lines)


def search() -> str:
    """Mean scores of the strategies that ran on every recorded space; fewer seeds are named.

    Variants among which the settings of `kt` were chosen are left out.
    """
    rows = json.loads((HERE / "results" / "search.json").read_text())["rows"]
    spaces, seeds = {row["space"] for row in rows}, max(row["seeds"] for row in rows)
    by_strategy: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_strategy.setdefault(row["strategy"], []).append(row)
    found = []
    for name, mine in by_strategy.items():
        variant = name.startswith("kt ") and name not in _SHOWN
        if {row["space"] for row in mine} == spaces and not variant:
            fewest = min(row["seeds"] for row in mine)
            name = name if fewest == seeds else f"{name} ({fewest} seeds)"
            means = [
                statistics.fmean(row[x] for row in mine) for x in ("score", "at_100", "at_400")
            ]
            worst = min(row["score"] for row in mine)
            found.append((means[0], f"| {name} | **{means[0]:.2f}** | {worst:.2f} "
                          f"| {means[1]:.3f} | {means[2]:.3f} |"))  # fmt: skip
    head = f"| strategy ({seeds} seeds, {len(spaces)} spaces) | mean score | worst space "
    lines = [head + "| of the optimum at 100 | at 400 |", "|---|---:|---:|---:|---:|"]
    return "\n".join(lines + [text for _, text in sorted(found, reverse=True)])


def transfer() -> str:
    """Recorded spaces of kt: how near the search comes, cold, taught and without a trial."""
    path = HERE / "results" / "transfer.json"
    if not path.exists():
        return "_Not measured yet._"
    columns = ("cold_16", "cold_64", "taught_16", "taught_64", "zero")
    lines = [
        "| recorded space | points | cold, 16 trials | 64 | taught, 16 trials | 64 | no trial |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in json.loads(path.read_text())["rows"]:
        shares = " | ".join("—" if row[x] is None else f"{row[x]:.3f}" for x in columns)
        lines.append(f"| `{row['workload']}` | {row['points']} | {shares} |")
    return "\n".join(lines)


def speed() -> str:
    """Recorded spaces of kt: what a refit and a batch of proposals cost."""
    path = HERE / "results" / "speed.json"
    if not path.exists():
        return "_Not measured yet._"
    lines = [
        "| recorded space | refit | batch of 16 | scored a second in it | scored at once |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in json.loads(path.read_text())["rows"]:
        lines.append(
            f"| `{row['workload']}` | {row['refit_seconds']:.2f} s "
            f"| {1e3 * row['proposal_seconds']:.0f} ms | {row['proposed_per_second']:,} "
            f"| {row['predicted_per_second']:,} |"
        )
    return "\n".join(lines)


def results() -> str:
    """All of RESULTS.md: every class that was measured, row by row."""
    parts = [
        "# Benchmark results\n\nWritten by `python benchmarks/tables.py` from "
        "`benchmarks/results/`, which has the raw samples. Ratios are opponent\ntime / kt time, "
        "medians of samples interleaved in one process, with 95 % intervals; below 1 is a loss. "
        "The opponent\nof a row is the fastest of its class's; `default` is the schedule that no "
        "tuning chose.\n"
    ]
    for name, one in CLASSES.items():
        if rows := rows_of(name):
            opponents = ", ".join(one.opponents)
            head = f"## {name}\n\n{_DEVICES[one.device]}; opponents: {opponents}.\n"
            if name == GRID:
                head += f"\n{by_roofline(rows)}\n"
            parts.append(f"{head}\n{table(name)}\n")
    return "\n".join(parts)


def rendered(text: str) -> str:
    """`text` with every marked table replaced by the current one."""
    made = {
        "summary": summary, "search": search, "transfer": transfer, "speed": speed,
        "ablation": knobs.table,
    }  # fmt: skip
    for name, make in made.items():
        begin, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
        if begin in text:
            pattern = re.escape(begin) + ".*?" + re.escape(end)
            body = f"{begin}\n{make()}\n{end}"
            text = re.sub(pattern, lambda _, body=body: body, text, flags=re.DOTALL)
    return text


def pages() -> dict[Path, str]:
    """What each page with tables must say."""
    found = {page: rendered(page.read_text()) for page in (README, ARCHITECTURE)}
    return found | {RESULTS: results()}


def main() -> None:
    """Rewrites what differs, or with --check exits 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    given = parser.parse_args()
    for page, new in pages().items():
        text = page.read_text() if page.exists() else ""
        if new != text and given.check:
            sys.exit(f"{page.name} differs from benchmarks/results")
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
