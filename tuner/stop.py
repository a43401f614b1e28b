"""When a run ends. Clocks are read here and nowhere in the search."""

from __future__ import annotations

import time

from kt.logs.record import Bound, Settings
from kt.spaces.workload import Workload

from .session import Session

FINALS_SHARE, FINAL_SECONDS = 0.3, 5.0
"""What a time budget keeps for the finals: at most this share, and seconds a workload."""


def bound_us(workload: Workload, bound: Bound) -> float:
    """The measured speed of light of a workload, microseconds."""
    return 1e6 * max(workload.flops / bound.flops, workload.bytes / bound.bandwidth)


class Stopper:
    """Decides whether to go on, from the settings and the session."""

    def __init__(self, session: Session, settings: Settings, started: float) -> None:
        """`started` is when the run's preparation began, on `time.monotonic`'s clock."""
        self._session, self._settings = session, settings
        self.started, self.begun = started, time.monotonic()

    @property
    def end(self) -> float | None:
        """When the time budget ends; None without one."""
        return self.started + self._settings.seconds if self._settings.seconds > 0 else None

    @property
    def deadline(self) -> float | None:
        """When measuring must end so that the finals fit into the budget.

        Until something was measured there is no final to keep time for.
        """
        if self.end is None or not self._session.best:
            return self.end
        finals = FINAL_SECONDS * len(self._session.workloads)
        return self.end - min(FINALS_SHARE * self._settings.seconds, finals)

    def final_deadline(self, which: int) -> float | None:
        """When the final of workload `which` must end: an even share of the time that is left."""
        if self.end is None:
            return None
        now = time.monotonic()
        return now + (self.end - now) / (len(self._session.workloads) - which)

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
