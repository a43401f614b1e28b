"""Runs a kt kernel's cubin on tensors of any library that shares CUDA memory.

`kt apply --format python` writes this file into every module that it emits; it imports nothing of
kt. CuPy loads the cubin and owns the workspace.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from .cupy_tensors import (
    Operand,
    detached,
    empty_for,
    import_cupy,
    like_first,
    one_device,
    outs_of,
    read_tensor,
    refuse_overlap,
    stream_of,
)

_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_CLUSTER_DIMENSION, _EARLY_START = 4, 6  # CUlaunchAttributeID
_PER_THREAD = 2  # stream, as DLPack numbers it
_PORTABLE_CLUSTER = 8


class Map(NamedTuple):
    """A tensor that a kernel takes in boxes: the arguments of cuTensorMapEncodeTiled."""

    argument: int  # whose address it begins at; -1: the workspace
    offset: int
    type: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int


class Step(NamedTuple):
    """One launch. Every entry takes the arguments in order, the workspace, and its maps."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    early: bool = False
    """It may start while the one before it in the stream ends (programmatic serialization)."""
    resident: bool = False
    """The grid is cut to the clusters that the device holds at once."""
    maps: tuple[Map, ...] = ()


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )  # fmt: skip


class Kernel:
    """A compiled kernel: call it with the inputs in order. The last `outputs` operands come back.

    `cubin` is base64 of the zlib-compressed image. The workspace of a stream is made by the first
    call there, which must come before a graph capture. Calls may come from any thread.
    """

    def __init__(
        self,
        cubin: str,
        arch: str,
        operands: Sequence[Operand],
        steps: Sequence[Step],
        workspace_bytes: int,
        zeroed_bytes: int,
        outputs: int = 1,
    ) -> None:
        self.arch, self.operands, self.steps = arch, tuple(operands), tuple(steps)
        self.outputs = outputs
        self.workspace_bytes, self.zeroed_bytes = workspace_bytes, zeroed_bytes
        self.cubin = zlib.decompress(base64.b64decode(cubin))
        self._functions: dict[int, list[tuple[ctypes.c_void_p, Step]]] = {}
        self._modules: list[Any] = []
        self._workspaces: dict[tuple[int, int, int], Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any, out: Any = None, views: Sequence[Operand] = ()) -> Any:
        """The output, or a tuple of several, of the first input's library unless `out` is given.

        Runs on the current torch stream for torch tensors, else on the current CuPy stream.
        `views` are the operands as this caller has them. Raises TypeError or ValueError for what
        the kernel was not built for.
        """
        operands = tuple(views) or self.operands
        wanted, returned = operands[: -self.outputs], operands[-self.outputs :]
        if len(inputs) != len(wanted):
            names = ", ".join(operand.name for operand in wanted)
            raise TypeError(f"{len(inputs)} inputs: the kernel takes {len(wanted)} ({names})")
        cupy = import_cupy()
        given = [detached(x, o.name) for x, o in zip(inputs, wanted, strict=True)]
        outs = outs_of(out, returned)
        device = one_device([*given, *outs], operands)
        with cupy.cuda.Device(device):
            stream = stream_of(given[0], device)
            made = outs or [empty_for(given[0], operand, device) for operand in returned]
            held: list[Any] = []  # capsules live until the kernel is enqueued
            tensors = [read_tensor(x, o, stream, held) for x, o in zip(given, wanted, strict=True)]
            for x, operand in zip(made, returned, strict=True):
                tensors.append(read_tensor(detached(x, "out"), operand, stream, held))
            refuse_overlap(tensors, operands, self.outputs)
            self._launch([tensor.address for tensor in tensors], device, stream)
            if out is not None:
                return out
            same = [operand.dtype == operands[0].dtype for operand in returned]
            found = [like_first(given[0], x, one) for x, one in zip(made, same, strict=True)]
            return found[0] if self.outputs == 1 else tuple(found)

    def _launch(self, arguments: list[int], device: int, stream: int) -> None:
        with self._lock:
            functions = self._functions.get(device) or self._load(device)
            arguments.append(self._workspace(device, stream))
            for function, step in functions:
                _start(function, step, arguments, stream)

    def _load(self, device: int) -> list[tuple[ctypes.c_void_p, Step]]:
        cupy = import_cupy()
        module = cupy.cuda.Module()
        try:
            module.load(self.cubin)
        except cupy.cuda.driver.CUDADriverError as error:
            capability = cupy.cuda.Device(device).compute_capability
            raise RuntimeError(
                f"this kernel is built for {self.arch}, device {device} is sm_{capability}: {error}"
            ) from None
        self._modules.append(module)
        found = []
        for step in self.steps:
            function = ctypes.c_void_p(module.get_function(step.entry).ptr)
            _allow(function, _MAX_DYNAMIC_SHARED, step.shared_bytes)
            if step.cluster[0] * step.cluster[1] * step.cluster[2] > _PORTABLE_CLUSTER:
                _allow(function, _NON_PORTABLE_CLUSTER, 1)
            found.append((function, _cut(function, step) if step.resident else step))
        self._functions[device] = found
        return found

    def _workspace(self, device: int, stream: int) -> int:
        """Address of the stream's own workspace, whose first bytes are zero between launches."""
        if not self.workspace_bytes:
            return 0
        thread = threading.get_ident() if stream == _PER_THREAD else 0
        key = (device, stream, thread)
        if key not in self._workspaces:
            cuda = import_cupy().cuda
            memory = cuda.Memory(self.workspace_bytes)  # of no pool: no other stream knows it
            cuda.runtime.memsetAsync(memory.ptr, 0, self.zeroed_bytes, stream)
            self._workspaces[key] = memory
        return int(self._workspaces[key].ptr)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown error').decode()}")


def _allow(function: ctypes.c_void_p, attribute: int, value: int) -> None:
    _check(_driver().cuFuncSetAttribute(function, attribute, value), "cuFuncSetAttribute")


def _configured(step: Step, stream: int) -> _Config:
    config = _Config(
        (ctypes.c_uint * 3)(*step.grid), (ctypes.c_uint * 3)(*step.block), step.shared_bytes, stream
    )
    wanted = []
    if step.cluster != (1, 1, 1):
        wanted.append(_Attribute(_CLUSTER_DIMENSION, (ctypes.c_uint32 * 16)(*step.cluster)))
    if step.early:
        wanted.append(_Attribute(_EARLY_START, (ctypes.c_uint32 * 16)(1)))
    config.attributes, config.count = (_Attribute * len(wanted))(*wanted), len(wanted)
    return config


def _cut(function: ctypes.c_void_p, step: Step) -> Step:
    """The launch with a grid of no more clusters than the device holds at once."""
    count, config = ctypes.c_int(), _configured(step, 0)
    code = _driver().cuOccupancyMaxActiveClusters(
        ctypes.byref(count), function, ctypes.byref(config)
    )
    _check(code, "cuOccupancyMaxActiveClusters")
    x, y, z = step.cluster
    return step._replace(grid=(min(step.grid[0], max(count.value, 1) * x * y * z), *step.grid[1:]))


@functools.lru_cache(maxsize=256)
def _encoded(tensor: Map, address: int) -> Any:
    """The 128 bytes of a CUtensorMap, aligned as the driver asks."""
    words, halves = ctypes.c_uint64, ctypes.c_uint32
    memory = ctypes.create_string_buffer(128 + 64)
    found = (ctypes.c_char * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
    rank, promotion = len(tensor.extents), 3  # L2 fetches 256 bytes
    code = _driver().cuTensorMapEncodeTiled(
        found, tensor.type, rank, ctypes.c_void_p(address), (words * rank)(*tensor.extents),
        (words * max(rank - 1, 1))(*tensor.strides), (halves * rank)(*tensor.box),
        (halves * rank)(*tensor.steps), 0, tensor.swizzle, promotion, 0,
    )  # fmt: skip
    _check(code, "cuTensorMapEncodeTiled")
    return found


def _start(function: ctypes.c_void_p, step: Step, arguments: Sequence[int], stream: int) -> None:
    config = _configured(step, stream)
    values: list[Any] = [ctypes.c_void_p(address) for address in arguments]
    values += [_encoded(tensor, arguments[tensor.argument] + tensor.offset) for tensor in step.maps]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    code = _driver().cuLaunchKernelEx(ctypes.byref(config), function, addresses, None)
    _check(code, f"launching {step.entry}")
