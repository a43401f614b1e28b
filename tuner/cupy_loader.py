"""Runs a kt kernel's cubin on tensors of any library that shares CUDA memory.

`kt apply --format python` writes this file into every module that it emits; it imports nothing of
kt. CuPy loads the cubin and owns the workspace. Tensors come through DLPack or the CUDA array
interface.
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

ALIGNMENT = 16
_CUDA, _CUDA_MANAGED = 2, 13
_INT, _UINT, _FLOAT, _BFLOAT, _E4M3, _E5M2 = 0, 1, 2, 4, 10, 12
# DLPack's (type code, bits) by element type. Libraries without such a type hold it as its bits.
_ELEMENTS = {
    "fp64": {(_FLOAT, 64)}, "fp32": {(_FLOAT, 32)}, "tf32": {(_FLOAT, 32)},
    "fp16": {(_FLOAT, 16)}, "bf16": {(_BFLOAT, 16), (_UINT, 16)},
    "int8": {(_INT, 8)}, "int32": {(_INT, 32)},
    "fp8_e4m3": {(_E4M3, 8), (_UINT, 8)}, "fp8_e5m2": {(_E5M2, 8), (_UINT, 8)},
}  # fmt: skip
_TYPESTR = {
    "<f8": (_FLOAT, 64), "<f4": (_FLOAT, 32), "<f2": (_FLOAT, 16), "<V2": (_BFLOAT, 16),
    "<u2": (_UINT, 16), "|i1": (_INT, 8), "|u1": (_UINT, 8), "<i4": (_INT, 32),
}  # fmt: skip
_NAMES = {
    "fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16",
    "bf16": "bfloat16", "int8": "int8", "int32": "int32",
}  # fmt: skip
_BITS = {"bf16": "uint16", "fp8_e4m3": "uint8", "fp8_e5m2": "uint8"}
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_LEGACY, _PER_THREAD = 1, 2  # streams as DLPack numbers them
_PORTABLE_CLUSTER = 8


class Operand(NamedTuple):
    """One argument: row-major and contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Step(NamedTuple):
    """One launch. Every entry takes the arguments in order, then the workspace."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int


class _Tensor(NamedTuple):
    """What a tensor's owner says of it; strides in elements, None when contiguous."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    element: tuple[int, int]


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


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


_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Kernel:
    """A compiled kernel: call it with the inputs in order.

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
    ) -> None:
        self.arch, self.operands, self.steps = arch, tuple(operands), tuple(steps)
        self.workspace_bytes, self.zeroed_bytes = workspace_bytes, zeroed_bytes
        self.cubin = zlib.decompress(base64.b64decode(cubin))
        self._functions: dict[int, list[ctypes.c_void_p]] = {}
        self._modules: list[Any] = []
        self._workspaces: dict[tuple[int, int, int], Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any, out: Any = None) -> Any:
        """The output, of the first input's library unless `out` is given.

        Runs on the current torch stream for torch tensors, else on the current CuPy stream.
        Raises TypeError or ValueError for what the kernel was not built for.
        """
        wanted = self.operands[:-1]
        if len(inputs) != len(wanted):
            names = ", ".join(operand.name for operand in wanted)
            raise TypeError(f"{len(inputs)} inputs: the kernel takes {len(wanted)} ({names})")
        cupy = _cupy()
        given = [_detached(x, o.name) for x, o in zip(inputs, wanted, strict=True)]
        device = _one_device([*given, *([] if out is None else [out])], self.operands)
        with cupy.cuda.Device(device):
            stream = _stream(given[0], device)
            made = _empty(given[0], self.operands[-1], device) if out is None else out
            held: list[Any] = []  # capsules live until the kernel is enqueued
            tensors = [_read(x, o, stream, held) for x, o in zip(given, wanted, strict=True)]
            tensors.append(_read(_detached(made, "out"), self.operands[-1], stream, held))
            _refuse_overlap(tensors, self.operands)
            self._launch([tensor.address for tensor in tensors], device, stream)
            if out is not None:
                return out
            return _like(given[0], made, self.operands[0].dtype == self.operands[-1].dtype)

    def _launch(self, arguments: list[int], device: int, stream: int) -> None:
        with self._lock:
            functions = self._functions.get(device) or self._load(device)
            arguments.append(self._workspace(device, stream))
            for step, function in zip(self.steps, functions, strict=True):
                _start(function, step, arguments, stream)

    def _load(self, device: int) -> list[ctypes.c_void_p]:
        cupy = _cupy()
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
            found.append(function)
        self._functions[device] = found
        return found

    def _workspace(self, device: int, stream: int) -> int:
        """Address of the stream's own workspace, whose first bytes are zero between launches."""
        if not self.workspace_bytes:
            return 0
        thread = threading.get_ident() if stream == _PER_THREAD else 0
        key = (device, stream, thread)
        if key not in self._workspaces:
            cuda = _cupy().cuda
            memory = cuda.Memory(self.workspace_bytes)  # of no pool: no other stream knows it
            cuda.runtime.memsetAsync(memory.ptr, 0, self.zeroed_bytes, stream)
            self._workspaces[key] = memory
        return int(self._workspaces[key].ptr)


def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise ImportError("this kernel is loaded by CuPy: pip install cupy-cuda13x") from None
    return cupy


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


def _start(function: ctypes.c_void_p, step: Step, arguments: Sequence[int], stream: int) -> None:
    config = _Config(
        (ctypes.c_uint * 3)(*step.grid), (ctypes.c_uint * 3)(*step.block), step.shared_bytes, stream
    )
    if step.cluster != (1, 1, 1):
        cluster = _Attribute(_CLUSTER_DIMENSION, (ctypes.c_uint32 * 16)(*step.cluster))
        config.attributes, config.count = ctypes.pointer(cluster), 1
    values = [ctypes.c_void_p(address) for address in arguments]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    code = _driver().cuLaunchKernelEx(ctypes.byref(config), function, addresses, None)
    _check(code, f"launching {step.entry}")


# -- tensors of other libraries -------------------------------------------------------------------


def _root(tensor: Any) -> str:
    return type(tensor).__module__.partition(".")[0]


def _detached(tensor: Any, name: str) -> Any:
    """A torch tensor without its gradient, which the kernel does not compute."""
    if _root(tensor) == "torch" and tensor.requires_grad:
        if sys.modules["torch"].is_grad_enabled():
            raise TypeError(f"{name} requires a gradient, which this kernel lacks: torch.no_grad()")
        return tensor.detach()
    return tensor


def _one_device(tensors: Sequence[Any], operands: Sequence[Operand]) -> int:
    """The device that all tensors are on."""
    devices = [_device(x, o.name) for x, o in zip(tensors, operands, strict=False)]
    for operand, device in zip(operands, devices, strict=False):
        if device != devices[0]:
            first = operands[0].name
            raise ValueError(f"{operand.name} is on device {device}, {first} on {devices[0]}")
    return devices[0]


def _device(tensor: Any, name: str) -> int:
    if hasattr(tensor, "__dlpack_device__"):
        kind, index = tensor.__dlpack_device__()
        if int(kind) not in (_CUDA, _CUDA_MANAGED):
            raise ValueError(f"{name} is not on a CUDA device")
        return int(index)
    if hasattr(tensor, "__cuda_array_interface__"):
        address = tensor.__cuda_array_interface__["data"][0]
        return int(_cupy().cuda.runtime.pointerGetAttributes(address).device)
    raise TypeError(
        f"{name} is a {type(tensor).__name__}: accepts tensors with DLPack or the CUDA array "
        "interface"
    )


def _stream(tensor: Any, device: int) -> int:
    """Handle of the current stream of the tensor's library."""
    if _root(tensor) == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    return int(_cupy().cuda.get_current_stream().ptr)


def _read(tensor: Any, operand: Operand, stream: int, held: list[Any]) -> _Tensor:
    """The tensor in memory, once it is what the kernel was built for."""
    found = _from_dlpack(tensor, stream, held) or _from_interface(tensor, operand.name)
    name, shape = operand.name, operand.shape
    if found.element not in _ELEMENTS[operand.dtype]:
        raise TypeError(f"{name} is not {operand.dtype}: {getattr(tensor, 'dtype', found.element)}")
    if found.shape != shape:
        raise ValueError(f"{name} has shape {found.shape}: accepts {shape}")
    if found.strides is not None and not _contiguous(shape, found.strides):
        raise ValueError(f"{name} is not contiguous (row-major)")
    if found.address % ALIGNMENT:
        raise ValueError(f"{name} begins at {found.address:#x}: accepts multiples of {ALIGNMENT}")
    return found


def _from_dlpack(tensor: Any, stream: int, held: list[Any]) -> _Tensor | None:
    if not hasattr(tensor, "__dlpack__"):
        return None
    try:
        capsule = tensor.__dlpack__(stream=stream or _LEGACY)
    except (BufferError, TypeError, ValueError):
        if hasattr(tensor, "__cuda_array_interface__"):
            return None  # an element type that its DLPack lacks
        raise
    held.append(capsule)
    found = _DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
    axes = range(found.ndim)
    strides = tuple(found.strides[i] for i in axes) if found.strides else None
    return _Tensor(
        (found.data or 0) + found.byte_offset, tuple(found.shape[i] for i in axes), strides,
        (found.code, found.bits * found.lanes),
    )  # fmt: skip


def _from_interface(tensor: Any, name: str) -> _Tensor:
    try:
        found = tensor.__cuda_array_interface__
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{name}: {error}") from None
    element = _TYPESTR.get(found["typestr"], (-1, 0))
    strides = found.get("strides")
    if strides is not None:
        strides = tuple(8 * stride // element[1] if element[1] else 0 for stride in strides)
    return _Tensor(found["data"][0], tuple(found["shape"]), strides, element)


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def _refuse_overlap(tensors: Sequence[_Tensor], operands: Sequence[Operand]) -> None:
    def end(tensor: _Tensor) -> int:
        size = tensor.element[1] // 8
        for extent in tensor.shape:
            size *= extent
        return tensor.address + size

    out = tensors[-1]
    for tensor, operand in zip(tensors[:-1], operands, strict=False):
        if tensor.address < end(out) and out.address < end(tensor):
            raise ValueError(f"the output overlaps {operand.name}")


def _empty(like: Any, operand: Operand, device: int) -> Any:
    """Memory for the output: of torch for torch, else of CuPy."""
    if _root(like) == "torch":
        torch = sys.modules["torch"]
        dtype = getattr(torch, _NAMES.get(operand.dtype, "uint8"))
        return torch.empty(operand.shape, dtype=dtype, device=f"cuda:{device}")
    dtype = _BITS.get(operand.dtype) or _NAMES[operand.dtype]
    return _cupy().empty(operand.shape, dtype=dtype)


def _like(first: Any, made: Any, same_type: bool) -> Any:
    """The output as an array of the first input's library; what is held as bits, of its type."""
    kind = _root(first)
    if kind != "torch" and kind != "cupy" and hasattr(first, "__array_namespace__"):
        made = first.__array_namespace__().from_dlpack(made)
    if same_type and made.dtype != first.dtype:
        return made.view(first.dtype)
    return made
