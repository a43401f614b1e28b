"""`cpu`: attention by blocks of scores that stay in cache (source: `cpu.c`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.attention.problem import as_attention, group, problem_defines
from kt.spaces.cpu import cpu_defines, lanes, part_counts, refuses_cpu, thread_counts
from kt.spaces.extents import ceil_div, with_extent
from kt.spaces.family import Columns, Family, Rule
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import DTYPE_BYTES, Attention, Workload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_TILE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 16, 20, 24, 28)
_BLOCKS_Q = (16, 32, 64, 128, 256, 512, 1024, 2048)
_BLOCKS_K = (32, 64, 128, 256, 512, 1024)
_ORDERS = ("heads", "longest")
"""Tasks head by head, or the last queries of all heads first: under a causal mask they see the most
keys, and an order that ends with short tasks balances (8 heads of 4 blocks on 8 threads: 1.25x)."""
_TASKS_PER_THREAD = 4
"""Keys are split only while a thread has no more than this many tasks."""
_SCARCE = 16
"""With fewer tasks than this a core at most, fewer threads may win, or be all there can be."""
_MOST_Q = 512
"""Larger blocks of queries gain nothing."""
_WAYS = 8
"""More rows of k at once, at a distance of a power of two, evict each other from most L1 caches."""
_WAKING_FLOPS = 1_000_000
"""A thread with less work than this a launch costs more to wake than it gives."""


def _rows(w: Attention) -> int:
    """Query rows that share a key/value head."""
    return w.s * group(w)


def _tile_rows(extent: int, target: Target) -> tuple[int, ...]:
    """Broadcast rows of a register tile: no more than there are, as they are read in place."""
    few = min(extent, target.vector_registers - 4)
    return tuple(sorted({r for r in _TILE_ROWS if r < few} | {few}))


def _registers(rows: Any, nv: Any) -> Any:
    """Vector registers of a register tile: its sums, one row of vectors and one broadcast."""
    return rows * nv + nv + 1


def _waste(extent: int, part: Any) -> Any:
    """Share that rounding up to whole parts adds."""
    return ceil_div(extent, part) * part / extent - 1.0


class _Shape:
    """What a batch of points makes of the problem; mirrors the constants of `cpu_attention.h`."""

    def __init__(self, w: Attention, target: Target, v: Columns) -> None:
        self.size = DTYPE_BYTES[w.dtype]
        self.nr = v["nv"].astype(np.int64) * lanes(w.dtype, target)
        self.panels = ceil_div(_rows(w), self.nr)
        self.block_panels = ceil_div(np.minimum(v["block_q"], _rows(w)), self.nr)
        self.blocks = ceil_div(self.panels, self.block_panels)
        self.tasks = w.b * w.kv_heads * self.blocks * v["splits"]
        self.keys = ceil_div(np.minimum(v["block_k"], w.kv_len), v["key_rows"]) * v["key_rows"]
        self.score_bytes = self.nr * self.keys * self.size
        self.panel_bytes = self.nr * (w.d + w.value_dim + 2) * self.size
        self.key_bytes = self.keys * (w.d + w.value_dim) * self.size


class AttentionCpu(Family):
    """Panels of queries against blocks of keys with an online softmax."""

    name = "cpu"
    empty: Mapping[str, str] = {
        "mem": "k and v are read in place: copies of their rows side by side gained nothing "
        "with the few that a register tile reads at a time",
        "fusion": "softmax, mask and both products are one pass over scores that stay in cache; "
        "a pass of its own would write and read all of them",
    }

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return refuses_cpu(workload, target, Attention)

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_attention(workload)
        rows, heads = _rows(w), w.b * w.kv_heads
        most = ceil_div(rows, lanes(w.dtype, target))
        splits = part_counts(ceil_div(w.kv_len, _BLOCKS_K[0]), target.cores)
        tasks = heads * most * splits[-1]
        scarce = tasks < _SCARCE * target.cores
        threads = part_counts(tasks, target.cores) if scarce else thread_counts(w.flops, target)
        return (
            Ordinal("tile", "nv", tuple(range(1, min(4, most) + 1))),
            Ordinal("tile", "key_rows", _tile_rows(w.kv_len, target)),
            Ordinal("tile", "value_rows", _tile_rows(w.value_dim, target)),
            Ordinal("tile", "block_q", with_extent(_BLOCKS_Q, rows)),
            Ordinal("tile", "block_k", with_extent(_BLOCKS_K, w.kv_len)),
            Categorical("perm", "order", _ORDERS if w.causal and most > 1 else _ORDERS[:1]),
            Ordinal("unroll", "d", (1, 2, 4)),
            Ordinal("unroll", "keys", (1, 2, 4)),
            Ordinal("map", "threads", threads),
            Ordinal("map", "splits", splits),
            Categorical("sync", "schedule", ("static", "dynamic")),
        )

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w, registers = as_attention(workload), target.vector_registers
        few = registers // 4

        def shape(v: Columns) -> _Shape:
            return _Shape(w, target, v)

        def tile(name: str, extent: int) -> tuple[Rule, Rule]:
            def size(v: Mapping[str, Any]) -> str:
                return f"{name} tile {v[f'{name}_rows']}x{v['nv']}"

            def needed(v: Mapping[str, Any]) -> Any:
                return _registers(v[f"{name}_rows"], v["nv"])

            least = min(few, extent)
            return (
                Rule(f"{name} registers",
                     lambda v: needed(v) <= registers,
                     lambda v: f"{size(v)} needs {needed(v)} vector registers, {target.arch} has "
                               f"{registers}"),
                Rule(f"{name} latency",
                     lambda v: v[f"{name}_rows"] * v["nv"] >= least,
                     lambda v: f"{size(v)} keeps fewer than {least} sums in flight and waits for "
                               "each multiply-add"),
            )  # fmt: skip

        def tasks(v: Mapping[str, Any]) -> int:
            return int(shape({name: np.array([x]) for name, x in v.items()}).tasks[0])

        smallest = min(with_extent(_BLOCKS_Q, _rows(w)))
        return (
            *tile("key", w.kv_len),
            *tile("value", w.value_dim),
            Rule("block of queries",
                 lambda v: (v["block_q"] > (v["nv"] - 1) * lanes(w.dtype, target))
                           | (v["block_q"] == smallest),
                 lambda v: f"a block of {v['block_q']} queries does not fill the "
                           f"{v['nv']} vectors of a panel"),
            Rule("panels in cache",
                 lambda v: (v["block_q"] == smallest) | (shape(v).block_panels == 1)
                           | (shape(v).block_panels * shape(v).panel_bytes <= target.l2_bytes),
                 lambda v: f"a block of {v['block_q']} queries, its q and o, exceeds the "
                           f"{target.l2_bytes} B of L2"),
            Rule("work for all threads",
                 lambda v: shape(v).tasks >= v["threads"],
                 lambda v: f"{tasks(v)} tasks leave some of {v['threads']} threads idle"),
            Rule("splits",
                 lambda v: (v["splits"] == 1)
                           | (shape(v).tasks <= v["threads"] * _TASKS_PER_THREAD),
                 lambda v: f"{v['splits']} splits of the keys make {tasks(v)} tasks, more than "
                           f"{_TASKS_PER_THREAD} for each of {v['threads']} threads"),
            Rule("schedule",
                 lambda v: (v["schedule"] == "static") | (shape(v).tasks > v["threads"]),
                 lambda v: f"{tasks(v)} tasks on {v['threads']} threads leave nothing to draw"),
        )  # fmt: skip

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        w = as_attention(workload)
        knobs = {knob.name: knob for knob in self.knobs(w, target)}
        ints = {name: knob.integers for name, knob in knobs.items()}
        width, size = lanes(w.dtype, target), DTYPE_BYTES[w.dtype]
        nv = min(ints["nv"], key=lambda nv: (_waste(_rows(w), nv * width), abs(nv - 2)))
        in_l1 = target.l1_bytes // 2 // (nv * width * size)
        blocks = [b for b in ints["block_q"] if (nv - 1) * width < b <= _MOST_Q]
        block_q, splits, threads = _share(w, target, nv, blocks or ints["block_q"][:1], ints)
        tasks = _tasks(w, nv * width, block_q) * splits
        even = tasks % threads == 0 and not w.causal
        return {
            "nv": nv,
            "key_rows": _rows_for(w.kv_len, nv, ints["key_rows"], target),
            "value_rows": _rows_for(w.value_dim, nv, ints["value_rows"], target),
            "block_q": block_q,
            "block_k": max((b for b in ints["block_k"] if b <= in_l1), default=ints["block_k"][0]),
            "order": knobs["order"].choices[-1],
            "d": 2, "keys": 4, "threads": threads, "splits": splits,
            "schedule": "static" if even or tasks <= threads else "dynamic",
        }  # fmt: skip

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w, v = as_attention(workload), values
        s = _Shape(w, target, v)
        rounds = ceil_div(s.tasks, v["threads"])
        return {
            "key_registers": _registers(v["key_rows"], v["nv"]).astype(np.float64),
            "value_registers": _registers(v["value_rows"], v["nv"]).astype(np.float64),
            "key_fma_per_load": v["key_rows"] * v["nv"] / (v["key_rows"] + v["nv"]),
            "value_fma_per_load": v["value_rows"] * v["nv"] / (v["value_rows"] + v["nv"]),
            "row_waste": _waste(_rows(w), s.nr),
            "value_waste": _waste(w.value_dim, v["value_rows"]),
            "scores_l1": s.score_bytes / target.l1_bytes,
            "panel_l1": s.panel_bytes / target.l1_bytes,
            "keys_l1": s.key_bytes / target.l1_bytes,
            "keys_l2": s.key_bytes / target.l2_bytes,
            "block_l2": s.block_panels * s.panel_bytes / target.l2_bytes,
            "key_blocks": ceil_div(w.kv_len, s.keys * v["splits"]) * 1.0,
            "tasks": s.tasks * 1.0,
            "balance": s.tasks / (rounds * v["threads"]),
        }

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w, t = as_attention(workload), theta.tile
        defines: dict[str, int | str] = {
            **cpu_defines(w, target),
            **problem_defines(w),
            **{f"KT_{name.upper()}": int(t[name])
               for name in ("nv", "key_rows", "value_rows", "block_q", "block_k")},
            "KT_LONGEST_FIRST": int(theta.perm["order"] == "longest"),
            "KT_UNROLL_D": int(theta.unroll["d"]),
            "KT_UNROLL_KEYS": int(theta.unroll["keys"]),
            "KT_THREADS": int(theta.map["threads"]),
            "KT_SPLITS": int(theta.map["splits"]),
            "KT_DYNAMIC": int(theta.sync["schedule"] == "dynamic"),
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_suffix(".c"))
        return Kernel(w, self.name, theta, "c", source)


def _tasks(w: Attention, nr: int, block_q: int) -> int:
    """Tasks of a launch that does not split keys."""
    panels = ceil_div(_rows(w), nr)
    block = ceil_div(min(block_q, _rows(w)), nr)
    return int(w.b * w.kv_heads * ceil_div(panels, block))


def _rows_for(extent: int, nv: int, choices: Sequence[int], target: Target) -> int:
    """Broadcast rows of a register tile: little waste, rows that L1 holds, sums for the latency."""
    registers = target.vector_registers
    least = min(registers // 4, extent)
    fitting = [r for r in choices if _registers(r, nv) <= registers and r * nv >= least]
    return min(
        fitting,
        key=lambda r: (
            round(_waste(extent, r), 1), ceil_div(r, _WAYS), -min(r * nv, registers // 2), -r
        ),
    )  # fmt: skip


def _share(
    w: Attention, target: Target, nv: int, blocks: Sequence[int], ints: Mapping[str, Sequence[int]]
) -> tuple[int, int, int]:
    """Block of queries, splits of the keys and threads: all threads busy, for several rounds if
    that can be had, by the largest blocks of queries and the fewest splits."""
    nr = nv * lanes(w.dtype, target)
    panel = nr * (w.d + w.value_dim + 2) * DTYPE_BYTES[w.dtype]
    fitting = [b for b in blocks if ceil_div(b, nr) * panel <= target.l2_bytes] or blocks[:1]
    plans = [(_TASKS_PER_THREAD, 1), *((1, splits) for splits in ints["splits"])]
    busy = [t for t in ints["threads"] if t * _WAKING_FLOPS <= w.flops] or ints["threads"][:1]
    for threads in reversed(busy):
        for rounds, splits in plans:
            for block_q in reversed(fitting):
                if _tasks(w, nr, block_q) * splits >= rounds * threads:
                    return block_q, splits, threads
    return fitting[0], 1, ints["threads"][0]
