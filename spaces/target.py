"""Targets: named, complete descriptions of the devices that kernels are built for.

`cpu` is this machine, detected. The CUDA entries are datasheet values, so that kernels can be
built for a GPU that is not here; a detected device (later) fills the same fields.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from .errors import TargetError


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One device. Sizes in bytes, clocks in MHz, bandwidth in B/s, peaks in flop/s by dtype."""

    name: str
    kind: str  # "cpu" | "cuda"
    arch: str  # "avx512" | "avx2" | "sse2" | "neon" | "sm_90a" …
    processor: str
    cores: int  # CPU cores this process may use, or SMs
    clock_mhz: int  # the highest clock the part can reach
    memory_bytes: int
    bandwidth: float
    peak: dict[str, float]
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int = 0
    simd_bytes: int = 0  # CPU: vector width
    vector_registers: int = 0  # CPU: architectural vector registers
    shared_bytes: int = 0  # CUDA: most shared memory of one block
    shared_bytes_sm: int = 0
    registers_sm: int = 0
    threads_sm: int = 0

    @property
    def device(self) -> tuple[str, str, str, int]:
        """What makes two targets one device."""
        return self.kind, self.arch, self.processor, self.cores

    def same_device(self, other: Target) -> bool:
        """Whether a measurement on `other` speaks for this device."""
        return self.device == other.device

    def descriptors(self) -> dict[str, float]:
        """Numbers that describe the device to the cost model."""
        return {
            "cores": self.cores, "simd_bytes": self.simd_bytes, "l1_bytes": self.l1_bytes,
            "l2_bytes": self.l2_bytes, "l3_bytes": self.l3_bytes,
            "shared_bytes": self.shared_bytes,
        }  # fmt: skip


def _cuda(
    name: str,
    arch: str,
    processor: str,
    *,
    sms: int,
    clock: int,
    memory_gb: int,
    bandwidth_gb: float,
    l2_mb: int,
    shared_kb: tuple[int, int],
    threads: int,
    tflops: Mapping[str, float],
) -> Target:
    return Target(
        name=name, kind="cuda", arch=arch, processor=processor, cores=sms, clock_mhz=clock,
        memory_bytes=memory_gb * 2**30, bandwidth=bandwidth_gb * 1e9,
        peak={dtype: value * 1e12 for dtype, value in tflops.items()},
        l1_bytes=shared_kb[1] * 1024, l2_bytes=l2_mb * 2**20,
        shared_bytes=shared_kb[0] * 1024, shared_bytes_sm=shared_kb[1] * 1024,
        registers_sm=65536, threads_sm=threads,
    )  # fmt: skip


def _tensor(fp64: float, fp32: float, half: float, fp8: float = 0.0) -> dict[str, float]:
    peaks = {"fp64": fp64, "fp32": fp32, "tf32": half / 2, "fp16": half, "bf16": half,
             "int8": 2 * half}  # fmt: skip
    return peaks | ({"fp8_e4m3": fp8, "fp8_e5m2": fp8} if fp8 else {})


# Dense peaks from the vendors' datasheets and architecture white papers.
CUDA_TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _cuda("h200", "sm_90a", "NVIDIA H200", sms=132, clock=1980, memory_gb=141,
              bandwidth_gb=4800, l2_mb=60, shared_kb=(227, 228), threads=2048,
              tflops=_tensor(67, 67, 989.4, 1978.9)),
        _cuda("h100", "sm_90a", "NVIDIA H100 80GB HBM3", sms=132, clock=1980, memory_gb=80,
              bandwidth_gb=3350, l2_mb=50, shared_kb=(227, 228), threads=2048,
              tflops=_tensor(67, 67, 989.4, 1978.9)),
        _cuda("a100", "sm_80", "NVIDIA A100-SXM4-80GB", sms=108, clock=1410, memory_gb=80,
              bandwidth_gb=2039, l2_mb=40, shared_kb=(163, 164), threads=2048,
              tflops=_tensor(19.5, 19.5, 312)),
        _cuda("rtx3090", "sm_86", "NVIDIA GeForce RTX 3090", sms=82, clock=1695, memory_gb=24,
              bandwidth_gb=936, l2_mb=6, shared_kb=(99, 100), threads=1536,
              tflops=_tensor(0.56, 35.6, 71)),
        _cuda("rtx4090", "sm_89", "NVIDIA GeForce RTX 4090", sms=128, clock=2520, memory_gb=24,
              bandwidth_gb=1008, l2_mb=72, shared_kb=(99, 100), threads=1536,
              tflops=_tensor(1.29, 82.6, 165.2, 330.3)),
        _cuda("l40s", "sm_89", "NVIDIA L40S", sms=142, clock=2520, memory_gb=48,
              bandwidth_gb=864, l2_mb=96, shared_kb=(99, 100), threads=1536,
              tflops=_tensor(1.43, 91.6, 362, 733)),
    )
}  # fmt: skip

# A core without a readable top clock is assumed to reach this; it only bounds what is plausible.
FALLBACK_CLOCK_MHZ = 6000
# Two fused multiply-add pipes a core is the widest shipping design.
FMA_PIPES = 2
# No CPU socket moves more than this (12 channels of DDR5, or HBM); bounds what is plausible.
CPU_BANDWIDTH_LIMIT = 1e12
SIMD: Mapping[str, tuple[int, int]] = {  # arch: (vector bytes, registers)
    "avx512": (64, 32), "avx2": (32, 16), "sse2": (16, 16), "neon": (16, 32), "generic": (16, 16),
}  # fmt: skip


def target_names() -> tuple[str, ...]:
    """Everything `--target` accepts."""
    return ("auto", "cpu", "cuda", *CUDA_TARGETS)


def named_target(name: str) -> Target:
    """The description of a named target; `cpu` is detected on this machine."""
    if name == "cpu":
        return detect_cpu()
    if name in CUDA_TARGETS:
        return CUDA_TARGETS[name]
    raise TargetError(f"unknown target '{name}': accepts {', '.join(target_names())}")


def detect_cpu() -> Target:
    """This machine's CPU as the process may use it (affinity and cgroup quota respected)."""
    info = _cpuinfo()
    arch = _simd_arch(set(info.get("flags", info.get("Features", "")).split()))
    simd_bytes, registers = SIMD[arch]
    cores, clock = usable_cores(), _max_clock_mhz()
    caches = _cache_bytes()
    lanes = {"fp32": simd_bytes // 4, "fp64": simd_bytes // 8}
    return Target(
        name="cpu", kind="cpu", arch=arch,
        processor=info.get("model name", platform.processor() or platform.machine()),
        cores=cores, clock_mhz=clock, memory_bytes=_memory_bytes(), bandwidth=CPU_BANDWIDTH_LIMIT,
        peak={t: cores * n * 2.0 * FMA_PIPES * clock * 1e6 for t, n in lanes.items()},
        l1_bytes=caches.get(1, 32 * 1024), l2_bytes=caches.get(2, 512 * 1024),
        l3_bytes=caches.get(3, 0), simd_bytes=simd_bytes, vector_registers=registers,
    )  # fmt: skip


_CUDA_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")


def checked_target(target: Target) -> Target:
    """`target`, which came from outside; raises TargetError when no such device can exist."""
    sane = (
        1 <= target.cores <= 4096
        and all(1024 <= size <= 2**36 for size in (target.l1_bytes, target.l2_bytes))
        and 0 <= target.l3_bytes <= 2**36
    )
    if target.kind == "cpu":
        sane &= SIMD.get(target.arch) == (target.simd_bytes, target.vector_registers)
    else:
        sizes = (target.shared_bytes, target.shared_bytes_sm, target.registers_sm)
        sane &= target.kind == "cuda" and _CUDA_ARCH.fullmatch(target.arch) is not None
        sane &= all(1024 <= n <= 2**24 for n in sizes) and 32 <= target.threads_sm <= 2**16
    if not sane:
        raise TargetError(
            f"there is no such device as the log describes: {target.kind} {target.processor} "
            f"({target.arch}, {target.cores} cores)"
        )
    return target


def usable_cores() -> int:
    """Cores this process may run on, by affinity and by cgroup quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2, or no quota ("max")
    return cores


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _simd_arch(flags: set[str]) -> str:
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    if {"avx512f", "avx512vl", "avx512dq", "avx512bw"} <= flags:
        return "avx512"
    if {"avx2", "fma"} <= flags:
        return "avx2"
    return "sse2" if platform.machine() in ("x86_64", "AMD64") else "generic"


def _cache_bytes() -> dict[int, int]:
    """Data cache of one core by level."""
    found: dict[int, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size = (
                (index / name).read_text().strip() for name in ("type", "level", "size")
            )
        except OSError:
            continue
        if kind in ("Data", "Unified") and size[-1:] in "KM":
            found[int(level)] = int(size[:-1]) * (1024 if size[-1] == "K" else 2**20)
    return found


def _max_clock_mhz() -> int:
    try:
        path = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
        return int(path.read_text()) // 1000
    except (OSError, ValueError):
        return FALLBACK_CLOCK_MHZ


def _memory_bytes() -> int:
    """Physical memory, or the cgroup's limit where that is lower."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        physical = 8 * 2**30
    try:
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return physical
