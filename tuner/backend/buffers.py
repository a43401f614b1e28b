"""Memory of a measurement: buffers between guards, and input sets that keep caches cold."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
CANARY = 0xA5
POISON = 0xFF  # all ones is a NaN in every floating-point type
ALIGN = 256  # of operands in the rotating sets, and of the workspace
# What malloc promises, and no more: a kernel that assumes more of its operands is caught.
_ODD = 16
_MOST_SETS = 4096

Bytes = NDArray[np.uint8]


def round_up(size: int, to: int) -> int:
    return -(-size // to) * to


def anonymous(size: int) -> Bytes:
    """Fresh private zeroed memory, on huge pages where the system has them; may raise OSError."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2 * 2**20:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def protect(array: Bytes, flags: int) -> None:
    """mprotect of whole pages; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address(array)), ctypes.c_size_t(array.nbytes), flags):
        raise OSError(ctypes.get_errno(), "mprotect")


class Guarded:
    """A buffer with a canary before and after it.

    With `edge` the buffer ends at an inaccessible page instead, so that reading beyond it crashes.
    The start is aligned to `align` bytes (16: deliberately not to more).
    """

    def __init__(self, size: int, align: int = _ODD, edge: bool = False) -> None:
        self._align = align
        self._capacity = round_up(size, PAGE)
        self._memory = anonymous(self._capacity + 4 * PAGE)
        if edge:
            last = 2 * PAGE + self._capacity
            protect(self._memory[last : last + PAGE], 0)
            self._memory = self._memory[:last]
            self._place((last - size) // align * align, size)
        else:
            self.resize(size)

    def resize(self, size: int) -> bool:
        """Makes this a buffer of `size` bytes in the same memory; False when it does not fit."""
        if size > self._capacity:
            return False
        self._place(2 * PAGE + self._align % ALIGN, size)
        return True

    def _place(self, first: int, size: int) -> None:
        self.size = size
        end = first + size
        self.data: Bytes = self._memory[first:end]
        self._before, self._after = self._memory[first - PAGE : first], self._memory[end:][:PAGE]
        self._before[:] = CANARY
        self._after[:] = CANARY

    @property
    def address(self) -> int:
        return address(self.data)

    def poison(self) -> None:
        """Fills the buffer with NaN."""
        ctypes.memset(self.address, POISON, self.size)

    def trespass(self) -> str | None:
        """Which side of the buffer was written to, or None; repairs the canaries."""
        found = None
        for side, zone in (("after its end", self._after), ("before its start", self._before)):
            changed = np.flatnonzero(zone != CANARY)
            if len(changed):
                near = changed[0] if zone is self._after else PAGE - 1 - changed[-1]
                found = f"{int(near) + 1} bytes {side}"
                zone[:] = CANARY
        return found


class RotatingSets:
    """Copies of all operands, used in turn so that together they exceed the caches.

    Inputs are read-only while they are timed: a kernel that writes to them crashes.
    """

    def __init__(
        self,
        inputs: Sequence[NDArray[Any]],
        output_bytes: Sequence[int],
        cache_bytes: int,
        limit_bytes: int,
    ) -> None:
        sizes = [round_up(array.nbytes, ALIGN) for array in inputs]
        out_sizes = [round_up(size, ALIGN) for size in output_bytes]
        in_stride, out_stride = sum(sizes), sum(out_sizes)
        per_set = in_stride + out_stride
        wanted = max(2, -(-2 * cache_bytes // per_set) + 1)
        self.count = max(1, min(wanted, _MOST_SETS, limit_bytes // per_set))
        self.bytes = self.count * per_set
        self._inputs = anonymous(round_up(self.count * in_stride, PAGE))
        self._outputs = anonymous(self.count * out_stride)
        self.arg_count = len(inputs) + len(out_sizes)
        self._input_count = len(inputs)
        table = (ctypes.c_void_p * (self.count * self.arg_count))()
        for i in range(self.count):
            at = i * in_stride
            for j, (array, size) in enumerate(zip(inputs, sizes, strict=True)):
                to = self._inputs[at : at + array.nbytes]
                ctypes.memmove(address(to), address(array), array.nbytes)
                table[i * self.arg_count + j] = address(to)
                at += size
            at = address(self._outputs) + i * out_stride
            for j, size in enumerate(out_sizes, len(inputs)):
                table[i * self.arg_count + j] = at
                at += size
        ctypes.memset(address(self._outputs), 0, self._outputs.nbytes)  # no page faults later
        self.table = table
        self._protected = False

    def protect(self, on: bool) -> None:
        if on != self._protected:
            protect(self._inputs, mmap.PROT_READ if on else mmap.PROT_READ | mmap.PROT_WRITE)
            self._protected = on

    def arrays(self, like: Sequence[tuple[tuple[int, ...], Any]]) -> list[list[NDArray[Any]]]:
        """Each set as NumPy arrays of the given (shape, dtype), for the vendor library."""
        sets = []
        for i in range(self.count):
            row: list[NDArray[Any]] = []
            for j, (shape, dtype) in enumerate(like):
                size = int(np.prod(shape)) * np.dtype(dtype).itemsize
                start = self.table[i * self.arg_count + j]
                assert start is not None
                home = self._inputs if j < self._input_count else self._outputs
                offset = start - address(home)
                row.append(home[offset : offset + size].view(dtype).reshape(shape))
            sets.append(row)
        return sets
