"""The blocked matrix product of CPUs: knobs, legality and features, for every family whose work is
such a product (source: `device/cpu_tile.h`, `device/cpu_blocks.h`)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.cpu import lanes, part_counts, thread_counts
from kt.spaces.extents import ceil_div, with_extent
from kt.spaces.family import Columns, Family, Rule
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import DTYPE_BYTES, Workload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14, 16, 20, 24, 28)
_BLOCK_MN = (32, 64, 128, 256, 512, 1024, 2048)
_BLOCK_K = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_REGIONS_PER_THREAD = 4
"""A region smaller than a quarter of a thread's share only adds packing."""
_WAKING_FLOPS = 1_000_000
"""A thread with less work than this a launch costs more to wake than it gives."""
_WAYS = ("none", "panel", "rows")
"""How an operand is read: in place, as panels [k][mr], as panels [mr][k]; the source's numbers."""


@dataclass(frozen=True)
class Product:
    """C[M,N] = A[M,K] B[K,N], `batch` times."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    ways_a: tuple[str, ...]
    """Of `_WAYS`, the preferred way of packing last."""
    ways_b: tuple[str, ...]
    near_a: bool
    """A in place is read along its rows; if not, packing always pays."""
    near_b: bool
    split_n: int = 1
    """What packing an element of B costs in elements of A: decides which side threads share out."""

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


def _grids(w: Product, target: Target) -> dict[str, tuple[int, ...]]:
    """Numbers of regions along each axis: a region is worth a few tiles, or 256 steps of k."""
    most = target.cores * _REGIONS_PER_THREAD
    return {
        "batch": part_counts(w.batch, most),
        "n": part_counts(ceil_div(w.n, lanes(w.dtype, target)), most),
        "m": part_counts(ceil_div(w.m, 8), most),
        "k": part_counts(ceil_div(w.k, 256), target.cores),
    }


def _threads(w: Product, target: Target) -> tuple[int, ...]:
    """Thread counts; fewer than all cores too where one region a core cannot be had."""
    counts = thread_counts(w.flops, target)
    regions = math.prod(_grid_for(w, target, counts[-1]).values())
    return counts if regions >= counts[-1] else tuple(sorted({*part_counts(regions, regions)}))


def _grid_for(w: Product, target: Target, threads: int) -> dict[str, int]:
    """One region a thread: the batch is shared out if it is large enough, else the side whose
    sharing saves packing, and what is missing then comes from the other axes."""
    first = "batch" if w.batch >= threads else "n" if w.split_n * w.n >= w.m else "m"
    choices, missing = _grids(w, target), threads
    grid: dict[str, int] = {}
    for axis in sorted(choices, key=lambda axis: axis != first):
        grid[axis] = max(c for c in choices[axis] if c <= missing and missing % c == 0)
        missing //= grid[axis]
    return grid


class _Shape:
    """What a batch of points makes of the problem; mirrors the constants of
    `cpu_tile.h`."""

    def __init__(self, w: Product, target: Target, v: Columns) -> None:
        self.size = DTYPE_BYTES[w.dtype]
        self.mr = v["mr"].astype(np.int64)
        self.nr = v["nv"].astype(np.int64) * lanes(w.dtype, target)
        self.threads = v["threads"].astype(np.int64)
        grid_m, grid_n, grid_k, grid_batch = (
            v[f"grid_{axis}"].astype(np.int64) for axis in ("m", "n", "k", "batch")
        )
        self.regions = grid_m * grid_n * grid_k * grid_batch
        self.m = ceil_div(w.m, grid_m)
        panels = ceil_div(ceil_div(w.n, self.nr), grid_n)
        self.n = np.minimum(w.n, panels * self.nr)
        self.k = ceil_div(w.k, grid_k)
        self.batch = ceil_div(w.batch, grid_batch)
        self.kc = np.minimum(v["kc"], self.k)
        self.tiles, self.panels = ceil_div(self.m, self.mr), panels
        self.mc_tiles = ceil_div(np.minimum(v["mc"], self.m), self.mr)
        self.nc_panels = ceil_div(np.minimum(v["nc"], self.n), self.nr)
        self.m_blocks = ceil_div(self.tiles, self.mc_tiles)
        self.n_blocks = ceil_div(self.panels, self.nc_panels)
        self.k_blocks = ceil_div(self.k, self.kc)
        self.panel_a, self.panel_b = (self.kc * r * self.size for r in (self.mr, self.nr))
        self.block_a, self.block_b = self.panel_a * self.mc_tiles, self.panel_b * self.nc_panels

    def packed_bytes(self) -> tuple[Ints, Ints]:
        """Bytes of A and of B that one region packs; A again for each block of n, unless all of
        it stays packed."""
        again = (self.k_blocks > 1) | (self.m_blocks > 1)
        whole_a = self.mr * self.size * self.k * self.tiles * self.batch
        whole_b = self.nr * self.size * self.k * self.panels * self.batch
        return whole_a * np.where(again, self.n_blocks, 1), whole_b


class Blocked(Family):
    """Goto-style blocking with panels packed just before use, on a grid of regions."""

    empty: Mapping[str, str] = {
        "fusion": "the epilogue is applied as a tile is stored: a pass of its own re-reads C",
    }

    @abstractmethod
    def product(self, workload: Workload) -> Product:
        """The matrix product that the workload is."""

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w, registers = self.product(workload), target.vector_registers
        rows = sorted({r for r in _ROWS if r < min(w.m, registers - 2)} | {min(w.m, registers - 4)})
        wide = max(1, min(5, ceil_div(w.n, lanes(w.dtype, target))))
        grids = _grids(w, target)
        return (
            Ordinal("tile", "mr", tuple(rows)),
            Ordinal("tile", "nv", tuple(range(1, wide + 1))),
            Ordinal("tile", "mc", with_extent(_BLOCK_MN, w.m)),
            Ordinal("tile", "nc", with_extent(_BLOCK_MN, w.n)),
            Ordinal("tile", "kc", with_extent(_BLOCK_K, w.k)),
            Categorical("mem", "pack_a", w.ways_a),
            Categorical("mem", "pack_b", w.ways_b),
            Categorical("mem", "prefetch_c", (False, True)),
            Categorical("perm", "inner", ("m", "n")),
            Ordinal("unroll", "k", (1, 2, 4)),
            Ordinal("map", "threads", _threads(w, target)),
            *(Ordinal("map", f"grid_{axis}", grids[axis]) for axis in ("m", "n", "k", "batch")),
            Categorical("sync", "schedule", ("static", "dynamic")),
        )  # fmt: skip

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w, registers = self.product(workload), target.vector_registers
        width, few = lanes(w.dtype, target), min(3 * registers // 8, w.m)
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
        w = self.product(workload)
        knobs = {knob.name: knob for knob in self.knobs(workload, target)}

        def nearest(name: str, wanted: int) -> int:
            """The largest choice up to `wanted`, else the smallest."""
            choices = knobs[name].integers
            return max((c for c in choices if c <= wanted), default=choices[0])

        size, width = DTYPE_BYTES[w.dtype], lanes(w.dtype, target)
        busy = nearest("threads", w.flops // _WAKING_FLOPS)
        grid = _grid_for(w, target, busy)
        m, n = ceil_div(w.m, grid["m"]), ceil_div(w.n, grid["n"])
        kc = nearest("kc", 4096 // size)
        # Packing pays when a panel is used often and the operands do not sit in L2 anyway.
        fits = (m + n) * ceil_div(w.k, grid["k"]) * size <= target.l2_bytes
        leave_a = w.near_a and (fits or n <= 8 * width)
        mr, nv = _micro_tile(m, n, width, knobs, target, in_place=leave_a)
        leave_b = w.near_b and (fits or m <= 2 * mr) and nv * width <= w.n
        return {
            "mr": mr, "nv": nv, "kc": kc,
            "mc": nearest("mc", target.l2_bytes // 2 // (kc * size)),
            "nc": nearest("nc", max(nv * width, target.l3_bytes // 8 // (kc * size))),
            "pack_a": "none" if leave_a else w.ways_a[-1],
            "pack_b": "none" if leave_b else w.ways_b[-1],
            "prefetch_c": True, "inner": "m" if m <= 16 * mr else "n", "k": 2,
            "threads": math.prod(grid.values()),
            **{f"grid_{axis}": parts for axis, parts in grid.items()},
            "schedule": "static",
        }  # fmt: skip

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w, v = self.product(workload), values
        s = _Shape(w, target, v)
        packed_a, packed_b = s.packed_bytes()
        packed_a = np.where(v["pack_a"] == "none", 0, packed_a)
        packed_b = np.where(v["pack_b"] == "none", 0, packed_b)
        c_bytes = s.m * s.n * s.batch * s.size * (2 * s.k_blocks - 1)
        rounds = ceil_div(s.regions, s.threads)
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

    def blocking_defines(self, theta: Theta) -> dict[str, int | str]:
        """The stub's lines that set the schedule."""
        t, mem, grid = theta.tile, theta.mem, theta.map
        return {
            **{f"KT_{name.upper()}": int(t[name]) for name in ("mr", "nv", "mc", "nc", "kc")},
            "KT_PACK_A": _WAYS.index(str(mem["pack_a"])),
            "KT_PACK_B": _WAYS.index(str(mem["pack_b"])),
            "KT_PREFETCH_C": int(mem["prefetch_c"]),
            "KT_INNER_M": int(theta.perm["inner"] == "m"),
            "KT_UNROLL": int(theta.unroll["k"]),
            "KT_THREADS": int(grid["threads"]),
            **{f"KT_GRID_{a.upper()}": int(grid[f"grid_{a}"]) for a in ("m", "n", "k", "batch")},
            "KT_DYNAMIC": int(theta.sync["schedule"] == "dynamic"),
        }


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
        tiles, columns = ceil_div(m, mr), ceil_div(n, nv * width) * nv * width
        rows = m if m >= tiles * (mr - 1) else tiles * mr
        waste, loads = round(rows * columns / (m * n), 2), (mr + nv) / (mr * nv)
        return waste, 0 if in_place else -mr * nv, loads

    return min(full, key=cost)
