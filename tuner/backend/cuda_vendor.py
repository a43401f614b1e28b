"""The opponents on CUDA, by name, and torch.matmul (cuBLAS) among them.

Each runs on the same rotating sets as the kernels it is compared with, in CUDA graphs.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kt.spaces.workload import Gemm, Operand, Workload

from .cublaslt import cublaslt_tuned
from .driver import Replayable

_TORCH = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_RAW = {8: "<i8", 4: "<i4", 2: "<i2"}
_WARM = 3


class Opponent(Protocol):
    """A library's product on given argument sets."""

    def warm_us(self) -> float:
        """Time of one launch, roughly, microseconds; graphs may be captured after it."""

    def graph(self, count: int) -> Replayable:
        """`count` launches over the sets as one graph."""

    def describe(self) -> str:
        """Library, version and what of it runs."""


class _DeviceArray:
    """Foreign device memory through the CUDA array interface, as integers of some width."""

    def __init__(self, address: int, shape: tuple[int, ...], width: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": _RAW[width], "data": (address, False), "version": 3,
        }  # fmt: skip


def vendor_library(workload: Workload, sets: Sequence[Sequence[int]]) -> TorchMatmul | None:
    """torch on these argument sets; None without torch or for what torch.matmul cannot do."""
    if importlib.util.find_spec("torch") is None or not isinstance(workload, Gemm):
        return None
    if workload.dtype not in _TORCH and workload.dtype != "tf32":
        return None
    return TorchMatmul(workload, sets)


class TorchMatmul:
    """`torch.matmul(out=)` and the epilogue as a torch user writes it."""

    def __init__(self, workload: Gemm, sets: Sequence[Sequence[int]]) -> None:
        import torch

        self._torch, self._workload = torch, workload
        torch.backends.cuda.matmul.allow_tf32 = workload.dtype == "tf32"
        operands = (*workload.inputs(), workload.output())
        self._names = [operand.name for operand in operands]
        self._sets = [
            [self._tensor(a, o) for a, o in zip(row, operands, strict=True)] for row in sets
        ]

    def _tensor(self, address: int, operand: Operand) -> Any:
        width = operand.bytes // operand.elements
        raw = self._torch.as_tensor(_DeviceArray(address, operand.shape, width), device="cuda")
        name = _TORCH.get(operand.dtype, "float32")
        return raw.view(getattr(self._torch, name))

    def _launch(self, tensors: Sequence[Any]) -> None:
        torch, named = self._torch, dict(zip(self._names, tensors, strict=True))
        a, b, c = tensors[0], tensors[1], tensors[-1]
        a = a.transpose(-1, -2) if self._workload.layout[0] == "t" else a
        b = b.transpose(-1, -2) if self._workload.layout[1] == "t" else b
        torch.matmul(a, b, out=c)
        for op in self._workload.epilogue:
            match op:
                case "bias" | "residual":
                    c.add_(named[op])
                case "scale":
                    c.mul_(named[op])
                case "relu":
                    torch.relu_(c)
                case "gelu":
                    c.copy_(torch.nn.functional.gelu(c))
                case _:
                    torch.nn.functional.silu(c, inplace=True)

    def describe(self) -> str:
        """Library and version."""
        return f"torch {self._torch.__version__}: torch.matmul(out=)"

    def warm_us(self) -> float:
        """Time of one launch, roughly; also makes torch pick its kernel before a capture."""
        for tensors in self._sets[:_WARM]:
            self._launch(tensors)
        self._torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(_WARM):
            self._launch(self._sets[i % len(self._sets)])
        self._torch.cuda.synchronize()
        return (time.perf_counter() - begin) / _WARM * 1e6

    def graph(self, count: int) -> TorchGraph:
        """`count` launches over the sets as one graph."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for i in range(count):
                self._launch(self._sets[i % len(self._sets)])
        return TorchGraph(graph, self._torch)


class TorchGraph:
    """A torch graph that replays on a stream of ours."""

    def __init__(self, graph: Any, torch: Any) -> None:
        self._graph, self._torch = graph, torch

    def replay(self, stream: Any) -> None:
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(int(stream))):
            self._graph.replay()

    def destroy(self) -> None:
        self._graph.reset()


def _torch_matmul(
    workload: Workload, sets: Sequence[Sequence[int]], stream: Any
) -> TorchMatmul | None:
    return vendor_library(workload, sets)


OPPONENTS: Mapping[str, Callable[[Workload, Sequence[Sequence[int]], Any], Opponent | None]] = {
    "torch": _torch_matmul,
    "cublaslt-tuned": cublaslt_tuned,
}
"""From a workload, its argument sets and a stream to the opponent; None where there is none."""
