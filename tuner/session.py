"""One tuning run between its header and its stop: freezing batches, recording, resuming."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kt.logs.journal import Journal
from kt.logs.query import Run
from kt.logs.record import (
    BatchRecord,
    Entry,
    Failure,
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
from kt.spaces.theta import Theta
from kt.spaces.workload import Workload, parse

from .measure import Candidate, FrozenBatch, Measured
from .search import Proposal, Search
from .state import Observation
from .versions import versions
from .warm import nested, warm_points


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
    censored: bool
    failure: str


class Session:
    """Owns the search, the journal and the trials' outcomes of one run."""

    def __init__(
        self, header: RunRecord, settings: Settings, journal: Journal, spaces: Sequence[Space] = ()
    ) -> None:
        self.header, self.settings, self.journal = header, settings, journal
        self.workloads = tuple(parse(text) for text in header.workloads)
        self.spaces = tuple(spaces) or tuple(space_of(w, header.target) for w in self.workloads)
        self.search = search_of(header, self.spaces)
        self.known: dict[int, Known] = {}
        self.best: dict[int, tuple[int, float]] = {}  # workload -> (trial, us)
        self.default_us: dict[int, float] = {}
        self._timed: dict[int, list[tuple[float, int, int]]] = {}
        self._default: dict[int, int] = {}
        self.failures: Counter[str] = Counter()
        self.first_failure: Failure | None = None
        self.since_improvement = 0
        self.planned_trials = 0
        self.search_seconds = 0.0
        self.spent = {"build": 0.0, "check": 0.0, "run": 0.0}
        self._logged: deque[BatchRecord] = deque()
        self._finished: dict[int, TrialRecord] = {}
        self._suspects: set[int] = set()

    # -- planning ---------------------------------------------------------------------------

    def plan(self, most: int) -> Planned | None:
        """Freezes and logs the next batch of at most `most` entries; None when all is exhausted."""
        started = time.perf_counter()
        proposal = self.search.propose()
        if proposal is None:
            return None
        if self._logged:
            proposal = self._as_logged(proposal, self._logged.popleft())
        else:
            proposal = self.search.take_back(proposal, min(most, len(proposal.points)))
            self.journal.append(self._batch_record(proposal), durable=True)
        planned = self._planned(proposal)
        self.planned_trials += len(proposal.points)
        self.search_seconds += time.perf_counter() - started
        return planned

    def _as_logged(self, proposal: Proposal, logged: BatchRecord) -> Proposal:
        cut = self.search.take_back(proposal, len(logged.entries))
        differing = mismatch(self.spaces[cut.which], cut, logged)
        if differing:
            raise LogError(
                f"cannot resume run {self.header.run}: {differing}; "
                f"{version_difference(self.header) or 'the versions are the same'}"
            )
        return cut

    def _batch_record(self, proposal: Proposal) -> BatchRecord:
        space = self.spaces[proposal.which]
        entries = tuple(
            Entry(self.planned_trials + i, space.family_of(p), nested(space.theta(p)), source)
            for i, (p, source) in enumerate(
                zip(proposal.points.tolist(), proposal.sources, strict=True)
            )
        )
        return BatchRecord(
            run=self.header.run, batch=proposal.number,
            workload=self.header.workloads[proposal.which], entries=entries,
            predicted=proposal.predicted, model=proposal.report, time=now(),
        )  # fmt: skip

    def _planned(self, proposal: Proposal) -> Planned:
        first = self.planned_trials
        space, workload = self.spaces[proposal.which], self.workloads[proposal.which]
        candidates = tuple(
            Candidate(first + i, space.kernel(point), alone=first + i in self._suspects)
            for i, point in enumerate(proposal.points.tolist())
            if first + i not in self._finished
        )
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
        return record

    def _copied(self, trial: int) -> Outcome:
        known = self.known[trial]
        if known.us is None:
            return Failure(known.failure, "build", f"same binary as trial {trial}")  # type: ignore[arg-type]
        return Timing((), known.us, known.censored, known.us if known.censored else 0.0)

    def _count(self, record: TrialRecord, which: int) -> None:
        outcome = record.outcome
        improved = False
        if isinstance(outcome, Failure):
            self.known[record.trial] = Known(None, False, outcome.failure)
            self.failures[outcome.failure] += 1
            self.first_failure = self.first_failure or outcome
        else:
            self.known[record.trial] = Known(outcome.median_us, outcome.censored, "")
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
        if record.source == "default" and which not in self.default_us:
            self.default_us[which] = us
            self._default[which] = record.trial
        if which in self.best and us >= self.best[which][1]:
            return False
        self.best[which] = (record.trial, us)
        return True

    def timed(self, which: int) -> list[tuple[int, int]]:
        """(trial, point) of a workload's distinct timed binaries, fastest first."""
        return [(trial, point) for _, trial, point in sorted(self._timed.get(which, []))]

    def default_trial(self, which: int) -> int:
        """The trial of the first family's default; -1 when it has no time."""
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
        self._logged = deque(sorted(run.batches, key=lambda b: b.batch))
        which = {text: i for i, text in enumerate(self.header.workloads)}
        for record in (run.trials[i] for i in sorted(run.trials)):
            self._finished[record.trial] = record
            self._count(record, which[record.workload])
        boots = [run.header.boot, *(r.boot for r in run.resumes)]
        if boots[-1] != boot_id():
            self._after_machine_crash(run, boots, which)
        self.journal.append(
            ResumeRecord(run=run.header.run, boot=boot_id(), settings=self.settings, time=now()),
            durable=True,
        )

    def _after_machine_crash(self, run: Run, boots: list[str], which: dict[str, int]) -> None:
        """What was running goes last and alone; what took the machine down twice has failed."""
        unfinished = [
            (batch, i, entry)
            for batch in self._logged
            for i, entry in enumerate(batch.entries)
            if entry.trial not in run.trials
        ]
        if not unfinished:
            return
        batch, i, entry = unfinished[0]
        retried = len(boots) > 1 and boots[-1] != boots[-2] and not run.trials_since_resume
        if not (retried and len(unfinished) == 1):
            self._suspects = {entry.trial}
            return
        record = TrialRecord(
            run=run.header.run, trial=entry.trial, batch=batch.batch, workload=batch.workload,
            family=entry.family, theta=Theta(**entry.knobs), source=entry.source,
            outcome=Failure("interrupted", "run", "the machine went down twice while this ran"),
            seconds=Seconds(), predicted=batch.predicted[i], time=now(),
        )  # fmt: skip
        self.journal.append(record, durable=True)
        self._finished[record.trial] = record
        self._count(record, which[record.workload])

    def finished_binaries(self) -> Iterable[tuple[str, int]]:
        """(binary, trial) of logged trials, so that their equals are not measured again."""
        for record in self._finished.values():
            if record.build and record.build.binary and record.duplicate_of is None:
                yield record.build.binary, record.trial

    @property
    def replaying(self) -> bool:
        """Whether batches of the log are still to be planned again."""
        return bool(self._logged)


def search_of(header: RunRecord, spaces: Sequence[Space]) -> Search:
    """The search that a header describes."""
    warm: list[Points] = [
        warm_points(space, header.warm.get(text, ()))
        for space, text in zip(spaces, header.workloads, strict=True)
    ]
    return Search(spaces, warm, header.settings, header.seed)


def mismatch(space: Space, proposal: Proposal, logged: BatchRecord) -> str | None:
    """How a recomputed batch differs from the logged one, or None when they are identical."""
    if str(space.workload) != logged.workload:
        return f"batch {logged.batch} proposes for '{space.workload}', not '{logged.workload}'"
    if len(proposal.points) < len(logged.entries):
        return f"batch {logged.batch} proposes {len(proposal.points)} of {len(logged.entries)}"
    for point, entry in zip(proposal.points.tolist(), logged.entries, strict=False):
        if (space.family_of(point), space.theta(point)) != (entry.family, Theta(**entry.knobs)):
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
