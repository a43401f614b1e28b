"""Kernels of the families on wgmma for tests: random workloads and θ, θ with a given property."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gemm_cases
import numpy as np

from kt.spaces.family import Family
from kt.spaces.gemm.wgmma import GemmWgmma
from kt.spaces.gemm.wgmma_swapped import GemmWgmmaSwapped
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import Gemm, parse

H200 = CUDA_TARGETS["h200"]
DTYPES = ("bf16", "bf16", "fp16", "tf32", "fp8_e4m3", "fp8_e5m2")
LARGER = (*gemm_cases.EDGES, 191, 193, 255, 256, 257, 300, 509, 511, 513, 588, 700)

NAMED = (
    "gemm 1000x1000x1000 dtype=bf16", "gemm 64x64x16384 dtype=bf16",
    "gemm 511x509x8192 dtype=fp16", "gemm 300x5000x700 epilogue=bias+gelu dtype=bf16",
    "gemm 64x48x80 batch=300 dtype=bf16", "gemm 1x1x1 dtype=fp16",
    "gemm 1x4096x4096 layout=nt dtype=bf16", "gemm 4096x8x520 layout=tn dtype=bf16",
    "gemm 1500x1336x328 batch=3 epilogue=bias+relu dtype=bf16", "gemm 2048x2048x512 dtype=fp16",
    "gemm 2047x2049x258 dtype=bf16", "gemm 777x1528x4090 layout=nt dtype=bf16",
    "gemm 640x1920x64 epilogue=bias+silu+residual dtype=bf16",
    "gemm 1023x1024x1001 layout=nt dtype=tf32", "gemm 1000x1000x1000 layout=nt dtype=fp8_e4m3",
    "gemm 520x1536x4096 layout=nt epilogue=tensor_scale+bias dtype=fp8_e4m3",
    "gemm 257x130x8192 layout=tn dtype=fp8_e5m2 acc=fp22",
    "gemm 1033x1255x264 batch=2 layout=tt epilogue=tensor_scale+gelu dtype=fp8_e5m2",
)  # fmt: skip
"""One tile, fewer tiles than SMs, more; k shorter than any ring; rows that start anywhere."""

NAMED_SWAPPED = (
    "gemm 1x4096x4096 layout=nt dtype=bf16", "gemm 16x2048x2048 dtype=bf16",
    "gemm 8x1000x7168 epilogue=bias+gelu dtype=fp16", "gemm 128x2048x1024 dtype=bf16",
    "gemm 40x777x520 layout=tt epilogue=scale+residual dtype=bf16",
    "gemm 1x2x8 layout=nt dtype=bf16",
    "gemm 96x3000x131 layout=tn epilogue=bias+relu+scale+shift dtype=bf16",
    "gemm 33x1001x500 layout=nt epilogue=bias+silu+residual dtype=tf32",
    "gemm 7x20000x72 dtype=bf16", "gemm 16x4096x4096 layout=nt dtype=fp8_e4m3",
    "gemm 100x1001x1040 layout=nt epilogue=tensor_scale+bias+gelu dtype=fp8_e5m2",
    "gemm 33x3000x7168 layout=nt dtype=fp8_e4m3 acc=fp22",
)  # fmt: skip
"""One row and 128, one tile and several waves of them, C's rows of odd length, every layout."""

_LARGE = "gemm 2500x1336x264 batch=2 epilogue=bias+relu dtype=bf16"
_SMALL = "gemm 328x712x1032 layout=tn dtype=fp16"
_SKINNY = "gemm 40x712x1032 layout=nn epilogue=bias+gelu+residual dtype=bf16"
_WIDE = "gemm 100x40008x136 layout=nn epilogue=scale+shift dtype=fp16"
_ODD = "gemm 75x1303x2056 layout=nt epilogue=bias+residual dtype=bf16"
_Wanted = Callable[[Mapping[str, Any]], bool]


def _strided(v: Mapping[str, Any], store: str = "") -> bool:
    return v["copy_a"] == "strided" and v["store"] in (store or v["store"])


_PLAIN: Mapping[str, tuple[str, _Wanted]] = {
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
        "gemm 700x712x516 batch=3 epilogue=scale dtype=bf16", _strided,
    ),
    "boxes of classes": (
        "gemm 1033x1256x263 epilogue=bias+relu dtype=bf16", lambda v: _strided(v, "tma"),
    ),
    "boxes of classes in batches": (
        "gemm 1032x1256x263 batch=2 epilogue=bias dtype=bf16",
        lambda v: _strided(v, "tma") and v["persistent"],
    ),
    "classes, k shorter than a tile": ("gemm 333x1256x23 dtype=fp16", _strided),
    "classes in clusters": (
        "gemm 1033x1256x263 dtype=bf16", lambda v: _strided(v) and v["cluster_n"] > 1,
    ),
    "classes in clusters of 4 along n": (
        "gemm 1033x1256x260 dtype=bf16", lambda v: _strided(v) and v["cluster_n"] == 4,
    ),
    "classes in clusters of 2 x 2": (
        "gemm 2500x1336x263 dtype=bf16",
        lambda v: _strided(v) and v["cluster_n"] == v["cluster_m"] == 2,
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
    "boxes in the stages, three consumers, sums by the last": (
        _SMALL,
        lambda v: (
            v["store"] == "tma" and v["split_mode"] == "last" and v["split_k"] > 1
            and v["consumers"] == 3 and not v["persistent"]
        ),
    ),
    "boxes in the stages, clusters": (
        _LARGE,
        lambda v: (
            v["store"] == "tma" and v["cluster_m"] == 2 and v["bn"] % 64 == 16
            and v["bk"] == 64 and not v["persistent"]
        ),
    ),
    "rows in the stages": (
        "gemm 1033x1255x264 epilogue=bias+gelu dtype=bf16",
        lambda v: (
            v["store"] == "rows" and v["bn"] in (144, 176, 192) and v["split_k"] == 1
            and not v["persistent"]
        ),
    ),
    "rows in the stages, a residual": (
        "gemm 1033x1255x264 epilogue=bias+residual dtype=bf16",
        lambda v: v["store"] == "rows" and v["bn"] == 144 and not v["persistent"],
    ),
    "clusters with fewer tiles along k than stages": (
        "gemm 1033x1256x64 dtype=fp16",
        lambda v: (
            v["cluster_m"] == 2 and v["stages"] == 2 and v["bk"] == 64 and not v["persistent"]
        ),
    ),
    "a cluster along k that shares unevenly": (
        "gemm 200x264x2051 epilogue=bias dtype=bf16",
        lambda v: v["cluster_k"] == 8 and v["bn"] in (24, 40),
    ),
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
    "promoted while others multiply": (
        "gemm 1500x1336x520 layout=nt dtype=fp8_e4m3", lambda v: v["pingpong"],
    ),
    "promoted with products in flight": (
        "gemm 700x1328x1100 layout=nt epilogue=tensor_scale dtype=fp8_e5m2",
        lambda v: v["in_flight"] and v["promote"] == 256,
    ),
    "promoted at once": (
        "gemm 2500x1336x1100 layout=nt dtype=fp8_e4m3", lambda v: v["bk"] == 256 and v["bn"] > 64,
    ),
}  # fmt: skip
_SWAPPED: Mapping[str, tuple[str, _Wanted]] = {
    "swapped, boxes of C": (
        _WIDE, lambda v: v["store"] == "tma" and v["bm"] == 256 and v["bn"] % 16 == 8,
    ),
    "swapped, rows of odd length": (_ODD, lambda v: v["consumers"] == 2),
    "swapped, sums by the last": (
        _SKINNY, lambda v: v["split_k"] > 1 and v["split_mode"] == "last" and v["store"] == "tma",
    ),
    "swapped, sums by atomics": (_ODD, lambda v: v["split_mode"] == "atomic"),
    "swapped, sums by a kernel": (_SKINNY, lambda v: v["split_mode"] == "kernel"),
    "swapped, odd sums by a kernel": (_ODD, lambda v: v["split_mode"] == "kernel"),
    "swapped, clusters along k": (_ODD, lambda v: v["cluster_k"] == 8),
    "swapped, clusters of two along k": (_SKINNY, lambda v: v["cluster_k"] == 2),
    "swapped, clusters along m": (_SKINNY, lambda v: v["cluster_m"] == 2),
    "swapped, clusters along n": (_SKINNY, lambda v: v["cluster_n"] > 1 and v["cluster_m"] > 1),
    "swapped, persistent": (_WIDE, lambda v: v["persistent"] and v["consumers"] == 2),
    "swapped, L2 warmed": (_SKINNY, lambda v: v["warm"] > 2 and v["cluster_n"] > 1),
    "swapped, tf32": (
        "gemm 24x1500x520 layout=nt epilogue=bias+relu dtype=tf32", lambda v: v["split_k"] > 1,
    ),
    "swapped, promoted with products in flight": (
        "gemm 24x1500x1040 layout=nt epilogue=tensor_scale dtype=fp8_e5m2",
        lambda v: v["in_flight"] and v["promote"] == 256,
    ),
}  # fmt: skip
PROPERTIES = {**_PLAIN, **_SWAPPED}


def draw(rng: np.random.Generator, extents: tuple[int, ...]) -> Gemm:
    """A random workload that the family serves."""
    w = gemm_cases.draw(rng, (str(rng.choice(DTYPES)),), extents)
    if w.dtype in ("fp8_e4m3", "fp8_e5m2") and rng.random() < 0.5:
        return dataclasses.replace(w, epilogue=("tensor_scale", *w.epilogue))
    if w.dtype != "tf32":
        return w
    return Gemm(dtype="tf32", m=w.m, n=w.n, k=w.k, batch=w.batch, layout="nt",
                epilogue=w.epilogue)  # fmt: skip


def random_kernel(seed: int, extents: tuple[int, ...], target: Target = H200) -> Kernel:
    """A kernel of a random workload; every tenth has the default θ."""
    rng = np.random.default_rng([2026, seed])
    return _random(Space(draw(rng, extents), target, [GemmWgmma()]), rng, seed)


def random_swapped_kernel(seed: int, extents: tuple[int, ...], target: Target = H200) -> Kernel:
    """The same of a product with few rows, as its transpose."""
    rng, family = np.random.default_rng([2027, seed]), GemmWgmmaSwapped()
    drawn = (draw(rng, extents) for _ in itertools.count())
    served = next(w for w in drawn if family.refuses(w, target) is None)
    return _random(Space(served, target, [family]), rng, seed)


def _random(space: Space, rng: np.random.Generator, seed: int) -> Kernel:
    default = int(space.defaults()[0])
    return space.kernel(default if seed % 10 == 0 else int(space.sample(rng, 1)[0]))


def named_kernels(target: Target = H200, count: int = 4) -> Iterator[tuple[str, Kernel]]:
    """The default and `count` - 1 random kernels of every named workload."""
    families: tuple[tuple[Family, Sequence[str]], ...] = (
        (GemmWgmma(), NAMED), (GemmWgmmaSwapped(), NAMED_SWAPPED),
    )  # fmt: skip
    for family, text in ((family, text) for family, texts in families for text in texts):
        space = Space(parse(text), target, [family])
        drawn = space.sample(np.random.default_rng(7), count - 1).tolist()
        for i, point in enumerate([int(space.defaults()[0]), *drawn]):
            yield f"{family.name} {text} #{i}", space.kernel(point)


def kernels_with(name: str, target: Target = H200, count: int = 3) -> list[Kernel]:
    """Up to `count` kernels that have a property of PROPERTIES."""
    text, wanted = PROPERTIES[name]
    space = Space(parse(text), target, [GemmWgmmaSwapped() if name in _SWAPPED else GemmWgmma()])
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
