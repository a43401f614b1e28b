"""What every view of a run shares, and the view for machines: one JSON object a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kt.logs.record import Failure, FinalRecord, StopRecord, TrialRecord

from .noise import noise_of
from .progress import Progress
from .session import Planned, Session
from .text import one_line


class BaseView:
    """Keeps the progress; subclasses print it. `closed` is called when nobody reads stdout."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self._closed = closed
        self._progress: Progress | None = None

    @property
    def progress(self) -> Progress:
        assert self._progress is not None
        return self._progress

    def __enter__(self) -> BaseView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def note(self, line: str) -> None:
        print(f"kt: {one_line(line)}", file=sys.stderr)

    def started(self, session: Session) -> None:
        self._progress = Progress(session)

    def planned(self, session: Session, planned: Planned) -> None:
        self.progress.planned(planned)

    def trial(self, session: Session, record: TrialRecord) -> None:
        self.progress.trial(record)

    def final(self, session: Session, record: FinalRecord) -> None:
        self.progress.final(record)

    def stopped(self, session: Session, record: StopRecord) -> None:
        pass

    def write(self, line: str) -> None:
        """One line to stdout, at once."""
        try:
            print(line, flush=True)
        except BrokenPipeError:
            self._closed()


class JsonView(BaseView):
    """One JSON object a line: start, batch, trial, final, stop."""

    def emit(self, event: str, session: Session, **fields: Any) -> None:
        """Prints one event."""
        self.write(json.dumps({"event": event, "run": session.header.run, **fields}))

    def started(self, session: Session) -> None:
        super().started(session)
        header = session.header
        bounds = {lane.name: round(lane.bound_us, 3) for lane in self.progress.lanes}
        self.emit(
            "start", session, log=str(session.journal.path), kt=header.kt, seed=header.seed,
            target=header.target.name, processor=header.target.processor, bound_us=bounds,
            workloads=header.workloads, trials=self.progress.total, vendor_us=header.vendor_us,
            resumed_trials=len(session.known), strategy=header.settings.strategy,
        )  # fmt: skip

    def planned(self, session: Session, planned: Planned) -> None:
        super().planned(session, planned)
        self.emit(
            "batch", session, batch=planned.proposal.number, workload=str(planned.workload),
            trials=[c.trial for c in planned.frozen.candidates],
            rank_correlation=planned.proposal.report.rank_correlation,
        )  # fmt: skip

    def trial(self, session: Session, record: TrialRecord) -> None:
        improved = self.progress.trial(record)
        lane, outcome = self.progress.lane(record.workload), record.outcome
        result: dict[str, Any]
        if isinstance(outcome, Failure):
            result = {"failure": outcome.failure, "message": outcome.message}
        else:
            result = {"us": outcome.median_us, "censored": outcome.censored}
        self.emit(
            "trial", session, trial=record.trial, batch=record.batch, workload=record.workload,
            family=record.family, source=record.source, **result, improved=improved,
            best_us=lane.best_us, done=self.progress.done, total=self.progress.total,
        )  # fmt: skip

    def final(self, session: Session, record: FinalRecord) -> None:
        super().final(session, record)
        lane = self.progress.lane(record.workload)
        self.emit(
            "final", session, workload=record.workload, best=record.best, best_us=lane.best_us,
            default_us=lane.default_us, vendor_us=lane.vendor_us, bound_us=lane.bound_us,
            noise=record.noise, vendor_noise=noise_of(record.vendor_us),
        )  # fmt: skip

    def stopped(self, session: Session, record: StopRecord) -> None:
        theta = {
            lane.name: {"family": w.family, "theta": w.theta.flat()}
            for i, lane in enumerate(self.progress.lanes)
            if (w := self.progress.winner(i))
        }
        self.emit(
            "stop", session, reason=record.reason, trials=record.trials, best=record.best,
            seconds=record.seconds, failures=self.progress.failures, winners=theta,
            log=str(session.journal.path),
        )  # fmt: skip
