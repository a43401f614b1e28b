"""`grouped`: groups of few channels on the tensor cores of sm_80 and later (`grouped.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kt.spaces.cuda import (
    Floats,
    early_knob,
    element_bytes,
    grid_rule,
    occupancy,
    register_limit,
    residency_rules,
    rule,
)
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.family import Columns, Family, Rule, once
from kt.spaces.kernel import Kernel, Launch, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Conv2d, Workload

from .cuda import (
    as_conv,
    conv_defines,
    group_channels,
    group_filters,
    patch_pixels,
    refuses_cuda_conv,
    up_to,
)

_BP = (1, 2, 4, 6, 7, 8, 12, 14, 16)
_BQ = (4, 7, 8, 14, 16, 28, 32, 56, 64)
_CLUSTERS = (1, 2, 3, 4, 6, 8, 12, 16)
_PIXELS = (32, 512)
"""Least and most output pixels of a CTA."""
_MOST_CHANNELS = 64
_MOST_WARPS = 16
_MOST_FILTER_REGISTERS = 120
_ADDRESS_REGISTERS = 48


class _Shape:
    """Clusters: groups of up to 8 channels taken together as 8, larger groups by themselves."""

    def __init__(self, w: Conv2d) -> None:
        channels, taps = group_channels(w), w.r * w.s
        self.paired = channels <= 8
        self.depth = 8 if self.paired else channels
        self.width = self.depth * group_filters(w) // channels
        self.clusters = w.c // self.depth
        self.steps = (taps + 1) // 2 if self.paired else taps * channels // 16
        self.n_tiles = self.width // 8

    @property
    def filter_registers(self) -> int:
        return self.steps * self.n_tiles * 2


class _Plan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, w: Conv2d, values: Mapping[str, Any]) -> None:
        self.w, self.v, self.s = w, values, _Shape(w)
        self.p, self.q = w.out_size

    @cached_property
    def threads(self) -> Any:
        return 32 * self.v["warps_m"] * self.v["warps_n"]

    @cached_property
    def pixels(self) -> Any:
        """Output pixels of a CTA."""
        return self.v["bp"] * self.v["bq"]

    @cached_property
    def m_tiles(self) -> Any:
        """Of 16 pixels, of one warp."""
        return ceil_div(ceil_div(self.pixels, 16), self.v["warps_m"])

    @cached_property
    def blocks(self) -> Any:
        tiles = ceil_div(self.p, self.v["bp"]) * ceil_div(self.q, self.v["bq"])
        return self.w.n * tiles * self.c_blocks

    @cached_property
    def c_blocks(self) -> Any:
        return ceil_div(self.s.clusters, self.v["clusters"])

    @cached_property
    def patch_pixels(self) -> Any:
        """Pixels of x that a CTA loads."""
        rows, columns = patch_pixels(self.w, self.v["bp"], self.v["bq"])
        return rows * columns

    @cached_property
    def shared_bytes(self) -> Any:
        stride = self.w.stride[1]
        rows, columns = patch_pixels(self.w, self.v["bp"], self.v["bq"])
        row = ceil_div(columns, stride) * stride
        chunks = self.v["clusters"] * self.s.depth // 8
        patch = round_up(rows * row * (chunks | 1) * 16, 128) + 128
        staged = self.pixels * (self.v["clusters"] * self.s.width + 8) * 4
        return patch + np.where(np.asarray(self.v["store"]) == "staged", staged, 0)

    @cached_property
    def registers(self) -> Any:
        """Estimate from above of what the compiler needs to keep everything in registers."""
        # Sums, and fragments of two steps.
        tiles = self.v["tiles"] * (4 * self.s.n_tiles + 8)
        return tiles + self.s.filter_registers + _ADDRESS_REGISTERS


class Conv2dGrouped(Family):
    """Patches of x in shared memory, filters of a few groups in registers."""

    name = "grouped"
    empty: Mapping[str, str] = {
        "fusion": "the epilogue is always fused, and no sum is split",
    }

    def refuses(self, workload: Workload, target: Target) -> str | None:
        reach = "the tensor cores multiply"
        refused = refuses_cuda_conv(workload, target, ("fp16", "bf16"), reach)
        if refused:
            return refused
        w = as_conv(workload)
        channels = group_channels(w)
        if w.acc == "fp16":
            return "accumulates in fp32"
        if w.groups == 1:
            return "serves several groups"
        if channels not in (1, 2, 4, 8) and (channels % 16 or channels > _MOST_CHANNELS):
            return f"groups have 1, 2, 4, 8 or multiples of 16 channels, not {channels}"
        s = _Shape(w)
        if w.c % s.depth or s.width % 8:
            return (
                f"{s.depth} channels and 8 filters at a time must divide those of {w.groups} groups"
            )
        if s.filter_registers > _MOST_FILTER_REGISTERS:
            registers = s.filter_registers
            return f"filters of {registers} registers a thread exceed {_MOST_FILTER_REGISTERS}"
        if not self._fitting(w, target):
            return "no patch of x fits shared memory"
        return None

    def _fitting(self, w: Conv2d, target: Target) -> bool:
        """Whether the smallest patch leaves a legal point."""
        knobs = {k.name: k.values for k in self.knobs(w, target)}
        return len(_legal_grid(w, target, self, knobs)["bp"]) > 0

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_conv(workload)
        (p, q), s = w.out_size, _Shape(w)
        return [
            Ordinal("tile", "bp", up_to(_BP, p)),
            Ordinal("tile", "bq", up_to(_BQ, q)),
            Ordinal("tile", "clusters", tuple(n for n in _CLUSTERS if n <= s.clusters)),
            Categorical("mem", "store", ("staged", "direct")),
            Categorical("perm", "first", ("channels", "pixels")),
            Ordinal("unroll", "tiles", (1, 2, 4)),
            Ordinal("map", "warps_m", (1, 2, 4, 8)),
            Ordinal("map", "warps_n", (1, 2, 3, 4, 6, 8)),
            Ordinal("map", "blocks", (1, 2, 3, 4, 6)),
            early_knob(target),
        ]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_conv(workload)

        @once
        def plan(v: Any) -> _Plan:
            return _Plan(w, v)

        least, most = _PIXELS
        return [
            rule(
                "warps",
                lambda v: plan(v).threads <= 32 * _MOST_WARPS,
                lambda v: f"{plan(v).threads // 32} warps exceed {_MOST_WARPS}",
            ),
            rule(
                "warps-n",
                lambda v: v["clusters"] % v["warps_n"] == 0,
                lambda v: f"{v['warps_n']} warps do not share {v['clusters']} clusters evenly",
            ),
            rule(
                "pixels",
                lambda v: (
                    (plan(v).pixels >= min(least, plan(v).p * plan(v).q)) & (plan(v).pixels <= most)
                ),
                lambda v: f"{plan(v).pixels} pixels of a CTA are not {least} to {most}",
            ),
            rule(
                "warps-m",
                lambda v: ceil_div(plan(v).pixels, 16) > plan(v).m_tiles * (v["warps_m"] - 1),
                lambda v: (
                    f"{v['warps_m']} warps for {ceil_div(plan(v).pixels, 16)} tiles of pixels"
                ),
            ),
            rule(
                "tiles",
                lambda v: (v["tiles"] == 1) | (v["tiles"] <= plan(v).m_tiles),
                lambda v: f"{v['tiles']} tiles at once of {int(plan(v).m_tiles)}",
            ),
            rule(
                "first",
                lambda v: (plan(v).c_blocks > 1) | (np.asarray(v["first"]) == "channels"),
                "all channels are in one CTA: pixels have one order",
            ),
            grid_rule(lambda v: plan(v).blocks),
            *residency_rules(target, plan),
        ]

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        """The legal values with the least modelled time."""
        w = as_conv(workload)
        knobs = {k.name: k.values for k in self.knobs(w, target)}
        values = _legal_grid(w, target, self, knobs)
        best = int(np.argmin(_modelled_time(w, target, values)))
        return {name: x[best].item() for name, x in values.items()}

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_conv(workload)
        p = _Plan(w, values)
        resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
        waves = p.blocks / (resident * target.cores)
        covered = p.blocks * p.pixels * values["clusters"] * p.s.width
        found = {
            "threads": p.threads,
            "shared_bytes": p.shared_bytes,
            "registers": p.registers,
            "register_share": p.registers / register_limit(target, p.threads, values["blocks"]),
            "m_tiles": p.m_tiles,
            "resident_warps": resident * p.threads // 32,
            "waves": waves,
            "wave_efficiency": waves / np.ceil(waves),
            "padding": covered / (w.n * p.p * p.q * w.k),
            "row_bytes": values["clusters"] * p.s.depth * element_bytes(w),
            "halo": p.patch_pixels / (p.pixels * w.stride[0] * w.stride[1]),
            "tile_padding": p.m_tiles * values["warps_m"] * 16 / p.pixels,
            "bytes_in_flight": resident * p.patch_pixels * values["clusters"] * p.s.depth * 2,
        }
        return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_conv(workload)
        v: dict[str, Any] = {name: value for _, name, value in theta.items()}
        p = _Plan(w, v)
        shared = int(p.shared_bytes)
        defines = {
            **conv_defines(w),
            "KT_BP": v["bp"], "KT_BQ": v["bq"], "KT_CLUSTERS": v["clusters"],
            "KT_STORE": f"KT_STORE_{str(v['store']).upper()}",
            "KT_CHANNELS_FIRST": int(v["first"] == "channels"),
            "KT_TILES": v["tiles"],
            "KT_WARPS_M": v["warps_m"], "KT_WARPS_N": v["warps_n"], "KT_BLOCKS": v["blocks"],
            "KT_EARLY": int(v["early"]), "KT_EXPECT_SHARED_BYTES": shared,
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("grouped.cuh"))
        launch = Launch(
            "kt_kernel", (p.blocks, 1, 1), (p.threads, 1, 1), shared_bytes=shared,
            early=bool(v["early"]),
        )  # fmt: skip
        return Kernel(w, self.name, theta, "cuda", source, launches=(launch,))


def _legal_grid(
    w: Conv2d, target: Target, family: Conv2dGrouped, knobs: Mapping[str, Any]
) -> dict[str, Any]:
    """Legal values with staged stores, channels first, and as many CTAs as fit."""
    fixed = {name: knobs[name][:1] for name in ("store", "first", "blocks")}
    fixed |= {"tiles": knobs["tiles"][:2], "early": knobs["early"][-1:]}
    grid = np.meshgrid(*{**knobs, **fixed}.values(), indexing="ij")
    values: dict[str, Any] = {name: x.ravel() for name, x in zip(knobs, grid, strict=True)}
    for each in family.rules(w, target):
        kept = each.ok(values)
        values = {name: x[kept] for name, x in values.items()}
    return values


_COPY_LATENCY = 1500  # cycles from the first load of a patch to its last
_ENOUGH_WARPS = 16  # on one SM
_START = 400  # instructions of a warp whatever its tile


def _modelled_time(w: Conv2d, target: Target, values: Columns) -> Floats:
    """Cycles of one SM for its CTAs: shared memory, instructions, or traffic to L2."""
    p = _Plan(w, values)
    tiles = p.m_tiles * values["warps_m"] * values["clusters"]
    shared = tiles * p.s.steps * 4 + p.pixels * values["clusters"] * p.s.width / 8
    bytes_ = (p.patch_pixels * p.s.depth + p.pixels * p.s.width) * values["clusters"] * 2
    line = values["clusters"] * p.s.depth * 2
    issued = p.threads / 128 * _START + bytes_ / 16
    work = np.maximum(np.maximum(shared, issued), bytes_ / 24 * np.maximum(1, 64 / line))
    resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
    idle = np.maximum(1, _ENOUGH_WARPS / (resident * p.threads // 32 * values["tiles"]))
    rounds = ceil_div(p.blocks, target.cores * resident)
    # A CTA loads, multiplies and stores one after the other: others must fill the gaps.
    time: Floats = rounds * (resident * work * idle * (1 + 1 / resident) + _COPY_LATENCY)
    return time
