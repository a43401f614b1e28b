"""A kernel on the device, ready to be launched: a cubin, or a library with the C ABI."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kt.spaces.kernel import Launch

from .cuda_data import POISON, Guarded
from .driver import CudaError, Device, Module, launch
from .load import Refused


class Program(msgspec.Struct, frozen=True):
    """What a runner needs to know of a kernel besides its binary.

    Without launches the binary is a library, whose `kt_launch` does all itself.
    """

    path: str
    launches: tuple[Launch, ...]
    workspace_bytes: int
    zeroed_bytes: int


class Loaded(Protocol):
    """A candidate on the device: its workspace and how it is launched."""

    workspace: Guarded | None

    def reset(self) -> None:
        """Poisons the workspace, but for what the kernel wants zeroed."""

    def launch(self, arguments: Sequence[int]) -> None:
        """Starts everything on the device's stream."""

    def unload(self) -> None: ...


def load(program: Program, device: Device) -> Loaded:
    """Loads a program; raises CudaError, or Refused for a library without the ABI."""
    return _Cubin(program, device) if program.launches else _Library(program, device)


class _Workspace:
    """The workspace of one kernel, between guard zones."""

    def __init__(self, size: int, zeroed: int) -> None:
        self.workspace = Guarded(size) if size else None
        self._zeroed = zeroed

    def reset(self) -> None:
        if self.workspace is not None:
            self.workspace.fill(POISON)
            self.workspace.fill(0, self._zeroed)

    @property
    def _address(self) -> int:
        return self.workspace.address if self.workspace is not None else 0


class _Cubin(_Workspace):
    def __init__(self, program: Program, device: Device) -> None:
        self._program, self._device = program, device
        super().__init__(program.workspace_bytes, program.zeroed_bytes)
        self._module = Module(Path(program.path))

    def launch(self, arguments: Sequence[int]) -> None:
        for step in self._program.launches:
            launch(self._module, step, [*arguments, self._address], self._device.stream)

    def unload(self) -> None:
        self._module.unload()


class _Library(_Workspace):
    """The C ABI of an emitted file. Stays loaded: its static CUDA runtime has no safe unloading."""

    def __init__(self, program: Program, device: Device) -> None:
        try:
            library = ctypes.CDLL(program.path)
            self._launch = library.kt_launch
            sizes = [library.kt_workspace_bytes, library.kt_workspace_zeroed_bytes]
        except (OSError, AttributeError) as error:
            raise Refused("launch_error", "load", f"cannot load the library: {error}") from None
        self._launch.argtypes = [ctypes.c_void_p] * 3
        for function in sizes:
            function.argtypes, function.restype = [], ctypes.c_size_t
        self._stream = int(device.stream)
        super().__init__(*(int(function()) for function in sizes))

    def launch(self, arguments: Sequence[int]) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*arguments)
        code = int(self._launch(ctypes.addressof(addresses), self._address, self._stream))
        if code:  # of the runtime, whose numbers are the driver's
            raise CudaError("kt_launch", code, f"error {code}")

    def unload(self) -> None:
        pass
