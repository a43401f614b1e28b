"""The CUDA Runner, in its own process: owns one GPU, loads a cubin, checks it, times it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from kt.logs.record import Bound, Failure, FailureKind, Outcome, Timing
from kt.spaces.target import Target
from kt.spaces.workload import Workload, parse

from .check import Verified
from .cpu import Compared, Ran, floor_us
from .cuda_data import POISON, Dataset, Oracle
from .cuda_program import Loaded, Program, load
from .cuda_vendor import OPPONENTS, Opponent, vendor_library
from .driver import (
    LOST,
    OUT_OF_MEMORY,
    CudaError,
    Device,
    Events,
    Graph,
    Memory,
    Replayable,
    call,
    capture,
    driver,
    sticky,
)
from .load import Refused
from .serve import report
from .timing import CONFIRM_RATIO, CUT_RATIO, SPREAD, relative_half_width
from .turn import Turn
from .vendor_torch import Unavailable

_MEMORY_SHARE = 0.8
_MOST_SETS = 256
_FEWEST, _MOST, _CHUNK = 5, 100, 5
_SAMPLE_US = 200.0
"""A sample is one graph replay that takes at least about this long."""
_LONG_SAMPLE_US = 2000.0
"""One sample of at least this long says whether a candidate is cut."""
_MOST_LAUNCHES = 1024
_PACE_US, _MOST_HOST_US = 1500.0, 1000.0
"""The first graph that shows how long a launch takes has as many as the host starts in so long; a
host that takes longer for one stalled."""
_HEATING_US, _HEAT_SECONDS = 8.0, 0.02
"""Launches of at least this long are timed after so much of them, in the regime `sustained`."""
REST_SECONDS = 0.01
"""The pause before a sample in the clock regime `rested`; without it, `sustained`."""
_FEWEST_CHECKS, _MOST_CHECKS = 4, 64

P = ParamSpec("P")
T = TypeVar("T")


class Sets:
    """Copies of all operands that together exceed twice the L2 cache."""

    def __init__(self, dataset: Dataset, l2_bytes: int, limit: int) -> None:
        workload = dataset.workload
        operands = workload.operands()
        sizes = [-(-o.bytes // 256) * 256 for o in operands]
        per_set = sum(sizes)
        wanted = 1 + -(-2 * l2_bytes // per_set)
        self.count = max(2, min(wanted, _MOST_SETS, limit // per_set))
        self._memory = Memory(self.count * per_set)
        self.arguments: list[list[int]] = []
        for i in range(self.count):
            at, row = self._memory.address + i * per_set, []
            for operand, size in zip(operands, sizes, strict=True):
                row.append(at)
                if operand.name in dataset.inputs:
                    self._copy(at, dataset.pristine(operand.name))
                at += size
            self.arguments.append(row)

    @staticmethod
    def _copy(to: int, source: Memory) -> None:
        from .driver import call

        call("cuMemcpyDtoDAsync", to, source.address, source.size, 0)


class Held:
    """What stays on the device while one workload and seed is measured."""

    def __init__(self, oracle: Oracle, text: str, seed: int, target: Target) -> None:
        self.key = (text, seed)
        self.dataset = Dataset(oracle, parse(text), seed)
        limit = int(_MEMORY_SHARE * oracle.device.free_bytes() / 2)
        self.sets = Sets(self.dataset, target.l2_bytes, limit)

    @property
    def workload(self) -> Workload:
        return self.dataset.workload


def _in_turn(
    job: Callable[Concatenate[CudaRunner, P], T],
) -> Callable[Concatenate[CudaRunner, P], T]:
    """A job that has the device alone, among processes of kt; it leaves nothing running on it."""

    @wraps(job)
    def waits(runner: CudaRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with runner.turn:
            try:
                return job(runner, *args, **kwargs)
            finally:
                driver().cuCtxSynchronize()  # whatever it says: errors are the job's to report

    return waits


class CudaRunner:
    """Owns GPU `index`. `oracle` is the cubin of oracle.cu for its architecture."""

    def __init__(self, target: Target, index: int, oracle: str) -> None:
        self._target = target
        self._device = Device(index)
        self.turn = Turn(self._device.uuid)
        self._oracle = Oracle(self._device, Path(oracle))
        self._held: Held | None = None

    # -- jobs -------------------------------------------------------------------------------

    @_in_turn
    def run(
        self, program: Program, text: str, seed: int, seconds: float, incumbent_us: float | None
    ) -> Ran:
        """Checks and times one candidate; reports the stages load, check and run."""
        held = self._hold(text, seed)
        begin, checked = time.monotonic(), 0.0
        report("load")
        outcome: Outcome
        try:
            with self._loaded(program) as loaded:
                report("check")
                error = self._check(loaded, held)
                checked = time.monotonic()
                report("run")
                timing = self._time(loaded, held, seconds, incumbent_us)
                outcome = self._judged(held, timing, error)
                if not timing.censored:
                    self._check_again(loaded, held)
        except Refused as refused:
            outcome = refused.failure
        end = time.monotonic()
        checked = checked or end
        return Ran(outcome, checked - begin, end - checked)

    @_in_turn
    def verify(self, program: Program, text: str, seed: int, seconds: float) -> Verified:
        """Checks a kernel again and again for about `seconds`; a moving error is a race."""
        held = self._hold(text, seed)
        report("load")
        wrong: list[str] = []
        worst, launches, end = 0.0, 0, time.monotonic() + seconds
        try:
            with self._loaded(program) as loaded:
                report("check")
                while launches < _FEWEST_CHECKS or (
                    time.monotonic() < end and launches < _MOST_CHECKS
                ):
                    launches += 1
                    try:
                        worst = max(worst, self._check(loaded, held, fresh=launches == 1))
                    except Refused as refused:
                        if refused.failure.failure != "wrong_result":
                            raise
                        wrong.append(f"{refused.failure.failure}: {refused}")
        except Refused as refused:
            return Verified(launches, worst, f"{refused.failure.failure}: {refused}")
        if wrong and len(wrong) < launches:
            first = wrong[0]
            return Verified(
                launches, worst, f"race: {len(wrong)} of {launches} launches failed, first {first}"
            )
        return Verified(launches, worst, wrong[0] if wrong else "")

    @_in_turn
    def compare(
        self,
        programs: Sequence[Program],
        text: str,
        seed: int,
        seconds: float,
        vendor: bool,
        opponents: Sequence[str] = (),
        rested: bool = False,
    ) -> Compared:
        """Times kernels in turn, round by round; the vendor library, where there is one, last.

        Named opponents run among them; their samples come by name. `rested` pauses before each
        sample. Each stage reported is the index of what runs.
        """
        held = self._hold(text, seed)
        graphs: list[Replayable] = []
        launches: list[int] = []
        loaded: list[Loaded] = []
        i = 0
        try:
            for i, program in enumerate(programs):
                report(str(i))
                with self._judging("load"):
                    loaded.append(load(program, self._device))
                    loaded[-1].reset()
                warm_us = self._warm(loaded[-1], held)
                with self._judging("run"):
                    make = partial(self._graph, loaded[-1], held)
                    graph, count = self._sampled(make, warm_us, held)
                graphs.append(graph)
                launches.append(count)
            rivals, absent = self._opponents(held, vendor, opponents)
            for rival in rivals.values():
                graph, count = self._sampled(rival.graph, rival.warm_us(), held)
                graphs.append(graph)
                launches.append(count)
            rows = self._rounds(graphs, launches, seconds, rested)
            first = len(programs) + ("" in rivals)
            names = [name for name in rivals if name]
            named = dict(zip(names, rows[first:], strict=True))
            facts = absent | {name: rivals[name].describe() for name in names}
            return Compared(rows[:first], opponents=named, facts=facts)
        except Refused as refused:
            return Compared((), i, f"{refused.failure.failure}: {refused}")
        finally:
            for graph in graphs:
                graph.destroy()
            for kernel in loaded:
                kernel.unload()

    @_in_turn
    def vendor(self, text: str, seed: int, seconds: float) -> float | None:
        """The vendor library's median time in µs, None where it is not installed."""
        held = self._hold(text, seed)
        library = vendor_library(held.workload, held.sets.arguments)
        if library is None:
            return None
        graph, count = self._sampled(library.graph, library.warm_us(), held)
        try:
            return statistics.median(self._group(graph, count, seconds))
        finally:
            graph.destroy()

    @_in_turn
    def bound(self, dtype: str) -> Bound:
        """Datasheet peak and measured copy bandwidth (read plus written) of a large buffer."""
        size = 2**30
        to, source = Memory(size), Memory(size)
        events, best = Events(1), float("inf")
        for _ in range(8):
            events.record(0, self._device.stream)
            call("cuMemcpyDtoDAsync", to.address, source.address, size, self._device.stream)
            events.record(1, self._device.stream)
            best = min(best, events.elapsed_us(0))
        events.destroy()
        return Bound(self._target.peak[dtype], 2 * size / best * 1e6)

    @_in_turn
    def evidence(self) -> dict[str, float]:
        """Read rates (GB/s) of an eighth of the L2: hot, and in rotation over twice the L2."""
        size = self._target.l2_bytes // 8 // 2**20 * 2**20
        count = 2 + 2 * self._target.l2_bytes // size
        memory, sink = Memory(size * count), Memory(4)
        memory.fill(1)
        events = Events(1)

        def read(first: int, step: int) -> float:
            """Time of one among `count` reads back to back."""
            events.record(0, self._device.stream)
            for i in range(count):
                at = memory.address + (first + i * step) % count * size
                self._oracle.start("kt_read", size // 16, at, size // 16, sink.address)
            events.record(1, self._device.stream)
            return events.elapsed_us(0) / count

        hot = statistics.median([read(0, 0) for _ in range(30)][10:])
        rotated = statistics.median([read(0, 1) for _ in range(30)][10:])
        events.destroy()
        rates = {"cold_hot_gbps": hot, "cold_rotated_gbps": rotated}
        return {name: round(size / us / 1e3, 1) for name, us in rates.items()}

    # -- parts ------------------------------------------------------------------------------

    def _hold(self, text: str, seed: int) -> Held:
        if self._held is None or self._held.key != (text, seed):
            self._held = None
            self._held = Held(self._oracle, text, seed, self._target)
        return self._held

    @contextmanager
    def _judging(self, stage: str) -> Iterator[None]:
        """Turns driver errors into failures of the candidate that caused them."""
        try:
            yield
        except CudaError as error:
            raise Refused(_kind(error.code), stage, str(error)) from None  # type: ignore[arg-type]

    @contextmanager
    def _loaded(self, program: Program) -> Iterator[Loaded]:
        with self._judging("load"):
            loaded = load(program, self._device)
        try:
            yield loaded
        finally:
            loaded.unload()

    def _check(self, loaded: Loaded, held: Held, fresh: bool = True) -> float:
        """One launch on poisoned memory; `fresh` also resets the workspace."""
        dataset = held.dataset
        with self._judging("check"):
            for output in dataset.outputs:
                output.fill(POISON)
            if fresh:
                loaded.reset()
            loaded.launch(dataset.arguments())
            self._device.synchronize()
            return dataset.judge(loaded.workspace)

    def _check_again(self, loaded: Loaded, held: Held) -> None:
        """Catches a kernel whose own state spoils later launches before it steers the search."""
        try:
            self._check(loaded, held, fresh=False)
        except Refused as refused:
            kind, message = refused.failure.failure, f"after the timed launches: {refused}"
            raise Refused(kind, "run", message) from None

    def _warm(self, loaded: Loaded, held: Held) -> float:
        """Time of one launch among a few from the host, which may be slower than the kernel."""
        with self._judging("run"):
            events = Events(1)
            loaded.launch(held.sets.arguments[0])
            events.record(0, self._device.stream)
            for i in range(3):
                loaded.launch(held.sets.arguments[i % held.sets.count])
            events.record(1, self._device.stream)
            us = events.elapsed_us(0) / 3
            events.destroy()
            return us

    def _launches(self, us: float, host_us: float, held: Held) -> int:
        """Launches in one sample: whole rotations, long enough that starting a graph is hidden."""
        hidden_us = 2 * min(host_us, _MOST_HOST_US) if host_us > 2 * us else 0.0
        sets = held.sets.count
        rotations = round(max(_SAMPLE_US, hidden_us) / (us * sets))
        return max(1, min(rotations, _MOST_LAUNCHES // sets)) * sets

    def _graph(self, loaded: Loaded, held: Held, count: int) -> Graph:
        def record() -> None:
            for i in range(count):
                loaded.launch(held.sets.arguments[i % held.sets.count])

        return capture(self._device.stream, record)

    def _paced(self, make: Callable[[int], Replayable], us: float) -> float:
        """Time of one launch; `us` is what it took from the host, `make` graphs of so many.

        A busy host takes tens of microseconds for a launch, and as long to start a graph: only one
        that runs for longer shows a kernel's own time.
        """
        count = min(max(1, round(_PACE_US / us)), _MOST_LAUNCHES)
        while True:
            graph = make(count)
            try:
                found = min(self._replays(graph, count, 3 if us < _LONG_SAMPLE_US else 1))
            finally:
                graph.destroy()
            if found > us / 2 or found * count > 2 * us or count >= _MOST_LAUNCHES:
                return found
            count = min(4 * count, _MOST_LAUNCHES)

    def _sampled(
        self, make: Callable[[int], Replayable], warm_us: float, held: Held
    ) -> tuple[Replayable, int]:
        """The graph of one sample, and its launches."""
        count = self._launches(self._paced(make, warm_us), warm_us, held)
        return make(count), count

    def _time(
        self, loaded: Loaded, held: Held, seconds: float, incumbent_us: float | None
    ) -> Timing:
        """Samples of graph replays; cut when clearly slow, confirmed when surprisingly fast."""
        cut_us = CUT_RATIO * incumbent_us if incumbent_us else 0.0
        warm_us = self._warm(loaded, held)
        with self._judging("run"):
            us = self._paced(partial(self._graph, loaded, held), warm_us)
            if cut_us and us > 2 * cut_us:  # far beyond: a few launches are evidence enough
                return _timing([us], censored=True, bound_us=cut_us)
            count = self._launches(us, warm_us, held)
            graph = self._graph(loaded, held, count)
            try:
                looks = _CHUNK if count * us < _LONG_SAMPLE_US else 1
                samples = self._replays(graph, count, looks)
                if cut_us and min(samples) > cut_us:
                    return _timing(samples, censored=True, bound_us=cut_us)
                self._heat(graph, us)
                samples = self._group(graph, count, seconds)
                confirm = incumbent_us and statistics.median(samples) < CONFIRM_RATIO * incumbent_us
                if confirm:
                    samples += self._group(graph, count, seconds)
                return _timing(samples, confirmed=bool(confirm))
            finally:
                graph.destroy()

    def _heat(self, graph: Replayable, us: float) -> None:
        """Back-to-back launches of kernels long enough to bring clocks down: samples follow."""
        end = time.monotonic() + (_HEAT_SECONDS if us > _HEATING_US else 0.0)
        while time.monotonic() < end:
            graph.replay(self._device.stream)
            self._device.synchronize()

    def _group(self, graph: Replayable, count: int, seconds: float) -> list[float]:
        samples: list[float] = []
        end = time.monotonic() + seconds
        graph.replay(self._device.stream)
        while len(samples) < _FEWEST or (time.monotonic() < end and len(samples) < _MOST):
            samples += self._replays(graph, count, _CHUNK)
            if relative_half_width(samples) < SPREAD:
                break
        return samples

    def _replays(self, graph: Replayable, count: int, times: int) -> list[float]:
        """`times` replays back to back; microseconds a launch."""
        events, stream = Events(times), self._device.stream
        events.record(0, stream)
        for i in range(times):
            graph.replay(stream)
            events.record(i + 1, stream)
        us = [events.elapsed_us(i) / count for i in range(times)]
        events.destroy()
        return us

    def _opponents(
        self, held: Held, vendor: bool, names: Sequence[str]
    ) -> tuple[dict[str, Opponent], dict[str, str]]:
        """Opponents in the order in which they are timed, and why others cannot take part.

        The vendor library's name is empty.
        """
        found: dict[str, Opponent] = {}
        absent: dict[str, str] = {}
        report(opponent_stage())
        if vendor and (library := vendor_library(held.workload, held.sets.arguments)):
            found[""] = library
        for name in names:
            report(opponent_stage(name))
            try:
                found[name] = OPPONENTS[name](
                    held.workload, held.sets.arguments, self._device.stream
                )
            except Unavailable as why:
                absent[name] = f"left out: {why}"
        return found, absent

    def _rounds(
        self,
        graphs: Sequence[Replayable],
        launches: Sequence[int],
        seconds: float,
        rested: bool = False,
    ) -> tuple[tuple[float, ...], ...]:
        samples: list[list[float]] = [[] for _ in graphs]
        end, rounds = time.monotonic() + seconds, 0
        with self._judging("run"):
            while rounds < 10 or time.monotonic() < end:
                for step in range(len(graphs)):
                    i = (rounds + step) % len(graphs)
                    report(str(i))
                    if rested:
                        time.sleep(REST_SECONDS)
                    graphs[i].replay(self._device.stream)
                    samples[i] += self._replays(graphs[i], launches[i], 1)
                rounds += 1
        return tuple(tuple(round(us, 4) for us in row) for row in samples)

    def _judged(self, held: Held, timing: Timing, error: float) -> Timing:
        floor = floor_us(held.workload, self._target)
        if timing.median_us < floor:
            message = f"{timing.median_us:.4g} us is below the physical floor of {floor:.4g} us"
            raise Refused("implausible", "run", message)
        return msgspec.structs.replace(timing, error=float(f"{error:.3g}"))


def _kind(code: int) -> FailureKind:
    """The failure that a CUresult means."""
    if code == OUT_OF_MEMORY:
        return "out_of_memory"
    if code in LOST:
        return "device_lost"
    return "crash" if sticky(code) else "launch_error"


def opponent_stage(name: str = "") -> str:
    """The stage in which an opponent is made; some tune themselves then, for minutes."""
    return f"opponent {name}".rstrip()


def lost_context(failure: Failure) -> bool:
    """Whether the process that reported `failure` has lost its context."""
    return failure.failure in ("crash", "device_lost")


def _timing(
    samples: Sequence[float], censored: bool = False, bound_us: float = 0.0, confirmed: bool = False
) -> Timing:
    rounded = tuple(round(us, 4) for us in samples)
    return Timing(rounded, round(statistics.median(samples), 4), censored, bound_us, confirmed)
