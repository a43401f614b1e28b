"""Benchmark classes: workloads, opponents and targets. Floor and goal are geometric means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchmarkClass:
    """Workloads measured together; the opponent of a row is the fastest of `opponents`."""

    device: str
    opponents: tuple[str, ...]
    floor: float
    goal: float
    workloads: tuple[str, ...]
    worst: float = 0.0


_H200, _LIBRARIES = "nvidia-h200", ("torch", "cublaslt-tuned")


CLASSES = {
    "cpu-gemm": BenchmarkClass(
        device="cpu",
        opponents=("openblas",),
        floor=1.0,
        goal=1.1,
        worst=0.85,
        workloads=(
            "gemm 256x256x256 dtype=fp32",
            "gemm 512x512x512 dtype=fp32",
            "gemm 1024x1024x1024 dtype=fp32",
            "gemm 1536x1536x1536 dtype=fp32",
            "gemm 2048x2048x2048 dtype=fp32",
            "gemm 511x767x1023 dtype=fp32",
            "gemm 64x4096x1024 dtype=fp32",
            "gemm 4096x64x1024 dtype=fp32",
            "gemm 1x4096x4096 dtype=fp32",
            "gemm 128x128x8192 dtype=fp32",
            "gemm 1000x1000x1000 dtype=fp32",
            "gemm 37x1411x811 dtype=fp32",
            "gemm 64x64x64 batch=64 dtype=fp32",
        ),
    ),
    "gemm-tiny": BenchmarkClass(
        device=_H200,
        opponents=_LIBRARIES,
        floor=1.05,
        goal=1.2,
        workloads=(
            "gemm 1024x1024x1024 dtype=bf16",
            "gemm 512x512x512 dtype=bf16",
            "gemm 256x1024x1024 dtype=bf16",
            "gemm 64x64x16384 dtype=bf16",
            "gemm 128x2048x1024 dtype=bf16",
            "gemm 1000x1000x1000 dtype=bf16",
            "gemm 64x1024x512 dtype=bf16",
            "gemm 256x256x256 dtype=bf16",
        ),
    ),
    "gemm-decode-small": BenchmarkClass(
        device=_H200,
        opponents=_LIBRARIES,
        floor=1.2,
        goal=1.6,
        workloads=(
            "gemm 1x2048x2048 dtype=bf16",
            "gemm 1x7168x1024 dtype=bf16",
            "gemm 4x2048x2048 dtype=bf16",
            "gemm 8x1024x7168 dtype=bf16",
            "gemm 16x2048x2048 dtype=bf16",
            "gemm 16x7168x1024 dtype=bf16",
            "gemm 1x4096x4096 dtype=bf16",
            "gemm 16x4096x4096 dtype=bf16",
        ),
    ),
    "gemm-decode-large": BenchmarkClass(
        device=_H200,
        opponents=_LIBRARIES,
        floor=1.0,
        goal=1.08,
        workloads=(
            "gemm 1x4096x14336 dtype=bf16",
            "gemm 4x14336x4096 dtype=bf16",
            "gemm 16x4096x14336 dtype=bf16",
            "gemm 8x28672x8192 dtype=bf16",
            "gemm 1x8192x28672 dtype=bf16",
        ),
    ),
    "gemm-unaligned": BenchmarkClass(
        device=_H200,
        opponents=_LIBRARIES,
        floor=2.5,
        goal=3.5,
        workloads=(
            "gemm 8191x8191x8191 dtype=bf16",
            "gemm 4095x4096x4097 dtype=bf16",
            "gemm 9477x1152x588 dtype=bf16",
            "gemm 4096x4096x4090 dtype=bf16",
            "gemm 300x5000x700 dtype=bf16",
            "gemm 2047x2049x2046 dtype=bf16",
        ),
    ),
    "gemm-batched": BenchmarkClass(
        device=_H200,
        opponents=_LIBRARIES,
        floor=1.1,
        goal=1.4,
        workloads=(
            "gemm 64x64x64 batch=256 dtype=bf16",
            "gemm 128x128x128 batch=512 dtype=bf16",
            "gemm 64x48x80 batch=1024 dtype=bf16",
            "gemm 256x256x256 batch=64 dtype=bf16",
            "gemm 128x512x64 batch=128 dtype=bf16",
            "gemm 512x512x512 batch=32 dtype=bf16",
        ),
    ),
    "gemm-fp32": BenchmarkClass(
        device=_H200,
        opponents=_LIBRARIES,
        floor=1.0,
        goal=1.08,
        workloads=(
            "gemm 1000x1000x1000 dtype=fp32",
            "gemm 1024x1024x1024 dtype=fp32",
            "gemm 2048x2048x2048 dtype=fp32",
            "gemm 4096x4096x4096 dtype=fp32",
            "gemm 4095x4096x4097 dtype=fp32",
        ),
    ),
}
