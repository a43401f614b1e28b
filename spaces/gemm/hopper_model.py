"""Features of a product on wgmma, estimated cycles among them (what ranks tiles: `hopper_time`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kt.spaces.cuda import VECTOR, Floats, acc_bytes, output_bytes
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.family import Columns
from kt.spaces.target import Target
from kt.spaces.workload import Gemm

from .cuda import output_group, split_traffic, wave_footprint
from .hopper_plan import HopperPlan, promotes

# Of one SM of sm_90, bytes and cycles. Logs replay with them.
_SHARED_BYTES = 128  # a cycle, to the tensor cores
_L2_BYTES = 46  # a cycle, its share
_STORED_BYTES = {"direct": 16, "tma": 40, "rows": 24, "whole rows": 36}  # a cycle
_CLUSTER_SUM, _CLUSTER_BYTES = 1200, 32  # cycles of two meetings; bytes a cycle from other CTAs
_FILL = 900  # until the first tile of k arrives
_STAGE_LATENCY = 700  # from a free stage to a full one
_K_TILE = 40  # of barriers for each tile of k
_ADDED = 128  # sums a cycle
_SPLIT = 2500
_LAUNCH, _EARLY_LAUNCH = 3000, 1800
_KERNEL = 3500  # of another kernel in the stream


def cycles(w: Gemm, target: Target, v: Mapping[str, Any], p: HopperPlan) -> dict[str, Floats]:
    """Parts of the time of the busiest SM, and the whole."""
    size, depth = p.a.bytes, p.bk * p.a.bytes // 32
    resident = np.minimum(v["blocks"], np.maximum(ceil_div(p.units * p.cluster, target.cores), 1))
    # The instruction reads 64 rows of A and all of B from shared memory.
    instruction = np.maximum(p.bn / 2, (64 + p.bn) * 32 / _SHARED_BYTES)
    math = p.bm / 64 * instruction * depth + _promotion(v, p) / (p.readers * resident)
    loaded = (p.bm / v["cluster_n"] + p.loaded_n / v["cluster_m"]) * p.bk * size
    l2 = np.maximum(loaded / _L2_BYTES, p.loaded_bytes / (1.5 * _L2_BYTES))
    latency = _STAGE_LATENCY / v["stages"]
    k_tile = np.maximum(np.maximum(math, l2) * resident, latency) + np.where(
        p.pingpong | (resident > 1), 0, _K_TILE
    )
    loop = p.split_tiles * k_tile
    aligned = output_group(w) * output_bytes(w) == VECTOR
    rows = _STORED_BYTES["whole rows" if aligned else "rows"]
    staged = np.where(p.by_rows, rows, _STORED_BYTES["direct"])
    rate = np.where(p.by_boxes, _STORED_BYTES["tma"], staged)
    store = p.bm * p.bn * output_bytes(w) / rate / v["cluster_k"]
    joined = _CLUSTER_SUM + p.bm * p.bn * acc_bytes(w) / _CLUSTER_BYTES
    store = store + np.where(np.asarray(v["cluster_k"]) > 1, joined, 0)
    split = np.asarray(v["split_k"])
    sums = np.where(split > 1, _SPLIT + (split + 1) * p.bm * p.bn * acc_bytes(w) / _L2_BYTES, 0)
    rounds = ceil_div(p.units * p.cluster, p.at_once)
    hidden = p.persistent & (p.pingpong | (resident > 1))
    tail = np.where(hidden, np.maximum(store + sums - loop, 0), store + sums)
    refill = np.where(p.persistent, 0, _FILL) * (rounds - 1)
    busy = rounds * (loop + tail) + np.where(hidden, store + sums, 0) + refill + _FILL
    memory = w.bytes * target.clock_mhz * 1e6 / target.bandwidth
    if p.streams:  # with nothing to hide the first tiles and the sums behind
        used = np.minimum(p.units * p.cluster, target.cores)
        busiest = rounds * p.split_tiles * resident * used / (p.tiles * p.k_tiles)
        memory = memory * np.maximum(busiest, 1) + _FILL + tail
    repacked = sum(p.repacked)
    copies = 2.2 * repacked * target.clock_mhz * 1e6 / target.bandwidth + _KERNEL * (repacked > 0)
    reduce = np.where((split > 1) & (np.asarray(v["split_mode"]) == "kernel"), _KERNEL, 0)
    start = np.where(np.asarray(v["early"]), _EARLY_LAUNCH, _LAUNCH)
    total = np.maximum(busy, memory) + start + copies + reduce
    return {
        "math_cycles": rounds * p.split_tiles * math * resident,
        "l2_cycles": rounds * p.split_tiles * l2 * resident,
        "store_cycles": store, "cycles": total,
    }  # fmt: skip


def _promotion(v: Mapping[str, Any], p: HopperPlan) -> Any:
    """Cycles in which a tile of k is added in fp32; others multiply meanwhile."""
    return p.bm * p.bn / _ADDED * p.bk / v["promote"] if promotes(p.w) else 0.0


def hopper_features(w: Gemm, target: Target, v: Columns, p: HopperPlan) -> dict[str, Floats]:
    """What the knobs imply, by name."""
    waves = p.units * p.cluster / p.at_once
    footprint = wave_footprint(
        v, p.m_clusters, p.n_clusters, p.bm * v["cluster_m"], p.bn * v["cluster_n"],
        np.maximum(p.at_once // p.cluster, 1),
    )  # fmt: skip
    size = p.a.bytes
    padded = p.m_clusters * p.bm * v["cluster_m"] * p.n_clusters * p.bn * v["cluster_n"]
    shared = (p.bm / v["cluster_n"] + p.loaded_n / v["cluster_m"]) * size
    found = {
        **cycles(w, target, v, p),
        "threads": p.threads,
        "shared_bytes": p.shared_bytes,
        "accumulators": p.accumulators,
        "register_share": p.all_accumulators / p.consumer_registers,
        "waves": waves,
        "wave_efficiency": waves / np.ceil(waves),
        "turns": p.turns,
        "padding": padded * round_up(w.k, p.bk) / (w.m * w.n * w.k),
        "intensity": p.bm * p.bn / shared,
        "bytes_in_flight": v["blocks"] * (v["stages"] - 1) * p.loaded_bytes,
        "wave_bytes": footprint * w.k * size / v["split_k"],
        "wave_l2": footprint * p.bk * size * v["stages"] / target.l2_bytes,
        "l2_bytes": p.units * p.cluster * p.split_tiles * shared * p.bk,
        "split_bytes": split_traffic(w, v),
        "k_tiles": p.split_tiles,
    }
    return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}
