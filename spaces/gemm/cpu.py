"""`cpu`: a blocked, packed matrix product for CPUs with vector units (source: `cpu.c`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.family import Columns, Family, Rule
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import DTYPE_BYTES, Gemm, Workload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14, 16, 20, 24, 28)
_BLOCK_MN = (32, 64, 128, 256, 512, 1024, 2048)
_BLOCK_K = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_REGIONS_PER_THREAD = 4
"""A region smaller than a quarter of a thread's share only adds packing."""
_SMALL_FLOPS = 4_000_000
"""Below this much work a core, fewer threads than cores may win."""


_WAKING_FLOPS = 1_000_000
"""A thread with less work than this a launch costs more to wake than it gives."""


def cpu_defines(workload: Gemm, target: Target) -> dict[str, int | str]:
    """The stub's lines that say what is computed and for which instruction set."""
    ops = workload.epilogue
    return {
        "KT_ISA": f"KT_ISA_{target.arch.upper()}",
        "KT_VEC_BYTES": target.simd_bytes,
        "KT_DOUBLE": int(workload.dtype == "fp64"),
        "KT_M": workload.m, "KT_N": workload.n, "KT_K": workload.k, "KT_BATCH": workload.batch,
        "KT_TRANS_A": int(workload.layout[0] == "t"),
        "KT_TRANS_B": int(workload.layout[1] == "t"),
        "KT_HAS_EPILOGUE": int(bool(ops)),
        "KT_EPILOGUE": " ".join(f"KT_OP_{op.upper()}" for op in ops),
        **{f"KT_HAS_{op.upper()}": int(op in ops) for op in ("bias", "residual", "scale")},
    }  # fmt: skip


def refuses_cpu_gemm(workload: Workload, target: Target) -> str | None:
    """Why no CPU GEMM family can serve the workload, or None."""
    if not isinstance(workload, Gemm) or target.kind != "cpu":
        return "serves gemm on the CPU"
    if workload.dtype not in ("fp32", "fp64"):
        return f"computes in fp32 or fp64, not {workload.dtype}"
    return None


def thread_counts(workload: Workload, target: Target) -> tuple[int, ...]:
    """Thread counts worth trying: all cores, and fewer where the product is small."""
    cores = target.cores
    if workload.flops > _SMALL_FLOPS * cores:
        return (cores,)
    return tuple(sorted({2**i for i in range(cores.bit_length())} | {cores}))


def _grids(w: Gemm, target: Target) -> dict[str, tuple[int, ...]]:
    """Numbers of regions along each axis: a region is worth a few tiles, or 256 steps of k."""
    most = target.cores * _REGIONS_PER_THREAD
    return {
        "batch": _counts(w.batch, most),
        "n": _counts(_ceil(w.n, lanes(w, target)), most),
        "m": _counts(_ceil(w.m, 8), most),
        "k": _counts(_ceil(w.k, 256), target.cores),
    }


def _threads(w: Gemm, target: Target) -> tuple[int, ...]:
    """Thread counts; fewer than all cores too where one region a core cannot be had."""
    counts = thread_counts(w, target)
    regions = math.prod(_grid_for(w, target, counts[-1]).values())
    return counts if regions >= counts[-1] else tuple(sorted({*_counts(regions, regions)}))


def _grid_for(w: Gemm, target: Target, threads: int) -> dict[str, int]:
    """One region a thread: the batch is shared out if it is large enough, else the longer side,
    and what is missing then comes from the other axes."""
    first = "batch" if w.batch >= threads else "n" if w.n >= w.m else "m"
    choices, missing = _grids(w, target), threads
    grid: dict[str, int] = {}
    for axis in sorted(choices, key=lambda axis: axis != first):
        grid[axis] = max(c for c in choices[axis] if c <= missing and missing % c == 0)
        missing //= grid[axis]
    return grid


def lanes(workload: Workload, target: Target) -> int:
    """Elements of one vector."""
    return target.simd_bytes // DTYPE_BYTES[workload.dtype]


def _up_to(choices: Sequence[int], extent: int) -> tuple[int, ...]:
    """The choices below `extent`, and `extent` itself (one block) where it is not too large."""
    below = tuple(c for c in choices if c < extent)
    return (*below, extent) if extent <= 2 * choices[-1] or not below else below


def _counts(extent: int, limit: int) -> tuple[int, ...]:
    """Numbers of parts up to `extent`: powers of two, and the limit over powers of two."""
    powers = [2**i for i in range(limit.bit_length())]
    counts = {*powers, *(limit // p for p in powers if limit % p == 0)}
    return tuple(sorted(c for c in counts if c <= extent))


def _ceil(a: Any, b: Any) -> Any:
    return -(-a // b)


class _Shape:
    """What a batch of points makes of the problem; mirrors the constants of `cpu.c`."""

    def __init__(self, workload: Gemm, target: Target, v: Columns) -> None:
        self.size = DTYPE_BYTES[workload.dtype]
        self.mr = v["mr"].astype(np.int64)
        self.nr = v["nv"].astype(np.int64) * lanes(workload, target)
        self.threads = v["threads"].astype(np.int64)
        grid_m, grid_n, grid_k, grid_batch = (
            v[f"grid_{axis}"].astype(np.int64) for axis in ("m", "n", "k", "batch")
        )
        self.regions = grid_m * grid_n * grid_k * grid_batch
        self.m = _ceil(workload.m, grid_m)
        panels = _ceil(_ceil(workload.n, self.nr), grid_n)
        self.n = np.minimum(workload.n, panels * self.nr)
        self.k = _ceil(workload.k, grid_k)
        self.batch = _ceil(workload.batch, grid_batch)
        self.kc = np.minimum(v["kc"], self.k)
        self.tiles, self.panels = _ceil(self.m, self.mr), panels
        self.mc_tiles = _ceil(np.minimum(v["mc"], self.m), self.mr)
        self.nc_panels = _ceil(np.minimum(v["nc"], self.n), self.nr)
        self.m_blocks = _ceil(self.tiles, self.mc_tiles)
        self.n_blocks = _ceil(self.panels, self.nc_panels)
        self.k_blocks = _ceil(self.k, self.kc)
        self.panel_a, self.panel_b = (self.kc * r * self.size for r in (self.mr, self.nr))
        self.block_a, self.block_b = self.panel_a * self.mc_tiles, self.panel_b * self.nc_panels

    def packed_bytes(self) -> tuple[Ints, Ints]:
        """Bytes of A and of B that one region packs; A again for each block of n, unless all of
        it stays packed."""
        again = (self.k_blocks > 1) | (self.m_blocks > 1)
        whole_a = self.mr * self.size * self.k * self.tiles * self.batch
        whole_b = self.nr * self.size * self.k * self.panels * self.batch
        return whole_a * np.where(again, self.n_blocks, 1), whole_b


class GemmCpu(Family):
    """Goto-style blocking with panels packed just before use, on a grid of regions."""

    name = "cpu"
    empty: Mapping[str, str] = {
        "fusion": "the epilogue is applied as a tile is stored: a pass of its own re-reads C",
    }

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return refuses_cpu_gemm(workload, target)

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        assert isinstance(workload, Gemm)
        w, registers = workload, target.vector_registers
        rows = sorted({r for r in _ROWS if r < min(w.m, registers - 2)} | {min(w.m, registers - 4)})
        wide = max(1, min(5, _ceil(w.n, lanes(w, target))))
        grids = _grids(w, target)
        b_ways = ("panel",) if w.layout[1] == "t" else ("none", "panel")
        return (
            Ordinal("tile", "mr", tuple(rows)),
            Ordinal("tile", "nv", tuple(range(1, wide + 1))),
            Ordinal("tile", "mc", _up_to(_BLOCK_MN, w.m)),
            Ordinal("tile", "nc", _up_to(_BLOCK_MN, w.n)),
            Ordinal("tile", "kc", _up_to(_BLOCK_K, w.k)),
            Categorical("mem", "pack_a", ("none", "panel")),
            Categorical("mem", "pack_b", b_ways),
            Categorical("mem", "prefetch_c", (False, True)),
            Categorical("perm", "inner", ("m", "n")),
            Ordinal("unroll", "k", (1, 2, 4)),
            Ordinal("map", "threads", _threads(w, target)),
            *(Ordinal("map", f"grid_{axis}", grids[axis]) for axis in ("m", "n", "k", "batch")),
            Categorical("sync", "schedule", ("static", "dynamic")),
        )  # fmt: skip

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        assert isinstance(workload, Gemm)
        w, width, registers = workload, lanes(workload, target), target.vector_registers
        few = min(3 * registers // 8, w.m)
        cache = max(target.l3_bytes, 8 * target.l2_bytes)

        def shape(v: Columns) -> _Shape:
            return _Shape(w, target, v)

        def packed(v: Columns) -> Ints:
            s = shape(v)
            return np.where(v["pack_a"] != "none", s.block_a, 0) + np.where(
                v["pack_b"] != "none", s.block_b, 0
            )

        return (
            Rule("registers",
                 lambda v: _registers(v["mr"], v["nv"]) <= registers,
                 lambda v: f"micro-tile {v['mr']}x{v['nv']} needs "
                           f"{_registers(v['mr'], v['nv'])} vector registers, "
                           f"{target.arch} has {registers}"),
            Rule("latency",
                 lambda v: v["mr"] * v["nv"] >= few,
                 lambda v: f"micro-tile {v['mr']}x{v['nv']} keeps fewer than {few} sums in flight "
                           "and waits for each multiply-add"),
            Rule("panel in place",
                 lambda v: (v["pack_b"] != "none") | (v["nv"] * width <= w.n),
                 lambda v: f"B is used in place, but a micro-tile of {v['nv'] * width} columns "
                           f"would read beyond its {w.n}"),
            Rule("regions",
                 lambda v: (shape(v).regions >= v["threads"])
                           & (shape(v).regions <= v["threads"] * _REGIONS_PER_THREAD),
                 lambda v: f"{_regions(v)} regions for {v['threads']} threads: accepts "
                           f"{v['threads']} to {v['threads'] * _REGIONS_PER_THREAD}"),
            Rule("schedule",
                 lambda v: np.where(v["schedule"] == "static",
                                    shape(v).regions % v["threads"] == 0,
                                    shape(v).regions > v["threads"]),
                 lambda v: f"a {v['schedule']} schedule of {_regions(v)} regions on "
                           f"{v['threads']} threads: static needs a multiple, dynamic needs more"),
            Rule("packed blocks",
                 lambda v: packed(v) <= cache,
                 lambda v: f"the packed blocks exceed {cache} B of cache"),
        )  # fmt: skip

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        assert isinstance(workload, Gemm)
        w, knobs = workload, {knob.name: knob for knob in self.knobs(workload, target)}

        def nearest(name: str, wanted: int) -> int:
            """The largest choice up to `wanted`, else the smallest."""
            choices = [c for c in knobs[name].choices if isinstance(c, int)]
            return max((c for c in choices if c <= wanted), default=choices[0])

        size, width = DTYPE_BYTES[w.dtype], lanes(w, target)
        busy = nearest("threads", w.flops // _WAKING_FLOPS)
        grid = _grid_for(w, target, busy)
        m, n = _ceil(w.m, grid["m"]), _ceil(w.n, grid["n"])
        kc = nearest("kc", 4096 // size)
        # Packing pays when a panel is used often and the operands do not sit in L2 anyway.
        fits = (m + n) * _ceil(w.k, grid["k"]) * size <= target.l2_bytes
        leave_a = w.layout[0] == "n" and (fits or n <= 8 * width)
        mr, nv = _micro_tile(m, n, width, knobs, target, in_place=leave_a)
        leave_b = w.layout[1] == "n" and (fits or m <= 2 * mr) and nv * width <= w.n
        return {
            "mr": mr, "nv": nv, "kc": kc,
            "mc": nearest("mc", target.l2_bytes // 2 // (kc * size)),
            "nc": nearest("nc", max(nv * width, target.l3_bytes // 8 // (kc * size))),
            "pack_a": "none" if leave_a else "panel", "pack_b": "none" if leave_b else "panel",
            "prefetch_c": True, "inner": "m" if m <= 16 * mr else "n", "k": 2,
            "threads": math.prod(grid.values()),
            **{f"grid_{axis}": parts for axis, parts in grid.items()},
            "schedule": "static",
        }  # fmt: skip

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        assert isinstance(workload, Gemm)
        w, v, s = workload, values, _Shape(workload, target, values)
        packed_a, packed_b = s.packed_bytes()
        packed_a = np.where(v["pack_a"] == "none", 0, packed_a)
        packed_b = np.where(v["pack_b"] == "none", 0, packed_b)
        c_bytes = s.m * s.n * s.batch * s.size * (2 * s.k_blocks - 1)
        rounds = _ceil(s.regions, s.threads)
        columns = s.panels * s.nr
        rows = np.where(s.m >= s.tiles * (s.mr - 1), s.m, s.tiles * s.mr)
        work = 2.0 * s.batch * rows * columns * s.k
        return {
            "registers": _registers(v["mr"], v["nv"]).astype(np.float64),
            "fma_per_load": v["mr"] * v["nv"] / (v["mr"] + v["nv"]),
            "panel_a_l1": s.panel_a / target.l1_bytes, "panel_b_l1": s.panel_b / target.l1_bytes,
            "block_a_l2": s.block_a / target.l2_bytes, "block_b_l2": s.block_b / target.l2_bytes,
            "k_blocks": s.k_blocks.astype(np.float64),
            "packed_bytes": (packed_a + packed_b) * rounds * 1.0,
            "intensity": work / (packed_a + packed_b + c_bytes + 1.0),
            "tiles": s.tiles * s.panels * s.batch * rounds * 1.0,
            "tile_waste": rows * columns / (s.m * s.n) - 1.0,
            "thread_flops": work * rounds,
            "balance": w.flops / (work * rounds * target.cores),
        }  # fmt: skip

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        assert isinstance(workload, Gemm)
        t, mem, grid = theta.tile, theta.mem, theta.map
        defines: dict[str, int | str] = {
            **cpu_defines(workload, target),
            **{f"KT_{name.upper()}": int(t[name]) for name in ("mr", "nv", "mc", "nc", "kc")},
            "KT_PACK_A": int(mem["pack_a"] == "panel"),
            "KT_PACK_B": int(mem["pack_b"] == "panel"),
            "KT_PREFETCH_C": int(mem["prefetch_c"]),
            "KT_INNER_M": int(theta.perm["inner"] == "m"),
            "KT_UNROLL": int(theta.unroll["k"]),
            "KT_THREADS": int(grid["threads"]),
            **{f"KT_GRID_{a.upper()}": int(grid[f"grid_{a}"]) for a in ("m", "n", "k", "batch")},
            "KT_DYNAMIC": int(theta.sync["schedule"] == "dynamic"),
        }
        source = stub(defines) + expand(Path(__file__).with_suffix(".c"))
        return Kernel(workload, self.name, theta, "c", source)


def _registers(mr: Any, nv: Any) -> Any:
    """Vector registers of a micro-tile: its sums, one row of B and one broadcast of A."""
    return mr * nv + nv + 1


def _regions(v: Mapping[str, Any]) -> int:
    return int(v["grid_m"] * v["grid_n"] * v["grid_k"] * v["grid_batch"])


def _micro_tile(
    m: int, n: int, width: int, knobs: Mapping[str, Knob], target: Target, in_place: bool
) -> tuple[int, int]:
    """Rows and vectors that pad an m x n region least. Of those: operands in place want few loads
    for each sum, packed ones the most sums."""
    sizes = [
        (int(mr), int(nv))
        for mr in knobs["mr"].choices
        for nv in knobs["nv"].choices
        if _registers(int(mr), int(nv)) <= target.vector_registers
    ]
    most = max(mr * nv for mr, nv in sizes)
    full = [(mr, nv) for mr, nv in sizes if 3 * mr * nv >= 2 * most]

    def cost(tile: tuple[int, int]) -> tuple[float, int, float]:
        mr, nv = tile
        tiles, columns = _ceil(m, mr), _ceil(n, nv * width) * nv * width
        rows = m if m >= tiles * (mr - 1) else tiles * mr
        waste, loads = round(rows * columns / (m * n), 2), (mr + nv) / (mr * nv)
        return waste, 0 if in_place else -mr * nv, loads

    return min(full, key=cost)
