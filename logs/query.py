"""Questions asked of logs: runs and their parts, best trials, curves, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kt.spaces.target import Target

from .record import (
    BatchRecord,
    Failure,
    FinalRecord,
    Record,
    ResumeRecord,
    RunRecord,
    StopRecord,
    Timing,
    TrialRecord,
)


@dataclass
class Run:
    """The records of one run, in file order by kind."""

    header: RunRecord
    batches: list[BatchRecord] = field(default_factory=list)
    trials: dict[int, TrialRecord] = field(default_factory=dict)
    finals: dict[str, FinalRecord] = field(default_factory=dict)
    resumes: list[ResumeRecord] = field(default_factory=list)
    stop: StopRecord | None = None
    trials_since_resume: int = 0

    def of(self, workload: str) -> list[TrialRecord]:
        """Trials of one workload in trial order."""
        return [t for _, t in sorted(self.trials.items()) if t.workload == workload]


def runs(records: Sequence[Record]) -> list[Run]:
    """Runs in order of their headers; records of a run without a header are left out."""
    found: dict[str, Run] = {}
    for record in records:
        if isinstance(record, RunRecord):
            found.setdefault(record.run, Run(record))
        elif run := found.get(record.run):
            _add(run, record)
    return list(found.values())


def _add(run: Run, record: Record) -> None:
    match record:
        case TrialRecord():
            # A second record of a trial (two resumes at once) does not replace the first.
            run.trials.setdefault(record.trial, record)
            run.trials_since_resume += 1
        case BatchRecord():
            run.batches.append(record)
        case FinalRecord():
            run.finals[record.workload] = record
        case ResumeRecord():
            run.resumes.append(record)
            run.stop, run.trials_since_resume = None, 0
        case StopRecord():
            run.stop = record
        case RunRecord():
            pass


def timed(trial: TrialRecord) -> float | None:
    """The trial's time in microseconds when it is a result: not failed, not cut early."""
    outcome = trial.outcome
    if isinstance(outcome, Timing) and not outcome.censored:
        return outcome.median_us
    return None


@dataclass(frozen=True)
class Best:
    """A workload's best trial of one run. `us` is the finalists' time where there was a final."""

    workload: str
    target: Target
    trial: TrialRecord
    us: float
    default_us: float | None
    final: FinalRecord | None


def best_of(run: Run, workload: str) -> Best | None:
    """The winner of the final, else the fastest trial; None when nothing was measured."""
    final = run.finals.get(workload)
    if final and final.best in run.trials:
        times = {entry.trial: entry.median_us for entry in final.entries}
        winner = run.trials[final.best]
        return Best(
            workload, run.header.target, winner, times[final.best], times.get(final.default), final
        )
    trials = run.of(workload)
    results = [(us, t.trial, t) for t in trials if (us := timed(t)) is not None]
    if not results:
        return None
    us, _, winner = min(results, key=lambda item: item[:2])
    default = next((timed(t) for t in trials if t.source == "default"), None)
    return Best(workload, run.header.target, winner, us, default, None)


def best_trials(records: Sequence[Record]) -> list[Best]:
    """The best of every (workload, device) over all runs, in order of first appearance."""
    found: dict[tuple[str, str, str], Best] = {}
    for run in runs(records):
        for workload in run.header.workloads:
            best = best_of(run, workload)
            if best is None:
                continue
            key = (workload, best.target.kind, best.target.processor)
            if key not in found or best.us < found[key].us:
                found[key] = best
    return list(found.values())


def failures(trials: Sequence[TrialRecord]) -> dict[str, int]:
    """Failed trials by kind, most frequent first."""
    kinds = Counter(t.outcome.failure for t in trials if isinstance(t.outcome, Failure))
    return dict(kinds.most_common())


def curve(trials: Sequence[TrialRecord]) -> Iterator[tuple[int, float]]:
    """(number of trials, best microseconds so far) wherever the best improved."""
    best = float("inf")
    for count, trial in enumerate(trials, 1):
        us = timed(trial)
        if us is not None and us < best:
            best = us
            yield count, us
