"""What runs next, and when a result is final: the bookkeeping of the batches under way.

A binary can run as soon as it is built, whatever its place in the batch. Of equal binaries the one
with the lowest trial is the original and the others its duplicates, whichever was built first: a
result is told only when every earlier build has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue

from kt.logs.record import Failure, Seconds

from .backend.build import Binary
from .backend.cpu import Ran
from .measure import Candidate, FrozenBatch, Measured

Results = SimpleQueue[Measured | BaseException | None]
_Key = tuple[object, ...]


class _State(Enum):
    WAITING, RUNNING, ENDED = range(3)


@dataclass
class Run:
    """One binary, run once for all candidates of its batch that have it."""

    binary: Binary
    batch: FrozenBatch
    deadline: float | None
    alone: bool
    state: _State = _State.WAITING
    ran: Ran | None = None
    """None for one that is not run, or that the deadline ended."""


@dataclass
class _Job:
    candidate: Candidate
    built: Binary | Failure | None = None
    told: bool = False


@dataclass
class _UnderWay:
    """A started batch. `runs` are in the order in which their binaries were built."""

    batch: FrozenBatch
    deadline: float | None
    jobs: dict[int, _Job]
    runs: dict[_Key, Run] = field(default_factory=dict)
    results: Results = field(default_factory=SimpleQueue)
    cut: bool = False

    @property
    def built(self) -> bool:
        return all(job.built is not None for job in self.jobs.values())

    @property
    def has_alone(self) -> bool:
        return any(job.candidate.alone for job in self.jobs.values())

    def in_state(self, state: _State) -> list[Run]:
        return [run for run in self.runs.values() if run.state is state]


class Dispatch:
    """Shared by builders, which say what is built, and by runners, which ask what to run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: list[_UnderWay] = []
        self._originals: dict[_Key, int] = {}
        self._closed = False

    def forget(self) -> None:
        """Begins a run: no binary is known."""
        with self._changed:
            self._originals.clear()
            self._under_way.clear()

    def know(self, workload: str, binary: str, trial: int) -> None:
        """`trial` of an earlier session had this binary."""
        with self._changed:
            self._originals.setdefault((workload, binary), trial)

    def start(self, batch: FrozenBatch, deadline: float | None) -> Results:
        """Takes up a batch whose builds begin now. Its results end with None, or an error."""
        jobs = {c.trial: _Job(c) for c in sorted(batch.candidates, key=lambda c: c.trial)}
        with self._changed:
            self._under_way.append(started := _UnderWay(batch, deadline, jobs))
            self._settle()
        return started.results

    # -- builders ---------------------------------------------------------------------------

    def built(self, batch: FrozenBatch, trial: int, built: Binary | Failure) -> None:
        """What became of a candidate's build."""
        with self._changed:
            started = self._find(batch)
            if started is None or started.cut:
                return
            job = started.jobs[trial]
            job.built = built
            if isinstance(built, Failure):
                self._tell(started, job, Measured(trial, built, None, Seconds()))
            else:
                self._plan(started, job, built)
            self._settle()

    def _plan(self, started: _UnderWay, job: _Job, binary: Binary) -> None:
        """A run of the binary, unless it has one or an earlier trial had it."""
        key = _key(started.batch, binary)
        if self._original(key) is not None:
            return
        run = Run(binary, started.batch, started.deadline, job.candidate.alone)
        known = started.runs.setdefault(key, run)
        known.alone |= job.candidate.alone

    # -- runners ----------------------------------------------------------------------------

    def next(self, batch: FrozenBatch) -> Run | None:
        """What to run next of one batch; None when nothing is left to run."""
        with self._changed:
            started = self._find(batch)
            return self._begin(self._choice(started)) if started else None

    def wait_next(self) -> Run | None:
        """What to run next of any batch, once there is something; None when this was closed."""
        with self._changed:
            while not self._closed:
                if run := self._begin(self._first_choice()):
                    return run
                self._changed.wait()
            return None

    def ran(self, run: Run, ran: Ran | None) -> None:
        """What became of a run; None when its deadline ended it, and all others with it."""
        with self._changed:
            run.state, run.ran = _State.ENDED, ran
            if ran is None:
                self._cut()
            self._settle()

    def again(self, run: Run) -> None:
        """Its device is gone: another one takes it."""
        with self._changed:
            run.state = _State.WAITING
            if (started := self._find(run.batch)) is None or started.cut:
                run.state = _State.ENDED
            self._settle()

    def _first_choice(self) -> Run | None:
        running = [run for one in self._under_way for run in one.in_state(_State.RUNNING)]
        if any(run.alone for run in running):
            return None
        for started in self._under_way:
            run = self._choice(started)
            if run is not None and not (run.alone and running):
                return run
            if started.has_alone:
                return None  # nothing of a later batch beside those that are to be alone
        return None

    def _choice(self, started: _UnderWay) -> Run | None:
        """The first that waits; those that want to be alone last, and then nothing is building."""
        waiting = started.in_state(_State.WAITING)
        if started.has_alone and not started.built:
            return None
        return min(waiting, key=lambda run: run.alone, default=None)

    @staticmethod
    def _begin(run: Run | None) -> Run | None:
        if run is not None:
            run.state = _State.RUNNING
        return run

    # -- ends -------------------------------------------------------------------------------

    def cut(self) -> None:
        """The deadline came: what is not running is left out, in every batch under way."""
        with self._changed:
            self._cut()
            self._settle()

    def fail(self, error: BaseException) -> None:
        """An error that is no candidate's: it is raised where results are awaited."""
        with self._changed:
            for started in self._under_way:
                started.results.put(error)
            self._under_way.clear()

    def close(self) -> None:
        """Sends the runners home."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _cut(self) -> None:
        for started in self._under_way:
            started.cut = True
            for run in started.in_state(_State.WAITING):
                run.state = _State.ENDED

    # -- results ----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Tells what has become final, ends batches that have nothing left, wakes the runners."""
        firsts: dict[_Key, int] = {}
        for started, job in self._known_prefix():
            if isinstance(job.built, Binary):
                key = _key(started.batch, job.built)
                firsts.setdefault(key, job.candidate.trial)
                if not job.told:
                    self._resolve(started, job, job.built, firsts[key])
        for started in list(self._under_way):
            untold = any(not job.told for job in started.jobs.values())
            if not untold or (started.cut and not started.in_state(_State.RUNNING)):
                started.results.put(None)
                self._under_way.remove(started)
        self._changed.notify_all()

    def _known_prefix(self) -> Iterator[tuple[_UnderWay, _Job]]:
        """Jobs by trial, up to the first whose build has not ended and still may."""
        jobs = [(started, job) for started in self._under_way for job in started.jobs.values()]
        for started, job in sorted(jobs, key=lambda pair: pair[1].candidate.trial):
            if job.built is None and not started.cut:
                return
            yield started, job

    def _resolve(self, started: _UnderWay, job: _Job, binary: Binary, first: int) -> None:
        trial, key = job.candidate.trial, _key(started.batch, binary)
        original = self._original(key)
        if original is not None:
            seconds = Seconds(build=round(binary.seconds, 4))
            self._tell(started, job, Measured(trial, None, binary.facts, seconds, original))
        elif first == trial:
            if (ran := started.runs[key].ran) is not None:
                self._tell(started, job, _measured(trial, binary, ran))
                self._originals[key] = trial
        elif first not in started.jobs and key in started.runs:
            run = started.runs[key]  # an earlier batch has the same binary, built later
            run.state = _State.ENDED if run.state is _State.WAITING else run.state

    def _tell(self, started: _UnderWay, job: _Job, measured: Measured) -> None:
        job.told = True
        started.results.put(measured)

    def _original(self, key: _Key) -> int | None:
        """The trial whose result is known for this binary; earlier sessions name only the file."""
        return self._originals.get(key, self._originals.get(key[:2]))

    def _find(self, batch: FrozenBatch) -> _UnderWay | None:
        trials = {c.trial for c in batch.candidates}
        return next((one for one in self._under_way if one.jobs.keys() == trials), None)


def _key(batch: FrozenBatch, binary: Binary) -> _Key:
    """What makes two candidates the same: the binary and how it is launched."""
    launch = (binary.launches, binary.workspace_bytes, binary.zeroed_bytes)
    return str(batch.workload), binary.facts.binary, launch


def _measured(trial: int, binary: Binary, ran: Ran) -> Measured:
    seconds = Seconds(
        build=round(binary.seconds, 4), check=round(ran.check_seconds, 4),
        run=round(ran.run_seconds, 4),
    )  # fmt: skip
    return Measured(trial, ran.outcome, binary.facts, seconds, clock_mhz=ran.clock_mhz)
