"""What CUDA kernels of matrix products share: the stub of the product, split-K, raster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kt.spaces.cuda import (
    Floats,
    acc_bytes,
    alignment,
    epilogue_defines,
    grid_rule,
    output_bytes,
    refuses_cuda,
    rule,
)
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.family import Columns, Rule
from kt.spaces.kernel import Launch
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.workload import Gemm, Workload

SPLIT_K = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
SPLIT_MODES = ("last", "atomic", "kernel")
GROUPS = (1, 2, 4, 8, 16, 32)
_SPLIT_WAVES = 4
"""A product with this many waves of tiles keeps the device busy without split-K."""


def refuses_cuda_gemm(
    workload: Workload, target: Target, dtypes: Sequence[str], reach: str
) -> str | None:
    """Why a CUDA GEMM family for `dtypes` cannot serve the workload, or None."""
    if not isinstance(workload, Gemm) or target.kind != "cuda":
        return "serves gemm on CUDA"
    return refuses_cuda(workload, target, dtypes, reach)


def as_gemm(workload: Workload) -> Gemm:
    """The workload of a family that has not refused it."""
    assert isinstance(workload, Gemm)
    return workload


def output_group(w: Gemm) -> int:
    """Outputs in one store of at most 16 bytes that every row of C allows."""
    return alignment(w.n * output_bytes(w)) // output_bytes(w)


def problem_defines(w: Gemm) -> dict[str, int | str]:
    """The stub's lines that say what is computed."""
    return {
        "KT_DTYPE": f"KT_{w.dtype.upper()}",
        "KT_M": w.m, "KT_N": w.n, "KT_K": w.k, "KT_BATCH": w.batch,
        "KT_TRANS_A": int(w.layout[0] == "t"), "KT_TRANS_B": int(w.layout[1] == "t"),
        **epilogue_defines(w),
    }  # fmt: skip


# -- split-K --------------------------------------------------------------------------------


def most_splits(k_tiles: int, smallest_grid: int, target: Target) -> int:
    """Splits worth trying: none where the largest tiles already keep the device busy."""
    return 1 if smallest_grid >= _SPLIT_WAVES * target.cores else k_tiles


def split_knobs(most: int) -> list[Knob]:
    """Split-K factors up to `most`, and where their sums meet."""
    splits = tuple(s for s in SPLIT_K if s <= most)
    modes = SPLIT_MODES if len(splits) > 1 else SPLIT_MODES[:1]
    return [Ordinal("fusion", "split_k", splits), Categorical("fusion", "split_mode", modes)]


def split_rules(blocks: Callable[[Columns], Any], k_tiles: Callable[[Columns], Any]) -> list[Rule]:
    """`blocks`: tiles of C over all batches; `k_tiles`: tiles along k."""
    return [
        rule(
            "split-k-tiles",
            lambda v: v["split_k"] <= k_tiles(v),
            lambda v: f"{v['split_k']} splits of {k_tiles(v)} tiles along k",
        ),
        rule(
            "split-mode",
            lambda v: (v["split_k"] > 1) | (v["split_mode"] == SPLIT_MODES[0]),
            lambda v: f"without split-K its mode is {SPLIT_MODES[0]}",
        ),
        grid_rule(lambda v: blocks(v) * v["split_k"]),
    ]


def split_waves_rule(target: Target, blocks: Callable[[Columns], Any]) -> Rule:
    """No split-K where its tiles fill the device several times without it."""
    full = _SPLIT_WAVES * target.cores
    return rule(
        "split-waves",
        lambda v: (v["split_k"] == 1) | (blocks(v) < full),
        lambda v: f"{blocks(v)} tiles fill {target.cores} SMs without split-K",
    )


@dataclass(frozen=True)
class SplitWorkspace:
    """Bytes that split-K needs (the layout is that of `split_k.cuh`)."""

    counters: int
    sums: int
    zeroed: int

    @property
    def bytes(self) -> int:
        return self.counters + self.sums


def split_workspace(
    w: Gemm, blocks: int, tile_sums: int, split_k: int, mode: str
) -> SplitWorkspace:
    """`blocks` tiles of C over all batches, of `tile_sums` accumulators each."""
    if split_k == 1:
        return SplitWorkspace(0, 0, 0)
    if mode == "kernel":
        sums = split_k * w.batch * w.m * w.n * acc_bytes(w)
        return SplitWorkspace(0, round_up(sums, 256), 0)
    counters = round_up(blocks * 4, 256)
    sums = blocks * tile_sums * acc_bytes(w) * (split_k if mode == "last" else 1)
    sums = round_up(sums, 256)
    return SplitWorkspace(counters, sums, counters + (sums if mode == "atomic" else 0))


def split_traffic(w: Gemm, values: Columns) -> Floats:
    """Bytes of sums that split-K writes and reads."""
    sums = float(w.batch * w.m * w.n * acc_bytes(w))
    split = np.asarray(values["split_k"])
    return np.where(split > 1, 2.0 * sums * split, 0.0)


def split_defines(values: Mapping[str, Any]) -> dict[str, int | str]:
    return {
        "KT_SPLIT_K": values["split_k"],
        "KT_SPLIT_MODE": f"KT_SPLIT_{values['split_mode'].upper()}",
    }


def reduce_launch(w: Gemm, early: bool = False) -> Launch:
    """The kernel that adds the sums of all splits."""
    threads = 128
    blocks = ceil_div(w.batch * w.m * w.n, output_group(w) * threads)
    return Launch("kt_reduce", (blocks, 1, 1), (threads, 1, 1), early=early)


# -- repack ---------------------------------------------------------------------------------

_REPACK_THREADS = 256
_MANY_VECTORS, _VECTORS_EACH = 2**18, 4


def repack_launch(vectors: int, early: bool = False) -> Launch:
    """The kernel of `repack_kernel.cuh`, which copies operands in so many vectors of 16 bytes."""
    each = _VECTORS_EACH if vectors >= _MANY_VECTORS else 1
    blocks = ceil_div(vectors, each * _REPACK_THREADS)
    return Launch("kt_repack", (blocks, 1, 1), (_REPACK_THREADS, 1, 1), early=early)


# -- raster ---------------------------------------------------------------------------------


def raster_knobs(m_blocks: int, n_blocks: int) -> list[Knob]:
    """`m_blocks` and `n_blocks`: the most tiles along each axis."""
    flat = min(m_blocks, n_blocks) == 1
    groups = tuple(g for g in GROUPS if g == 1 or g < 2 * max(m_blocks, n_blocks))
    return [
        Categorical("perm", "raster", ("m",) if flat else ("m", "n")),
        Ordinal("perm", "group", (1,) if flat else groups),
    ]


def raster_rules(
    m_blocks: Callable[[Columns], Any], n_blocks: Callable[[Columns], Any]
) -> list[Rule]:
    """Only orders that differ."""

    def across(v: Any) -> Any:
        return np.where(np.asarray(v["raster"]) == "m", m_blocks(v), n_blocks(v))

    return [
        rule(
            "raster-group",
            lambda v: (v["group"] == 1) | (v["group"] < 2 * across(v)),
            lambda v: f"groups of {v['group']} tiles where there are {int(across(v))}",
        ),
        rule(
            "raster-line",
            lambda v: (
                (np.minimum(m_blocks(v), n_blocks(v)) > 1)
                | ((v["raster"] == "m") & (v["group"] == 1))
            ),
            "the tiles are one line, which has one order",
        ),
    ]


def raster_defines(values: Mapping[str, Any]) -> dict[str, int | str]:
    return {"KT_RASTER_M": int(values["raster"] == "m"), "KT_GROUP": values["group"]}


def wave_footprint(
    values: Columns, m_blocks: Any, n_blocks: Any, bm: Any, bn: Any, at_once: Any
) -> Floats:
    """Rows of A plus columns of B that one wave of `at_once` CTAs touches."""
    by_m = np.asarray(values["raster"]) == "m"
    across = np.minimum(np.where(by_m, m_blocks, n_blocks), values["group"])
    along = ceil_div(np.maximum(np.minimum(at_once, m_blocks * n_blocks), 1), across)
    rows, columns = np.where(by_m, across, along), np.where(by_m, along, across)
    found: Floats = (rows * bm + columns * bn).astype(np.float64)
    return found
