"""`cpu_direct`: grouped convolution, a lane for each output channel (source: `cpu_direct.c`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.conv2d.cpu import conv2d_defines, refuses_cpu_conv2d
from kt.spaces.cpu import cpu_defines, lanes, part_counts, thread_counts
from kt.spaces.family import Columns, Family, Rule
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import DTYPE_BYTES, Conv2d, Workload

Floats = NDArray[np.float64]

_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
_STRIPS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56)
_MOST_UNROLLED = 16
"""Taps of a filter's row; more make code that no longer fits its cache."""


class Conv2dCpuDirect(Family):
    """Vectors of output channels, one multiply-add a tap; x in place or spread over the lanes."""

    name = "cpu_direct"
    empty: Mapping[str, str] = {
        "mem": "x is used in place where lanes are its channels, else spread over lanes in cache",
        "fusion": "the epilogue is applied as a register tile is stored",
        "sync": "threads take equal runs of units, which all cost the same",
    }

    def refuses(self, workload: Workload, target: Target) -> str | None:
        why = refuses_cpu_conv2d(workload, target)
        if why or not isinstance(workload, Conv2d):
            return why
        w, most = workload, lanes(workload.dtype, target) - 1
        if w.groups == 1 or w.k // w.groups > most:
            return f"serves groups of up to {most} filters"
        least, cache = _strip_bytes(w, 1, lanes(w.dtype, target)), _cache(target)
        if not _in_place(w, lanes(w.dtype, target)) and least > cache:
            return f"one output row reads {least} B of spread x, more than {cache} B of cache"
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        assert isinstance(workload, Conv2d)
        w, (p, q) = workload, workload.out_size
        vectors = -(-w.k // lanes(w.dtype, target))
        return (
            Ordinal("tile", "pixels", tuple(c for c in _PIXELS if c <= q)),
            Ordinal("tile", "vectors", tuple(c for c in (1, 2, 4) if c < 2 * vectors)),
            Ordinal("tile", "strip", tuple(c for c in _STRIPS if c < 2 * p)),
            Categorical("perm", "outer", ("channels", "rows")),
            Categorical(
                "unroll", "taps", ("one", "row") if 1 < w.s <= _MOST_UNROLLED else ("one",)
            ),
            Ordinal("map", "threads", _threads(w, target)),
        )

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        assert isinstance(workload, Conv2d)
        w, registers, width = workload, target.vector_registers, lanes(workload.dtype, target)
        cache, in_place = _cache(target), _in_place(w, width)

        def strip(v: Mapping[str, Any]) -> Any:
            return 0 * v["strip"] if in_place else _strip_bytes(w, v["strip"], v["vectors"] * width)

        return (
            Rule("registers",
                 lambda v: _registers(v) <= registers,
                 lambda v: f"{v['pixels']} pixels by {v['vectors']} vectors need {_registers(v)} "
                           f"vector registers, {target.arch} has {registers}"),
            Rule("block in place",
                 lambda v: (not in_place) | (v["vectors"] * width <= w.k),
                 lambda v: f"x is used in place, but a block of {v['vectors'] * width} channels "
                           f"would read beyond its {w.k}"),
            Rule("strip in cache",
                 lambda v: strip(v) <= cache,
                 lambda v: f"a strip of {v['strip']} rows spreads x over {strip(v)} B, more than "
                           f"{cache} B of cache"),
            Rule("work for all threads",
                 lambda v: _units(w, v, width) >= v["threads"],
                 lambda v: f"{_units(w, v, width)} units leave some of {v['threads']} threads "
                           "idle"),
        )  # fmt: skip

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        assert isinstance(workload, Conv2d)
        w, knobs = workload, {knob.name: knob for knob in self.knobs(workload, target)}
        width, in_place = lanes(w.dtype, target), _in_place(workload, lanes(workload.dtype, target))

        # Sums enough to hide the latency of a multiply-add; more only reach into other rows.
        inner, vectors = _inner(w), 1
        few = [c for c in knobs["pixels"].integers if c <= 8 and (c <= inner or c == 1)]
        pixels = min(few, key=lambda c: (-(-inner // c) * c, -c))
        threads, strip = next(
            (threads, strip)
            for threads in reversed(knobs["threads"].integers)
            for limit in (target.l2_bytes // 2, _cache(target))
            for strip in reversed(knobs["strip"].integers)
            if _units(w, {"strip": strip, "vectors": vectors}, width) >= threads
            and (in_place or _strip_bytes(w, strip, vectors * width) <= limit)
        )
        return {"pixels": pixels, "vectors": vectors, "strip": strip, "outer": "rows",
                "taps": knobs["taps"].choices[-1], "threads": threads}  # fmt: skip

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        assert isinstance(workload, Conv2d)
        w, v, width = workload, values, lanes(workload.dtype, target)
        units = _units(w, v, width)
        rounds = -(-units // v["threads"])
        spread = _strip_bytes(w, v["strip"], v["vectors"] * width) * (not _in_place(w, width))
        block = v["vectors"] * width
        return {
            "registers": _registers(v).astype(np.float64),
            "strip_l2": spread / target.l2_bytes,
            "reread": _reach(w, v["strip"]) / (v["strip"] * w.stride[0]) * 1.0,
            "balance": units / (rounds * v["threads"]),
            "lane_waste": -(-w.k // block) * block / w.k - 1.0,
            "edge_share": 1.0 - np.where(v["pixels"] <= _inner(w), _inner(w), 0) / w.out_size[1],
            "pixel_waste": -(-_inner(w) // v["pixels"]) * v["pixels"] / w.out_size[1] * 1.0,
        }

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        assert isinstance(workload, Conv2d)
        defines: dict[str, int | str] = {
            **cpu_defines(workload, target),
            **conv2d_defines(workload),
            "KT_PIXELS": int(theta.tile["pixels"]),
            "KT_NV": int(theta.tile["vectors"]),
            "KT_STRIP": int(theta.tile["strip"]),
            "KT_ROWS_OUTER": int(theta.perm["outer"] == "rows"),
            "KT_UNROLL_S": int(theta.unroll["taps"] == "row"),
            "KT_THREADS": int(theta.map["threads"]),
        }
        source = stub(defines) + expand(Path(__file__).with_suffix(".c"))
        return Kernel(workload, self.name, theta, "c", source)


def _threads(w: Conv2d, target: Target) -> tuple[int, ...]:
    """Thread counts; fewer than all cores too where there are fewer units."""
    units = int(_units(w, {"strip": 1, "vectors": 1}, lanes(w.dtype, target)))
    counts = thread_counts(w.flops, target)
    return counts if units >= counts[-1] else part_counts(units, units)


def _in_place(w: Conv2d, width: int) -> bool:
    """Whether output channel k reads channel k of x, and a vector of them exists."""
    return w.groups == w.c == w.k >= width


def _inner(w: Conv2d) -> int:
    """Outputs of a row whose filter rows lie inside x."""
    first = min(-(-w.pad[1] // w.stride[1]), w.out_size[1])
    span = w.w + w.pad[1] - (w.s - 1) * w.dilation[1]
    last = min((span - 1) // w.stride[1] + 1, w.out_size[1]) if span >= 1 else 0
    return max(0, last - first)


def _cache(target: Target) -> int:
    """What the copies of all threads may take together."""
    return max(target.l3_bytes, 8 * target.l2_bytes) // target.cores


def _reach(w: Conv2d, strip: Any) -> Any:
    """Rows of x that `strip` output rows read."""
    return np.minimum(w.h, (strip - 1) * w.stride[0] + (w.r - 1) * w.dilation[0] + 1)


def _strip_bytes(w: Conv2d, strip: Any, block: Any) -> Any:
    """Bytes of a strip of x with a lane for each of `block` output channels."""
    return _reach(w, strip) * w.w * (w.c // w.groups) * block * DTYPE_BYTES[w.dtype]


def _registers(v: Mapping[str, Any]) -> Any:
    """Vector registers of a tile: its sums, one vector of x and one of filters."""
    return v["pixels"] * v["vectors"] + 2


def _units(w: Conv2d, v: Mapping[str, Any], width: int) -> Any:
    """Units of work: blocks of channels by strips of all images."""
    return -(-w.k // (v["vectors"] * width)) * w.n * -(-w.out_size[0] // v["strip"])
