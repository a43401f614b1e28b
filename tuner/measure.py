"""The one seam of the tuner: a Measurer turns frozen batches into outcomes.

Real ones own pools of builders and runners (`kt.tuner.pool`); fakes compute times from a formula
and recorded ones read them from a log, so that search, commands and replay need no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kt.logs.record import Bound, BuildFacts, FinalEntry, Outcome, Seconds
from kt.spaces.kernel import Kernel
from kt.spaces.workload import Workload


@dataclass(frozen=True)
class Candidate:
    """One proposal with its kernel; `alone` asks for a run with nothing else under way."""

    trial: int
    kernel: Kernel
    alone: bool = False


VENDOR = -1
"""The "trial" of the vendor library among the entries of a final."""


@dataclass(frozen=True)
class FrozenBatch:
    """A logged batch. `incumbent_us` is the best time its proposals knew (early cuts use it)."""

    number: int
    workload: Workload
    candidates: tuple[Candidate, ...]
    incumbent_us: float | None


@dataclass(frozen=True)
class Measured:
    """One candidate's final result. A duplicate has no outcome of its own."""

    trial: int
    outcome: Outcome | None
    build: BuildFacts | None
    seconds: Seconds
    duplicate_of: int | None = None
    clock_mhz: float = 0.0


class Measurer(Protocol):
    """Builds and runs candidates. One object serves a whole tuning run."""

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """Begins a run: makes inputs and references, and knows no binary.

        Raises KtError when the device cannot hold them.
        """

    def bound(self, dtype: str) -> Bound:
        """Measured limits of the device for `dtype`."""

    def vendor_us(self, workload: Workload) -> float | None:
        """The vendor library's time under the same conditions, where there is one."""

    def environment(self) -> dict[str, str | int | float | bool]:
        """Device, driver, toolchain, clocks and throttle state, for the header."""

    def know(self, workload: str, binary: str, trial: int) -> None:
        """Records that `trial` of an earlier session had this binary for this workload."""

    def start(self, batch: FrozenBatch, deadline: float | None = None) -> None:
        """Begins building, and where the device allows running, a batch; returns at once."""

    def finish(self, batch: FrozenBatch, deadline: float | None = None) -> Iterator[Measured]:
        """Each candidate's result as it becomes final, once each; a duplicate after its original.

        At `deadline` (of `time.monotonic`) what is running is ended and the rest is left out.
        """

    def busy_seconds(self) -> float:
        """Wall time so far in which a device had a candidate to run; the mean over devices."""

    def qualify(
        self, workload: Workload, candidates: Sequence[Candidate], deadline: float | None = None
    ) -> list[FinalEntry]:
        """Times candidates interleaved, in less time than a final and not verified again.

        Sound ones only; empty where a trial's time ranks as well, when one fails, and when
        `deadline` is near.
        """

    def finals(
        self, workload: Workload, candidates: Sequence[Candidate], deadline: float | None = None
    ) -> list[FinalEntry]:
        """Verifies on other seeds and repeatedly, then times interleaved with each other.

        An entry for each candidate; one more, with trial VENDOR, where there is a vendor library.
        A near `deadline` (of `time.monotonic`) makes it shorter.
        """

    def close(self) -> None:
        """Ends every process this object started."""
