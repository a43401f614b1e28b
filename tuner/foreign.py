"""Recordings of other tools: T4 result files and Kernel Tuner cache files, plain or gzip.

Every configuration is kept, failures included. Times are converted to microseconds and the cost of
evaluating a configuration to seconds. A file is untrusted input: only its JSON is read.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt.spaces.errors import LogError

Level = bool | int | float | str
"""One value of a parameter."""

ABSENT = "absent"
"""The value of a parameter that a configuration does not have (null in the file)."""
MOST_BYTES = 2**30
_SECONDS: Mapping[str, float] = {
    "seconds": 1.0, "s": 1.0, "milliseconds": 1e-3, "miliseconds": 1e-3, "ms": 1e-3,
    "microseconds": 1e-6, "us": 1e-6, "nanoseconds": 1e-9, "ns": 1e-9,
}  # fmt: skip
_COSTS = ("compilation", "framework", "search_algorithm", "validation", "runtimes")
"""Parts of what one evaluation cost, in a T4 file's `times`."""
_CACHE_COSTS = ("compile_time", "framework_time", "strategy_time", "verification_time", "times")
_T4_HEAD, _CACHE_HEAD = "results", "cache"


@dataclass(frozen=True)
class Result:
    """One configuration: its parameters' values, its time or its failure, what it cost."""

    values: tuple[Level, ...]
    us: float | None
    failure: str
    seconds: float


@dataclass(frozen=True)
class Recording:
    """A recorded space: parameters by name with their values ascending, and the results."""

    title: str
    form: str  # "T4" | "Kernel Tuner cache"
    parameters: Mapping[str, tuple[Level, ...]]
    results: tuple[Result, ...]

    @property
    def failures(self) -> dict[str, int]:
        """Configurations without a time, by reason."""
        counts: dict[str, int] = {}
        for result in self.results:
            if result.us is None:
                counts[result.failure] = counts.get(result.failure, 0) + 1
        return counts


def read_recording(path: Path) -> Recording | None:
    """The recording in `path`; None when it is a file of another kind.

    Raises LogError when it is such a file and cannot be understood.
    """
    if not path.is_file():
        return None
    try:
        text = _text(path)
    except zlib.error:
        return None  # damaged: the reader of logs takes what is whole
    if not text.lstrip().startswith("{") or "\n{" in text[:65536].lstrip()[1:]:
        return None  # JSON Lines, as a log of kt
    data = _loads(text)
    if isinstance(data, dict) and isinstance(data.get(_T4_HEAD), list):
        return _of_t4(path, data)
    if isinstance(data, dict) and isinstance(data.get(_CACHE_HEAD), dict):
        return _of_cache(path, data)
    return None


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            expander = zlib.decompressobj(zlib.MAX_WBITS | 16)
            raw = expander.decompress(raw, MOST_BYTES)
            if expander.unconsumed_tail:
                raise LogError(f"{path}: more than {MOST_BYTES} bytes uncompressed")
        return raw.decode("utf-8", "replace")
    except OSError as error:
        raise LogError(f"{path}: {error}") from None


def _loads(text: str) -> Any:
    """The JSON in `text`; a cache that was cut off ends at its last whole entry."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if f'"{_CACHE_HEAD}"' not in text:
        return None
    body = text.rstrip()
    for end in (body.rstrip(","), body[: body.rfind("\n")].rstrip().rstrip(",")):
        try:
            return json.loads(end + "}}")
        except (ValueError, RecursionError):
            continue
    return None


def _of_t4(path: Path, data: Mapping[str, Any]) -> Recording:
    entries = data[_T4_HEAD]
    unit = _unit(path, data.get("metadata", {}).get("timeunit", "milliseconds"))
    names = _names(path, (entry.get("configuration") for entry in entries))
    results = []
    for number, entry in enumerate(entries):
        values = _values(path, number, entry.get("configuration"), names)
        times = entry.get("times", {})
        value = _measured(entry)
        why = str(entry.get("invalidity", "correct"))
        us = None if value is None or why != "correct" else value * unit * 1e6
        why = "" if us is not None else (why if why != "correct" else "no time")
        results.append(Result(values, us, why, unit * sum(_cost(times.get(k)) for k in _COSTS)))
    return _recording(path.name, "T4", names, results)


def _measured(entry: Mapping[str, Any]) -> float | None:
    """The objective's value, else the mean of the runtimes."""
    objectives = entry.get("objectives") or ["time"]
    for one in entry.get("measurements", ()):
        if one.get("name") == objectives[0]:
            return _positive(one.get("value"))
    runtimes = entry.get("times", {}).get("runtimes") or ()
    return _positive(sum(runtimes) / len(runtimes)) if runtimes else None


def _of_cache(path: Path, data: Mapping[str, Any]) -> Recording:
    entries = data[_CACHE_HEAD].values()
    objective = data.get("objective", "time")
    if objective != "time":
        raise LogError(f"{path}: the objective is '{objective}': accepts time")
    names = data.get("tune_params_keys") or _names(path, entries)
    results = []
    for number, entry in enumerate(entries):
        us = _positive(entry.get("time"))
        why = "" if us is not None else str(entry.get("__error__", entry.get("time", "no time")))
        cost = sum(_cost(entry.get(key)) for key in _CACHE_COSTS) / 1e3
        us = None if us is None else us * 1e3
        results.append(Result(_values(path, number, entry, names), us, why, cost))
    title = f"{data.get('kernel_name', path.name)} on {data.get('device_name', 'a device')}"
    return _recording(title, "Kernel Tuner cache", tuple(names), results)


def _recording(title: str, form: str, names: Sequence[str], results: Sequence[Result]) -> Recording:
    distinct = {result.values: result for result in reversed(results)}  # the first of each counts
    kept = [r for r in results if distinct[r.values] is r]
    levels = {
        name: tuple(sorted({r.values[i] for r in kept}, key=_order)) for i, name in enumerate(names)
    }
    return Recording(title, form, levels, tuple(kept))


def _order(value: Level) -> tuple[bool, float, str]:
    """Numbers by size, then texts."""
    text = isinstance(value, str)
    return text, 0.0 if text else float(value), str(value)


def _names(path: Path, configurations: Any) -> tuple[str, ...]:
    first = next(iter(configurations), None)
    if not isinstance(first, dict) or not first:
        raise LogError(f"{path}: no configuration in it")
    return tuple(first)


def _values(path: Path, number: int, entry: Any, names: Sequence[str]) -> tuple[Level, ...]:
    try:
        values = tuple(ABSENT if entry[name] is None else entry[name] for name in names)
    except (KeyError, TypeError):
        raise LogError(f"{path}: result {number} lacks a parameter") from None
    if not all(isinstance(v, bool | int | float | str) for v in values):
        raise LogError(f"{path}: result {number} has a parameter that is no number or text")
    return values


def _positive(value: object) -> float | None:
    """A finite number above zero, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None


def _cost(value: object) -> float:
    """Of one part, in the file's unit; a list is one time a run."""
    parts = value if isinstance(value, list) else [value]
    return sum(_positive(part) or 0.0 for part in parts)


def _unit(path: Path, name: object) -> float:
    seconds = _SECONDS.get(str(name).lower())
    if seconds is None:
        raise LogError(f"{path}: time unit '{name}': accepts {', '.join(_SECONDS)}")
    return seconds
