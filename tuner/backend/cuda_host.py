"""The parent's side of one GPU's runner: limits, deaths as data, lost contexts replaced."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kt.logs.record import Bound, Failure, Settings, Stage
from kt.spaces.errors import TargetError
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .build import Binary
from .check import Verified
from .cpu import Compared, Ran
from .cuda import CudaRunner, lost_context
from .cuda_data import SOURCE, needed_bytes
from .cuda_program import Program
from .driver import CudaError
from .worker import Died, Done, Ended, Stopped, TimedOut, Worker

_RUNNER_CALLS = 2000
_PREPARE_SECONDS = 600.0
_VERIFY_SECONDS = 0.1
_VENDOR_SECONDS = 0.1
_STAGES: Mapping[str, Stage] = {"check": "check", "run": "run"}


class CudaHost:
    """One runner process that owns GPU `index`. Datasets are made on the device when needed."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        directory: Path,
        own: Callable[[str], Path],
        index: int = 0,
    ) -> None:
        self._target, self._settings = target, settings
        oracle = str(own(SOURCE.read_text()))
        log = directory / f"runner{index}.log"
        self._worker = Worker(CudaRunner, (target, index, oracle), log, _RUNNER_CALLS)

    def close(self) -> None:
        self._worker.stop()

    def kill(self) -> None:
        """Ends the runner while another thread waits for it."""
        self._worker.kill()

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
        ended = self._call(
            "run", _program(binary), str(workload), data, self._settings.sample_seconds,
            incumbent_us, limit=_PREPARE_SECONDS, limits={"load": self._settings.run_timeout},
            deadline=deadline,
        )  # fmt: skip
        match ended:
            case Done(Ran() as ran):
                if isinstance(ran.outcome, Failure) and lost_context(ran.outcome):
                    self._worker.stop()
                return ran
            case Stopped():
                return None
            case TimedOut():
                return Ran(self._failure(ended), 0.0, ended.seconds)
            case Died():
                return Ran(self._failure(ended), 0.0, 0.0)
            case _:
                raise AssertionError(ended)

    def verify(self, binary: Binary, workload: Workload, data: int) -> Verified:
        """Checks a binary repeatedly on one dataset."""
        ended = self._call(
            "verify", _program(binary), str(workload), data, _VERIFY_SECONDS,
            limit=_PREPARE_SECONDS, limits={"load": self._settings.run_timeout},
        )  # fmt: skip
        if isinstance(ended, Done):
            assert isinstance(ended.value, Verified)
            if ended.value.failure.startswith(("crash", "device_lost")):
                self._worker.stop()
            return ended.value
        return Verified(0, 0.0, self._reason(ended))

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
        programs = tuple(map(_program, binaries))
        ended = self._call(
            "compare", programs, str(workload), data, seconds, vendor, tuple(opponents), rested,
            limit=_PREPARE_SECONDS, limits=limits,
        )  # fmt: skip
        if isinstance(ended, Done):
            assert isinstance(ended.value, Compared)
            if ended.value.failure.startswith(("crash", "device_lost")):
                self._worker.stop()
            return ended.value
        assert isinstance(ended, Died | TimedOut)
        if ended.stage not in limits:
            raise TargetError(f"the GPU's runner ended in 'compare': {self._reason(ended)}")
        return Compared((), int(ended.stage), self._reason(ended))

    # -- ends -------------------------------------------------------------------------------

    def _call(self, method: str, *args: object, **limits: Any) -> Ended:
        """A call of the runner. Its process is replaced after a driver's error of nobody's kernel.

        Such an error, for example that the device is gone, is raised.
        """
        try:
            return self._worker.call(method, *args, **limits)
        except CudaError:
            self._worker.stop()
            raise

    def _ask(self, method: str, *args: object) -> object:
        """A call that runs no candidate, so that its death is not data."""
        ended = self._call(method, *args, limit=_PREPARE_SECONDS)
        if isinstance(ended, Done):
            return ended.value
        raise TargetError(f"the GPU's runner ended in '{method}': {self._reason(ended)}")

    def _reason(self, ended: Ended) -> str:
        assert isinstance(ended, Died | TimedOut)
        failure = self._failure(ended)
        return f"{failure.failure}: {failure.message} {failure.detail}".strip()

    def _failure(self, ended: Died | TimedOut) -> Failure:
        """What the end of the runner says of the kernel that ran in it."""
        stage = _STAGES.get(ended.stage, "load")
        if isinstance(ended, TimedOut):
            message = f"no result within {ended.seconds:g} s: killed"
            return Failure("run_timeout", stage, message, ended.log)
        kind = "out_of_memory" if ended.code == -signal.SIGKILL else "crash"
        return Failure(kind, stage, str(ended), ended.log)  # type: ignore[arg-type]


def _program(binary: Binary) -> Program:
    return Program(str(binary.path), binary.launches, binary.workspace_bytes, binary.zeroed_bytes)
