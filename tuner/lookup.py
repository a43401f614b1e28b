"""Finding things in a log for a command: its runs, the workloads asked for, one trial."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kt.logs.journal import BadLines, read_log
from kt.logs.query import Run, runs
from kt.logs.record import Failure, TrialRecord
from kt.spaces.errors import LogError

from .request import choose_logged, listed
from .text import one_line

_BAD_SHOWN = 8


def open_runs(log: Path, run: str | None = None) -> tuple[list[Run], BadLines]:
    """Runs of a log file or directory, and its bad lines; `run` is the start of a run's id."""
    found = read_log(log)
    every = runs(found.records)
    chosen = [r for r in every if run is None or (run and r.header.run.startswith(run))]
    if every and not chosen:
        ids = listed([r.header.run for r in every])
        raise LogError(f"{log}: no run '{run}'; it has {ids}")
    if not any(r.trials for r in chosen):
        why = f" (line {found.bad[0].line}: {found.bad[0].reason})" if found.bad else ""
        raise LogError(f"{log}: no trials in this log{why}")
    return chosen, found.bad


def report_bad(bad: BadLines) -> None:
    """Says on stderr which lines were skipped."""
    for line in bad[:_BAD_SHOWN]:
        print(f"kt: {one_line(str(line))}", file=sys.stderr)
    if bad.total > _BAD_SHOWN:
        print(f"kt: and {bad.total - _BAD_SHOWN} more bad lines skipped", file=sys.stderr)


def workloads_in(
    found: Sequence[Run], words: Sequence[str], flags: Mapping[str, str | None]
) -> list[str]:
    """The logged workloads that a command names, in order of appearance; all without words."""
    logged = dict.fromkeys(text for run in found for text in run.header.workloads)
    return choose_logged(list(logged), words, flags)


def one_trial(found: Sequence[Run], texts: Sequence[str], number: int) -> tuple[Run, TrialRecord]:
    """Trial `number` of these workloads; LogError when none or several runs have it."""
    wanted = frozenset(texts)
    hits = [
        (run, trial)
        for run in found
        if (trial := run.trials.get(number)) and trial.workload in wanted
    ]
    if not hits:
        most = max((max(run.trials, default=0) for run in found), default=0)
        gaps = " but for those that a stopped run left without a result" if number < most else ""
        raise LogError(f"no trial {number} in this log: accepts 0 to {most}{gaps}")
    if len(hits) > 1:
        ids = listed([run.header.run for run, _ in hits])
        raise LogError(f"{len(hits)} runs have a trial {number}: choose one with --run ({ids})")
    return hits[0]


def failure_text(failure: Failure) -> str:
    """A failure in one line."""
    return one_line(f"{failure.failure} in {failure.stage}: {failure.message}", 300)
