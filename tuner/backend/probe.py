"""Measurements of the machine itself: peak, bandwidth, and whether rotation leaves caches cold."""

from __future__ import annotations

import ctypes
import statistics
from pathlib import Path
from typing import Any

from kt.logs.record import Bound
from kt.spaces.errors import ToolchainError
from kt.spaces.kernel import expand
from kt.spaces.target import Target

from .buffers import address, anonymous

_SECONDS = 0.4
_SMALLEST_COPY = 64 * 2**20
_ISA = {"sse2": 1, "avx2": 2, "avx512": 3, "neon": 4}
_HOT_BYTES = 256 * 2**10


def bounds_source(dtype: str, arch: str) -> str:
    """Source of the bound kernels for a CPU's instruction set and an element type."""
    isa = f"#define KT_ISA {_ISA[arch]}\n" if arch in _ISA else ""
    double = f"#define KT_DOUBLE {int(dtype == 'fp64')}\n"
    return isa + double + expand(Path(__file__).with_name("bounds.c"))


def measure_bound(library: str, target: Target) -> Bound:
    """Peak of fused multiply-adds and of copying (read plus written) on all usable cores."""
    try:
        native = ctypes.CDLL(library)
    except OSError as error:
        raise ToolchainError(f"kt's own library cannot be loaded: {error}") from None
    native.kt_peak_flops.restype = native.kt_copy_bandwidth.restype = ctypes.c_double
    native.kt_peak_flops.argtypes = [ctypes.c_int, ctypes.c_double]
    native.kt_copy_bandwidth.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_double
    ]  # fmt: skip
    flops = native.kt_peak_flops(target.cores, _SECONDS)
    size = min(max(4 * target.l3_bytes, _SMALLEST_COPY), target.memory_bytes // 8)
    to, source = anonymous(size), anonymous(size)
    to[:], source[:] = 1, 2
    bandwidth = native.kt_copy_bandwidth(target.cores, address(to), address(source), size, _SECONDS)
    return Bound(flops=float(flops), bandwidth=float(bandwidth))


def cold_evidence(native: Any, target: Target) -> dict[str, float]:
    """Read rates (GB/s) of 256 KiB: hot, in rotation over twice the last cache, and flushed.

    `cold_share` is rotated / flushed time: near 1 when rotation leaves nothing in the caches.
    """
    count = 2 * max(target.l3_bytes, target.l2_bytes) // _HOT_BYTES + 1
    memory = anonymous(count * _HOT_BYTES)
    memory[:] = 1
    sink = ctypes.c_uint64()

    def read(i: int) -> float:
        at = address(memory) + i % count * _HOT_BYTES
        return float(native.kt_read_us(at, _HOT_BYTES, ctypes.byref(sink)))

    hot = statistics.median([read(0) for _ in range(50)][10:])
    rotated = statistics.median([read(i) for i in range(2 * count)][count:])
    flushed = []
    for i in range(50):
        if native.kt_flush(address(memory) + i * _HOT_BYTES, _HOT_BYTES):
            flushed.append(read(i))
    rates = {"cold_hot_gbps": hot, "cold_rotated_gbps": rotated}
    if flushed:
        rates["cold_flushed_gbps"] = statistics.median(flushed)
    found = {name: round(_HOT_BYTES / us / 1e3, 2) for name, us in rates.items()}
    if flushed:
        found["cold_share"] = round(rotated / statistics.median(flushed), 3)
    return found
