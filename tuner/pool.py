"""The Measurer of this machine: builders that compile, and a runner process for each device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol

from kt.logs.record import Bound, Failure, FinalEntry, Seconds, Settings
from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .backend.build import Binary
from .backend.builders import BuilderPool, print_note
from .backend.cache import BinaryCache
from .backend.check import Verified
from .backend.cpu import Compared, Ran
from .backend.cuda_host import CudaHost
from .backend.environment import Facts, describe
from .backend.host import CpuHost
from .backend.session import Session
from .devices import has_nvidia_driver
from .measure import VENDOR, Candidate, FrozenBatch, Measured

_NATIVE_SECONDS = 60.0
_LANGUAGE = {"cpu": "c", "cuda": "cuda"}
_VERIFY_SEEDS = 2
_FINAL_SECONDS = 2.0


Data = Any
Results = SimpleQueue[Measured | BaseException | None]


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


class LocalMeasurer:
    """Measures on this machine: its CPU, or its GPUs. A context manager, else call `close`.

    `builders` processes compile (default: the usable cores); one more a device runs kernels, on
    the GPUs of `gpus`. Binaries in `bundles` are not built again. Raises ToolchainError when a
    compiler or the driver's bindings are missing.
    """

    def __init__(
        self,
        target: Target,
        settings: Settings,
        seed: int = 0,
        *,
        builders: int | None = None,
        gpus: Sequence[int] = (0,),
        note: Callable[[str], None] = print_note,
        bundles: Sequence[BinaryCache] = (),
    ) -> None:
        if target.kind == "cuda" and not has_nvidia_driver():
            raise TargetError(f"target '{target.name}' cannot be measured here: no NVIDIA driver")
        self._target, self._settings, self._seed = target, settings, seed
        self._known: dict[tuple[str, str], int] = {}  # (workload, binary): its first trial
        self._builds: dict[int, Future[Binary | Failure]] = {}
        self._started: dict[int, Results] = {}
        self._driven: list[Future[None]] = []
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="kt-drive")
        self._session = Session()
        self._builders = BuilderPool(self._session.path, builders, note, bundles)
        try:
            self._hosts = self._make_hosts(gpus)
        except BaseException:
            self._builders.close()
            self._session.close()
            raise

    def _make_hosts(self, gpus: Sequence[int]) -> list[Host]:
        place = (self._target, self._settings, self._session.path)
        if self._target.kind == "cpu":
            return [CpuHost(*place, self._own_library)]
        return [CudaHost(*place, self._own_library, index) for index in gpus]

    @property
    def _host(self) -> Host:
        """The host of everything that is not a trial."""
        return self._hosts[0]

    def __enter__(self) -> LocalMeasurer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process and removes every temporary file; a second call does nothing."""
        self._driver.shutdown(wait=False, cancel_futures=True)
        while wait(self._driven, 0.02).not_done:  # a batch still runs: end its kernels
            for host in self._hosts:
                host.kill()
        for host in self._hosts:
            host.close()
        self._builders.close()
        self._session.close()

    # -- the device -------------------------------------------------------------------------

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """Begins a run: makes inputs and references, and forgets what an earlier one measured.

        Raises TargetError for what cannot be measured here.
        """
        self._known.clear()
        for workload in workloads:
            self._host.refuse(workload)
        for workload in workloads:
            self._host.dataset(workload, self._seed)

    def bound(self, dtype: str) -> Bound:
        """Measured peak of multiply-adds and of copying on all usable cores (about 1 s)."""
        return self._host.bound(dtype)

    def vendor_us(self, workload: Workload) -> float | None:
        """NumPy's median time on the same rotating sets, its epilogue included; µs."""
        return self._host.vendor_us(workload, self._host.dataset(workload, self._seed))

    def environment(self) -> Facts:
        """Processor, clocks, load, versions, and evidence that timed kernels find cold caches."""
        compiler = self._builders.toolchain(_LANGUAGE[self._target.kind])
        compiled_by = compiler.identity(self._target.arch).replace("\n", " ")
        return describe(self._target, compiled_by) | self._host.evidence()

    def know(self, workload: str, binary: str, trial: int) -> None:
        """Records that `trial` of an earlier session had this binary."""
        self._known.setdefault((workload, binary), trial)

    # -- batches ----------------------------------------------------------------------------

    def start(self, batch: FrozenBatch, deadline: float | None = None) -> None:
        """Begins building a batch; on a GPU also runs it, behind the batches started before."""
        for candidate in batch.candidates:
            self._builds[candidate.trial] = self._submit(candidate)
        if self._target.kind == "cuda":
            results: Results = SimpleQueue()
            self._started[batch.number] = results
            self._driven.append(self._driver.submit(self._drive, batch, deadline, results))

    def _drive(self, batch: FrozenBatch, deadline: float | None, results: Results) -> None:
        """Runs a started batch while the search thinks about the next one."""
        try:
            for measured in self._batch(batch, deadline):
                results.put(measured)
            results.put(None)
        except BaseException as error:  # raised again where the batch is finished
            results.put(error)

    def finish(self, batch: FrozenBatch, deadline: float | None = None) -> Iterator[Measured]:
        """The batch's results; one that was not started is built and run now."""
        results = self._started.pop(batch.number, None)
        if results is None:
            yield from self._batch(batch, deadline)
            return
        self._driven = [run for run in self._driven if not run.done()]
        while (item := results.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _batch(self, batch: FrozenBatch, deadline: float | None) -> Iterator[Measured]:
        """Runs the batch once it is built; on the CPU no build is then under way.

        In index order, candidates that want to be alone last. At `deadline` (of `time.monotonic`)
        what is running is ended and the rest is left out.
        """
        for candidate in batch.candidates:
            if candidate.trial not in self._builds:
                self._builds[candidate.trial] = self._submit(candidate)
        mine = [self._builds[candidate.trial] for candidate in batch.candidates]
        awaited = self._builds.values() if self._target.kind == "cpu" else mine
        if wait(awaited, _left(deadline)).not_done:
            self._builders.abandon(self._builds.values())
            self._builds.clear()
            return
        jobs = []
        for candidate in batch.candidates:
            binary = _without_spills(self._builds.pop(candidate.trial).result())
            if isinstance(binary, Binary):
                binary = binary.started_by(candidate.kernel)
                key = (str(batch.workload), binary.facts.binary)
                self._known.setdefault(key, candidate.trial)
            jobs.append((candidate, binary))
        first = {c.trial: self._first(c, binary, batch) for c, binary in jobs}
        done: set[int] = set()
        for alone in (False, True):
            originals = [j for j in jobs if j[0].alone == alone and first[j[0].trial] is None]
            for group in [[job] for job in originals] if alone else [originals]:
                for measured in self._run_all(group, batch, deadline):
                    done.add(measured.trial)
                    yield measured
        here = {candidate.trial for candidate, _ in jobs}
        for candidate, binary in jobs:
            original = first[candidate.trial]
            if original is not None and (original in done or original not in here):
                assert isinstance(binary, Binary)
                seconds = Seconds(build=round(binary.seconds, 4))
                yield Measured(candidate.trial, None, binary.facts, seconds, original)

    def _first(
        self, candidate: Candidate, binary: Binary | Failure, batch: FrozenBatch
    ) -> int | None:
        """The earlier trial with this binary, None when this is the first."""
        if isinstance(binary, Failure):
            return None
        first = self._known[str(batch.workload), binary.facts.binary]
        return first if first != candidate.trial else None

    def _run_all(
        self,
        jobs: Sequence[tuple[Candidate, Binary | Failure]],
        batch: FrozenBatch,
        deadline: float | None,
    ) -> Iterator[Measured]:
        """Runs candidates on every host, each taking the next when it is free."""
        if len(self._hosts) == 1:
            for candidate, binary in jobs:
                measured = self._measured(self._host, candidate, binary, batch, deadline)
                if measured is None:
                    return
                yield measured
            return
        idle: SimpleQueue[Host] = SimpleQueue()
        for host in self._hosts:
            idle.put(host)

        def run(job: tuple[Candidate, Binary | Failure]) -> Measured | None:
            host = idle.get()
            try:
                return self._measured(host, *job, batch, deadline)
            finally:
                idle.put(host)

        with ThreadPoolExecutor(len(self._hosts), thread_name_prefix="kt-run") as threads:
            running = [threads.submit(run, job) for job in jobs]
            try:
                for done in as_completed(running):
                    measured = done.result()
                    if measured is not None:
                        yield measured
            finally:
                for future in running:
                    future.cancel()

    def _submit(self, candidate: Candidate) -> Future[Binary | Failure]:
        kernel, timeout = candidate.kernel, self._settings.build_timeout
        return self._builders.submit(kernel.source, kernel.language, self._target.arch, timeout)

    def _measured(
        self,
        host: Host,
        candidate: Candidate,
        binary: Binary | Failure,
        batch: FrozenBatch,
        deadline: float | None,
    ) -> Measured | None:
        """The candidate's result, or None when the deadline came first."""
        trial = candidate.trial
        if isinstance(binary, Failure):
            return Measured(trial, binary, None, Seconds())
        data = host.dataset(batch.workload, self._seed)
        ran = host.run(binary, batch.workload, data, batch.incumbent_us, deadline)
        if ran is None:
            return None
        seconds = Seconds(
            build=round(binary.seconds, 4), check=round(ran.check_seconds, 4),
            run=round(ran.run_seconds, 4),
        )  # fmt: skip
        return Measured(trial, ran.outcome, binary.facts, seconds, clock_mhz=ran.clock_mhz)

    # -- finalists and emitted kernels ------------------------------------------------------

    def finals(
        self, workload: Workload, candidates: Sequence[Candidate], deadline: float | None = None
    ) -> list[FinalEntry]:
        """Verifies on other seeds and repeatedly, then times the sound ones interleaved.

        With little time until `deadline` there is one other seed, and a shorter comparison.
        """
        builds = [(candidate, self._submit(candidate)) for candidate in candidates]
        binaries, failures = dict[int, Binary](), dict[int, str]()
        for candidate, build in builds:
            match build.result():
                case Failure() as failure:
                    failures[candidate.trial] = f"{failure.failure}: {failure.message}"
                case binary:
                    binaries[candidate.trial] = binary.started_by(candidate.kernel)
        left = _left(deadline)
        hurried = left is not None and left < 2 * _FINAL_SECONDS
        seeds = [self._seed + 1 + i for i in range(1 if hurried else _VERIFY_SEEDS)]
        verified = self._verify(binaries, workload, seeds)
        failures |= {trial: found.failure for trial, found in verified.items() if found.failure}
        times: dict[int, tuple[float, ...]] = {}
        while not times and (sound := [trial for trial in binaries if trial not in failures]):
            left = _left(deadline)
            seconds = _FINAL_SECONDS if left is None else min(_FINAL_SECONDS, left)
            compared = self.compare_binaries(
                workload, [binaries[trial] for trial in sound], seconds=seconds, vendor=True
            )
            if compared.failure:
                failures[sound[compared.failed]] = compared.failure
            else:
                times = dict(zip([*sound, VENDOR], compared.us, strict=False))
        order = [candidate.trial for candidate in candidates] + [VENDOR] * (VENDOR in times)
        return [
            FinalEntry(trial, us, statistics.median(us or (0.0,)), failures.get(trial, ""))
            for trial, us in ((trial, times.get(trial, ())) for trial in order)
        ]

    def build_source(self, source: str, language: str = "c") -> Binary | Failure:
        """Builds a source text, such as that of an emitted kernel."""
        timeout = self._settings.build_timeout
        return self._builders.submit(source, language, self._target.arch, timeout).result()

    def verify_binary(self, binary: Binary, workload: Workload, seeds: Sequence[int]) -> Verified:
        """Checks a binary repeatedly on fresh inputs of each seed; stops at the first failure."""
        return self._verify({0: binary}, workload, seeds)[0]

    def compare_binaries(
        self,
        workload: Workload,
        binaries: Sequence[Binary],
        *,
        seconds: float = _FINAL_SECONDS,
        vendor: bool = False,
        opponents: Sequence[str] = (),
        rested: bool = False,
    ) -> Compared:
        """Times binaries interleaved in one process; the vendor's samples come last with `vendor`.

        On CUDA, samples of named `opponents` come by name, and `rested` pauses before each sample
        where the default is back to back. A binary that fails meanwhile is named by its index in
        `failed`, and there are no times.
        """
        host, data = self._host, self._host.dataset(workload, self._seed)
        if not opponents and not rested:
            return host.compare(binaries, workload, data, seconds, vendor)
        if not isinstance(host, CudaHost):
            raise TargetError("opponents by name and rested samples are for CUDA")
        return host.compare(binaries, workload, data, seconds, vendor, opponents, rested)

    def _verify(
        self, binaries: Mapping[int, Binary], workload: Workload, seeds: Sequence[int]
    ) -> dict[int, Verified]:
        """Verification by key; a job a binary and seed, seed by seed so that inputs are reused."""
        found = {key: Verified(0, 0.0) for key in binaries}
        for seed in seeds:
            data = self._host.dataset(workload, seed)
            for key, binary in binaries.items():
                if not found[key].failure:
                    result = self._host.verify(binary, workload, data)
                    launches = found[key].launches + result.launches
                    error = max(found[key].error, result.error)
                    found[key] = Verified(launches, error, result.failure)
            if seed != self._seed:
                self._host.forget(data)
        return found

    def _own_library(self, source: str) -> Path:
        """A library of ours, built like a kernel; raises ToolchainError when that fails."""
        language = _LANGUAGE[self._target.kind]
        built = self._builders.submit(source, language, self._target.arch, _NATIVE_SECONDS).result()
        if isinstance(built, Failure):
            raise ToolchainError(f"the compiler cannot build kt's own code: {built.message}")
        return built.path


def _without_spills(built: Binary | Failure) -> Binary | Failure:
    """A build, refused when its registers spill: such a kernel is not worth the device's time."""
    if isinstance(built, Binary) and built.facts.spill_bytes:
        message = f"{built.facts.spill_bytes} bytes of registers spill to local memory"
        return Failure("resource", "build", message)
    return built


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
