"""Result files: one JSON a class, written after every row, so that a benchmark can be resumed."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
LIBRARIES = ("numpy", "xgboost", "scikit-learn", "scipy")
MOST_SAMPLES = 200


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


def thinned(samples: Sequence[float]) -> list[float]:
    """At most `MOST_SAMPLES` of interleaved samples, evenly spaced."""
    step = -(-len(samples) // MOST_SAMPLES)
    return list(samples[:: max(step, 1)])


def versus(
    ours: Sequence[float], default: Sequence[float], opponents: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """A row's times, ratio and raw samples; its opponent is the fastest of `opponents`."""
    rest = {name: thinned(us) for name, us in opponents.items()}
    fastest = min(rest, key=lambda name: statistics.median(rest[name]))
    opponent, mine, untuned = rest.pop(fastest), thinned(ours), thinned(default)
    ratio, low, high = ratio_interval(opponent, mine)
    return {
        "opponent": fastest, "opponent_us": median(opponent), "kt_us": median(mine),
        "ratio": round(ratio, 4), "ratio_low": round(low, 4), "ratio_high": round(high, 4),
        "others": {name: median(us) for name, us in rest.items()}, "default_us": median(untuned),
        "samples": {"kt_us": mine, "opponent_us": opponent, "default_us": untuned, **rest},
    }  # fmt: skip


def versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """The checked-out commit, marked when the tree differs from it."""
    git = ["git", "-C", str(HERE)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "--", "..", ":!results", ":!logs", ":!../README.md"],
        capture_output=True, text=True,
    )  # fmt: skip
    return found.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits for other processes that write there: a class may be measured on several GPUs."""
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def write_document(
    path: Path, command: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Writes a result file, whole or not at all; `about` says what the rows were made with."""
    document = {
        "schema": 1, "command": command, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **about, "rows": rows,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(draft, path)


class Results:
    """The rows of one class in `benchmarks/results/<device>/<name>.json`."""

    def __init__(
        self,
        device: str,
        name: str,
        fingerprint: Mapping[str, Any],
        libraries: Sequence[str] = LIBRARIES,
        kt: str = "",
    ) -> None:
        self.path = HERE / "results" / device / f"{name}.json"
        self.name, self._fingerprint = name, fingerprint
        self._libraries, self._kt = libraries, kt or commit()
        self.rows = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        return {row["workload"]: row for row in json.loads(self.path.read_text())["rows"]}

    def is_of_this_tree(self, workload: str) -> bool:
        """Whether the workload has a row that this commit made."""
        return self.rows.get(workload, {}).get("kt") == self._kt

    def add(self, row: dict[str, Any]) -> None:
        """Replaces the workload's row; rows that other processes wrote meanwhile stay."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with alone(self.path.parent):
            made = {"class": self.name, "kt": self._kt, **row}
            self.rows = self._read() | {row["workload"]: made}
            self._write()

    def _write(self) -> None:
        about = {
            "kt": self._kt, "device": self._fingerprint, "libraries": versions(self._libraries),
        }  # fmt: skip
        command = " ".join(["python", *sys.argv])
        write_document(self.path, command, about, list(self.rows.values()))


def compressed(log: Path) -> Path:
    """Replaces a log by its gzip, with no time stamp inside, and returns that."""
    packed, draft = log.with_suffix(".jsonl.gz"), log.with_suffix(".tmp")
    draft.write_bytes(gzip.compress(log.read_bytes(), mtime=0))
    os.replace(draft, packed)
    log.unlink()
    return packed


def median(samples: Sequence[float]) -> float:
    return round(statistics.median(samples), 3)


def packed(name: str, device: str, folder: Path, unmeasured: Iterable[Path] = ()) -> Path:
    """Writes one archive of a class's results and logs, with paths below `benchmarks/`.

    Logs that have no row yet are `unmeasured`. `tar -xzf ARCHIVE -C benchmarks` puts all in place.
    """
    archive = folder / f"{name}.tar.gz"
    results = HERE / "results" / device / f"{name}.json"
    rows = json.loads(results.read_text())["rows"] if results.exists() else []
    logs = sorted({*unmeasured, *(HERE.parent / row["log"] for row in rows)})
    draft = archive.with_suffix(".tmp")
    with alone(folder):
        with tarfile.open(draft, "w:gz") as tar:
            for path in (*([results] if rows else []), *logs):
                tar.add(path, str(path.relative_to(HERE)))
        os.replace(draft, archive)
    return archive
