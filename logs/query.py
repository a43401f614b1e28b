"""Questions asked of logs: runs and their parts, best trials, curves, failures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

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
    """In batch order; records that are not in order (two resumes at once) are left out."""
    trials: dict[int, TrialRecord] = field(default_factory=dict)
    finals: dict[str, FinalRecord] = field(default_factory=dict)
    resumes: list[ResumeRecord] = field(default_factory=list)
    stop: StopRecord | None = None

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
        case TrialRecord() if record.workload in run.header.workloads:
            # A second record of a trial (two resumes at once) does not replace the first.
            run.trials.setdefault(record.trial, record)
        case BatchRecord():
            _add_batch(run.batches, record)
        case FinalRecord():
            run.finals[record.workload] = record
        case ResumeRecord():
            run.resumes.append(record)
            run.stop = None
        case StopRecord():
            run.stop = record


def _add_batch(batches: list[BatchRecord], record: BatchRecord) -> None:
    """Files a batch, or completes the one that a budget had cut short."""
    last = batches[-1] if batches else None
    if last is None or last.batch < record.batch:
        batches.append(record)
    elif last.batch == record.batch:
        known = {entry.trial for entry in last.entries}
        pairs = zip(record.entries, record.predicted, strict=False)
        more = [(entry, guess) for entry, guess in pairs if entry.trial not in known]
        batches[-1] = msgspec.structs.replace(
            last,
            entries=last.entries + tuple(entry for entry, _ in more),
            predicted=last.predicted + tuple(guess for _, guess in more),
        )


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

    @property
    def rank(self) -> tuple[bool, float]:
        """Smaller is better: verified before unverified, then by time."""
        return self.final is None, self.us

    @property
    def vendor_us(self) -> float | None:
        """The vendor library's time in the final's rounds."""
        samples = self.final.vendor_us if self.final else ()
        return statistics.median(samples) if samples else None


def best_of(run: Run, workload: str) -> Best | None:
    """The winner of the final, else the fastest trial; None when nothing was measured."""
    final = run.finals.get(workload)
    entries = final.entries if final else ()
    times = {entry.trial: entry.median_us for entry in entries if not entry.failure}
    if final and final.best in run.trials and final.best in times:
        winner = run.trials[final.best]
        return Best(
            workload, run.header.target, winner, times[final.best], times.get(final.default), final
        )
    disqualified = {entry.trial for entry in entries if entry.failure}
    trials = [trial for trial in run.of(workload) if trial.trial not in disqualified]
    results = [(us, t.trial, t) for t in trials if (us := timed(t)) is not None]
    if not results:
        return None
    us, _, winner = min(results, key=lambda item: item[:2])
    defaults = [us for us, _, trial in results if trial.source == "default"]
    default = min(defaults, default=None)
    return Best(workload, run.header.target, winner, us, default, None)


def best_trials(records: Sequence[Record]) -> list[Best]:
    """The best of every workload on every device over all runs, in order of first appearance.

    A verified final is preferred to a single trial's time.
    """
    found: dict[tuple[str, tuple[str, str, str, int]], Best] = {}
    for run in runs(records):
        for workload in run.header.workloads:
            best = best_of(run, workload)
            if best is None:
                continue
            key = (workload, best.target.device)
            if key not in found or best.rank < found[key].rank:
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
