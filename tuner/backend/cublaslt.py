"""The opponent "cublaslt-tuned": the fastest of all that cuBLASLt offers for a product.

Every candidate of cublasLtMatmulAlgoGetHeuristic, with either storage order of both operands, is
timed in CUDA graphs on the rotating sets; the best few are timed again. An operand in the other
order reuses the bytes of the given one: they are draws of one distribution in any order, and its
repacking is the opponent's for free. GELU is cuBLASLt's own, the tanh form.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from kt.spaces.workload import Gemm

from .driver import CudaError, Events, Graph, Memory, capture, sticky
from .vendor_torch import Unavailable, one_line

WORKSPACE_BYTES = 128 * 2**20
_ASKED = 512
_SCREEN_SECONDS, _FINALISTS, _FINAL_SECONDS, _FINAL_ROUNDS = 1.5, 5, 0.25, 5
_SCREEN_SAMPLES, _SLOW_US = 3, 1000.0
_HOPELESS, _HOST_US = 1.5, 1000.0
"""A candidate is dropped when one plain launch takes longer than `_HOPELESS` times the best graph
time plus `_HOST_US`, what a busy host may need to start it."""

# Values of cublasLt.h and library_types.h.
_TYPE = {"fp64": 1, "fp32": 0, "tf32": 0, "fp16": 2, "bf16": 14}
_COMPUTE = {"fp64": 70, "fp32": 68, "tf32": 77, "fp16": 68, "bf16": 68}
_EPILOGUE = {(): 1, ("relu",): 2, ("bias",): 4, ("bias", "relu"): 6, ("gelu",): 32,
             ("bias", "gelu"): 36}  # fmt: skip
_TRANSA, _TRANSB, _EPILOGUE_KIND, _BIAS_POINTER = 3, 4, 7, 8
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_WORKSPACE = 1
_CONFIG = {"algorithm": (0, 4), "tile": (1, 4), "stages": (6, 4), "split_k": (2, 4),
           "cluster": (8, 2)}  # fmt: skip
"""Attributes of an algorithm and their sizes."""


class LtError(Exception):
    """A cuBLASLt call failed."""


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; its first 64 bytes are the cublasLtMatmulAlgo_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class Library:
    """libcublasLt with one handle."""

    def __init__(self) -> None:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self._functions = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
        self._functions.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._functions.cublasLtGetVersion())
        self.handle = self.create("cublasLtCreate")

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._functions, name)(*arguments)
        if status:
            raise LtError(f"{name} returned status {status}")

    def create(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """The object that a function makes through its first argument."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made

    def put(self, kind: str, what: ctypes.c_void_p, key: int, value: Any) -> None:
        """Sets an attribute; `value` is a ctypes number."""
        name = f"cublasLt{kind}SetAttribute"
        self.call(name, what, key, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class Form:
    """The product with one choice of storage orders ("n" or "t", as in a workload's layout).

    Row-major C = A·B is column-major Cᵗ = Bᵗ·Aᵗ: cuBLASLt's first operand is B, its second A.
    """

    def __init__(self, library: Library, workload: Gemm, layout: str) -> None:
        self._library, self.layout, m, n, k = library, layout, workload.m, workload.n, workload.k
        kind, self._batch = _TYPE[workload.dtype], workload.batch
        scalar = ctypes.c_double if workload.dtype == "fp64" else ctypes.c_float
        self._one, self._zero = scalar(1.0), scalar(0.0)
        scale = ctypes.c_int(1 if workload.dtype == "fp64" else 0)
        compute = ctypes.c_int(_COMPUTE[workload.dtype])
        self._product = library.create("cublasLtMatmulDescCreate", compute, scale)
        self._put(_TRANSA, ctypes.c_int(layout[1] == "t"))
        self._put(_TRANSB, ctypes.c_int(layout[0] == "t"))
        self._put(_EPILOGUE_KIND, ctypes.c_int(_EPILOGUE[workload.epilogue]))
        self._bias = "bias" in workload.epilogue
        self._first = self._matrix(kind, *((k, n) if layout[1] == "t" else (n, k)))
        self._second = self._matrix(kind, *((m, k) if layout[0] == "t" else (k, m)))
        self._out = self._matrix(_TYPE[workload.out_dtype], n, m)

    def _put(self, key: int, value: Any) -> None:
        self._library.put("MatmulDesc", self._product, key, value)

    def _matrix(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        """A packed column-major matrix, or a batch of them one after the other."""
        made = self._library.create(
            "cublasLtMatrixLayoutCreate", ctypes.c_int(kind), ctypes.c_uint64(rows),
            ctypes.c_uint64(columns), ctypes.c_int64(rows),
        )  # fmt: skip
        if self._batch > 1:
            stride = ctypes.c_int64(rows * columns)
            self._library.put("MatrixLayout", made, _BATCH_COUNT, ctypes.c_int32(self._batch))
            self._library.put("MatrixLayout", made, _BATCH_STRIDE, stride)
        return made

    def candidates(self, addresses: Sequence[int]) -> list[Candidate]:
        """What the heuristic offers, its favourite first; none where cuBLASLt cannot."""
        wanted = self._library.create("cublasLtMatmulPreferenceCreate")
        size = ctypes.c_uint64(WORKSPACE_BYTES)
        self._library.put("MatmulPreference", wanted, _WORKSPACE, size)
        self._aim(addresses)
        found, count = (_Result * _ASKED)(), ctypes.c_int()
        try:
            self._library.call(
                "cublasLtMatmulAlgoGetHeuristic", self._library.handle, self._product, self._first,
                self._second, self._out, self._out, wanted, _ASKED, found, ctypes.byref(count),
            )  # fmt: skip
        except LtError:
            return []
        finally:
            self._library.call("cublasLtMatmulPreferenceDestroy", wanted)
        return [Candidate(self, result) for result in found[: count.value] if result.state == 0]

    def _aim(self, addresses: Sequence[int]) -> None:
        """The bias is an attribute, not an argument; it is the third of a workload's inputs."""
        if self._bias:
            self._put(_BIAS_POINTER, ctypes.c_void_p(addresses[2]))

    def launch(self, result: _Result, addresses: Sequence[int], workspace: Memory, on: int) -> None:
        """Starts the product on one argument set."""
        self._aim(addresses)
        a, b, out = (ctypes.c_void_p(addresses[i]) for i in (0, 1, -1))
        self._library.call(
            "cublasLtMatmul", self._library.handle, self._product, ctypes.byref(self._one),
            b, self._first, a, self._second, ctypes.byref(self._zero), out, self._out, out,
            self._out, ctypes.byref(result), ctypes.c_void_p(workspace.address),
            ctypes.c_size_t(workspace.size), ctypes.c_void_p(on),
        )  # fmt: skip

    def configuration(self, result: _Result) -> dict[str, int]:
        """What cuBLASLt says of an algorithm; identifiers are those of cublasLt.h."""
        found = {}
        for name, (key, size) in _CONFIG.items():
            value, written = ctypes.c_uint32(), ctypes.c_size_t()
            with contextlib.suppress(LtError):
                self._library.call(
                    "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(result), key,
                    ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written),
                )  # fmt: skip
                found[name] = value.value
        return found


@dataclass(frozen=True)
class Candidate:
    """One algorithm for one form."""

    form: Form
    result: _Result


class CublasLt:
    """The fastest candidate; tuned when made. `stream` is where it is captured and timed."""

    def __init__(self, workload: Gemm, sets: Sequence[Sequence[int]], stream: Any) -> None:
        self._sets, self._stream = sets, stream
        self._library, self._workspace = Library(), Memory(WORKSPACE_BYTES)
        layouts = sorted(("nn", "nt", "tn", "tt"), key=lambda one: one != workload.layout)
        forms = [Form(self._library, workload, layout) for layout in layouts]
        offers = [form.candidates(sets[0]) for form in forms]
        self._offered, self._timed = sum(map(len, offers)), 0
        in_turn = [one for one in chain(*zip_longest(*offers)) if one is not None]
        self._us, self._chosen = self._final(self._screened(in_turn))

    @property
    def found(self) -> bool:
        """Whether any candidate ran."""
        return self._chosen is not None

    def warm_us(self) -> float:
        """Time of one launch of the chosen candidate."""
        return self._us

    def graph(self, count: int) -> Graph:
        """`count` launches over the sets as one graph."""
        assert self._chosen is not None
        return self._graph(self._chosen, count)

    def describe(self) -> str:
        """Which candidate was chosen among how many."""
        assert self._chosen is not None
        form, result = self._chosen.form, self._chosen.result
        config = " ".join(f"{key}={n}" for key, n in form.configuration(result).items())
        return (
            f"cuBLASLt {self._library.version}: layout={form.layout} {config} "
            f"workspace={result.workspace}, {self._timed} of {self._offered} candidates timed"
        )

    def launch(self, addresses: Sequence[int]) -> None:
        """Starts the chosen candidate on one argument set."""
        assert self._chosen is not None
        self._start(self._chosen, addresses)

    # -- tuning -----------------------------------------------------------------------------

    def _screened(self, candidates: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        """Candidates with a rough time, fastest first; slow ones are dropped early."""
        end, found, best = time.monotonic() + _SCREEN_SECONDS, [], float("inf")
        for candidate in candidates:
            if time.monotonic() > end:
                break
            try:
                self._start(candidate, self._sets[0])  # loads its code, which no capture allows
                once = self._plain_us(candidate)
                if once > _HOPELESS * best + _HOST_US:
                    continue
                us = self._graph_us(candidate, once)
                self._timed += 1
            except (LtError, CudaError) as error:
                if isinstance(error, CudaError) and sticky(error.code):
                    raise
                continue
            best = min(best, us)
            found.append((us, candidate))
        return sorted(found, key=lambda item: item[0])

    def _final(self, screened: list[tuple[float, Candidate]]) -> tuple[float, Candidate | None]:
        """The winner of the best few, timed in turn for longer."""
        best = screened[:_FINALISTS]
        graphs = [self._graph(candidate, len(self._sets)) for _, candidate in best]
        samples: list[list[float]] = [[] for _ in best]
        end, rounds = time.monotonic() + _FINAL_SECONDS, 0
        while best and (rounds < _FINAL_ROUNDS or time.monotonic() < end):
            for graph, mine in zip(graphs, samples, strict=True):
                mine += self._replays(graph, 1)
            rounds += 1
        for graph in graphs:
            graph.destroy()
        medians = [statistics.median(mine) for mine in samples]
        return min(
            zip(medians, (candidate for _, candidate in best), strict=True),
            key=lambda item: item[0], default=(0.0, None),
        )  # fmt: skip

    def _start(self, candidate: Candidate, addresses: Sequence[int]) -> None:
        candidate.form.launch(candidate.result, addresses, self._workspace, int(self._stream))

    def _plain_us(self, candidate: Candidate) -> float:
        """One launch, not in a graph."""
        events = Events(1)
        events.record(0, self._stream)
        self._start(candidate, self._sets[1])
        events.record(1, self._stream)
        us = events.elapsed_us(0)
        events.destroy()
        return us

    def _graph_us(self, candidate: Candidate, once: float) -> float:
        """Median of a few replays of one rotation; of one where a launch takes long."""
        graph = self._graph(candidate, len(self._sets))
        try:
            samples = self._replays(graph, 1 if once > _SLOW_US else _SCREEN_SAMPLES)
            return statistics.median(samples)
        finally:
            graph.destroy()

    def _replays(self, graph: Graph, times: int) -> list[float]:
        """Microseconds a launch; a replay that is not timed goes first."""
        events = Events(times)
        graph.replay(self._stream)
        events.record(0, self._stream)
        for i in range(times):
            graph.replay(self._stream)
            events.record(i + 1, self._stream)
        us = [events.elapsed_us(i) / len(self._sets) for i in range(times)]
        events.destroy()
        return us

    def _graph(self, candidate: Candidate, count: int) -> Graph:
        def record() -> None:
            for addresses in self._rotation(count):
                self._start(candidate, addresses)

        return capture(self._stream, record)

    def _rotation(self, count: int) -> Iterator[Sequence[int]]:
        return (self._sets[i % len(self._sets)] for i in range(count))


def cublaslt_tuned(workload: Gemm, sets: Sequence[Sequence[int]], stream: Any) -> CublasLt:
    """The tuned opponent; raises Unavailable without the library, or a candidate of it."""
    acc = "fp64" if workload.dtype == "fp64" else "fp32"
    if workload.epilogue not in _EPILOGUE:
        raise Unavailable(f"cuBLASLt fuses no {'+'.join(workload.epilogue)}")
    if workload.dtype not in _TYPE or workload.acc != acc:
        raise Unavailable(f"no cuBLASLt product of {workload.dtype} with {workload.acc} sums")
    try:
        tuned = CublasLt(workload, sets, stream)
    except (ImportError, OSError, RuntimeError) as error:  # not installed, or not for this machine
        raise Unavailable(f"cuBLASLt does not load: {one_line(error)}") from None
    if not tuned.found:
        raise Unavailable("cuBLASLt has no candidate that runs")
    return tuned
