"""A CuPy and a CUDA driver in host memory, which record what an emitted module asks of them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

_DEVICE_OF: dict[int, int] = {}  # address: device


@dataclass
class Tensor:
    """Memory with the CUDA array interface."""

    array: np.ndarray[Any, Any]
    typestr: str
    device: int

    def __post_init__(self) -> None:
        _DEVICE_OF[self.address] = self.device

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def T(self) -> Tensor:
        return Tensor(self.array.T, self.typestr, self.device)

    def transpose(self, axes: tuple[int, ...]) -> Tensor:
        return Tensor(self.array.transpose(axes), self.typestr, self.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self.array.flags.c_contiguous else self.array.strides
        return {"shape": self.shape, "typestr": self.typestr, "data": (self.address, False),
                "strides": strides, "version": 3}  # fmt: skip


class Capsuled:
    """Memory that calls itself CUDA's through DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.dtype = array, array.dtype
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()


def tensor(shape: tuple[int, ...], typestr: str, offset: int = 0, device: int = 0) -> Tensor:
    """Memory that begins `offset` bytes after a multiple of 512."""
    dtype = np.dtype(typestr)
    memory = np.zeros(int(np.prod(shape)) * dtype.itemsize + 1024, np.uint8)
    start = -memory.ctypes.data % 512 + offset
    end = start + int(np.prod(shape)) * dtype.itemsize
    return Tensor(memory[start:end].view(dtype).reshape(shape), typestr, device)


@dataclass
class Launched:
    """One launch as the driver saw it."""

    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...] | None
    shared: int
    stream: int
    arguments: list[int]
    early: bool = False


class Gpu:
    """Both libraries; `fails` is the code that launches return."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.attributes: list[tuple[str, int, int]] = []
        self.cubins: list[bytes] = []
        self.arrays: list[Tensor] = []
        self.stream = self.fails = 0
        self._entries: list[str] = []
        self._parameters = 1

    # -- the driver -------------------------------------------------------------------------

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((self._entries[function.value - 1], attribute, value))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, addresses: Any, extra: None) -> int:
        found = config._obj
        arguments = [ctypes.c_void_p.from_address(a).value or 0 for a in addresses]
        attributes = {one.id: one.value for one in found.attributes[: found.count]}
        assert set(attributes) <= {4, 6}
        cluster = tuple(attributes[4][:3]) if 4 in attributes else None
        self.launches.append(
            Launched(
                self._entries[function.value - 1], tuple(found.grid), tuple(found.block), cluster,
                found.shared, found.stream or 0, arguments,
                6 in attributes and attributes[6][0] == 1,
            )
        )  # fmt: skip
        return self.fails

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = f"CUDA_ERROR_{code}".encode()
        return 0

    # -- CuPy -------------------------------------------------------------------------------

    def cupy(self) -> Any:
        """What `import cupy` gives."""
        gpu = self

        class Module:
            def load(self, cubin: bytes) -> None:
                gpu.cubins.append(cubin)

            def get_function(self, name: str) -> Any:
                gpu._entries.append(name)
                return SimpleNamespace(ptr=len(gpu._entries))

        @contextlib.contextmanager
        def entered(*_: Any) -> Iterator[None]:
            yield

        def empty(shape: Any, dtype: str) -> Tensor:
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            made = tensor(shape, np.dtype(dtype).str)
            made.array.view(np.uint8)[...] = 0xFF
            gpu.arrays.append(made)
            return made

        def memory(size: int) -> Any:
            made = empty(size, "uint8")
            return SimpleNamespace(ptr=made.address)

        def memset(address: int, byte: int, size: int, stream: int) -> None:
            ctypes.memset(address, byte, size)

        cuda = SimpleNamespace(
            Module=Module, Device=entered, Memory=memory,
            get_current_stream=lambda: SimpleNamespace(ptr=gpu.stream),
            driver=SimpleNamespace(CUDADriverError=RuntimeError),
            runtime=SimpleNamespace(
                pointerGetAttributes=lambda at: SimpleNamespace(device=_DEVICE_OF[at]),
                memsetAsync=memset,
            ),
        )  # fmt: skip
        return SimpleNamespace(cuda=cuda, empty=empty)
