"""The parent's side of a runner process: its limits, and its ends turned into data."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kt.logs.record import Bound, Failure, FailureKind, Stage
from kt.spaces.errors import TargetError
from kt.spaces.workload import Workload

from .build import Binary
from .check import Verified
from .cpu import Compared, Ran
from .worker import Died, Done, Ended, Stopped, TimedOut, Worker

# What is said by a kernel that ends itself because an allocation failed.
_NO_MEMORY = ("bad_alloc", "out of memory", "memoryerror", "cannot allocate memory")
_STAGES: Mapping[str, Stage] = {"check": "check", "run": "run"}

Own = Callable[[str], Path]
"""Builds a library of kt's own from its source."""
Data = Any
"""Whatever a host calls a dataset."""


class Host(Protocol):
    """What a measurer asks of a runner."""

    def close(self) -> None: ...
    def kill(self) -> None: ...
    def refuse(self, workload: Workload) -> None: ...
    def dataset(self, workload: Workload, seed: int) -> Data: ...
    def forget(self, data: Data) -> None: ...
    def bound(self, dtype: str) -> Bound: ...
    def evidence(self) -> dict[str, float]: ...
    def vendor_us(self, workload: Workload, data: Data) -> float | None: ...
    def run(
        self,
        binary: Binary,
        workload: Workload,
        data: Data,
        incumbent_us: float | None,
        deadline: float | None,
    ) -> Ran | None: ...
    def verify(self, binary: Binary, workload: Workload, data: Data) -> Verified: ...
    def compare(
        self,
        binaries: Sequence[Binary],
        workload: Workload,
        data: Data,
        seconds: float,
        vendor: bool,
    ) -> Compared: ...


class RunnerHost:
    """One runner process, replaced when it dies or is killed."""

    PREPARE_SECONDS: float
    """For all of a call but the stages that have limits of their own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def close(self) -> None:
        self._worker.stop()

    def kill(self) -> None:
        """Ends the runner while another thread waits for it."""
        self._worker.kill()

    # -- calls ------------------------------------------------------------------------------

    def _call(self, method: str, *args: object, **limits: Any) -> Ended:
        """A call of the runner within `limits`, those of `Worker.call`."""
        return self._worker.call(method, *args, **{"limit": self.PREPARE_SECONDS, **limits})

    def _ask(self, method: str, *args: object, **limits: Any) -> object:
        """A call that runs no candidate, so that its death is not data."""
        ended = self._call(method, *args, **limits)
        if isinstance(ended, Done):
            return ended.value
        assert not isinstance(ended, Stopped)
        why = f"{ended.seconds:g} s passed" if isinstance(ended, TimedOut) else str(ended)
        raise TargetError(f"the runner process ended in '{method}' ({why}) {ended.log}".rstrip())

    def _run(self, *args: object, **limits: Any) -> Ran | None:
        """Checks and times one candidate; None when the deadline ended it."""
        ended = self._call("run", *args, **limits)
        match ended:
            case Done(Ran() as ran):
                return ran
            case Stopped():
                return None
            case TimedOut():
                return Ran(_failure(ended), 0.0, ended.seconds)
            case Died():
                return Ran(_failure(ended), 0.0, 0.0)
            case _:
                raise AssertionError(ended)

    def _verify(self, *args: object, **limits: Any) -> Verified:
        """Checks a binary repeatedly on one dataset."""
        ended = self._call("verify", *args, **limits)
        if isinstance(ended, Done):
            assert isinstance(ended.value, Verified)
            return ended.value
        return Verified(0, 0.0, _reason(ended))

    def _compare(self, *args: object, limits: Mapping[str, float]) -> Compared:
        """Times binaries interleaved; the one that fails is named and spoils the comparison.

        `limits` are seconds by stage; that of a binary is its number.
        """
        ended = self._call("compare", *args, limits=limits)
        if isinstance(ended, Done):
            assert isinstance(ended.value, Compared)
            return ended.value
        assert isinstance(ended, Died | TimedOut)
        if not ended.stage.isdecimal():  # no kernel ran: data or an opponent was being made
            raise TargetError(
                f"the runner process ended in 'compare', {ended.stage}: {_reason(ended)}"
            )
        return Compared((), int(ended.stage), _reason(ended))


# -- ends -----------------------------------------------------------------------------------


def _reason(ended: Ended) -> str:
    assert isinstance(ended, Died | TimedOut)
    failure = _failure(ended)
    return f"{failure.failure}: {failure.message}"


def _failure(ended: Died | TimedOut) -> Failure:
    """What the end of the runner says of the kernel that ran in it."""
    stage = _STAGES.get(ended.stage, "load")
    if isinstance(ended, TimedOut):
        message = f"no result within {ended.seconds:g} s: killed"
        return Failure("run_timeout", stage, message, ended.log)
    kind: FailureKind = "out_of_memory" if _lacked_memory(ended) else "crash"
    return Failure(kind, stage, str(ended), ended.log)


def _lacked_memory(ended: Died) -> bool:
    """Whether the system killed the runner, or a kernel gave up and said that memory was short."""
    gave_up = ended.code >= 0 or ended.code == -signal.SIGABRT
    said = ended.log.lower()
    return ended.code == -signal.SIGKILL or (gave_up and any(text in said for text in _NO_MEMORY))
