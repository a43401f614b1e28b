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
    worst: float
    workloads: tuple[str, ...]


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
}
