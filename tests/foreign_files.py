"""Small recordings of other tools, made up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

X, Y, MODES = (1, 2, 4, 8), (16, 32, 48, 64), ("a", "b")


def milliseconds(x: int, y: int, mode: str) -> float | None:
    """A time, or None for a failure."""
    if x == 8 and y == 64:
        return None
    return 1.0 + abs(x - 4) + abs(y - 48) / 16 + (0.5 if mode == "b" else 0.0)


def configurations() -> list[tuple[int, int, str]]:
    return [(x, y, mode) for x in X for y in Y for mode in MODES if x * y <= 384]


def t4() -> dict[str, Any]:
    results = []
    for x, y, mode in configurations():
        ms = milliseconds(x, y, mode)
        times: dict[str, Any] = {"compilation": 100.0, "framework": 1.0, "validation": 2.0}
        results.append(
            {
                "configuration": {"x": x, "y": y, "mode": mode},
                "times": times | ({"runtimes": [ms, ms, ms]} if ms else {}),
                "invalidity": "correct" if ms else "runtime", "correctness": 1 if ms else 0,
                "measurements": [{"name": "time", "value": ms or "RuntimeFailedConfig",
                                  "unit": ""}],
                "objectives": ["time"],
            }
        )  # fmt: skip
    return {
        "schema_version": "1.0.0", "metadata": {"timeunit": "miliseconds"}, "results": results,
    }  # fmt: skip


def cache() -> dict[str, Any]:
    entries = {}
    for x, y, mode in configurations():
        ms = milliseconds(x, y, mode)
        entries[f"{x},{y},{mode}"] = {
            "x": x, "y": y, "mode": mode, "time": ms or "RuntimeFailedConfig",
            **({"times": [ms, ms, ms]} if ms else {"__error__": "RuntimeFailedConfig"}),
            "compile_time": 100.0, "verification_time": 2.0, "benchmark_time": 5.0,
            "strategy_time": 0, "framework_time": 1.0, "timestamp": "",
        }  # fmt: skip
    return {
        "device_name": "a GPU", "kernel_name": "k", "problem_size": 1,
        "tune_params_keys": ["x", "y", "mode"],
        "tune_params": {"x": list(X), "y": list(Y), "mode": list(MODES)},
        "objective": "time", "cache": entries,
    }  # fmt: skip


def t1(*conditions: str, **defaults: object) -> dict[str, Any]:
    values = {"x": X, "y": Y, "mode": MODES}
    return {
        "ConfigurationSpace": {
            "TuningParameters": [
                {"Name": name, "Type": "int", "Values": str(list(levels))}
                | ({"Default": defaults[name]} if name in defaults else {})
                for name, levels in values.items()
            ],
            "Conditions": [{"Expression": text, "Parameters": []} for text in conditions],
        }
    }


def write(path: Path, document: object) -> Path:
    """Writes JSON, compressed where the name says so."""
    raw = json.dumps(document).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def cache_lines(document: dict[str, Any]) -> str:
    """A cache as the tool writes it: one entry a line, the end still open."""
    head = json.dumps({k: v for k, v in document.items() if k != "cache"}, indent=0)
    entries = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in document["cache"].items()]
    return head.rstrip()[:-1].rstrip() + ',\n"cache": {\n' + ",\n".join(entries) + ","
