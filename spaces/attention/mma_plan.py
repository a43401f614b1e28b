"""What the knobs of attention's `mma` imply, and its default θ."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from kt.spaces.cuda import VECTOR, element_bytes, is_legal, register_limit
from kt.spaces.extents import ceil_div
from kt.spaces.family import Rule
from kt.spaces.kernel import Launch
from kt.spaces.target import Target
from kt.spaces.theta import Value
from kt.spaces.workload import Attention

from .cuda import copies, dim, fragments, narrowest_copy, out_dim, tile_bytes, window

_ADDRESS_REGISTERS = 46
_NARROW_COPIES = 24
"""Registers of copies of less than 16 bytes, which are many."""
_SCHEDULE_REGISTERS = 24
"""The compiler moves loads forward as if it had this many registers to spare."""


class Plan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, w: Attention, values: Mapping[str, Any]) -> None:
        self.w, self.v = w, values
        self.bm, self.bn, self.warps = values["bm"], values["bn"], values["warps"]

    @cached_property
    def joint(self) -> Any:
        """1 where K and V of a tile are waited for together."""
        return (np.asarray(self.v["barriers"]) == "joint") * 1

    @cached_property
    def overlap(self) -> Any:
        return np.asarray(self.v["overlap"]) * 1

    @cached_property
    def held(self) -> Any:
        return np.asarray(self.v["q"]) == "registers"

    @cached_property
    def threads(self) -> Any:
        return 32 * self.warps

    @cached_property
    def m_tiles(self) -> Any:
        """Tiles of 16 queries of a warp."""
        return ceil_div(self.bm, 16 * self.warps)

    @cached_property
    def m_blocks(self) -> Any:
        return ceil_div(self.w.s, self.bm)

    @cached_property
    def blocks(self) -> Any:
        return self.m_blocks * self.w.b * self.w.h

    @cached_property
    def key_tiles(self) -> Any:
        """The most tiles of keys that a CTA passes over."""
        every = ceil_div(self.w.kv_len, self.bn)
        if not window(self.w) or not self.w.causal:
            return every
        return np.minimum(every, ceil_div(window(self.w) + self.bm, self.bn) + 1)

    @cached_property
    def stage_bytes(self) -> Any:
        return self._k_bytes + self._v_bytes

    @cached_property
    def _k_bytes(self) -> Any:
        return tile_bytes(self.w, self.bn, dim(self.w), self.padded)

    @cached_property
    def _v_bytes(self) -> Any:
        return tile_bytes(self.w, self.bn, out_dim(self.w), self.padded)

    @cached_property
    def padded(self) -> Any:
        return np.asarray(self.v["layout"]) == "padded"

    @cached_property
    def copies(self) -> Any:
        """Copies of one operand that a thread starts for a tile of keys."""
        return copies(self.w, self.bn, self.threads)

    @cached_property
    def shared_bytes(self) -> Any:
        w, ring = self.w, self.v["stages"] * self.stage_bytes
        q = (
            ring
            - np.where(self.held, self._v_bytes, 0)
            + tile_bytes(w, self.bm, dim(w), self.padded)
        )
        slab = self.bm * (out_dim(w) * element_bytes(w) + 16)
        staged = np.where(np.asarray(self.v["store"]) == "staged", slab, 0)
        return np.maximum(np.maximum(ring, q), staged)

    @cached_property
    def fragments(self) -> Any:
        """Registers of sums, logits and held queries."""
        return fragments(self.w, self.m_tiles, self.bn, 1 + self.overlap, self.held)

    @cached_property
    def registers(self) -> Any:
        """What the compiler needs at least to keep everything in registers; fitted to reports."""
        each = np.asarray(self.v["rescale"]) == "each"  # o is scaled amid its products
        rows = 4 + 4 * each + self.overlap * np.where(self.held, 12, 24)
        narrow = _NARROW_COPIES * (narrowest_copy(self.w) < VECTOR)
        separate = 4 * (1 - self.joint)
        uneven = 4 * (dim(self.w) % 64 != 0)  # rows of 128 bytes share their addresses
        others = separate + uneven + narrow + _ADDRESS_REGISTERS
        return self.fragments + rows * self.m_tiles + others

    def may_spill(self, limit: Any) -> Any:
        """Whether the compiler, whose schedules differ, may spill some words all the same."""
        return self.registers > limit - _SCHEDULE_REGISTERS

    @cached_property
    def warp_intensity(self) -> Any:
        """Multiply-adds of a warp for each byte it reads from shared memory."""
        w, rows, size = self.w, 16 * self.m_tiles, element_bytes(self.w)
        read = self.bn * (w.d + w.value_dim) + np.where(self.held, 0, rows * w.d)
        return rows * self.bn * (w.d + w.value_dim) / (read * size)

    # -- which keys tiles meet ----------------------------------------------------------------

    @cached_property
    def mean_tiles(self) -> Any:
        """Tiles of keys that a CTA passes over, on average: whole tiles around what is visible."""
        w = self.w
        cut = w.causal * 1 + bool(window(w)) * 1
        keys = w.visible / w.s + cut * (self.bm / 2 + self.bn / 2)
        return np.minimum(keys / self.bn, ceil_div(w.kv_len, self.bn) * 1.0)

    @cached_property
    def computed(self) -> Any:
        """Query-key pairs of one head that the tiles compute."""
        return self.m_blocks * self.bm * self.mean_tiles * self.bn

    @cached_property
    def masked_share(self) -> Any:
        """Share of a CTA's tiles that a mask or the end of the keys cuts."""
        w = self.w
        tail = np.where(w.kv_len % self.bn != 0, 1.0, 0.0)
        edges = w.causal * 1 + bool(window(w)) * 1
        diagonal = edges * (self.bm / self.bn + 1)
        return np.minimum(1.0, np.maximum(diagonal, tail) / np.maximum(self.mean_tiles, 1e-9))

    def wave_kv_bytes(self, at_once: Any) -> Any:
        """Bytes of K and V of the heads that one wave of CTAs works on."""
        w = self.w
        together = np.minimum(self.v["heads"], w.b * w.h)
        strips = ceil_div(at_once, together * self.m_blocks)
        heads = np.minimum(np.minimum(strips * together, at_once), w.b * w.h)
        shared = np.maximum(1, ceil_div(heads * w.kv_heads, w.h))
        return shared * w.kv_len * (w.d + w.value_dim) * element_bytes(w)

    def launch(self) -> Launch:
        """Of one θ only."""
        grid, block = (int(self.blocks), 1, 1), (int(self.threads), 1, 1)
        return Launch("kt_kernel", grid, block, shared_bytes=int(self.shared_bytes))


# -- default --------------------------------------------------------------------------------

# Tiles that people use, best first: bm, bn, warps; later ones where registers or memory end.
_WIDE = ((128, 128, 4), (128, 96, 4), (128, 64, 4), (128, 48, 4), (128, 32, 4), (64, 64, 4))
_NARROW = ((64, 128, 4), (64, 96, 4), (64, 64, 4), (64, 48, 4), (64, 32, 4), (32, 32, 2),
           (32, 16, 2), (16, 16, 1))  # fmt: skip


def likely_values(
    w: Attention, target: Target, knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule]
) -> list[Mapping[str, Value]]:
    """Two CTAs an SM with the widest tile that leaves registers, then narrower ones, then one CTA.

    The first is the default. `knobs` holds the choices by name.
    """
    found: list[Mapping[str, Value]] = []
    filled = w.b * w.h * ceil_div(w.s, 128) >= 2 * target.cores and w.s > 64
    tiles = (*_WIDE, *_NARROW) if filled else (*_NARROW, *_WIDE)
    plans = (("joint", 2), ("separate", 1))
    for sure, blocks, (bm, bn, warps), (barriers, stages) in itertools.product(
        (True, False), (2, 1), tiles, plans
    ):
        if bm not in knobs["bm"] or bn not in knobs["bn"]:
            continue
        values: dict[str, Any] = {
            "bm": bm, "bn": bn, "stages": stages, "layout": "swizzle", "q": "shared",
            "prefetch": 128, "store": knobs["store"][0], "heads": 1, "rescale": "lazy",
            "overlap": False, "warps": warps, "blocks": blocks, "barriers": barriers,
        }  # fmt: skip
        spills = Plan(w, values).may_spill(register_limit(target, 32 * warps, blocks))
        if is_legal(rules, values) and sure is not bool(spills):
            found.append(values)
    assert found, f"no default for '{w}' on {target.name}"
    return found
