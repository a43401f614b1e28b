"""The Measurer of this machine: builders that compile, and a runner process for each device."""

from __future__ import annotations

import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import Empty
from types import TracebackType

from kt.logs.record import Bound, Failure, FinalEntry, Settings
from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .backend.build import Binary
from .backend.builders import BuilderPool, print_note
from .backend.cache import BinaryCache
from .backend.check import Verified
from .backend.cpu import Compared, Ran
from .backend.cpu_host import CpuHost
from .backend.cuda_host import CudaHost
from .backend.environment import Facts, describe
from .backend.host import Host
from .backend.session import Session
from .devices import has_nvidia_driver
from .dispatch import Dispatch, Results, Run
from .measure import VENDOR, Candidate, FrozenBatch, Measured

_NATIVE_SECONDS = 60.0
_LANGUAGE = {"cpu": "c", "cuda": "cuda"}
_VERIFY_SEEDS = 2
_COMPARE_SECONDS = 2.0
_FINAL_SECONDS = {"cpu": 2.0, "cuda": 1.2}
_QUALIFYING_SECONDS = 0.8
_SERIALISED = re.compile(r"\bC75(0[7-9]|1[0-7])\b")
"""Advisories of ptxas: every wgmma waits for the one before it."""
# While the search thinks, a device's thread would wait 5 ms for the interpreter before each run.
_SWITCH_SECONDS = 0.0005


Built = Future[Binary | Failure]


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
        self._dispatch = Dispatch()
        self._builds: dict[int, Built] = {}
        self._results: dict[tuple[int, ...], Results] = {}
        self._runners: list[threading.Thread] = []
        self._lost, self._lock, self._note = 0, threading.Lock(), note
        self._session = Session()
        self._builders = BuilderPool(self._session.path, builders, note, bundles)
        try:
            self._hosts = self._make_hosts(gpus)
        except BaseException:
            self._builders.close()
            self._session.close()
            raise
        self._busy = [0.0 for _ in self._hosts]

    def _make_hosts(self, gpus: Sequence[int]) -> list[Host]:
        place = (self._target, self._settings, self._session.path)
        if self._target.kind == "cpu":
            return [CpuHost(*place, self._own_library)]
        return [CudaHost(*place, self._own_library, index, self._note) for index in gpus]

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
        self._dispatch.close()
        while any(thread.is_alive() for thread in self._runners):  # end what still runs
            for host in self._hosts:
                host.kill()
            self._runners[-1].join(0.02)
        if self._runners:
            self._runners = []
            sys.setswitchinterval(self._switch_seconds)
        for host in self._hosts:
            host.close()
        self._builders.close()
        self._session.close()

    # -- the device -------------------------------------------------------------------------

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """Begins a run: makes inputs and references, and forgets what an earlier one measured.

        Raises TargetError for what cannot be measured here.
        """
        self._dispatch.forget()
        self._results.clear()
        for workload in workloads:
            self._host.refuse(workload)
        if self._target.kind == "cuda":
            self._builders.warm("cuda", self._target.arch)
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
        self._dispatch.know(workload, binary, trial)

    # -- batches ----------------------------------------------------------------------------

    def start(self, batch: FrozenBatch, deadline: float | None = None) -> None:
        """Begins building a batch; on a GPU each binary runs as soon as a device is free for it."""
        self._results[_trials(batch)] = self._dispatch.start(batch, deadline)
        if self._target.kind == "cuda":
            self._start_runners()
        for candidate in batch.candidates:
            build = self._submit(candidate)
            self._builds[candidate.trial] = build
            if self._target.kind == "cuda":
                build.add_done_callback(partial(self._built, batch, candidate))

    def finish(self, batch: FrozenBatch, deadline: float | None = None) -> Iterator[Measured]:
        """The batch's results; one that was not started is built and run now."""
        if _trials(batch) not in self._results:
            self.start(batch, deadline)
        results = self._results.pop(_trials(batch))
        if self._target.kind == "cpu":
            yield from self._run_here(batch, deadline, results)
            return
        while True:
            try:
                item = results.get(timeout=_left(deadline))
            except Empty:
                deadline = None
                self._dispatch.cut()
                self._abandon_builds()
                continue
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            yield item

    def busy_seconds(self) -> float:
        """Wall time in which a device had something to run, averaged over the devices."""
        return sum(self._busy) / len(self._busy)

    def _run_here(
        self, batch: FrozenBatch, deadline: float | None, results: Results
    ) -> Iterator[Measured]:
        """Runs a batch on the CPU once nothing is being built, and reports between the runs.

        At `deadline` (of `time.monotonic`) what is running is ended and the rest is left out.
        """
        if wait(self._builds.values(), _left(deadline)).not_done:
            self._abandon_builds()
            self._dispatch.cut()
            return
        for candidate in batch.candidates:
            self._built(batch, candidate, self._builds[candidate.trial])
        yield from _told(results)
        while (run := self._dispatch.next(batch)) is not None:
            self._dispatch.ran(run, self._ran(0, run, deadline))
            yield from _told(results)

    def _start_runners(self) -> None:
        """A thread for each device, which takes what is built and runs it."""
        if not self._runners:
            self._switch_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_SECONDS, self._switch_seconds))
            self._runners = [
                threading.Thread(target=self._serve, args=(i,), name=f"kt-run{i}", daemon=True)
                for i in range(len(self._hosts))
            ]
            for thread in self._runners:
                thread.start()

    def _serve(self, index: int) -> None:
        while (run := self._dispatch.wait_next()) is not None:
            try:
                self._dispatch.ran(run, self._ran(index, run, run.deadline))
            except TargetError as error:  # of the device: the others go on without it
                if self._last_one_lost():
                    self._dispatch.fail(error)
                    continue
                self._note(f"goes on without one GPU: {error}")
                self._dispatch.again(run)
                return
            except BaseException as error:  # raised again where the batch is finished
                self._dispatch.fail(error)

    def _last_one_lost(self) -> bool:
        """Counts a device that is gone, unless none other is left."""
        with self._lock:
            if self._lost + 1 == len(self._hosts):
                return True
            self._lost += 1
            return False

    def _ran(self, index: int, run: Run, deadline: float | None) -> Ran | None:
        """Runs one binary on one device; None when the deadline came first."""
        begin, host, batch = time.monotonic(), self._hosts[index], run.batch
        try:
            data = host.dataset(batch.workload, self._seed)
            return host.run(run.binary, batch.workload, data, batch.incumbent_us, deadline)
        finally:
            self._busy[index] += time.monotonic() - begin

    def _built(self, batch: FrozenBatch, candidate: Candidate, build: Built) -> None:
        """Hands a finished build on; called on the thread that built it, or on the CPU's."""
        if self._builds.get(candidate.trial) is not build:
            return  # of a batch, or a run, that ended without it
        del self._builds[candidate.trial]
        if build.cancelled():
            return
        if (error := build.exception()) is not None:
            self._dispatch.fail(error)
            return
        built = _worth_running(build.result(), candidate.kernel.most_spill_bytes)
        if isinstance(built, Binary):
            built = built.started_by(candidate.kernel)
        self._dispatch.built(batch, candidate.trial, built)

    def _abandon_builds(self) -> None:
        """Nobody waits for these builds any more.

        On a GPU those under way may end beside what follows; new builders would take longer.
        """
        left, self._builds = list(self._builds.values()), {}
        if self._target.kind == "cuda":
            self._builders.cancel(left)
        else:
            self._builders.abandon(left)

    def _submit(self, candidate: Candidate) -> Built:
        kernel, timeout = candidate.kernel, self._settings.build_timeout
        return self._builders.submit(kernel.source, kernel.language, self._target.arch, timeout)

    # -- finalists and emitted kernels ------------------------------------------------------

    def qualify(
        self, workload: Workload, candidates: Sequence[Candidate], deadline: float | None = None
    ) -> list[FinalEntry]:
        """Times candidates interleaved, in less time than a final and not verified again.

        Empty on a CPU, without two that build, when a kernel fails, and when `deadline` leaves too
        little for the final.
        """
        left, needed = _left(deadline), 2 * (_QUALIFYING_SECONDS + self._final_seconds)
        if self._target.kind != "cuda" or (left is not None and left < needed):
            return []
        binaries, _ = self._all_built(candidates)
        if len(binaries) < 2:
            return []
        compared = self.compare_binaries(
            workload, list(binaries.values()), seconds=_QUALIFYING_SECONDS
        )
        if compared.failure:
            return []
        samples = zip(binaries, compared.us, strict=True)
        return [FinalEntry(trial, us, statistics.median(us)) for trial, us in samples]

    def finals(
        self, workload: Workload, candidates: Sequence[Candidate], deadline: float | None = None
    ) -> list[FinalEntry]:
        """Verifies on other seeds and repeatedly, then times the sound ones interleaved.

        With little time until `deadline` there is one other seed, and a shorter comparison.
        """
        binaries, failures = self._all_built(candidates)
        left = _left(deadline)
        hurried = left is not None and left < 2 * self._final_seconds
        seeds = [self._seed + 1 + i for i in range(1 if hurried else _VERIFY_SEEDS)]
        verified = self._verify(binaries, workload, seeds)
        failures |= {trial: found.failure for trial, found in verified.items() if found.failure}
        times: dict[int, tuple[float, ...]] = {}
        while not times and (sound := [trial for trial in binaries if trial not in failures]):
            left, seconds = _left(deadline), self._final_seconds
            compared = self.compare_binaries(
                workload, [binaries[trial] for trial in sound],
                seconds=seconds if left is None else min(seconds, left), vendor=True,
            )  # fmt: skip
            if compared.failure:
                failures[sound[compared.failed]] = compared.failure
            else:
                times = dict(zip([*sound, VENDOR], compared.us, strict=False))
        order = [candidate.trial for candidate in candidates] + [VENDOR] * (VENDOR in times)
        return [
            FinalEntry(trial, us, statistics.median(us or (0.0,)), failures.get(trial, ""))
            for trial, us in ((trial, times.get(trial, ())) for trial in order)
        ]

    @property
    def _final_seconds(self) -> float:
        return _FINAL_SECONDS[self._target.kind]

    def _all_built(
        self, candidates: Sequence[Candidate]
    ) -> tuple[dict[int, Binary], dict[int, str]]:
        """Binaries by trial, and failures by trial."""
        builds = [(candidate, self._submit(candidate)) for candidate in candidates]
        binaries, failures = dict[int, Binary](), dict[int, str]()
        for candidate, build in builds:
            match build.result():
                case Failure() as failure:
                    failures[candidate.trial] = f"{failure.failure}: {failure.message}"
                case binary:
                    binaries[candidate.trial] = binary.started_by(candidate.kernel)
        return binaries, failures

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
        seconds: float = _COMPARE_SECONDS,
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


def _worth_running(built: Binary | Failure, most: int) -> Binary | Failure:
    """A build, refused when more than `most` bytes spill or the compiler serialised its wgmma."""
    if isinstance(built, Failure):
        return built
    if built.facts.spill_bytes > most:
        message = f"{built.facts.spill_bytes} bytes of registers spill to local memory"
        return Failure("resource", "build", message)
    if serial := next((w for w in built.facts.warnings if _SERIALISED.search(w)), ""):
        return Failure("resource", "build", f"wgmma is serialised: {serial}")
    return built


def _trials(batch: FrozenBatch) -> tuple[int, ...]:
    return tuple(sorted(candidate.trial for candidate in batch.candidates))


def _told(results: Results) -> Iterator[Measured]:
    """What is known so far; raises what went wrong."""
    while not results.empty():
        item = results.get()
        if isinstance(item, BaseException):
            raise item
        if item is not None:
            yield item


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
