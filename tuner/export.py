"""`kt export`: a workload's trials as a T4 result file or a Kernel Tuner cache.

θ becomes flat parameters (`tile.block_m` …) with the family as one more; a knob that a family lacks
is null. Nothing is lost: each result carries its whole trial record under `kt`, which the other
tools pass over.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kt.logs.query import Run
from kt.logs.record import Failure, Timing, TrialRecord
from kt.spaces.errors import LogError, SettingsError
from kt.spaces.theta import Value

from .lookup import open_runs, report_bad, workloads_in
from .output import refuse_overwriting, write_atomically

FORMATS = ("t4", "kernel-tuner")
FAMILY = "family"
_INVALID: Mapping[str, str] = {
    "compile_error": "compile", "resource": "compile", "build_timeout": "timeout",
    "launch_error": "runtime", "run_timeout": "timeout", "crash": "runtime",
    "wrong_result": "correctness", "implausible": "correctness", "out_of_memory": "runtime",
    "device_lost": "runtime", "interrupted": "runtime",
}  # fmt: skip
"""T4's word for each kind of failure."""
_ERRORS: Mapping[str, str] = {
    "compile": "CompilationFailedConfig", "runtime": "RuntimeFailedConfig",
    "timeout": "RuntimeFailedConfig", "correctness": "InvalidConfig",
}  # fmt: skip
"""Kernel Tuner's."""

Row = tuple[dict[str, Value | None], TrialRecord]


def export_command(
    *,
    log: Path,
    words: tuple[str, ...],
    form: str,
    output: Path | None,
    run: str | None,
    force: bool = False,
    **flags: str | None,
) -> int:
    """Writes or prints the file."""
    if form not in FORMATS:
        raise SettingsError(f"--format {form}: accepts {', '.join(FORMATS)}")
    if output is not None:
        refuse_overwriting(output, force, is_export, "kt export")
    found, bad = open_runs(log, run)
    report_bad(bad)
    texts = workloads_in(found, words, flags)
    if len(texts) > 1:
        raise SettingsError(f"this log has {len(texts)} workloads: name one, as {texts[0]}")
    text = json.dumps(exported(found, texts[0], form), indent=1) + "\n"
    if output is None:
        sys.stdout.write(text)
        return 0
    write_atomically(output, text.encode())
    print(f"wrote {output}")
    return 0


def is_export(content: bytes) -> bool:
    """Whether a file that begins with `content` is one that kt exported: it has our headers."""
    return content.startswith(b"{") and b'"kt": [' in content


def exported(runs: Sequence[Run], workload: str, form: str) -> dict[str, Any]:
    """The trials of one workload and device as a T4 document or a Kernel Tuner cache."""
    having = [run for run in runs if run.of(workload)]
    if not having:
        raise LogError(f"no trial of '{workload}' in this log")
    device = having[-1].header.target
    alike = [run for run in having if run.header.target.same_device(device)]
    trials = [trial for run in alike for trial in run.of(workload)]
    names = list(dict.fromkeys(path for trial in trials for path in trial.theta.flat()))
    rows = [(_parameters(trial, names), trial) for trial in trials]
    headers = [msgspec.to_builtins(run.header) for run in alike]
    if form == "t4":
        return _t4(rows, headers)
    return _cache(rows, headers, workload, device.processor or device.name)


def _parameters(trial: TrialRecord, names: Sequence[str]) -> dict[str, Value | None]:
    flat = trial.theta.flat()
    return {FAMILY: trial.family, **{name: flat.get(name) for name in names}}


def _t4(rows: Sequence[Row], headers: Sequence[Any]) -> dict[str, Any]:
    return {
        "schema_version": "1.0.0", "metadata": {"timeunit": "milliseconds", "kt": headers},
        "results": [_t4_result(parameters, trial) for parameters, trial in rows],
    }  # fmt: skip


def _t4_result(parameters: Mapping[str, Value | None], trial: TrialRecord) -> dict[str, Any]:
    outcome, seconds = trial.outcome, trial.seconds
    why = _INVALID[outcome.failure] if isinstance(outcome, Failure) else "correct"
    value = outcome.median_us / 1e3 if isinstance(outcome, Timing) else _ERRORS[why]
    return {
        "timestamp": trial.time, "configuration": parameters,
        "times": {
            "compilation": 1e3 * seconds.build, "framework": 0, "search_algorithm": 0,
            "validation": 1e3 * seconds.check, "benchmark": 1e3 * seconds.run,
            **({"runtimes": _samples(outcome)} if isinstance(outcome, Timing) else {}),
        },
        "invalidity": why, "correctness": 1 if why == "correct" else 0,
        "measurements": [{"name": "time", "value": value, "unit": "milliseconds"}],
        "objectives": ["time"], "kt": msgspec.to_builtins(trial),
    }  # fmt: skip


def _samples(outcome: Timing) -> list[float]:
    """Milliseconds of each run; a duplicate's only time is the median of its original."""
    return [us / 1e3 for us in outcome.us or (outcome.median_us,)]


def _cache(
    rows: Sequence[Row], headers: Sequence[Any], workload: str, device: str
) -> dict[str, Any]:
    entries: dict[str, dict[str, Any]] = {}
    names = list(rows[0][0])
    for parameters, trial in rows:
        key = ",".join(str(value) for value in parameters.values())
        entry = entries.setdefault(key, _cache_entry(parameters, trial))
        entry["kt"].append(msgspec.to_builtins(trial))
    values = {
        name: list(dict.fromkeys(parameters[name] for parameters, _ in rows)) for name in names
    }
    return {
        "device_name": device, "kernel_name": workload, "problem_size": 1,
        "tune_params_keys": names, "tune_params": values, "objective": "time", "kt": headers,
        "cache": entries,
    }  # fmt: skip


def _cache_entry(parameters: Mapping[str, Value | None], trial: TrialRecord) -> dict[str, Any]:
    outcome, seconds = trial.outcome, trial.seconds
    if isinstance(outcome, Timing):
        measured: dict[str, Any] = {
            "time": outcome.median_us / 1e3, "times": _samples(outcome),
        }  # fmt: skip
    else:
        error = _ERRORS[_INVALID[outcome.failure]]
        measured = {"time": error, "__error__": error}
    return {
        **parameters, **measured, "compile_time": 1e3 * seconds.build,
        "verification_time": 1e3 * seconds.check, "benchmark_time": 1e3 * seconds.run,
        "strategy_time": 0, "framework_time": 0, "timestamp": trial.time, "kt": [],
    }  # fmt: skip
