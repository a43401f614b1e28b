"""The real pool with builders that sleep and devices that sleep: no compiler, no GPU."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kt.logs.record import Bound, BuildFacts, Failure, Settings, Timing
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import Workload
from kt.tuner import pool
from kt.tuner.backend.build import Binary
from kt.tuner.backend.cpu import Ran
from kt.tuner.measure import FrozenBatch

Seconds = Callable[[str], float]
Outcome = Callable[[Binary], Timing | Failure]


class SleepyBuilders:
    """`count` builders that take `seconds` of a source; equal sources give equal binaries.

    What comes after `// twin` is no part of the binary.
    """

    def __init__(self, count: int, seconds: Seconds) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="kt-build")
        self._seconds = seconds
        self.built: list[str] = []

    def submit(self, source: str, *_: Any) -> Future[Binary | Failure]:
        return self._threads.submit(self._build, source)

    def warm(self, language: str, arch: str) -> None:
        pass

    def _build(self, source: str) -> Binary | Failure:
        seconds = self._seconds(source)
        time.sleep(seconds)
        self.built.append(source)
        if source.startswith("#error"):
            return Failure("compile_error", "build", "#error")
        digest = hashlib.sha256(source.split("// twin")[0].encode()).hexdigest()
        return Binary(Path(source[:20]), BuildFacts(seconds, digest), seconds)

    def cancel(self, builds: Sequence[Future[Binary | Failure]]) -> None:
        for build in builds:
            build.cancel()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def timed(binary: Binary) -> Timing:
    """A time that depends on nothing but the binary."""
    us = 100.0 + int(binary.facts.binary[:4], 16) % 997 / 10
    return Timing((us,), us)


class SleepyGpu:
    """A device that takes `seconds` a run and remembers what it ran, when and with what."""

    def __init__(self, seconds: float = 0.0, outcome: Outcome = timed) -> None:
        self._seconds, self._outcome = seconds, outcome
        self.ran: list[tuple[float, float, Binary]] = []
        self.before: Callable[[Binary], None] = lambda binary: None
        self._killed = threading.Event()

    def dataset(self, workload: Workload, seed: int) -> int:
        return seed

    def run(
        self,
        binary: Binary,
        workload: Workload,
        data: int,
        incumbent_us: float | None,
        deadline: float | None,
    ) -> Ran | None:
        begin = time.monotonic()
        self.before(binary)
        wait = self._seconds if deadline is None else min(self._seconds, deadline - begin)
        if self._killed.wait(max(wait, 0)) or wait < self._seconds:
            return None
        self.ran.append((begin, time.monotonic(), binary))
        return Ran(self._outcome(binary), 0.3 * self._seconds, 0.7 * self._seconds)

    def refuse(self, workload: Workload) -> None:
        pass

    def kill(self) -> None:
        self._killed.set()

    def close(self) -> None:
        self.kill()


class SleepyMeasurer(pool.LocalMeasurer):
    """A machine with these GPUs; a context manager."""

    def __init__(
        self,
        gpus: Sequence[SleepyGpu],
        builders: int = 4,
        build_seconds: Seconds = lambda source: 0.0,
        settings: Settings | None = None,
    ) -> None:
        self._gpus = gpus
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "has_nvidia_driver", lambda: True)
            super().__init__(CUDA_TARGETS["h200"], settings or Settings(), gpus=range(len(gpus)))
        self._builders.close()
        self._builders: Any = SleepyBuilders(builders, build_seconds)

    def _make_hosts(self, gpus: Sequence[int]) -> list[Any]:
        return list(self._gpus)

    def bound(self, dtype: str) -> Bound:
        return Bound(1e15, 1e12)

    def vendor_us(self, workload: Workload) -> float | None:
        return None

    def environment(self) -> dict[str, str | int | float | bool]:
        return {"device": "sleepy"}

    def qualify(self, workload: Workload, *_: Any) -> list[Any]:
        return []

    def finals(self, workload: Workload, *_: Any) -> list[Any]:
        return []

    def all_of(self, batch: FrozenBatch, deadline: float | None = None) -> dict[int, Any]:
        """Results of one batch by trial."""
        return {measured.trial: measured for measured in self.finish(batch, deadline)}
