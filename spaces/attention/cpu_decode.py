"""`cpu_decode`: attention of a few query rows, bound by bandwidth (source: `cpu_decode.c`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.attention.problem import as_attention, group, problem_defines
from kt.spaces.cpu import cpu_defines, lanes, part_counts, refuses_cpu, thread_counts
from kt.spaces.family import Columns, Family, Rule
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import DTYPE_BYTES, Attention, Workload

Floats = NDArray[np.float64]

_MOST_ROWS = 16
"""More query rows a key/value head are faster as the lanes of vectors (`cpu`)."""
_BLOCKS = (16, 32, 64, 128, 256)
_TASKS_PER_THREAD = 4
_WAKING_BYTES = 100_000
"""A thread with less to read than this a launch costs more to wake than it gives."""


class AttentionCpuDecode(Family):
    """Streams k and v once, in the order in which they are stored."""

    name = "cpu_decode"
    empty: Mapping[str, str] = {
        "perm": "keys go in order, and heads within a block of keys: `map` says which ones",
        "fusion": "softmax, mask and both products are one pass over k and v",
        "sync": "tasks are equally long, so threads take them in turn",
    }

    def refuses(self, workload: Workload, target: Target) -> str | None:
        why = refuses_cpu(workload, target, Attention)
        if why or not isinstance(workload, Attention):
            return why
        rows = workload.s * group(workload)
        if rows > _MOST_ROWS:
            return f"serves up to {_MOST_ROWS} query rows a key/value head, not {rows}"
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_attention(workload)
        most = target.cores * _TASKS_PER_THREAD
        splits = part_counts(-(-w.kv_len // _BLOCKS[0]), most)
        parts = tuple(sorted({*part_counts(w.kv_heads, most), w.kv_heads}))
        tasks = w.b * w.kv_heads * splits[-1]
        scarce = tasks < most
        threads = part_counts(tasks, target.cores) if scarce else thread_counts(w.flops, target)
        return (
            Ordinal("tile", "block_k", _BLOCKS),
            Ordinal("mem", "prefetch", (0, 4, 16, 32)),
            Ordinal("unroll", "keys", (1, 2, 4)),
            Ordinal("map", "threads", threads),
            Ordinal("map", "head_parts", parts),
            Ordinal("map", "splits", splits),
        )

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_attention(workload)

        def tasks(v: Mapping[str, Any]) -> Any:
            return w.b * v["head_parts"] * v["splits"]

        return (
            Rule("work for all threads",
                 lambda v: tasks(v) >= v["threads"],
                 lambda v: f"{tasks(v)} tasks leave some of {v['threads']} threads idle"),
            Rule("splits",
                 lambda v: (v["splits"] == 1) | (tasks(v) <= v["threads"] * _TASKS_PER_THREAD),
                 lambda v: f"{v['splits']} splits of the keys make {tasks(v)} tasks, more than "
                           f"{_TASKS_PER_THREAD} for each of {v['threads']} threads"),
        )  # fmt: skip

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        w = as_attention(workload)
        knobs = {knob.name: knob for knob in self.knobs(w, target)}

        # Long runs of memory first: all heads of some keys, or else all keys of a head.
        beside = w.layout == "bshd" and w.kv_heads > 1
        plans = [
            (threads, parts, splits)
            for threads in reversed(knobs["threads"].integers)
            for parts in sorted(knobs["head_parts"].integers, reverse=not beside)
            for splits in knobs["splits"].integers
            if w.b * parts * splits >= threads
            and (splits == 1 or w.b * parts * splits <= threads * _TASKS_PER_THREAD)
        ]
        busy = [plan for plan in plans if plan[0] * _WAKING_BYTES <= w.bytes]
        threads, parts, splits = (busy or plans[-1:])[0]
        # The hardware does not foresee the short runs of heads that are stored side by side.
        ahead = 4 if beside else 0
        return {"block_k": 32, "prefetch": ahead, "keys": 4, "threads": threads,
                "head_parts": parts, "splits": splits}  # fmt: skip

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w, v = as_attention(workload), values
        size, width = DTYPE_BYTES[w.dtype], lanes(w.dtype, target)
        heads = -(-w.kv_heads // v["head_parts"])
        tasks = w.b * v["head_parts"] * v["splits"]
        rounds = -(-tasks // v["threads"])
        run = heads * (w.d + w.value_dim) * size
        return {
            "tasks": tasks * 1.0,
            "balance": tasks / (rounds * v["threads"]),
            "run_bytes": run * (1.0 if w.layout == "bshd" else v["block_k"] / heads),
            "block_l2": v["block_k"] * run / target.l2_bytes,
            "rows": np.full(len(tasks), 1.0 * w.s * group(w)),
            "key_waste": -(-v["block_k"] // width) * width / v["block_k"] - 1.0,
        }

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_attention(workload)
        defines: dict[str, int | str] = {
            **cpu_defines(w, target),
            **problem_defines(w),
            "KT_BLOCK_K": int(theta.tile["block_k"]),
            "KT_PREFETCH": int(theta.mem["prefetch"]),
            "KT_UNROLL_KEYS": int(theta.unroll["keys"]),
            "KT_THREADS": int(theta.map["threads"]),
            "KT_HEAD_PARTS": int(theta.map["head_parts"]),
            "KT_SPLITS": int(theta.map["splits"]),
            "KT_DYNAMIC": 0,
        }
        source = stub(defines) + expand(Path(__file__).with_suffix(".c"))
        return Kernel(w, self.name, theta, "c", source)
