"""Time of a product on wgmma, estimated, in cycles: what ranks default and likely θ.

Its constants are fitted to the times of the committed H200 logs. What limits most tiles is shared
memory: of its 128 bytes a cycle and SM tiles get 120, to the tensor cores and from the TMA
together. The feature `cycles` of `hopper_model` is an older estimate: logs replay with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kt.spaces.cuda import VECTOR, Floats, acc_bytes, output_bytes
from kt.spaces.extents import ceil_div
from kt.spaces.target import Target
from kt.spaces.workload import Gemm

from .cuda import output_group
from .hopper_plan import HopperPlan, promotes, surely_at_once

_SHARED_BYTES = 120  # a cycle
_L2_BYTES, _LINE = 45, 128  # a cycle and SM; of a line
_DRAM_SHARE, _DRAM_BYTES = 0.76, 28  # of the datasheet's bandwidth; a cycle, to one SM
_MATH = 1.32  # cycles of an instruction under load, when clocks are down, over those at full clock
_PART_OF_SLAB = 1.03, 1.06  # times as many cycles where 64 columns at a time leave 32, or other
_K_TILE, _CLUSTERED_K_TILE = 10, 5  # of barriers for each tile of k, less what sharing saves
_STAGE_LATENCY = 2260  # from a free stage to a full one
_HIDDEN = 0.2  # of what goes on behind something longer
_TILE = 400  # of each tile of C, whatever its size
_FILL = 2330  # until the first tile of k arrives
_LAUNCH, _EARLY_LAUNCH, _KERNEL = 3090, 1470, 3260
_STORED_BYTES = {"direct": 12, "rows": 24, "whole rows": 36}  # a cycle
_BOX_BYTES, _BOX_ROW = 60, 2  # a cycle by the TMA at most; cycles of each row of a box
_BOX = 100  # of each box of a warpgroup
_COPIED = 2.2  # reads and writes of a repacked byte
_JOIN, _JOINED_BYTES = 1250, 12  # meetings of a cluster; bytes a cycle from its CTAs
_SPLIT = 2170
_SPLIT_BYTES = {"last": 36, "atomic": 19}  # a cycle
_ADDED = 128  # sums a cycle in fp32


def estimated_cycles(w: Gemm, target: Target, v: Mapping[str, Any], p: HopperPlan) -> Floats:
    """Cycles of a whole launch; arrays in, an array out."""
    ctas = p.units * p.cluster
    resident = np.minimum(v["blocks"], np.maximum(ceil_div(ctas, target.cores), 1))
    loop = p.split_tiles * _k_tile(v, p, resident)
    store, sums = _store(w, v, p), _split(w, v, p)
    rounds = ceil_div(ctas, surely_at_once(target, v["blocks"], p.cluster))
    hidden = p.persistent & (p.pingpong | (resident > 1))
    tail = np.where(hidden, np.maximum(store + sums - loop, 0), store + sums)
    refill = np.where(p.persistent, 0, _FILL) * (rounds - 1)
    busy = rounds * (loop + tail + _TILE) + np.where(hidden, store + sums, 0) + refill
    a_byte = target.clock_mhz * 1e6 / (target.bandwidth * _DRAM_SHARE)
    used = np.minimum(ctas, target.cores)
    shared_out = rounds * p.split_tiles * resident * used / (p.tiles * p.k_tiles)
    unevenly = np.where(p.streams, np.maximum(shared_out, 1), 1)
    read = np.maximum(w.bytes * a_byte, w.bytes / (used * _DRAM_BYTES)) * unevenly
    memory = read + store + sums
    repacked = sum(p.repacked)
    copies = _COPIED * repacked * a_byte + _KERNEL * (repacked > 0)
    reduce = np.where((v["split_k"] > 1) & (np.asarray(v["split_mode"]) == "kernel"), _KERNEL, 0)
    start = np.where(np.asarray(v["early"]), _EARLY_LAUNCH, _LAUNCH)
    longer, shorter = np.maximum(busy, memory), np.minimum(busy, memory)
    found: Floats = longer + _HIDDEN * shorter + _FILL + start + copies + reduce
    return found


def _k_tile(v: Mapping[str, Any], p: HopperPlan, resident: Any) -> Any:
    """Of all CTAs of an SM, for a tile of k each."""
    depth = p.bk * p.a.bytes // 32  # an instruction reads 32 bytes of each row
    blocks = p.bm / 64
    math = blocks * p.bn / 2 * depth * _MATH
    if not p.b.along_k:
        math = math * np.where(p.bn % 64 == 0, 1, np.where(p.bn % 32 == 0, *_PART_OF_SLAB))
    if promotes(p.w):
        math = math + p.bm * p.bn / _ADDED * p.bk / v["promote"] / (p.readers * resident)
    read = blocks * (64 + p.bn) * 32 * depth  # 64 rows of A and all of B, by each instruction
    shared = (read + p.loaded_bytes) / _SHARED_BYTES
    # Lines of L2 that a part of a row touches.
    lines_a, lines_b = (
        np.where((copied > 0) | (x.pitch_bytes % _LINE == 0), 1, 2)
        for x, copied in zip((p.a, p.b), p.repacked, strict=True)
    )
    rows = lines_a * p.bm / v["cluster_n"] + lines_b * p.loaded_n / v["cluster_m"]
    loaded = rows * p.bk * p.a.bytes / _L2_BYTES
    clustered = v["cluster_m"] * v["cluster_n"] > 1
    barriers = np.where(clustered, _CLUSTERED_K_TILE, _K_TILE)
    busiest = np.maximum(np.maximum(math, shared), loaded) + barriers
    return np.maximum(busiest * resident, _STAGE_LATENCY / (v["stages"] - 0.5))


def _store(w: Gemm, v: Mapping[str, Any], p: HopperPlan) -> Any:
    """Of a CTA's tile, or of its share where a cluster has one."""
    aligned = output_group(w) * output_bytes(w) == VECTOR
    rows = _STORED_BYTES["whole rows" if aligned else "rows"]
    rate = np.where(p.by_rows, rows, _STORED_BYTES["direct"])
    rate = np.where(p.by_boxes, np.minimum(p.box_row / _BOX_ROW, _BOX_BYTES), rate)
    joined = _JOIN + p.bm * p.bn * acc_bytes(w) / _JOINED_BYTES
    store = p.bm * p.bn * output_bytes(w) / rate / v["cluster_k"]
    store = store + np.where(p.by_boxes, p.boxes * _BOX, 0)
    return store + np.where(np.asarray(v["cluster_k"]) > 1, joined, 0)


def _split(w: Gemm, v: Mapping[str, Any], p: HopperPlan) -> Any:
    """Of parts of k whose sums meet in memory: written by each, read by the last."""
    split, mode = np.asarray(v["split_k"]), np.asarray(v["split_mode"])
    rate = np.where(mode == "atomic", _SPLIT_BYTES["atomic"], _SPLIT_BYTES["last"])
    moved = (1 + np.where(mode == "last", split, 1)) * p.bm * p.bn * acc_bytes(w)
    return np.where(split > 1, _SPLIT + moved / rate, 0)
