"""The CPU Runner, in a process of its own: checks and times binaries of one machine's CPU."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kt.logs.record import Bound, Outcome, Timing
from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.target import Target
from kt.spaces.workload import Workload, parse

from .buffers import ALIGN, Guarded, RotatingSets
from .check import Checker, Verified
from .environment import current_clock_mhz
from .interleave import Spoilt, interleave
from .load import LoadedKernel, Refused, loaded, within
from .probe import cold_evidence, measure_bound
from .reference import load_dataset, make_dataset
from .serve import report
from .timing import (
    CUT_RATIO,
    SLOW_US,
    KernelLauncher,
    Launcher,
    LaunchFailed,
    Samples,
    native,
    sample,
)
from .vendor import NumpyLauncher, serves, settle

MEMORY_SHARE = 0.8
"""Share of the target's memory that a runner may use."""
_SETS_SHARE = 0.25


@dataclass(frozen=True)
class Ran:
    """One candidate's outcome and the seconds of its stages."""

    outcome: Outcome
    check_seconds: float
    run_seconds: float
    clock_mhz: float = 0.0


@dataclass(frozen=True)
class Compared:
    """Interleaved samples (µs) by kernel; `failed` is the kernel that spoilt the comparison.

    `opponents` has the samples of those asked for by name, `facts` what they say of themselves.
    """

    us: tuple[tuple[float, ...], ...]
    failed: int = -1
    failure: str = ""
    opponents: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Held:
    """What a workload's kernels need, kept between jobs."""

    directory: str
    workload: Workload
    checker: Checker
    sets: RotatingSets


class CpuRunner:
    """Owns the CPU while kernels are checked and timed. `library` is the built timing.c.

    Workloads come as their canonical text, datasets as the directory that `prepare` filled.
    """

    def __init__(self, target: Target, library: str) -> None:
        self._target = target
        self._memory = int(MEMORY_SHARE * target.memory_bytes)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = within(self._memory + _reserved_bytes(), hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            self._native = native(Path(library))
        except (OSError, AttributeError) as error:
            raise ToolchainError(f"kt's own library cannot be loaded: {error}") from None
        self._held: _Held | None = None
        self._workspace: Guarded | None = None

    def prepare(self, workload: str, seed: int, directory: str) -> float:
        """Makes the dataset of a workload and seed; the seconds that its reference took."""
        seconds = make_dataset(parse(workload), seed, Path(directory))
        self._hold(workload, directory)
        settle()
        return seconds

    def bound(self, library: str) -> Bound:
        """Measured limits, by the built bounds.c."""
        return measure_bound(library, self._target)

    def evidence(self) -> dict[str, float]:
        """Whether rotating sets leave the caches cold."""
        return cold_evidence(self._native, self._target)

    # -- jobs -------------------------------------------------------------------------------

    def run(
        self,
        path: str,
        workload: str,
        directory: str,
        seconds: float,
        incumbent_us: float | None,
    ) -> Ran:
        """Checks and times one candidate; reports the stages load, check and run."""
        held = self._hold(workload, directory)
        begin, checked = time.monotonic(), 0.0
        report("load")
        try:
            with loaded(path) as kernel:
                workspace = self._space_for([kernel], held)
                report("check")
                error = held.checker.check(kernel, workspace)
                checked = time.monotonic()
                report("run")
                launcher = self._launcher(kernel, held, workspace)
                timed = _timed(launcher, seconds, incumbent_us)
                outcome: Outcome = self._judged(held.workload, timed, incumbent_us, error)
                if not timed.cut and timed.median_us < SLOW_US:
                    _check_again(held.checker, kernel, workspace)
        except Refused as refused:
            outcome = refused.failure
        end = time.monotonic()
        checked = checked or end
        return Ran(outcome, checked - begin, end - checked, current_clock_mhz())

    def verify(self, path: str, workload: str, directory: str, seconds: float) -> Verified:
        """Checks a kernel again and again for about `seconds`."""
        held = self._hold(workload, directory)
        report("load")
        try:
            with loaded(path) as kernel:
                workspace = self._space_for([kernel], held)
                report("check")
                return held.checker.repeat(kernel, workspace, seconds)
        except Refused as refused:
            return Verified(0, 0.0, f"{refused.failure.failure}: {refused}")

    def compare(
        self, paths: Sequence[str], workload: str, directory: str, seconds: float, vendor: bool
    ) -> Compared:
        """Times kernels in turn, round by round, in about `seconds`; the vendor library last.

        Each stage reported is the index of the kernel that runs.
        """
        held = self._hold(workload, directory)
        with ExitStack() as stack:
            launchers: list[Launcher] = []
            try:
                kernels = []
                for i, path in enumerate(paths):
                    report(str(i))
                    kernels.append(stack.enter_context(loaded(path)))
                space = self._space_for(kernels, held)
            except Refused as refused:
                return Compared((), i, str(refused))
            launchers += [self._launcher(kernel, held, space) for kernel in kernels]
            if vendor:
                launchers.append(self._numpy(held))
            try:
                return Compared(interleave(launchers, seconds))
            except Spoilt as spoilt:
                return Compared((), spoilt.index, str(spoilt))

    def vendor(self, workload: str, directory: str, seconds: float) -> float | None:
        """NumPy's median time in µs, or None where it has no such operator."""
        held = self._hold(workload, directory)
        if not serves(held.workload):
            return None
        us = sample(self._numpy(held), seconds, None).median_us
        settle()
        return us

    # -- parts ------------------------------------------------------------------------------

    def _hold(self, text: str, directory: str) -> _Held:
        """Buffers of a workload and dataset, kept until another is asked for."""
        if self._held is None or self._held.directory != directory:
            self._held = None
            workload = parse(text)
            dataset = load_dataset(workload, Path(directory))
            cache_bytes = max(self._target.l3_bytes, self._target.l2_bytes)
            limit = int(_SETS_SHARE * self._target.memory_bytes)
            try:
                sizes = [operand.bytes for operand in workload.outputs()]
                sets = RotatingSets(dataset.inputs, sizes, cache_bytes, limit)
                checker = Checker(self._native, workload, dataset)
            except (OSError, MemoryError):
                raise TargetError(f"no memory for the operands of '{text}'") from None
            self._held = _Held(directory, workload, checker, sets)
        return self._held

    def _space_for(self, kernels: Sequence[LoadedKernel], held: _Held) -> Guarded:
        """A guarded workspace of just the size that the kernels ask for; its memory is kept."""
        size = max(kernel.workspace_bytes() for kernel in kernels)
        if self._workspace is None or not self._workspace.resize(size):
            self._workspace = None
            free = self._memory - held.sets.bytes
            if size > free:
                message = f"a workspace of {size} bytes exceeds the {free} bytes left for it"
                raise Refused("out_of_memory", "load", message)
            try:
                self._workspace = Guarded(size, ALIGN)
            except (OSError, MemoryError):
                message = f"no memory for a workspace of {size} bytes"
                raise Refused("out_of_memory", "load", message) from None
        return self._workspace

    def _launcher(self, kernel: LoadedKernel, held: _Held, workspace: Guarded) -> KernelLauncher:
        sets = held.sets
        sets.protect(True)
        return KernelLauncher(
            self._native, kernel.address, workspace.address, sets.table, sets.count, sets.arg_count
        )

    def _numpy(self, held: _Held) -> NumpyLauncher:
        return NumpyLauncher(held.workload, held.sets)

    def _judged(
        self, workload: Workload, timed: Samples, incumbent_us: float | None, error: float
    ) -> Timing:
        """The outcome of samples; raises Refused below the physical floor."""
        floor = floor_us(workload, self._target)
        median = timed.median_us
        if median < floor:
            message = f"{median:.4g} us is below the physical floor of {floor:.4g} us"
            raise Refused("implausible", "run", message)
        return Timing(
            us=tuple(round(us, 4) for us in timed.us), median_us=round(median, 4),
            censored=timed.cut, bound_us=CUT_RATIO * (incumbent_us or 0.0) if timed.cut else 0.0,
            confirmed=timed.confirmed, error=float(f"{error:.3g}"),
        )  # fmt: skip


def _reserved_bytes() -> int:
    """Memory that is mapped but unused: stacks and buffers of the libraries' threads."""
    try:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        kilobytes = {words[0]: int(words[1]) for words in lines if words[2:] == ["kB"]}
        return 1024 * max(0, kilobytes["VmData:"] - kilobytes["RssAnon:"])
    except (OSError, KeyError):
        return 0


def floor_us(workload: Workload, target: Target) -> float:
    """The time, in µs, that no implementation can beat: peak arithmetic, and every operand once."""
    peak = target.peak.get(workload.dtype)
    compute = workload.flops / peak if peak else 0.0
    return 1e6 * max(compute, workload.bytes / target.bandwidth)


def _check_again(checker: Checker, kernel: LoadedKernel, workspace: Guarded) -> None:
    """Catches a kernel whose static state spoils later launches before it steers the search."""
    try:
        checker.check(kernel, workspace)
    except Refused as refused:
        kind, message = refused.failure.failure, f"after the timed launches: {refused}"
        raise Refused(kind, "run", message) from None


def _timed(launcher: Launcher, seconds: float, incumbent_us: float | None) -> Samples:
    try:
        return sample(launcher, seconds, incumbent_us)
    except LaunchFailed as failed:
        raise Refused("launch_error", "run", str(failed)) from None
