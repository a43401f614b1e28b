"""Benchmark classes: workloads, opponents and targets (classes.json)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MOST_TRIALS: Mapping[str, int] = {"cpu": 128, "nvidia-h200": 256}
"""Trials that a workload may have, by device."""
GRID, GRID_TRIALS = "gemm-grid", 64
"""The class of many shapes, which `grid.py` measures, and the trials of each of them."""


@dataclass(frozen=True)
class BenchmarkClass:
    """Workloads measured together; the opponent of a row is the fastest of `opponents`.

    `floor` and `goal` are geometric means of opponent time / kt time, `worst` is the least of one
    workload. `family` names the only kernel families that kt may use.
    """

    device: str
    opponents: tuple[str, ...]
    floor: float
    goal: float
    workloads: tuple[str, ...]
    worst: float = 0.0
    family: str = "all"
    roofline: str = ""
    note: str = ""


def _read() -> dict[str, BenchmarkClass]:
    classes = json.loads(Path(__file__).with_name("classes.json").read_text())
    return {
        name: BenchmarkClass(**{k: tuple(v) if isinstance(v, list) else v for k, v in one.items()})
        for name, one in classes.items()
    }


CLASSES = _read()


def chosen(workloads: Iterable[str], only: Iterable[str]) -> list[str]:
    """Those that `--only` asks for."""
    return [text for text in workloads if any(part in text for part in only)]
