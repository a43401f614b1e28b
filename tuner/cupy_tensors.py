"""Tensors of any library that shares CUDA memory: through DLPack or the CUDA array interface.

`kt apply --format python` writes this file into every module that it emits.
"""

from __future__ import annotations

import ctypes
import sys
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
_TORCH_FP8 = {"torch.float8_e4m3fn": (_E4M3, 8), "torch.float8_e5m2": (_E5M2, 8)}
"""Elements that neither protocol of torch carries in every version: they go as bytes."""
_LEGACY = 1  # stream, as DLPack numbers it


class Operand(NamedTuple):
    """One argument, as the caller has it: row-major in the given order of its axes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] = ()
    """The axis of the caller's tensor behind each of the kernel's; empty: the same."""
    memory: str = "contiguous (row-major)"
    """What that memory format is called."""


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


_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def import_cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise ImportError("this kernel is loaded by CuPy: pip install cupy-cuda13x") from None
    return cupy


def _root(tensor: Any) -> str:
    return type(tensor).__module__.partition(".")[0]


def detached(tensor: Any, name: str) -> Any:
    """A torch tensor without its gradient, which the kernel does not compute."""
    if _root(tensor) == "torch" and tensor.requires_grad:
        if sys.modules["torch"].is_grad_enabled():
            raise TypeError(f"{name} requires a gradient, which this kernel lacks: torch.no_grad()")
        return tensor.detach()
    return tensor


def one_device(tensors: Sequence[Any], operands: Sequence[Operand]) -> int:
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
        return int(import_cupy().cuda.runtime.pointerGetAttributes(address).device)
    raise TypeError(
        f"{name} is a {type(tensor).__name__}: accepts tensors with DLPack or the CUDA array "
        "interface"
    )


def stream_of(tensor: Any, device: int) -> int:
    """Handle of the current stream of the tensor's library."""
    if _root(tensor) == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    return int(import_cupy().cuda.get_current_stream().ptr)


def read_tensor(tensor: Any, operand: Operand, stream: int, held: list[Any]) -> _Tensor:
    """The tensor in memory, once it is what the kernel was built for."""
    small = _TORCH_FP8.get(str(tensor.dtype)) if _root(tensor) == "torch" else None
    plain = tensor.view(sys.modules["torch"].uint8) if small else tensor
    found = _from_dlpack(plain, stream, held) or _from_interface(plain, operand.name)
    found = found._replace(element=small or found.element)
    name, shape = operand.name, operand.shape
    if found.element not in _ELEMENTS[operand.dtype]:
        raise TypeError(f"{name} is not {operand.dtype}: {getattr(tensor, 'dtype', found.element)}")
    if found.shape != shape:
        raise ValueError(f"{name} has shape {found.shape}: accepts {shape}")
    if not _contiguous(shape, found.strides or _row_major(shape), operand.order):
        raise ValueError(f"{name} is not {operand.memory}")
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


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


def _contiguous(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the memory is row-major once the axes stand in `order`."""
    step = 1
    for axis in reversed(order or range(len(shape))):
        if shape[axis] != 1 and strides[axis] != step:
            return False
        step *= shape[axis]
    return True


def refuse_overlap(tensors: Sequence[_Tensor], operands: Sequence[Operand], outputs: int) -> None:
    """Raises ValueError when an output shares memory with another argument."""

    def end(tensor: _Tensor) -> int:
        size = tensor.element[1] // 8
        for extent in tensor.shape:
            size *= extent
        return tensor.address + size

    first = len(tensors) - outputs
    for i in range(first, len(tensors)):
        for tensor, operand in zip(tensors[:i], operands, strict=False):
            if tensor.address < end(tensors[i]) and tensors[i].address < end(tensor):
                what = operands[i].name if outputs > 1 else "the output"
                raise ValueError(f"{what} overlaps {operand.name}")


def outs_of(out: Any, operands: Sequence[Operand]) -> list[Any]:
    """The caller's outputs, one by one."""
    if out is None:
        return []
    outs = [out] if len(operands) == 1 else list(out) if isinstance(out, tuple | list) else []
    if len(outs) != len(operands):
        names = ", ".join(operand.name for operand in operands)
        raise TypeError(f"out: accepts a tuple of {len(operands)} tensors ({names})")
    return outs


def empty_for(like: Any, operand: Operand, device: int) -> Any:
    """Memory for an output, seen as the caller wants it: of torch for torch, else of CuPy."""
    order = operand.order or tuple(range(len(operand.shape)))
    shape = tuple(operand.shape[axis] for axis in order)
    back = tuple(order.index(axis) for axis in range(len(order)))
    if _root(like) == "torch":
        torch = sys.modules["torch"]
        dtype = getattr(torch, _NAMES.get(operand.dtype, "uint8"))
        made = torch.empty(shape, dtype=dtype, device=f"cuda:{device}")
        return made.permute(back) if operand.order else made
    dtype = _BITS.get(operand.dtype) or _NAMES[operand.dtype]
    made = import_cupy().empty(shape, dtype=dtype)
    return made.transpose(back) if operand.order else made


def like_first(first: Any, made: Any, same_type: bool) -> Any:
    """The output as an array of the first input's library; what is held as bits, of its type."""
    kind = _root(first)
    if kind != "torch" and kind != "cupy" and hasattr(first, "__array_namespace__"):
        made = first.__array_namespace__().from_dlpack(made)
    if same_type and made.dtype != first.dtype:
        return made.view(first.dtype)
    return made
