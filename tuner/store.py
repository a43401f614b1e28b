"""Where a run is logged: the file to append to, what it can learn from, the run it resumes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kt.logs.journal import log_files, read_log
from kt.logs.query import Run, runs
from kt.logs.record import Record, Settings
from kt.spaces.errors import LogError, SettingsError
from kt.spaces.target import Target
from kt.spaces.workload import Workload

DECIDING = ("strategy", "batch_size", "lag", "model_threads", "epsilon")
"""Settings that proposals depend on: a resumed run must have the same."""


@dataclass(frozen=True)
class Store:
    """`run` is the run to resume, if any; `earlier` are records to start warm from."""

    path: Path
    earlier: tuple[Record, ...] = ()
    run: Run | None = None


def open_store(
    log: Path,
    workloads: Sequence[Workload],
    target: Target,
    settings: Settings,
    seed: int,
    resume: bool,
) -> Store:
    """Resolves `--log` and `--resume`.

    `log` is a directory when it is one or has no suffix. Raises LogError for a file that is not a
    log, SettingsError when the run to resume has other settings, seed or device.
    """
    directory = log.is_dir() or (not log.is_file() and not log.suffix)
    if resume and (found := _newest(log, tuple(map(str, workloads)))):
        _check_same(found.run, target, settings, seed)
        return found
    earlier = _earlier(log, directory)
    return Store(_new_file(log, workloads) if directory else log, earlier)


def _earlier(log: Path, directory: bool) -> tuple[Record, ...]:
    if not log.exists() or (log.is_file() and not log.stat().st_size):
        return ()
    try:
        return tuple(read_log(log).records)
    except LogError:
        if directory:  # an empty database, or one with foreign files: nothing to learn from
            return ()
        raise


def _newest(log: Path, workloads: tuple[str, ...]) -> Store | None:
    """The latest run of exactly these workloads."""
    if not log.exists() or (log.is_file() and not log.stat().st_size):
        return None
    try:
        files = log_files(log)
    except LogError:
        return None
    found: list[Store] = []
    for file in files:
        try:
            records = read_log(file).records
        except LogError:
            if file == log:
                raise
            continue
        found += [Store(file, run=r) for r in runs(records) if r.header.workloads == workloads]
    return max(found, key=lambda store: store.run.header.time if store.run else "", default=None)


def _check_same(run: Run | None, target: Target, settings: Settings, seed: int) -> None:
    assert run is not None
    header = run.header
    if not header.target.same_device(target):
        raise SettingsError(
            f"cannot resume run {header.run}: it was measured on {header.target.processor} "
            f"({header.target.arch}, {header.target.cores} cores), this is {target.processor} "
            f"({target.arch}, {target.cores} cores)"
        )
    mine = {name: getattr(settings, name) for name in DECIDING} | {"seed": seed}
    theirs = {name: getattr(header.settings, name) for name in DECIDING} | {"seed": header.seed}
    for name, value in theirs.items():
        if mine[name] != value:
            option = "--" + name.replace("_", "-")
            raise SettingsError(
                f"cannot resume run {header.run}: it has {option} {value}, not {mine[name]}"
            )


def _new_file(directory: Path, workloads: Sequence[Workload]) -> Path:
    stem = re.sub(r"[^a-z0-9]+", "-", str(workloads[0]))[:80]
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")[:-3]
    return directory / f"{stem}-{stamp}.jsonl"
