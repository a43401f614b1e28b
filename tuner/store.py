"""Where a run is logged: the file to append to, what it can learn from, the run it resumes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kt.logs.journal import holds_nothing, log_files, read_log
from kt.logs.query import Run, runs
from kt.logs.record import Record, Settings, WarmStart
from kt.spaces.errors import LogError, SettingsError
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .preset import preset_of
from .strategy import MODEL_OF
from .transfer import lessons
from .warm import nearest

DECIDING = (
    "strategy", "batch_size", "model_threads", "epsilon", "family", "scheduler",
)  # fmt: skip
"""Settings that proposals depend on and a user may choose: a resumed run must have the same.

Revision and lag are always those of its header."""


@dataclass(frozen=True)
class Store:
    """`run` is the run to resume, if any; else `warm` holds the warm starts of each workload."""

    path: Path
    warm: dict[str, tuple[WarmStart, ...]] = field(default_factory=dict)
    run: Run | None = None


def open_store(
    log: Path,
    workloads: Sequence[Workload],
    target: Target,
    settings: Settings,
    seed: int,
    resume: bool,
    others: Sequence[Record] = (),
) -> Store:
    """Resolves `--log` and `--resume`.

    `log` is a directory when it is one or has no suffix; a new run also learns from `others`,
    records of other logs. Raises LogError for a file that is not a
    log, SettingsError when the run to resume has other settings, seed or device.
    """
    logs = () if holds_nothing(log) else tuple(_readable(log))
    directory = log.is_dir() or (not log.exists() and not log.suffix)
    if resume and (found := _newest(logs, tuple(map(str, workloads)))):
        path, run = found
        _check_same(run, target, settings, seed)
        return Store(path, run=run)
    earlier = [*others, *(record for _, records in logs for record in records)]
    teach = settings.strategy in MODEL_OF and preset_of(settings).transfer
    warm = {}
    for workload in workloads:
        starts = nearest(earlier, workload, target)
        if starts and teach:
            starts += lessons(earlier, workload, target)
        if starts:
            warm[str(workload)] = starts
    return Store(_new_file(log, workloads) if directory else log, warm)


def _readable(log: Path) -> Iterator[tuple[Path, list[Record]]]:
    """The log, or what can be read of a directory's logs (foreign files may lie there too)."""
    if log.is_file():
        yield log, read_log(log).records
        return
    with suppress(LogError):
        for file in log_files(log):
            with suppress(LogError):
                yield file, read_log(file).records


def _newest(
    logs: Sequence[tuple[Path, list[Record]]], workloads: tuple[str, ...]
) -> tuple[Path, Run] | None:
    """The latest run of exactly these workloads."""
    found = [
        (path, run)
        for path, records in logs
        for run in runs(records)
        if run.header.workloads == workloads
    ]
    return max(found, key=lambda item: item[1].header.time, default=None)


def _check_same(run: Run, target: Target, settings: Settings, seed: int) -> None:
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
