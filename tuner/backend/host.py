"""The parent's side of a runner, and the CPU's: datasets, limits, deaths turned into data."""

from __future__ import annotations

import shutil
import signal
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kt.logs.record import Bound, Failure, FailureKind, Settings, Stage
from kt.spaces.errors import TargetError
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .build import Binary
from .check import Verified
from .cpu import MEMORY_SHARE, Compared, CpuRunner, Ran
from .probe import bounds_source
from .reference import refuse_unmeasurable
from .timing import SOURCE
from .worker import Died, Done, Ended, Stopped, TimedOut, Worker

_RUNNER_CALLS = 200
_PREPARE_SECONDS = 1800.0
_PROBE_SECONDS = 120.0
_VERIFY_SECONDS = 0.2
_VENDOR_SECONDS = 0.5
# Large workloads: a run may take this many times the float64 reference's time, if that is more.
_SLOW_LAUNCHES = 10.0
# Checks, warming up and sampling again take their share of time beside one sampling.
_SAMPLINGS = 4.0
# What is said by a kernel that ends itself because an allocation failed.
_NO_MEMORY = ("bad_alloc", "out of memory", "memoryerror", "cannot allocate memory")
_STAGES: Mapping[str, Stage] = {"check": "check", "run": "run"}

Own = Callable[[str], Path]
"""Builds a library of kt's own from its source."""


Data = Any


class Host(Protocol):
    """The parent's side of one runner process; `Data` is whatever it calls a dataset."""

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


class CpuHost:
    """One runner process and the datasets of a session. `directory` is the session's."""

    def __init__(self, target: Target, settings: Settings, directory: Path, own: Own) -> None:
        self._target, self._settings, self._own = target, settings, own
        self._directory, self._data = directory, directory / "data"
        self._limits: dict[Path, float] = {}  # seconds of a run, by dataset that exists
        timing = str(self._own_copy(SOURCE.read_text(), "timing.so"))
        self._worker = Worker(CpuRunner, (target, timing), directory / "runner.log", _RUNNER_CALLS)

    def close(self) -> None:
        self._worker.stop()

    def kill(self) -> None:
        """Ends the runner while another thread waits for it."""
        self._worker.kill()

    # -- the device -------------------------------------------------------------------------

    def refuse(self, workload: Workload) -> None:
        """Raises TargetError for what cannot be measured here."""
        refuse_unmeasurable(workload, int(MEMORY_SHARE * self._target.memory_bytes))

    def dataset(self, workload: Workload, seed: int) -> Path:
        """Inputs and reference of a workload, made when first asked for."""
        directory = self._data / f"{zlib.crc32(str(workload).encode()):08x}-{seed}"
        if directory not in self._limits:
            seconds = self._ask("prepare", str(workload), seed, str(directory))
            assert isinstance(seconds, float)
            self._limits[directory] = max(self._settings.run_timeout, _SLOW_LAUNCHES * seconds)
        return directory

    def forget(self, directory: Path) -> None:
        """Removes a dataset."""
        shutil.rmtree(directory)
        del self._limits[directory]

    def bound(self, dtype: str) -> Bound:
        """Measured peak of multiply-adds and of copying on all usable cores."""
        library = self._own_copy(bounds_source(dtype, self._target.arch), f"bounds-{dtype}.so")
        bound = self._ask("bound", str(library), limit=_PROBE_SECONDS)
        assert isinstance(bound, Bound)
        return bound

    def evidence(self) -> dict[str, float]:
        """Whether rotating sets leave the caches cold."""
        evidence = self._ask("evidence", limit=_PROBE_SECONDS)
        assert isinstance(evidence, dict)
        return evidence

    def vendor_us(self, workload: Workload, data: Path) -> float | None:
        """NumPy's median time in µs, None where it has no such operator."""
        us = self._ask("vendor", str(workload), str(data), _VENDOR_SECONDS)
        assert us is None or isinstance(us, float)
        return us

    # -- kernels ----------------------------------------------------------------------------

    def run(
        self,
        binary: Binary,
        workload: Workload,
        data: Path,
        incumbent_us: float | None,
        deadline: float | None,
    ) -> Ran | None:
        """Checks and times one candidate; None when the deadline ended it."""
        sampling = self._settings.sample_seconds
        ended = self._worker.call(
            "run", str(binary.path), str(workload), str(data), sampling, incumbent_us,
            limit=_PREPARE_SECONDS, deadline=deadline,
            limits={"load": self._limits[data] + _SAMPLINGS * sampling},
        )  # fmt: skip
        match ended:
            case Done(Ran() as ran):
                return ran
            case Stopped():
                return None
            case TimedOut():
                return Ran(self._failure(ended), 0.0, ended.seconds)
            case Died():
                return Ran(self._failure(ended), 0.0, 0.0)
            case _:
                raise AssertionError(ended)

    def verify(self, binary: Binary, workload: Workload, data: Path) -> Verified:
        """Checks a binary repeatedly on one dataset."""
        ended = self._worker.call(
            "verify", str(binary.path), str(workload), str(data), _VERIFY_SECONDS,
            limit=_PREPARE_SECONDS, limits={"load": self._limits[data]},
        )  # fmt: skip
        if isinstance(ended, Done):
            assert isinstance(ended.value, Verified)
            return ended.value
        return Verified(0, 0.0, self._reason(ended))

    def compare(
        self,
        binaries: Sequence[Binary],
        workload: Workload,
        data: Path,
        seconds: float,
        vendor: bool,
    ) -> Compared:
        """Times binaries interleaved; the one that fails is named and spoils the comparison."""
        limits = {str(i): self._limits[data] for i in range(len(binaries) + 1)}
        paths = [str(binary.path) for binary in binaries]
        ended = self._worker.call(
            "compare", paths, str(workload), str(data), seconds, vendor,
            limit=_PREPARE_SECONDS, limits=limits,
        )  # fmt: skip
        if isinstance(ended, Done):
            assert isinstance(ended.value, Compared)
            return ended.value
        assert isinstance(ended, Died | TimedOut)
        if ended.stage not in limits:  # before the first kernel was loaded
            raise TargetError(f"the runner process ended in 'compare': {self._reason(ended)}")
        return Compared((), int(ended.stage), self._reason(ended))

    def _own_copy(self, source: str, name: str) -> Path:
        """A library of kt's own, where it stays even if somebody removes the cache."""
        path = self._directory / name
        if not path.exists():
            shutil.copyfile(self._own(source), path)
        return path

    # -- ends -------------------------------------------------------------------------------

    def _ask(self, method: str, *args: object, limit: float = _PREPARE_SECONDS) -> object:
        """A call that runs no candidate, so that its death is not data."""
        ended = self._worker.call(method, *args, limit=limit)
        if isinstance(ended, Done):
            return ended.value
        assert not isinstance(ended, Stopped)
        why = f"{ended.seconds:g} s passed" if isinstance(ended, TimedOut) else str(ended)
        raise TargetError(f"the runner process ended in '{method}' ({why}) {ended.log}".rstrip())

    def _reason(self, ended: Ended) -> str:
        assert isinstance(ended, Died | TimedOut)
        failure = self._failure(ended)
        return f"{failure.failure}: {failure.message}"

    def _failure(self, ended: Died | TimedOut) -> Failure:
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
