"""The parent's side of one GPU's runner: limits, deaths as data, lost contexts replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kt.logs.record import Bound, Failure, Settings
from kt.spaces.errors import TargetError
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .build import Binary
from .builders import print_note
from .check import Verified
from .cpu import Compared, Ran
from .cuda import CudaRunner, lost_context, opponent_stage
from .cuda_data import SOURCE, needed_bytes
from .cuda_program import Program
from .driver import CudaError
from .host import Own, RunnerHost
from .turn import TAKEN, WAITING
from .worker import Ended, TimedOut, Worker

_RUNNER_CALLS = 2000
_VERIFY_SECONDS = 0.1
_GRACE_SECONDS = 0.3
"""What a run may take beyond its deadline: most end in time, and a new process takes seconds."""
_VENDOR_SECONDS = 0.1
_LOST = ("crash", "device_lost")
"""Failures after which a process has no context."""


class CudaHost(RunnerHost):
    """One runner process that owns GPU `index`. Datasets are made on the device when needed."""

    PREPARE_SECONDS = 600.0
    WAIT_SECONDS = 1800.0
    """For another run's job, which may be an opponent that tunes itself."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        directory: Path,
        own: Own,
        index: int = 0,
        note: Callable[[str], None] = print_note,
    ) -> None:
        self._target, self._settings, self._index = target, settings, index
        self._note, self._shared = note, False
        args = (target, index, str(own(SOURCE.read_text())))
        log = directory / f"runner{index}.log"
        super().__init__(Worker(CudaRunner, args, log, _RUNNER_CALLS, self._told))

    # -- the device -------------------------------------------------------------------------

    def refuse(self, workload: Workload) -> None:
        """Raises TargetError for what the device's memory cannot hold."""
        needed = needed_bytes(workload)
        if needed > 0.8 * self._target.memory_bytes:
            raise TargetError(
                f"'{workload}' needs {needed / 2**30:.1f} GiB to be measured and checked; "
                f"{self._target.name} has {self._target.memory_bytes / 2**30:.0f} GiB"
            )

    def dataset(self, workload: Workload, seed: int) -> int:
        """A dataset is named by its seed; the runner makes it when it is not the held one."""
        return seed

    def forget(self, data: int) -> None:
        """Nothing to do: the runner holds one dataset at a time."""

    def bound(self, dtype: str) -> Bound:
        """Datasheet peak and measured copy bandwidth."""
        bound = self._ask("bound", dtype)
        assert isinstance(bound, Bound)
        return bound

    def evidence(self) -> dict[str, float]:
        """Whether rotating sets leave the L2 cold."""
        evidence = self._ask("evidence")
        assert isinstance(evidence, dict)
        return evidence

    def vendor_us(self, workload: Workload, data: int) -> float | None:
        """The vendor library's median time in µs, None where it is not installed."""
        us = self._ask("vendor", str(workload), data, _VENDOR_SECONDS)
        assert us is None or isinstance(us, float)
        return us

    # -- kernels ----------------------------------------------------------------------------

    def run(
        self,
        binary: Binary,
        workload: Workload,
        data: int,
        incumbent_us: float | None,
        deadline: float | None,
    ) -> Ran | None:
        """Checks and times one candidate; None when the deadline ended it."""
        if deadline is not None:
            if time.monotonic() >= deadline:
                return None
            deadline += _GRACE_SECONDS
        ran = self._run(
            _program(binary), str(workload), data, self._settings.sample_seconds, incumbent_us,
            limits={"load": self._settings.run_timeout}, deadline=deadline,
        )  # fmt: skip
        if ran is not None and isinstance(ran.outcome, Failure) and lost_context(ran.outcome):
            self._worker.stop()
        return ran

    def verify(self, binary: Binary, workload: Workload, data: int) -> Verified:
        """Checks a binary repeatedly on one dataset."""
        verified = self._verify(
            _program(binary), str(workload), data, _VERIFY_SECONDS,
            limits={"load": self._settings.run_timeout},
        )  # fmt: skip
        if verified.failure.startswith(_LOST):
            self._worker.stop()
        return verified

    def compare(
        self,
        binaries: Sequence[Binary],
        workload: Workload,
        data: int,
        seconds: float,
        vendor: bool,
        opponents: Sequence[str] = (),
        rested: bool = False,
    ) -> Compared:
        """Times binaries interleaved; the one that fails is named and spoils the comparison.

        `opponents` are names of cuda_vendor.OPPONENTS; `rested` pauses before each sample.
        """
        count = len(binaries) + 1 + len(opponents)
        limits = {str(i): self._settings.run_timeout for i in range(count)}
        limits |= dict.fromkeys(map(opponent_stage, ("", *opponents)), self.PREPARE_SECONDS)
        programs = tuple(map(_program, binaries))
        compared = self._compare(
            programs, str(workload), data, seconds, vendor, tuple(opponents), rested, limits=limits
        )
        if compared.failure.startswith(_LOST):
            self._worker.stop()
        return compared

    def _call(
        self, method: str, *args: object, limits: Mapping[str, float] | None = None, **rest: Any
    ) -> Ended:
        """A call of the runner. Its process is replaced after a driver's error of no kernel.

        Such an error, for example that the device is gone, is raised; so is a TargetError when
        another process has had the device for too long.
        """
        waiting = {WAITING: self.WAIT_SECONDS, TAKEN: self.PREPARE_SECONDS}
        try:
            ended = super()._call(method, *args, limits=waiting | dict(limits or {}), **rest)
        except CudaError:
            self._worker.stop()
            raise
        if isinstance(ended, TimedOut) and ended.stage == WAITING:
            raise TargetError(
                f"another run of kt has measured on GPU {self._index} for {ended.seconds:g} s: "
                "wait for it, or choose another with --gpus"
            )
        return ended

    def _told(self, stage: str) -> None:
        if stage == WAITING and not self._shared:
            self._shared = True
            self._note(f"another run of kt measures on GPU {self._index}: the two take turns")


def _program(binary: Binary) -> Program:
    return Program(str(binary.path), binary.launches, binary.workspace_bytes, binary.zeroed_bytes)
