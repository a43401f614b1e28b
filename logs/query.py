"""Questions asked of logs: runs and their parts, best trials, curves, failures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, field

import msgspec

from kt.spaces.target import Target

from .record import (
    BatchRecord,
    Entry,
    Failure,
    FinalRecord,
    Record,
    ResumeRecord,
    RunRecord,
    StopRecord,
    Timing,
    TrialRecord,
)

MOST_ENTRIES = 4096
"""Of one batch: the largest `batch_size`."""


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
    left_out: int = 0
    """Trial records that no logged batch of this run proposed."""
    planned: int = 0
    """Trials in `batches`, and the number of the next one."""
    entries: dict[int, tuple[str, Entry]] = field(default_factory=dict)
    """(workload, entry) of `batches` by trial."""
    _by_workload: dict[str, list[TrialRecord]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_workload = {workload: [] for workload in self.header.workloads}

    def of(self, workload: str) -> list[TrialRecord]:
        """Trials of one workload in trial order."""
        return sorted(self._by_workload.get(workload, ()), key=lambda trial: trial.trial)

    @property
    def workloads(self) -> KeysView[str]:
        """The header's, each once; quick to look one up."""
        return self._by_workload.keys()

    def take(self, trial: TrialRecord) -> None:
        """Files a trial that a batch proposed; its first record counts (two resumes at once)."""
        workload, entry = self.entries.get(trial.trial, ("", None))
        if entry is None or (workload, entry.family, entry.knobs) != (
            trial.workload, trial.family, trial.theta,
        ):  # fmt: skip
            self.left_out += 1
        elif trial.trial not in self.trials:
            self.trials[trial.trial] = trial
            self._by_workload[workload].append(trial)


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
            run.take(record)
        case BatchRecord() if record.workload in run.workloads:
            _add_batch(run, record)
        case FinalRecord() if record.workload in run.workloads:
            run.finals[record.workload] = record
        case ResumeRecord():
            run.resumes.append(record)
            run.stop = None
        case StopRecord():
            run.stop = record


def _add_batch(run: Run, record: BatchRecord) -> None:
    """Files a batch, or completes the one that a budget had cut short.

    One whose trials are not numbered on from the last one's is left out.
    """
    last = run.batches[-1] if run.batches else None
    following = last.batch + 1 if last else 0
    if len(record.entries) != len(record.predicted):
        return
    first, pairs = run.planned, list(zip(record.entries, record.predicted, strict=True))
    completed = last if last and (last.batch, last.workload) == _place(record) else None
    if completed:
        pairs = [pair for pair in pairs if pair[0].trial >= first]
    elif record.batch < following:
        return
    elif record.batch > following and pairs:
        first = max(first, pairs[0][0].trial)  # a batch is missing, and its trials with it
    if any(entry.trial != first + i for i, (entry, _) in enumerate(pairs)):
        return
    entries, predicted = tuple(e for e, _ in pairs), tuple(guess for _, guess in pairs)
    if completed:
        entries, predicted = completed.entries + entries, completed.predicted + predicted
    if len(entries) > MOST_ENTRIES:
        return
    run.planned = first + len(pairs)
    run.entries.update({entry.trial: (record.workload, entry) for entry, _ in pairs})
    whole = msgspec.structs.replace(completed or record, entries=entries, predicted=predicted)
    run.batches[len(run.batches) - bool(completed) :] = [whole]


def _place(record: BatchRecord) -> tuple[int, str]:
    return record.batch, record.workload


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
    times = {entry.trial: entry.median_us for entry in entries if entry.sound}
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
        for workload in run.workloads:
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
