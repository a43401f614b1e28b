"""One tuning run between its header and its stop: freezing batches, recording, resuming."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kt.logs.journal import Journal
from kt.logs.query import Run
from kt.logs.record import (
    BatchRecord,
    Entry,
    Failure,
    FinalRecord,
    Heuristic,
    Outcome,
    ResumeRecord,
    RunRecord,
    Seconds,
    Settings,
    Timing,
    TrialRecord,
)
from kt.spaces.errors import LogError
from kt.spaces.families import space_of
from kt.spaces.space import Points, Space
from kt.spaces.target import checked_target
from kt.spaces.workload import Workload, parse

from .measure import Candidate, FrozenBatch, Measured
from .preset import preset_of
from .search import Proposal, Search
from .state import Observation
from .transfer import lessons_of
from .versions import versions
from .warm import heuristics, logged_defaults, starts_of, warm_points


def now() -> str:
    """UTC time for records."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def boot_id() -> str:
    """Changes when the machine restarts; empty where it cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Planned:
    """A frozen batch: its proposal, the number of its first trial, what is still to be measured."""

    proposal: Proposal
    workload: Workload
    first_trial: int
    frozen: FrozenBatch


@dataclass(frozen=True)
class Known:
    """What a session keeps of a finished trial."""

    us: float | None
    censored: bool = False
    failure: Failure | None = None


class Session:
    """Owns the search, the journal and the trials' outcomes of one run."""

    def __init__(
        self,
        header: RunRecord,
        settings: Settings,
        journal: Journal,
        spaces: Sequence[Space] = (),
        batches: Sequence[BatchRecord] = (),
    ) -> None:
        """`batches` are those of a run to `resume`."""
        self.header, self.settings, self.journal = header, settings, journal
        self.workloads = tuple(parse(text) for text in header.workloads)
        device = checked_target(header.target)
        only = header.settings.family
        self.spaces = tuple(spaces) or tuple(space_of(w, device, only) for w in self.workloads)
        self.search = search_of(header, self.spaces, batches)
        self.known: dict[int, Known] = {}
        self.best: dict[int, tuple[int, float]] = {}  # workload -> (trial, us)
        self.default_us: dict[int, float] = {}  # of the fastest family's default
        self.decided: dict[str, FinalRecord] = {}
        """Finals of an earlier session that no later trial has put in question."""
        self.winners: dict[str, int] = {}
        """Trials that won a final of an earlier session by workload, -1 where none did."""
        self._timed: dict[int, list[tuple[float, int, int]]] = {}
        self._default: dict[int, int] = {}
        self.failures: Counter[str] = Counter()
        self.first_failure: Failure | None = None
        self.since_improvement = 0
        self._planned_trials = [0] * len(self.workloads)
        self.search_seconds = 0.0
        self.spent = {"build": 0.0, "check": 0.0, "run": 0.0}
        self.pace: dict[str, float] = {}
        """Seconds of the finished loop, and of the device's idleness in it."""
        self._logged: deque[BatchRecord] = deque()
        self._finished: dict[int, TrialRecord] = {}
        self._suspects: set[int] = set()

    # -- planning ---------------------------------------------------------------------------

    @property
    def planned_trials(self) -> int:
        """Trials frozen so far; also the number of the next one."""
        return sum(self._planned_trials)

    @property
    def room(self) -> list[int]:
        """Trials that may still be planned, by workload; a scheduler by gain shares them all.

        Until each workload has had a batch, one takes no more than its even share of what is left.
        """
        if self.header.settings.scheduler == "gain":
            count, fresh = len(self.workloads), self._planned_trials.count(0)
            left = self.settings.trials * count - self.planned_trials
            return [left // max(fresh, 1)] * count
        return [self.settings.trials - planned for planned in self._planned_trials]

    def plan(self) -> Planned | None:
        """Freezes and logs the next batch; None when its workload is full, or all exhausted."""
        started = time.perf_counter()
        logged = self._logged.popleft() if self._logged else None
        proposal = self.search.propose(self._room_like(logged) if logged else self.room)
        if logged:
            self._refuse_other(proposal, logged)
        if proposal is None:
            return None
        done = len(logged.entries) if logged else 0
        if done < len(proposal.points):
            self.journal.append(self._batch_record(proposal, done), durable=True)
        planned = self._planned(proposal)
        self._planned_trials[proposal.which] += len(proposal.points)
        self.search_seconds += time.perf_counter() - started
        return planned

    def _room_like(self, logged: BatchRecord) -> list[int]:
        """Room for a logged batch; the last one, if a budget cut it short, is completed."""
        size = len(logged.entries)
        return [size if self._logged else max(size, room) for room in self.room]

    def _refuse_other(self, proposal: Proposal | None, logged: BatchRecord) -> None:
        differing = mismatch(self.spaces, proposal, logged)
        if differing:
            raise LogError(
                f"cannot resume run {self.header.run}: {differing}; "
                f"{version_difference(self.header) or 'the versions are the same'}"
            )

    def _batch_record(self, proposal: Proposal, start: int) -> BatchRecord:
        """The record of a proposal's entries from `start` on."""
        space, first = self.spaces[proposal.which], self.planned_trials
        entries = tuple(
            Entry(first + i, space.family_of(p), space.theta(p), source)
            for i, (p, source) in enumerate(
                zip(proposal.points.tolist(), proposal.sources, strict=True)
            )
        )
        return BatchRecord(
            run=self.header.run, batch=proposal.number,
            workload=self.header.workloads[proposal.which], entries=entries[start:],
            predicted=proposal.predicted[start:], model=proposal.report, time=now(),
        )  # fmt: skip

    def _planned(self, proposal: Proposal) -> Planned:
        first = self.planned_trials
        space, workload = self.spaces[proposal.which], self.workloads[proposal.which]
        candidates = tuple(
            Candidate(first + i, space.kernel(point), alone=first + i in self._suspects)
            for i, point in enumerate(proposal.points.tolist())
            if first + i not in self._finished
        )
        candidates = tuple(sorted(candidates, key=lambda candidate: candidate.alone))
        frozen = FrozenBatch(proposal.number, workload, candidates, proposal.incumbent_us)
        return Planned(proposal, workload, first, frozen)

    # -- recording --------------------------------------------------------------------------

    def record(self, planned: Planned, measured: Measured) -> TrialRecord:
        """Logs one candidate's final result and returns its record."""
        index = measured.trial - planned.first_trial
        proposal = planned.proposal
        space, point = self.spaces[proposal.which], int(proposal.points[index])
        outcome = measured.outcome
        if outcome is None:
            assert measured.duplicate_of is not None
            outcome = self._copied(measured.duplicate_of)
        record = TrialRecord(
            run=self.header.run, trial=measured.trial, batch=proposal.number,
            workload=self.header.workloads[proposal.which], family=space.family_of(point),
            theta=space.theta(point), outcome=outcome, seconds=measured.seconds,
            source=proposal.sources[index], predicted=proposal.predicted[index],
            build=measured.build, duplicate_of=measured.duplicate_of,
            clock_mhz=measured.clock_mhz, time=now(),
        )  # fmt: skip
        self.journal.append(record)
        self._count(record, proposal.which)
        self.decided.pop(record.workload, None)
        return record

    def _copied(self, trial: int) -> Outcome:
        known = self.known[trial]
        if known.failure is not None:
            message = f"same binary as trial {trial}: {known.failure.message}"
            return msgspec.structs.replace(known.failure, message=message, detail="")
        assert known.us is not None
        return Timing((), known.us, known.censored, known.us if known.censored else 0.0)

    def _count(self, record: TrialRecord, which: int) -> None:
        outcome = record.outcome
        improved = False
        if isinstance(outcome, Failure):
            self.known[record.trial] = Known(None, failure=outcome)
            self.failures[outcome.failure] += 1
            self.first_failure = self.first_failure or outcome
        else:
            self.known[record.trial] = Known(outcome.median_us, outcome.censored)
            if not outcome.censored:
                improved = self._keep(record, outcome.median_us, which)
        self.since_improvement = 0 if improved else self.since_improvement + 1
        for stage in self.spent:
            self.spent[stage] += getattr(record.seconds, stage)

    def _keep(self, record: TrialRecord, us: float, which: int) -> bool:
        """Files a time under its workload; whether it is the best so far."""
        point = self.spaces[which].point(record.family, record.theta)
        if record.duplicate_of is None:
            self._timed.setdefault(which, []).append((us, record.trial, point))
        if record.source == "default" and us < self.default_us.get(which, float("inf")):
            self.default_us[which] = us
            self._default[which] = record.trial
        if which in self.best and us >= self.best[which][1]:
            return False
        self.best[which] = (record.trial, us)
        return True

    def timed(self, which: int) -> list[tuple[float, int, int]]:
        """(µs, trial, point) of a workload's distinct timed binaries, fastest first."""
        return sorted(self._timed.get(which, []))

    def default_trial(self, which: int) -> int:
        """The trial of the fastest family default; -1 when none has a time."""
        return self._default.get(which, -1)

    def best_trials(self) -> dict[str, int]:
        """The fastest trial of each workload so far, -1 without one."""
        texts = enumerate(self.header.workloads)
        return {text: self.best.get(i, (-1, 0.0))[0] for i, text in texts}

    def observe(self, planned: Planned) -> None:
        """Tells the search a batch's final events in index order."""
        started = time.perf_counter()
        observations = [
            Observation(point, known.us, known.censored)
            for i, point in enumerate(planned.proposal.points.tolist())
            if (known := self.known.get(planned.first_trial + i))
        ]
        self.search.observe(planned.proposal, observations)
        self.search_seconds += time.perf_counter() - started

    # -- resuming ---------------------------------------------------------------------------

    def resume(self, run: Run) -> None:
        """Takes up a logged run: its batches are planned again and its trials not repeated."""
        if missing := {workload.dtype for workload in self.workloads} - set(run.header.bounds):
            raise LogError(f"run {run.header.run} has no measured bound for {', '.join(missing)}")
        self._logged = deque(run.batches)
        self.decided = dict(run.finals)
        self.winners = {text: final.best for text, final in run.finals.items()}
        for record in (run.trials[i] for i in sorted(run.trials)):
            self._finish(record)
        last = run.resumes[-1] if run.resumes else None
        self.spent = dict.fromkeys(self.spent, 0.0)  # that was the earlier sessions' time
        self._suspects = set(last.suspects) - set(self._finished) if last else set()
        if (last or run.header).boot != boot_id():
            self._after_machine_crash()
        self.journal.append(
            ResumeRecord(
                run=run.header.run, boot=boot_id(), settings=self.settings, time=now(),
                suspects=tuple(sorted(self._suspects)),
            ),
            durable=True,
        )  # fmt: skip

    def _finish(self, record: TrialRecord) -> None:
        self._finished[record.trial] = record
        self._count(record, self.header.workloads.index(record.workload))

    def _after_machine_crash(self) -> None:
        """What was running goes last and alone; what took the machine down twice has failed."""
        waiting = [
            (entry.trial in self._suspects, entry, batch)
            for batch in self._logged
            for entry in batch.entries
            if entry.trial not in self._finished
        ]
        if not waiting:
            return
        number = waiting[0][2].batch  # the batch under way; within it, suspects ran last
        retried, entry, batch = min(
            (item for item in waiting if item[2].batch == number), key=lambda item: item[0]
        )
        if not retried:
            self._suspects.add(entry.trial)
            return
        record = TrialRecord(
            run=self.header.run, trial=entry.trial, batch=batch.batch, workload=batch.workload,
            family=entry.family, theta=entry.knobs, source=entry.source,
            outcome=Failure("interrupted", "run", "the machine went down twice while this ran"),
            seconds=Seconds(), time=now(),
        )  # fmt: skip
        self.journal.append(record, durable=True)
        self._suspects.discard(entry.trial)
        self._finish(record)

    def finished_binaries(self) -> Iterable[tuple[str, str, int]]:
        """(workload, binary, trial) of logged trials: their equals are not measured again."""
        for record in self._finished.values():
            if record.build and record.build.binary and record.duplicate_of is None:
                yield record.workload, record.build.binary, record.trial

    @property
    def replaying(self) -> bool:
        """Whether batches of the log are still to be planned again."""
        return bool(self._logged)


def heuristics_of(spaces: Sequence[Space], settings: Settings) -> dict[str, tuple[Heuristic, ...]]:
    """What a header keeps of today's heuristics, which may change while its log stays."""
    most = preset_of(settings).likely
    return {str(space.workload): heuristics(space, most) for space in spaces}


def search_of(
    header: RunRecord, spaces: Sequence[Space], batches: Sequence[BatchRecord] = ()
) -> Search:
    """The search that a header describes; `batches` name the defaults that older headers do not."""
    warm: list[Points] = [
        warm_points(space, header.warm.get(text, ()))
        for space, text in zip(spaces, header.workloads, strict=True)
    ]
    lessons = lessons_of(header.warm, spaces[0].target, header.settings.family)
    weights = [header.weights.get(text, 1.0) for text in header.workloads]
    starts = [
        starts_of(space, header.heuristics.get(text) or logged_defaults(batches, text))
        for space, text in zip(spaces, header.workloads, strict=True)
    ]
    return Search(
        spaces, warm, header.settings, header.seed,
        lessons=lessons, weights=weights, starts=starts,
    )  # fmt: skip


def mismatch(spaces: Sequence[Space], proposal: Proposal | None, logged: BatchRecord) -> str | None:
    """How a recomputed batch differs from the logged one, or None when it begins with that."""
    if proposal is None:
        return f"batch {logged.batch} proposes nothing: the space is exhausted"
    if proposal.number != logged.batch:
        return f"batch {proposal.number} is missing from the log"
    space = spaces[proposal.which]
    if str(space.workload) != logged.workload:
        return f"batch {logged.batch} proposes for '{space.workload}', not '{logged.workload}'"
    if len(proposal.points) < len(logged.entries):
        return f"batch {logged.batch} proposes {len(proposal.points)} of {len(logged.entries)}"
    for point, entry in zip(proposal.points.tolist(), logged.entries, strict=False):
        if (space.family_of(point), space.theta(point)) != (entry.family, entry.knobs):
            return f"batch {logged.batch} proposes other points from trial {entry.trial} on"
    return None


def version_difference(header: RunRecord) -> str:
    """Versions of the log that differ from this installation's, as text; empty when none do."""
    mine = versions()
    return ", ".join(
        f"{name} {logged} in the log, {mine.get(name, 'absent')} here"
        for name, logged in header.versions.items()
        if mine.get(name) != logged
    )
