"""The numbers of a run while it goes on: what every view shows, kept in one place."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from kt.logs.record import Failure, FinalRecord, ModelReport, Timing, TrialRecord
from kt.spaces.theta import Theta
from kt.spaces.workload import Workload

from . import text
from .noise import busy, unstable, unstable_text
from .session import Planned, Session
from .stop import bound_us


@dataclass
class Lane:
    """One workload of the run. Times in microseconds."""

    workload: Workload
    name: str
    bound_us: float
    vendor_us: float | None
    done: int = 0
    best_us: float | None = None
    default_us: float | None = None
    final: FinalRecord | None = None
    curve: list[float] = field(default_factory=list)
    """Best throughput so far after each trial, relative to the bound."""

    def facts(self) -> list[str]:
        """Best time, throughput, share of the bound, ratios to default and vendor."""
        cells = [text.time_of(self.best_us), text.rate_of(self.workload.flops, self.best_us)]
        cells.append(f"{text.of_bound(self.bound_us, self.best_us)} of bound")
        best_us = None if busy(self.final) else self.best_us  # then no ratio is claimed
        cells.append(f"{text.ratio(self.default_us, best_us)} default")
        if unstable(self.vendor_samples):
            cells.append(f"vendor {unstable_text(self.vendor_samples)}")
        elif self.vendor_us is not None:
            cells.append(f"{text.ratio(self.vendor_us, best_us)} vendor")
        return cells

    @property
    def vendor_samples(self) -> tuple[float, ...]:
        """The vendor's times in the final, where it was held."""
        return self.final.vendor_us if self.final else ()

    def take(self, record: TrialRecord) -> bool:
        """Counts a trial; whether the best improved."""
        self.done += 1
        us = record.outcome.median_us if isinstance(record.outcome, Timing) else None
        if isinstance(record.outcome, Timing) and record.outcome.censored:
            us = None
        if us is not None and record.source == "default":
            self.default_us = min(us, self.default_us or us)
        improved = us is not None and (self.best_us is None or us < self.best_us)
        if improved:
            self.best_us = us
        self.curve.append(text.quotient(self.bound_us, self.best_us) or 0.0)
        return improved

    def finish(self, final: FinalRecord) -> None:
        """Takes over the finalists' times."""
        times = {entry.trial: entry.median_us for entry in final.entries if not entry.failure}
        self.final = final
        self.best_us, self.default_us = times.get(final.best), times.get(final.default)
        if final.vendor_us:
            self.vendor_us = statistics.median(final.vendor_us)


@dataclass(frozen=True)
class Winner:
    """Who is best."""

    trial: int
    family: str
    theta: Theta


class Progress:
    """Fed by a view with the events of the loop."""

    def __init__(self, session: Session) -> None:
        header = session.header
        self.session, self.started = session, time.monotonic()
        self.lanes = [
            Lane(w, name, bound_us(w, header.bounds[w.dtype]), header.vendor_us.get(name))
            for w, name in zip(session.workloads, header.workloads, strict=True)
        ]
        self._by_name = {lane.name: lane for lane in self.lanes}
        self.measured = 0
        self.total = session.settings.trials * len(self.lanes)
        self.each = 0 if header.settings.scheduler == "gain" else session.settings.trials
        """Trials that a workload may have; 0 when all share one budget."""
        self.failures: Counter[str] = Counter(session.failures)
        self.report = ModelReport()
        self.batch = 0
        for which, (_, us) in session.best.items():
            self.lanes[which].best_us = us
            self.lanes[which].default_us = session.default_us.get(which)

    @property
    def done(self) -> int:
        return sum(lane.done for lane in self.lanes)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Trials a second of this session."""
        return self.measured / max(self.elapsed, 1e-9)

    @property
    def eta(self) -> float | None:
        """Seconds until the trials or the time budget end, whichever is first."""
        left = [(self.total - self.done) / self.rate] if self.measured else []
        if self.session.settings.seconds > 0:
            left.append(self.session.settings.seconds - self.elapsed)
        return max(0.0, min(left)) if left else None

    def lane(self, name: str) -> Lane:
        return self._by_name[name]

    def planned(self, planned: Planned) -> None:
        """A batch was frozen; trials of it that an earlier session finished count as done."""
        lane = self.lane(str(planned.workload))
        lane.done += len(planned.proposal.points) - len(planned.frozen.candidates)
        self.batch, self.report = planned.proposal.number, planned.proposal.report

    def trial(self, record: TrialRecord) -> bool:
        """A trial is final; whether its workload's best improved."""
        self.measured += 1
        if isinstance(record.outcome, Failure):
            self.failures[record.outcome.failure] += 1
        return self.lane(record.workload).take(record)

    def final(self, record: FinalRecord) -> None:
        self.lane(record.workload).finish(record)

    def winner(self, which: int) -> Winner | None:
        """The final's choice for a workload, else its fastest trial so far."""
        lane = self.lanes[which]
        points = {trial: point for _, trial, point in self.session.timed(which)}
        trial = lane.final.best if lane.final else self.session.best.get(which, (-1, 0.0))[0]
        if trial not in points:
            return None
        space = self.session.spaces[which]
        return Winner(trial, space.family_of(points[trial]), space.theta(points[trial]))

    def status(self) -> str:
        """Trials, speed, time left, failures and model quality in one line."""
        parts = [f"{self.done}/{self.total} trials", f"{self.rate:.1f} trials/s"]
        if self.eta is not None:
            parts.append(f"ETA {text.duration(self.eta)}")
        parts.append(f"failures: {text.counts(self.failures)}")
        if self.report.rank_correlation is not None:
            parts.append(f"model rank correlation {self.report.rank_correlation:.2f}")
        return " · ".join(parts)
