"""THE LOOP: propose, freeze, build, run, log, learn; and what stands before and after it."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kt.logs.claim import Claim
from kt.logs.journal import Journal
from kt.logs.record import (
    Bound,
    FinalRecord,
    Record,
    RunRecord,
    Settings,
    StopRecord,
    TrialRecord,
    WarmStart,
)
from kt.spaces.errors import SettingsError
from kt.spaces.families import space_of
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .finals import hold_finals
from .measure import Measurer
from .session import Planned, Session, boot_id, heuristics_of, now
from .stop import Stopper
from .store import open_store
from .versions import kt_version, versions


class View(Protocol):
    """Watches a run. Called from the loop; must not block."""

    def note(self, line: str) -> None: ...
    def started(self, session: Session) -> None: ...
    def planned(self, session: Session, planned: Planned) -> None: ...
    def trial(self, session: Session, record: TrialRecord) -> None: ...
    def final(self, session: Session, record: FinalRecord) -> None: ...
    def stopped(self, session: Session, record: StopRecord) -> None: ...


class Quiet:
    """A view that shows nothing."""

    def note(self, line: str) -> None:
        pass

    def started(self, session: Session) -> None:
        pass

    def planned(self, session: Session, planned: Planned) -> None:
        pass

    def trial(self, session: Session, record: TrialRecord) -> None:
        pass

    def final(self, session: Session, record: FinalRecord) -> None:
        pass

    def stopped(self, session: Session, record: StopRecord) -> None:
        pass


@dataclass(frozen=True)
class Result:
    """How a run ended. `best` maps each workload to its winner's trial, -1 without one."""

    log: Path
    run: str
    reason: str
    trials: int
    best: dict[str, int]
    failures: dict[str, int]
    first_failure: str


def run_batches(session: Session, measurer: Measurer, stop: Stopper, view: View) -> str:
    """The loop. Returns why it ended."""
    window: deque[Planned] = deque()
    while True:
        while len(window) <= session.header.settings.lag and stop.reason() is None:
            planned = session.plan()
            if planned is None:
                break
            measurer.start(planned.frozen, stop.deadline)
            window.append(planned)
            view.planned(session, planned)
        if not window:
            return stop.reason() or "exhausted"
        planned = window.popleft()
        for measured in measurer.finish(planned.frozen, stop.deadline):
            view.trial(session, session.record(planned, measured))
        session.observe(planned)


def tune(
    workloads: Sequence[Workload],
    target: Target,
    log: Path,
    measurer: Measurer,
    settings: Settings | None = None,
    seed: int = 0,
    resume: bool = False,
    view: View | None = None,
    earlier: Sequence[Record] = (),
    weights: Mapping[Workload, float] | None = None,
) -> Result:
    """Tunes `workloads` on `target` and appends everything to `log`.

    `log` is a file, or a directory in which a new file is made. With `resume` the newest run of
    these workloads in it goes on. A new run learns from what is in `log`, and from the records of
    other logs in `earlier`. `weights` say what a workload's time counts beside the others', where
    that is not 1. Raises KtError for what the user must change.
    """
    settings, view, started = settings or Settings(), view or Quiet(), time.monotonic()
    if not 0 <= seed < 2**63:
        raise SettingsError(f"--seed {seed}: accepts 0 to {2**63 - 1}")
    asked = (log, workloads, target, settings, seed, resume, earlier)
    place = open_store(*asked)
    with Journal(place.path) as journal, ExitStack() as claims:
        if resume and place.run is None:
            view.note(f"nothing to resume in {log}: a new run begins")
        if place.run:
            claims.enter_context(Claim(place.path, place.run.header.run))
            place = open_store(*asked)  # what another process wrote until the claim was ours
        counted = {str(w): weight for w, weight in (weights or {}).items() if weight != 1}
        if place.run and weights is not None and counted != place.run.header.weights:
            raise SettingsError(
                f"cannot resume run {place.run.header.run}: its workloads have other weights"
            )
        measurer.prepare(workloads)
        if place.run:
            session = Session(place.run.header, settings, journal, batches=place.run.batches)
            session.resume(place.run)
            for workload, binary, trial in session.finished_binaries():
                measurer.know(workload, binary, trial)
        else:
            header = _header(workloads, target, settings, seed, place.warm, counted, measurer)
            journal.append(header, durable=True)
            claims.enter_context(Claim(place.path, header.run))
            session = Session(header, settings, journal)
        stop = Stopper(session, settings, started)
        return _run(session, measurer, stop, view, place.path)


def _run(session: Session, measurer: Measurer, stop: Stopper, view: View, path: Path) -> Result:
    view.started(session)
    decided: dict[str, int] = {}
    try:
        reason = _paced_batches(session, measurer, stop, view)
        for i, text in enumerate(session.header.workloads):
            final = session.decided.get(text) or hold_finals(
                session, measurer, i, stop.final_deadline(i)
            )
            if final:
                view.final(session, final)
                decided[text] = final.best
    except KeyboardInterrupt:
        reason = "interrupted"
    best = session.best_trials() | decided
    record = StopRecord(
        run=session.header.run, reason=reason, trials=len(session.known), best=best,
        seconds=_seconds(session, stop), time=now(),
    )  # fmt: skip
    session.journal.append(record, durable=True)
    view.stopped(session, record)
    first = session.first_failure
    return Result(
        path, session.header.run, reason, len(session.known), best, dict(session.failures),
        f"{first.failure}: {first.message}\n{first.detail}".strip() if first else "",
    )  # fmt: skip


def _paced_batches(session: Session, measurer: Measurer, stop: Stopper, view: View) -> str:
    """The loop, with its wall time and how much of it the device had nothing to run."""
    begin, busy = time.monotonic(), measurer.busy_seconds()
    try:
        return run_batches(session, measurer, stop, view)
    finally:
        loop = time.monotonic() - begin
        session.pace = {"loop": loop, "idle": max(loop - (measurer.busy_seconds() - busy), 0.0)}


def _seconds(session: Session, stop: Stopper) -> dict[str, float]:
    """Wall time of this session, and what was spent on each stage (builds overlap).

    `wall` counts from the first batch to the end of the finals; `prepare` is what went before it,
    `loop` the part without finals, and `idle` how long of that the device had nothing to run
    (the mean over several devices).
    """
    spent = {
        "wall": time.monotonic() - stop.begun, "prepare": stop.begun - stop.started,
        "search": session.search_seconds,
    }  # fmt: skip
    spent |= session.pace | session.spent
    return {name: round(value, 3) for name, value in spent.items()}


def _header(
    workloads: Sequence[Workload],
    target: Target,
    settings: Settings,
    seed: int,
    warm: dict[str, tuple[WarmStart, ...]],
    weights: dict[str, float],
    measurer: Measurer,
) -> RunRecord:
    spaces = [space_of(workload, target, settings.family) for workload in workloads]
    bounds: dict[str, Bound] = {w.dtype: measurer.bound(w.dtype) for w in workloads}
    vendor = {str(w): us for w in workloads if (us := measurer.vendor_us(w)) is not None}
    return RunRecord(
        run=uuid.uuid4().hex[:12], kt=kt_version(), seed=seed, settings=settings, target=target,
        workloads=tuple(map(str, workloads)), spaces=tuple(space.digest for space in spaces),
        bounds=bounds, vendor_us=vendor, warm=warm, heuristics=heuristics_of(spaces, settings),
        weights=weights, versions=versions(),
        environment=measurer.environment(), boot=boot_id(), time=now(),
    )  # fmt: skip
