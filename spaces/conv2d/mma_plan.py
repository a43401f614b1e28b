"""What the knobs of the convolution `mma` imply beyond its tiles: how x and filters are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kt.spaces.cuda import VECTOR, alignment, element_bytes
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.gemm.mma_plan import Operand, Plan
from kt.spaces.kernel import Launch
from kt.spaces.workload import Conv2d, Gemm

from .cuda import group_channels, out_pixels

LEAST_COPY = 4
"""Bytes of the smallest cp.async."""
_REPACK_THREADS = 256


@dataclass(frozen=True)
class Gather:
    """One way to read x along k."""

    name: str
    width: int  # bytes of a copy
    channels: int  # of a group, as they lie where they are read
    joined: bool  # the taps of a filter row are one run along k
    repacked: bool  # x is copied first

    def padded_run(self, w: Conv2d) -> int:
        """Elements of a run along k, filled up to whole copies."""
        run = w.s * self.channels if self.joined else self.channels
        return int(round_up(run, self.width // element_bytes(w)))

    def k(self, w: Conv2d) -> int:
        return w.r * (1 if self.joined else w.s) * self.padded_run(w)

    def repacked_bytes(self, w: Conv2d) -> int:
        if not self.repacked:
            return 0
        columns = w.w + 2 * w.pad[1] if self.joined else w.w
        size = w.n * w.h * columns * self.channels * w.groups * element_bytes(w)
        return int(round_up(size, VECTOR))


def gathers(w: Conv2d) -> tuple[Gather, ...]:
    """Ways to read x: in place by the widest copies that its channels allow, first."""
    size, c = element_bytes(w), group_channels(w)
    found = []
    in_place = alignment(c * size)
    if in_place >= LEAST_COPY:
        found.append(Gather(f"tap{in_place}", in_place, c, joined=False, repacked=False))
    if w.groups == 1 and w.s > 1 and w.dilation[1] == 1 and c * size < 128:
        if w.pad[1] == 0:
            # The first tap of every output pixel and row must be aligned; so is then every run.
            width = alignment(math.gcd(w.s * c, w.stride[1] * c, w.w * c) * size)
            if width >= LEAST_COPY:
                found.append(Gather(f"row{width}", width, c, joined=True, repacked=False))
        if c * size < VECTOR:
            found += _joined_repacks(w, size, c)
    if in_place < VECTOR:
        channels = round_up(c, VECTOR // size)
        found.append(Gather("repack", VECTOR, channels, joined=False, repacked=True))
    return tuple(found)


def _joined_repacks(w: Conv2d, size: int, c: int) -> list[Gather]:
    """Columns padded by zeros, and as many channels as make first taps and rows aligned."""
    found: list[Gather] = []
    columns = w.w + 2 * w.pad[1]
    for width in (16, 8):
        step = math.gcd(w.stride[1], columns) * size
        channels = next(n for n in range(c, c + VECTOR + 1) if n * step % width == 0)
        in_place = channels == c and w.pad[1] == 0
        if not in_place and channels not in [g.channels for g in found]:
            found.append(Gather(f"repack_row{width}", width, channels, joined=True, repacked=True))
    return found


class ConvPlan(Plan):
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, conv: Conv2d, product: Gemm, values: Mapping[str, Any]) -> None:
        super().__init__(product, values)
        self.conv = conv
        self.ways = {g.name: g for g in gathers(conv)}
        self.a = Operand(product.m, product.k, True, element_bytes(conv))

    def _of_way(self, what: Mapping[str, int]) -> Any:
        """A number of each way, by knob value."""
        copy = np.asarray(self.v["copy_a"])
        return sum(np.where(copy == name, number, 0) for name, number in what.items())

    @cached_property
    def k(self) -> Any:
        return self._of_way({name: g.k(self.conv) for name, g in self.ways.items()})

    @cached_property
    def run(self) -> Any:
        """Elements along k that are neighbours in memory."""
        return self._of_way({name: g.padded_run(self.conv) for name, g in self.ways.items()})

    @cached_property
    def one_tap(self) -> Any:
        """Whether every tile of k lies in one run."""
        return self.run % self.bk == 0

    def width(self, name: str) -> Any:
        if name == "b":
            return super().width(name)
        return self._of_way({name: g.width for name, g in self.ways.items()})

    def copy_registers(self, operand: Operand, name: str, rows: Any) -> Any:
        """Of x: the offset of each pixel and its taps inside x."""
        if name == "b":
            return super().copy_registers(operand, name, rows)
        conv, size = self.conv, element_bytes(self.conv)
        wide = conv.n * conv.h * conv.w * conv.c * size >= 2**31
        bits = conv.r + 1 + conv.s <= 32
        each = 3 + wide + (not bits)
        return self.pieces(operand, name, rows) * each + (24 if size == 1 else 12)

    @property
    def way(self) -> Gather:
        """Of one θ only."""
        return self.ways[self.v["copy_a"]]

    @property
    def filters_repacked(self) -> bool:
        return bool(self.v["copy_b"] == "repack")

    @cached_property
    def repacked_parts(self) -> tuple[int, ...]:
        pitch = round_up(self.way.k(self.conv) * element_bytes(self.conv), VECTOR)
        parts = self.way.repacked_bytes(self.conv), self.conv.k * pitch * self.filters_repacked
        return tuple(part for part in parts if part)

    def repack_launch(self, vectors: int, early: bool) -> Launch:
        """Of a kernel of its own, whose threads gather one vector each."""
        blocks = ceil_div(vectors, _REPACK_THREADS)
        return Launch("kt_repack", (blocks, 1, 1), (_REPACK_THREADS, 1, 1), early=early)

    @property
    def fresh_pixels(self) -> float:
        """Pixels of x for each output pixel and tap: how little neighbouring taps share."""
        w = self.conv
        return w.n * w.h * w.w / (out_pixels(w) * w.r * w.s)
