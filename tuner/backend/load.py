"""Loading a built C kernel: `dlopen`, the two symbols of the ABI, and unloading."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kt.logs.record import Failure, FailureKind, Stage

from .environment import plain

_LOG_BYTES = 16 * 2**20


class Refused(Exception):
    """A candidate's failure, found while it is loaded, checked or timed."""

    def __init__(self, kind: FailureKind, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, stage, message)


class LoadedKernel:
    """`kt_launch` and `kt_workspace_bytes` of one binary."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            self._launch = self._library.kt_launch
            self._bytes = self._library.kt_workspace_bytes
        except (OSError, AttributeError) as error:
            message = plain(f"cannot load the binary: {error}")
            raise Refused("launch_error", "load", message) from None
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._bytes.argtypes, self._bytes.restype = [], ctypes.c_size_t
        self.address = ctypes.cast(self._launch, ctypes.c_void_p).value or 0

    def launch(self, args: int, workspace: int) -> int:
        """The code that the kernel returns; `args` and `workspace` are addresses."""
        return int(self._launch(args, workspace))

    def workspace_bytes(self) -> int:
        return int(self._bytes())

    def close(self) -> None:
        """Unloads the binary, which ends its threads."""
        libc = ctypes.CDLL(None)
        libc.dlclose.argtypes = [ctypes.c_void_p]
        libc.dlclose(self._library._handle)


def within(limit: int, hard: int) -> int:
    """The limit, or the hard one (of `getrlimit`) where that is lower."""
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


@contextmanager
def loaded(path: str | Path) -> Iterator[LoadedKernel]:
    """A kernel while it is in use; what it may write to files (its output's log too) is bounded.

    Raises Refused for a binary that cannot be loaded.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (within(_LOG_BYTES, hard), hard))
    try:
        kernel = LoadedKernel(str(path))
        try:
            yield kernel
        finally:
            kernel.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
