"""Kernels of the family `wgmma` for tests: random workloads and θ, and θ with a given property."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gemm_cases
import numpy as np

from kt.spaces.gemm.wgmma import GemmWgmma
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import Gemm, parse

H200 = CUDA_TARGETS["h200"]
DTYPES = ("bf16", "bf16", "fp16", "tf32")
LARGER = (*gemm_cases.EDGES, 191, 193, 255, 256, 257, 300, 509, 511, 513, 588, 700)

NAMED = (
    "gemm 1000x1000x1000 dtype=bf16", "gemm 64x64x16384 dtype=bf16",
    "gemm 511x509x8192 dtype=fp16", "gemm 300x5000x700 epilogue=bias+gelu dtype=bf16",
    "gemm 64x48x80 batch=300 dtype=bf16", "gemm 1x1x1 dtype=fp16",
    "gemm 1x4096x4096 layout=nt dtype=bf16", "gemm 4096x8x520 layout=tn dtype=bf16",
    "gemm 1500x1336x328 batch=3 epilogue=bias+relu dtype=bf16", "gemm 2048x2048x512 dtype=fp16",
    "gemm 2047x2049x258 dtype=bf16", "gemm 777x1528x4090 layout=nt dtype=bf16",
    "gemm 640x1920x64 epilogue=bias+silu+residual dtype=bf16",
    "gemm 1023x1024x1001 layout=nt dtype=tf32",
)  # fmt: skip
"""One tile, fewer tiles than SMs, more; k shorter than any ring; rows that start anywhere."""

_LARGE = "gemm 2500x1336x264 batch=2 epilogue=bias+relu dtype=bf16"
_SMALL = "gemm 328x712x1032 layout=tn dtype=fp16"
_Wanted = Callable[[Mapping[str, Any]], bool]


def _strided(v: Mapping[str, Any], store: str = "") -> bool:
    return v["copy_a"] == "strided" and v["store"] in (store or v["store"])


PROPERTIES: Mapping[str, tuple[str, _Wanted]] = {
    "ping-pong": (_LARGE, lambda v: v["pingpong"]),
    "ping-pong in clusters": (_LARGE, lambda v: v["pingpong"] and v["cluster_m"] > 1),
    "ping-pong with split-K": (
        "gemm 1100x1160x1032 batch=2 dtype=bf16", lambda v: v["pingpong"] and v["split_k"] > 1,
    ),
    "clusters along m": (_SMALL, lambda v: v["cluster_m"] == 4 and v["cluster_n"] == 1),
    "clusters along n": (_SMALL, lambda v: v["cluster_n"] == 4 and v["cluster_m"] == 1),
    "clusters of 2 x 2": (_LARGE, lambda v: v["cluster_n"] == v["cluster_m"] == 2),
    "clusters of 4 x 2": (_LARGE, lambda v: (v["cluster_m"], v["cluster_n"]) == (4, 2)),
    "clusters along k": (_SMALL, lambda v: v["cluster_k"] == 4),
    "clusters of 8 along k": (
        "gemm 200x264x2056 epilogue=bias+gelu dtype=bf16", lambda v: v["cluster_k"] == 8,
    ),
    "rows of odd length": (
        "gemm 1033x1255x264 batch=2 epilogue=bias+residual dtype=bf16",
        lambda v: v["store"] == "rows",
    ),
    "rows of even length": (
        "gemm 1033x1254x264 epilogue=scale dtype=fp16", lambda v: v["store"] == "rows",
    ),
    "8 classes of rows": (
        "gemm 1033x1256x263 epilogue=bias+relu dtype=bf16", lambda v: _strided(v, "rows"),
    ),
    "4 classes of rows": (
        "gemm 1033x1255x262 epilogue=bias+residual dtype=fp16", lambda v: _strided(v, "rows"),
    ),
    "2 classes of rows": (
        "gemm 700x712x516 batch=3 layout=nt epilogue=scale dtype=bf16", _strided,
    ),
    "classes in clusters": (
        "gemm 1033x1256x263 dtype=bf16", lambda v: _strided(v) and v["cluster_n"] > 1,
    ),
    "classes in parts": (
        "gemm 1033x1256x260 dtype=bf16", lambda v: _strided(v) and v["cluster_n"] == 4,
    ),
    "classes in ping-pong": (
        "gemm 2500x1336x262 batch=2 dtype=bf16", lambda v: _strided(v) and v["pingpong"],
    ),
    "classes with split-K": (
        "gemm 327x712x1031 dtype=fp16", lambda v: _strided(v) and v["split_k"] > 1,
    ),
    "classes in clusters along k": (
        "gemm 200x264x2051 epilogue=bias+gelu dtype=bf16",
        lambda v: _strided(v) and v["cluster_k"] == 4,
    ),
    "classes, three consumers": (
        "gemm 2500x1336x263 dtype=bf16", lambda v: _strided(v, "rows") and v["consumers"] == 3,
    ),
    "classes of tf32": ("gemm 1023x1024x1001 layout=nt dtype=tf32", _strided),
    "both repacked, many vectors": (
        "gemm 2047x1027x1023 layout=tn dtype=bf16", lambda v: v["store"] == "rows",
    ),
    "clusters with split-K": (
        _SMALL, lambda v: v["cluster_m"] * v["cluster_n"] > 1 and v["split_k"] > 1,
    ),
    "persistent, three consumers": (_LARGE, lambda v: v["consumers"] == 3 and v["persistent"]),
    "two instructions along n": (
        "gemm 2500x1336x264 dtype=bf16", lambda v: v["consumers"] == 3 and v["bn"] > 208,
    ),
    "several CTAs an SM": (_LARGE, lambda v: v["blocks"] > 2),
    "persistent, two CTAs an SM": (_LARGE, lambda v: v["blocks"] == 2 and v["persistent"]),
    "sums by atomics": (_SMALL, lambda v: v["split_k"] > 1 and v["split_mode"] == "atomic"),
    "sums by the last": (_SMALL, lambda v: v["split_k"] > 1 and v["split_mode"] == "last"),
    "sums by a kernel": (_SMALL, lambda v: v["split_k"] > 1 and v["split_mode"] == "kernel"),
    "boxes of C": (_LARGE, lambda v: v["store"] == "tma" and v["buffers"] == 2),
    "narrow slabs of B": (
        "gemm 700x1328x264 dtype=bf16", lambda v: v.get("swizzle_b", 128) < 128,
    ),
    "a long ring": (_SMALL, lambda v: v["stages"] >= 10),
    "bk 128": (_SMALL, lambda v: v["bk"] == 128),
    "bk 32": (_SMALL, lambda v: v["bk"] == 32),
}  # fmt: skip


def draw(rng: np.random.Generator, extents: tuple[int, ...]) -> Gemm:
    """A random workload that the family serves."""
    w = gemm_cases.draw(rng, (str(rng.choice(DTYPES)),), extents)
    if w.dtype != "tf32":
        return w
    return Gemm(dtype="tf32", m=w.m, n=w.n, k=w.k, batch=w.batch, layout="nt",
                epilogue=w.epilogue)  # fmt: skip


def random_kernel(seed: int, extents: tuple[int, ...], target: Target = H200) -> Kernel:
    """A kernel of a random workload; every tenth has the default θ."""
    rng = np.random.default_rng([2026, seed])
    space = Space(draw(rng, extents), target, [GemmWgmma()])
    default = int(space.defaults()[0])
    return space.kernel(default if seed % 10 == 0 else int(space.sample(rng, 1)[0]))


def named_kernels(target: Target = H200, count: int = 4) -> Iterator[tuple[str, Kernel]]:
    """The default and `count` - 1 random kernels of every named workload."""
    for text in NAMED:
        space = Space(parse(text), target, [GemmWgmma()])
        drawn = space.sample(np.random.default_rng(7), count - 1).tolist()
        for i, point in enumerate([int(space.defaults()[0]), *drawn]):
            yield f"{text} #{i}", space.kernel(point)


def kernels_with(name: str, target: Target = H200, count: int = 3) -> list[Kernel]:
    """Up to `count` kernels that have a property of PROPERTIES."""
    text, wanted = PROPERTIES[name]
    space = Space(parse(text), target, [GemmWgmma()])
    rng, found = np.random.default_rng(11), list[Kernel]()
    for _ in range(40):
        for point in space.sample(rng, 256).tolist():
            values = {knob: value for _, knob, value in space.theta(point).items()}
            if wanted(values):
                found.append(space.kernel(point))
                if len(found) == count:
                    return found
    assert found, f"{name}: no such kernel found for {text}"
    return found
