"""Result files: one JSON a class, written after every row, so that a benchmark can be resumed."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
LIBRARIES = ("numpy", "xgboost", "scikit-learn", "scipy")


def slug(workload: str) -> str:
    """A file name for a workload."""
    return re.sub(r"[^a-z0-9]+", "-", workload)


def ratio_interval(
    opponent: Sequence[float], ours: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Median ratio opponent / ours with its 95 % bootstrap interval."""
    rng = np.random.default_rng(seed)
    a, b = np.array(opponent), np.array(ours)
    draws = [
        np.median(rng.choice(a, len(a))) / np.median(rng.choice(b, len(b))) for _ in range(1000)
    ]
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def commit() -> str:
    """The checked-out commit, marked when the tree differs from it."""
    git = ["git", "-C", str(HERE)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "--", "..", ":!results", ":!logs", ":!../README.md"],
        capture_output=True, text=True,
    )  # fmt: skip
    return found.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


class Results:
    """The rows of one class in `benchmarks/results/<device>/<name>.json`."""

    def __init__(self, device: str, name: str, fingerprint: dict[str, Any]) -> None:
        self.path = HERE / "results" / device / f"{name}.json"
        self.name, self._fingerprint = name, fingerprint
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.rows = {r["workload"]: r for r in json.loads(self.path.read_text())["rows"]}

    def add(self, row: dict[str, Any]) -> None:
        """Replaces the workload's row and writes the file."""
        self.rows[row["workload"]] = {"class": self.name, **row}
        document = {
            "schema": 1, "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "kt": commit(),
            "device": self._fingerprint,
            "libraries": {"python": platform.python_version()}
            | {name: metadata.version(name) for name in LIBRARIES},
            "rows": list(self.rows.values()),
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(draft, self.path)


def compressed(log: Path) -> Path:
    """Replaces a log by its gzip, with no time stamp inside, and returns that."""
    packed = log.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(log.read_bytes(), mtime=0))
    log.unlink()
    return packed


def median(samples: Sequence[float]) -> float:
    return round(statistics.median(samples), 3)
