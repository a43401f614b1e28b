"""torch on our device memory: the fastest of some ways to compute a workload, in CUDA graphs."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kt.spaces.workload import Operand, Workload

TORCH_TYPE: Mapping[str, str] = {
    "fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16",
}  # fmt: skip
"""torch's name of an element type."""
TORCH_FP8: Mapping[str, str] = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Of those that few of its operators take."""
_RAW = {8: "<i8", 4: "<i4", 2: "<i2", 1: "|u1"}
_WARM, _ROTATION, _REPLAYS = 3, 64, 5
_LONGEST = 300

Tensors = Mapping[str, Any]
"""A workload's operands by name."""
Form = Callable[[Tensors], Any]
"""One way to compute a workload; it returns or writes the output."""


class Unavailable(Exception):
    """An opponent that cannot take part, and why."""


class _DeviceArray:
    """Foreign device memory through the CUDA array interface, as integers of some width."""

    def __init__(self, address: int, shape: tuple[int, ...], width: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": _RAW[width], "data": (address, False), "version": 3,
        }  # fmt: skip


def import_torch(workload: Workload, types: Mapping[str, str] = TORCH_TYPE) -> Any:
    """torch, set up for the workload's element type; raises Unavailable without either."""
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed")
    if workload.dtype not in types:
        raise Unavailable(f"torch has no {workload.dtype} form of this operator")
    import torch

    torch.backends.cuda.matmul.allow_tf32 = workload.dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = workload.dtype == "tf32"
    return torch


class TorchOpponent:
    """The fastest of `forms` on given argument sets; chosen when made.

    Raises Unavailable with every form's error when none runs, in a graph as outside of one.
    """

    def __init__(
        self, torch: Any, workload: Workload, sets: Sequence[Sequence[int]], what: str,
        forms: Mapping[str, Form],
    ) -> None:  # fmt: skip
        self._torch, self._what = torch, what
        operands = workload.operands()
        self._sets = [
            {o.name: _tensor(torch, a, o) for a, o in zip(row, operands, strict=True)}
            for row in sets
        ]
        times: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        for name, form in forms.items():
            try:
                times[name] = self._time(form)
            except Exception as error:  # of any library below torch, and of its compilers
                self._failed[name] = one_line(error)
        if not times:
            raise Unavailable("; ".join(f"{name}: {why}" for name, why in self._failed.items()))
        self._chosen = min(times, key=lambda name: times[name])
        self._form = forms[self._chosen]

    def describe(self) -> str:
        """Library, version and the form that was the fastest."""
        failed = "".join(f"; not {name} ({why})" for name, why in self._failed.items())
        return f"torch {self._torch.__version__}: {self._what}, {self._chosen}{failed}"

    def warm_us(self) -> float:
        """Time of one launch, roughly; also makes torch pick its kernels before a capture."""
        return self._warm(self._form)

    def graph(self, count: int) -> TorchGraph:
        """`count` launches over the sets as one graph."""
        return self._graph(self._form, count)

    def outputs(self) -> list[Any]:
        """What the form computes on each set, where it writes no output of ours."""
        return [self._form(tensors) for tensors in self._sets]

    def _time(self, form: Form) -> float:
        """Milliseconds of a rotation as a graph: the fastest of a few replays."""
        self._warm(form)
        graph = self._graph(form, min(len(self._sets), _ROTATION))
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
        try:
            graph.start()
            events[0].record()
            for event in events[1:]:
                graph.start()
                event.record()
            self._torch.cuda.synchronize()
            return min(float(a.elapsed_time(b)) for a, b in pairwise(events))
        finally:
            graph.destroy()

    def _warm(self, form: Form) -> float:
        for tensors in self._sets[:_WARM]:
            form(tensors)
        self._torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(_WARM):
            form(self._sets[i % len(self._sets)])
        self._torch.cuda.synchronize()
        return (time.perf_counter() - begin) / _WARM * 1e6

    def _graph(self, form: Form, count: int) -> TorchGraph:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for i in range(count):
                form(self._sets[i % len(self._sets)])
        return TorchGraph(graph, self._torch)


class TorchGraph:
    """A torch graph that replays on a stream of ours."""

    def __init__(self, graph: Any, torch: Any) -> None:
        self._graph, self._torch = graph, torch

    def start(self) -> None:
        """Replays on torch's current stream."""
        self._graph.replay()

    def replay(self, stream: Any) -> None:
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(int(stream))):
            self._graph.replay()

    def destroy(self) -> None:
        self._graph.reset()


def _tensor(torch: Any, address: int, operand: Operand) -> Any:
    width = operand.bytes // operand.elements
    raw = torch.as_tensor(_DeviceArray(address, operand.shape, width), device="cuda")
    return raw.view(getattr(torch, {**TORCH_TYPE, **TORCH_FP8}[operand.dtype]))


def compiled(torch: Any, function: Callable[..., Any], backends: str = "") -> Callable[..., Any]:
    """`function` compiled by Inductor in max-autotune mode, with these backends only if any."""
    from torch._inductor import list_mode_options

    torch._dynamo.reset()  # else it gives up recompiling after a few workloads
    options = dict(list_mode_options("max-autotune-no-cudagraphs"))
    if backends:
        options |= dict.fromkeys(
            ("max_autotune_gemm_backends", "max_autotune_conv_backends"), backends
        )
    made: Callable[..., Any] = torch.compile(function, options=options, dynamic=False)
    return made


def epilogue(torch: Any, ops: Sequence[str], x: Any, named: Tensors, channels: int = -1) -> Any:
    """The operations after a product, as new tensors; `channels` is the axis of a vector."""
    functional = torch.nn.functional
    for op in ops:
        match op:
            case "bias" | "residual" | "shift":
                x = x + _along(named[op], x, channels)
            case "scale" | "tensor_scale":
                x = (x * _along(named[op], x, channels)).to(x.dtype)
            case _:
                x = getattr(functional, op)(x)
    return x


def epilogue_in_place(
    torch: Any, ops: Sequence[str], x: Any, named: Tensors, channels: int = -1
) -> Any:
    """The same as a user writes it who spares memory traffic: in place where torch can."""
    functional = torch.nn.functional
    for op in ops:
        match op:
            case "bias" | "residual" | "shift":
                x.add_(_along(named[op], x, channels))
            case "scale" | "tensor_scale":
                x.mul_(_along(named[op], x, channels))
            case "relu":
                torch.relu_(x)
            case "gelu":
                x.copy_(functional.gelu(x))
            case _:
                functional.silu(x, inplace=True)
    return x


def _along(vector: Any, x: Any, channels: int) -> Any:
    """A vector shaped to go with axis `channels` of x; what has more axes stays."""
    if vector.dim() > 1 or channels == -1:
        return vector
    return vector.view(-1, *[1] * (x.dim() - channels - 1))


def one_line(error: BaseException) -> str:
    """An error's kind and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_LONGEST]
