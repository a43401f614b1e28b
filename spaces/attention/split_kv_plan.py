"""What the knobs of `split_kv` imply, and its default θ."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from kt.spaces.cuda import is_legal
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.family import Rule
from kt.spaces.kernel import Launch
from kt.spaces.target import Target
from kt.spaces.theta import Value
from kt.spaces.workload import Attention

from .cuda import dim, fragments, out_dim, tile_bytes, window
from .problem import group

ROW_TILE = 16
"""Rows of one matrix instruction."""
_COMBINE_THREADS = 128
_CHUNK_OVERHEAD = 6
"""Chunks in whose time a CTA starts and combines, roughly; it only ranks defaults."""


def packed_rows(w: Attention) -> int:
    """Rows that share keys: the queries of all heads of a group."""
    return w.s * group(w)


class SplitPlan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, w: Attention, values: Mapping[str, Any]) -> None:
        self.w, self.v = w, values

    @cached_property
    def bm(self) -> Any:
        return ROW_TILE * self.v["m_tiles"]

    @cached_property
    def rows(self) -> Any:
        """Rows of a tile that can exist."""
        return np.minimum(self.bm, packed_rows(self.w))

    @cached_property
    def row_tiles(self) -> Any:
        return ceil_div(packed_rows(self.w), self.bm)

    @cached_property
    def tiles(self) -> Any:
        return self.row_tiles * self.w.kv_heads * self.w.b

    @cached_property
    def chunks(self) -> Any:
        """The most chunks of keys that a tile of rows sees."""
        w = self.w
        keys = min(w.kv_len, window(w) + w.s) if window(w) and w.causal else w.kv_len
        return ceil_div(keys, self.v["keys"])

    @cached_property
    def split_chunks(self) -> Any:
        return ceil_div(self.chunks, self.v["splits"])

    @cached_property
    def warp_chunks(self) -> Any:
        return np.maximum(1, ceil_div(self.split_chunks, self.v["warps"]))

    @cached_property
    def threads(self) -> Any:
        return 32 * self.v["warps"]

    @cached_property
    def held(self) -> Any:
        return np.asarray(self.v["q"]) == "registers"

    @cached_property
    def ring_bytes(self) -> Any:
        """Rings of all warps of a CTA."""
        w, keys = self.w, self.v["keys"]
        chunk = tile_bytes(w, keys, dim(w)) + tile_bytes(w, keys, out_dim(w))
        return self.v["warps"] * self.v["stages"] * chunk

    @cached_property
    def shares_bytes(self) -> Any:
        """Shared memory in which the parts of a tile are weighed."""
        return np.where(np.asarray(self.v["splits"]) > 1, self.v["splits"] * self.rows * 4, 0)

    @cached_property
    def shared_bytes(self) -> Any:
        w = self.w
        sums = self.v["warps"] * self.rows * ((out_dim(w) + 4) * 4 + 8)
        shares = np.where(np.asarray(self.v["combine"]) == "last", self.shares_bytes, 0)
        ring = tile_bytes(w, self.bm, dim(w)) + self.ring_bytes
        return np.maximum(ring, np.maximum(sums, shares))

    @cached_property
    def registers(self) -> Any:
        """What the compiler needs to keep everything in registers; fitted to its reports."""
        return fragments(self.w, self.v["m_tiles"], self.v["keys"], 1, self.held) + 48

    # -- of one θ only ------------------------------------------------------------------------

    @cached_property
    def counter_bytes(self) -> int:
        last = self.v["splits"] > 1 and self.v["combine"] == "last"
        return int(round_up(self.tiles * 4, 256)) if last else 0

    @cached_property
    def combine_bytes(self) -> Any:
        """Sums and maxima of all parts, which are written and read."""
        part_rows = np.where(
            np.asarray(self.v["splits"]) > 1, self.tiles * self.v["splits"] * self.rows, 0
        )
        return part_rows * (out_dim(self.w) * 4 + 16)

    @cached_property
    def workspace_bytes(self) -> int:
        return int(round_up(self.counter_bytes + int(self.combine_bytes), 256))

    def launches(self) -> tuple[Launch, ...]:
        v, early = self.v, bool(self.v["early"])
        grid, block = (int(self.tiles * v["splits"]), 1, 1), (int(self.threads), 1, 1)
        main = Launch("kt_kernel", grid, block, shared_bytes=int(self.shared_bytes), early=early)
        if v["splits"] == 1 or v["combine"] != "kernel":
            return (main,)
        combine = Launch(
            "kt_combine", (int(self.tiles), 1, 1), (_COMBINE_THREADS, 1, 1),
            shared_bytes=int(self.shares_bytes), early=early,
        )  # fmt: skip
        return (main, combine)


# -- default --------------------------------------------------------------------------------


def likely_values(
    w: Attention, target: Target, knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule]
) -> list[Mapping[str, Value]]:
    """Warps, stages and splits by modelled time, two CTAs an SM where they fit.

    The first is the default.
    """
    for blocks, q in itertools.product((2, 1), ("registers", "shared")):
        base: dict[str, Any] = {
            "m_tiles": 1, "keys": knobs["keys"][0], "q": q, "prefetch": 128, "warm": False,
            "order": "splits", "combine": "last", "rescale": "lazy", "blocks": blocks,
            "early": False,
        }  # fmt: skip
        stages = [s for s in knobs["stages"] if s <= 4]
        found = [
            {**base, "stages": s, "warps": warps, "splits": splits}
            for s, warps, splits in itertools.product(stages, (4, 2, 1), knobs["splits"])
        ]
        legal = [values for values in found if is_legal(rules, values)]
        if legal:
            return sorted(legal, key=lambda values: _modelled_time(w, target, values))
    raise AssertionError(f"no default for '{w}' on {target.name}")


def _modelled_time(w: Attention, target: Target, values: Mapping[str, Any]) -> tuple[float, float]:
    """(chunks of keys that a warp waits for, over all waves of CTAs; minus those in flight)."""
    p = SplitPlan(w, values)
    waves = ceil_div(p.tiles * values["splits"], values["blocks"] * target.cores)
    rounds = waves * (p.warp_chunks + _CHUNK_OVERHEAD) + values["splits"] / 16
    return float(rounds), -float(values["warps"] * (values["stages"] - 1))
