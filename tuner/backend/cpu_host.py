"""The parent's side of the CPU's runner: datasets on disk and libraries of kt's own."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

from kt.logs.record import Bound, Settings
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .build import Binary
from .check import Verified
from .cpu import MEMORY_SHARE, Compared, CpuRunner, Ran
from .host import Own, RunnerHost
from .probe import bounds_source
from .reference import refuse_unmeasurable
from .timing import SOURCE
from .worker import Worker

_RUNNER_CALLS = 200
_PROBE_SECONDS = 120.0
_VERIFY_SECONDS = 0.2
_VENDOR_SECONDS = 0.5
# Large workloads: a run may take this many times the float64 reference's time, if that is more.
_SLOW_LAUNCHES = 10.0
# Checks, warming up and sampling again take their share of time beside one sampling.
_SAMPLINGS = 4.0


class CpuHost(RunnerHost):
    """One runner process and the datasets of a session. `directory` is the session's."""

    PREPARE_SECONDS = 1800.0

    def __init__(self, target: Target, settings: Settings, directory: Path, own: Own) -> None:
        self._target, self._settings, self._own = target, settings, own
        self._directory, self._data = directory, directory / "data"
        self._limits: dict[Path, float] = {}  # seconds of a run, by dataset that exists
        timing = str(self._own_copy(SOURCE.read_text(), "timing.so"))
        log = directory / "runner.log"
        super().__init__(Worker(CpuRunner, (target, timing), log, _RUNNER_CALLS))

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
        return self._run(
            str(binary.path), str(workload), str(data), sampling, incumbent_us, deadline=deadline,
            limits={"load": self._limits[data] + _SAMPLINGS * sampling},
        )  # fmt: skip

    def verify(self, binary: Binary, workload: Workload, data: Path) -> Verified:
        """Checks a binary repeatedly on one dataset."""
        return self._verify(
            str(binary.path), str(workload), str(data), _VERIFY_SECONDS,
            limits={"load": self._limits[data]},
        )  # fmt: skip

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
        return self._compare(paths, str(workload), str(data), seconds, vendor, limits=limits)

    def _own_copy(self, source: str, name: str) -> Path:
        """A library of kt's own, where it stays even if somebody removes the cache."""
        path = self._directory / name
        if not path.exists():
            shutil.copyfile(self._own(source), path)
        return path
