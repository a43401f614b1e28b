"""`cpu_skinny`: a product with one tiny extent, bound by bandwidth (source: `cpu_skinny.c`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.cpu import cpu_defines, lanes, refuses_cpu, thread_counts
from kt.spaces.family import Columns, Family, Rule
from kt.spaces.gemm.cpu import gemm_defines
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import DTYPE_BYTES, Gemm, Workload

Floats = NDArray[np.float64]

_TINY = 16
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
_STREAMS = (1, 2, 3, 4, 6, 8, 12, 16)


def _extents(w: Gemm) -> tuple[int, int]:
    """The tiny and the long extent."""
    return (w.n, w.m) if w.n < w.m else (w.m, w.n)


def _by_dots(w: Gemm) -> bool:
    """Whether the large operand is stored with k contiguous, so that outputs are dot products."""
    return w.layout[0] == "n" if w.n < w.m else w.layout[1] == "t"


class GemmCpuSkinny(Family):
    """Streams the large operand once, several rows at a time; packs nothing large."""

    name = "cpu_skinny"
    empty: Mapping[str, str] = {
        "mem": "the large operand is read once, in place; the hardware prefetches its streams "
        "at least as well as instructions do",
        "perm": "the storage of the large operand fixes the loop order",
        "fusion": "the epilogue is applied as a block is stored",
        "sync": "threads take equal runs of blocks; a dynamic schedule would break the streams",
    }

    def refuses(self, workload: Workload, target: Target) -> str | None:
        why = refuses_cpu(workload, target, Gemm)
        if why or not isinstance(workload, Gemm):
            return why
        tiny, limit = _extents(workload)[0], min(_TINY, target.vector_registers - 4)
        return f"serves M or N up to {limit}, not {tiny}" if tiny > limit else None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        assert isinstance(workload, Gemm)
        _, long = _extents(workload)
        blocks = [b for b in _BLOCKS if b < long]
        slices = [2**i for i in range(target.cores.bit_length()) if 2**i * 64 <= workload.k]
        return (
            Ordinal("tile", "block", (*blocks, long) if long <= 2 * _BLOCKS[-1] else (*blocks,)),
            Ordinal("unroll", "streams", _STREAMS),
            Ordinal("unroll", "vectors", (1, 2, 4, 8)),
            Ordinal("map", "threads", thread_counts(workload.flops, target)),
            Ordinal("map", "slices", tuple(slices) or (1,)),
        )

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        assert isinstance(workload, Gemm)
        w, (tiny, long), registers = workload, _extents(workload), target.vector_registers
        row_bytes = tiny * DTYPE_BYTES[w.dtype]

        def needed(v: Mapping[str, Any]) -> Any:
            return _registers(w, v["streams"], v["vectors"])

        return (
            Rule("registers",
                 lambda v: needed(v) <= registers,
                 lambda v: f"{v['streams']} streams need {needed(v)} vector registers, "
                           f"{target.arch} has {registers}"),
            Rule("sums in cache",
                 lambda v: v["block"] * row_bytes <= target.l2_bytes // 2,
                 lambda v: f"the sums of a block take {v['block'] * row_bytes} B, half of L2 is "
                           f"{target.l2_bytes // 2} B"),
            Rule("work for all threads",
                 lambda v: w.batch * -(-long // v["block"]) * v["slices"] >= v["threads"],
                 lambda v: f"{w.batch * -(-long // v['block'])} blocks in {v['slices']} slices "
                           f"leave some of {v['threads']} threads idle"),
        )  # fmt: skip

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        assert isinstance(workload, Gemm)
        w, knobs = workload, {knob.name: knob for knob in self.knobs(workload, target)}
        tiny, long = _extents(w)
        streams = max(
            s for s in _STREAMS if s <= 4 and _registers(w, s, 1) <= target.vector_registers
        )
        share = long if not _by_dots(w) else -(-long // target.cores)
        limit = min(share, target.l2_bytes // 2 // (tiny * DTYPE_BYTES[w.dtype]))

        # Long contiguous runs first: whole rows, sharing out k; shorter blocks where k is short.
        options = [
            (block, slices, threads)
            for threads in reversed(knobs["threads"].integers)
            for block in reversed(knobs["block"].integers)
            for slices in knobs["slices"].integers
            if block <= max(limit, knobs["block"].integers[0])
            and w.batch * -(-long // block) * slices >= threads
        ]
        block, slices, threads = options[0] if options else (knobs["block"].integers[0], 1, 1)
        return {"block": block, "streams": streams, "vectors": 1, "threads": threads,
                "slices": slices}  # fmt: skip

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        assert isinstance(workload, Gemm)
        w, v, (tiny, long) = workload, values, _extents(workload)
        size = DTYPE_BYTES[w.dtype]
        items = w.batch * -(-long // v["block"]) * v["slices"]
        rounds = -(-items // v["threads"])
        width = v["vectors"] * lanes(w.dtype, target) if not _by_dots(w) else v["streams"]
        return {
            "sums_l1": tiny * v["block"] * size / target.l1_bytes,
            "registers": _registers(w, v["streams"], v["vectors"]).astype(np.float64),
            "stream_bytes": v["vectors"] * target.simd_bytes * 1.0,
            "run_bytes": (v["block"] if not _by_dots(w) else w.k) * size * 1.0,
            "balance": items / (rounds * v["threads"]),
            "vector_waste": -(-v["block"] // width) * width / v["block"] - 1.0,
        }

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        assert isinstance(workload, Gemm)
        defines: dict[str, int | str] = {
            **cpu_defines(workload, target),
            **gemm_defines(workload),
            "KT_BLOCK": int(theta.tile["block"]),
            "KT_STREAMS": int(theta.unroll["streams"]),
            "KT_VECTORS": int(theta.unroll["vectors"]),
            "KT_THREADS": int(theta.map["threads"]),
            "KT_SLICES": int(theta.map["slices"]),
        }
        source = stub(defines) + expand(Path(__file__).with_suffix(".c"))
        return Kernel(workload, self.name, theta, "c", source)


def _registers(w: Gemm, streams: Any, vectors: Any) -> Any:
    """Vector registers of the inner step: sums, stream vectors and one factor."""
    if _by_dots(w):
        return streams * _extents(w)[0] + 2
    return streams * vectors + vectors + 1
