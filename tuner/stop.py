"""When a run ends. Clocks are read here and nowhere in the search."""

from __future__ import annotations

import time

from kt.logs.record import Bound, Settings
from kt.spaces.workload import Workload

from .session import Session

FINALS_SHARE, FINALS_MOST = 0.15, 6.0
"""Part of a time budget, in share and seconds, that is kept for the finalists."""


def bound_us(workload: Workload, bound: Bound) -> float:
    """The measured speed of light of a workload, microseconds."""
    return 1e6 * max(workload.flops / bound.flops, workload.bytes / bound.bandwidth)


class Stopper:
    """Decides whether to go on, from the settings and the session."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session, self._settings = session, settings
        self.started = time.monotonic()

    @property
    def deadline(self) -> float | None:
        """When measuring must end, on `time.monotonic`'s clock; None without a time budget."""
        budget = self._settings.seconds
        if budget <= 0:
            return None
        return self.started + budget - min(FINALS_SHARE * budget, FINALS_MOST)

    def reason(self) -> str | None:
        """Why the run should end now, or None."""
        session, settings = self._session, self._settings
        if session.replaying:
            return None
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "time"
        if not session.best and sum(session.failures.values()) >= settings.max_failures:
            return "failures"
        if 0 < settings.patience <= session.since_improvement:
            return "patience"
        if settings.near_bound > 0 and self._near_bound():
            return "near_bound"
        which = session.search.turn()
        return "trials" if which is not None and session.room[which] <= 0 else None

    def _near_bound(self) -> bool:
        session = self._session
        for i, workload in enumerate(session.workloads):
            if i not in session.best:
                return False
            limit = bound_us(workload, session.header.bounds[workload.dtype])
            if session.best[i][1] > limit * (1 + self._settings.near_bound):
                return False
        return True
