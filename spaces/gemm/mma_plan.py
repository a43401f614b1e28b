"""What the knobs of `mma` imply: tiles, threads, memory, registers, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kt.spaces.cuda import acc_bytes, alignment, element_bytes
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.kernel import Launch
from kt.spaces.workload import Gemm

from .cuda import SplitWorkspace, reduce_launch, repack_launch, split_workspace

_STEP_BYTES = 32
"""Bytes of k that one matrix instruction takes, whatever the type."""
_ADDRESS_REGISTERS = 30


@dataclass(frozen=True)
class Operand:
    """One of A and B as it lies in memory."""

    rows: int  # of m or n
    k: int
    k_major: bool
    bytes: int  # of an element

    @property
    def pitch_bytes(self) -> int:
        return (self.k if self.k_major else self.rows) * self.bytes

    @property
    def transposed_by_repack(self) -> bool:
        """No matrix instruction reads bytes along rows."""
        return self.bytes == 1 and not self.k_major

    @property
    def copies(self) -> tuple[str, ...]:
        """Ways into shared memory: the widest cp.async that the rows' alignment allows, first."""
        if self.transposed_by_repack:
            return ("repack",)
        width = alignment(self.pitch_bytes)
        if width == 16:
            return ("async16",)
        return (f"async{width}", "shift", "repack") if width >= 4 else ("shift", "repack")

    @property
    def along_k(self) -> bool:
        """Whether k is contiguous in shared memory."""
        return self.k_major or self.transposed_by_repack

    @property
    def by_words(self) -> bool:
        """Read column by column in 32-bit words, which padding keeps free of conflicts."""
        return not self.along_k and self.bytes == 4

    def repacked_bytes(self, batch: int) -> int:
        outer, inner = (self.rows, self.k) if self.along_k else (self.k, self.rows)
        return int(batch * outer * round_up(inner * self.bytes, 16))


def operands(w: Gemm) -> tuple[Operand, Operand]:
    size = element_bytes(w)
    return (
        Operand(w.m, w.k, w.layout[0] == "n", size),
        Operand(w.n, w.k, w.layout[1] == "t", size),
    )


class Plan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, w: Gemm, values: Mapping[str, Any]) -> None:
        self.w, self.v = w, values
        self.a, self.b = operands(w)

    @property
    def bn(self) -> Any:
        return self.v["bn"]

    @property
    def bk(self) -> Any:
        return self.v["bk"]

    @cached_property
    def bm(self) -> Any:
        """Rows of C in a tile."""
        return self.v["bm"]

    @property
    def fresh_rows(self) -> Any:
        """Rows of A that a tile of k brings from memory."""
        return self.bm

    @property
    def k(self) -> Any:
        """Extent of k as the kernel walks it."""
        return self.w.k

    @cached_property
    def warps_mn(self) -> Any:
        return self.v["warps_m"] * self.v["warps_n"]

    @cached_property
    def threads(self) -> Any:
        return 32 * self.warps_mn * self.v["warps_k"]

    @cached_property
    def m_blocks(self) -> Any:
        return ceil_div(self.w.m, self.bm)

    @cached_property
    def n_blocks(self) -> Any:
        return ceil_div(self.w.n, self.bn)

    @cached_property
    def blocks(self) -> Any:
        """Tiles of C over all batches."""
        return self.m_blocks * self.n_blocks * self.w.batch

    @cached_property
    def k_tiles(self) -> Any:
        return ceil_div(self.k, self.bk)

    @cached_property
    def split_tiles(self) -> Any:
        """The most tiles of k that one CTA works on."""
        return ceil_div(self.k_tiles, self.v["split_k"])

    @cached_property
    def steps(self) -> Any:
        """Matrix instructions of one warp along a tile of k."""
        return self.bk * self.a.bytes // (_STEP_BYTES * self.v["warps_k"])

    @cached_property
    def stage_bytes(self) -> Any:
        return self._tile_bytes(self.a, self.bm) + self._tile_bytes(self.b, self.bn)

    def _tile_bytes(self, operand: Operand, rows: Any) -> Any:
        outer, inner = (rows, self.bk) if operand.along_k else (self.bk, rows)
        inner = inner * operand.bytes
        swizzled = (np.asarray(self.v["layout"]) == "swizzle") & (not operand.by_words)
        pad = np.where(swizzled, 0, 32 if operand.by_words else 16)
        return round_up(outer * (inner + pad), 128)

    @property
    def resident_bytes(self) -> Any:
        """Shared memory before the ring of stages."""
        return 0

    @cached_property
    def shared_bytes(self) -> Any:
        w = self.w
        slab = self.warps_mn * 16 * (self.bn // self.v["warps_n"] + 8) * acc_bytes(w)
        staged = np.where(np.asarray(self.v["store"]) == "staged", slab, 0)
        joined = self.v["warps_k"] // 2 * self.bm * self.bn * acc_bytes(w)
        ring = self.resident_bytes + self.v["stages"] * self.stage_bytes
        return np.maximum(ring, np.maximum(staged, joined))

    @cached_property
    def accumulators(self) -> Any:
        return self.bm * self.bn // (32 * self.warps_mn)

    @cached_property
    def registers(self) -> Any:
        """What the compiler needs to keep everything in registers; fitted to its reports."""
        v = self.v
        m_tiles, n_pairs = self.bm // v["warps_m"] // 16, ceil_div(self.bn // v["warps_n"], 16)
        copies = self.copy_registers(self.a, "a", self.bm)
        copies = copies + self.copy_registers(self.b, "b", self.bn)
        direct = np.where(np.asarray(v["store"]) == "direct", 4 * m_tiles, 0)
        rounding = 20 * (self.w.dtype == "tf32")
        doubles = 40 * (self.w.dtype == "int8" and bool(self.w.epilogue))
        sums = self.accumulators + self.accumulators // 16
        fragments = 4 * (m_tiles + n_pairs) * v["fragments"]
        return sums + fragments + copies + direct + rounding + doubles + _ADDRESS_REGISTERS

    @cached_property
    def most_pieces(self) -> Any:
        """Copies that a thread starts for one tile of the operand with more of them."""
        a, b = self.pieces(self.a, "a", self.bm), self.pieces(self.b, "b", self.bn)
        return np.maximum(a, b)

    @cached_property
    def warp_intensity(self) -> Any:
        """Multiply-adds of a warp for each byte it reads from shared memory."""
        m, n = self.bm // self.v["warps_m"], self.bn // self.v["warps_n"]
        return m * n / ((m + n) * self.a.bytes)

    def pieces(self, operand: Operand, name: str, rows: Any) -> Any:
        """Copies that a thread starts for one tile of an operand."""
        return ceil_div(rows * self.bk * operand.bytes, self.width(name) * self.threads)

    def width(self, name: str) -> Any:
        """Bytes of one copy of an operand."""
        copy = np.asarray(self.v[f"copy_{name}"])
        return np.where(copy == "async4", 4, np.where(copy == "async8", 8, 16))

    def width_or_zero(self, name: str) -> int:
        """The same for one θ; 0 when the operand goes through registers."""
        return 0 if self.v[f"copy_{name}"] == "shift" else int(self.width(name))

    def copy_registers(self, operand: Operand, name: str, rows: Any) -> Any:
        """Registers of addresses, and of vectors on their way into shared memory."""
        pieces = self.pieces(operand, name, rows)
        per_row = (self.bk if operand.along_k else rows) * operand.bytes // self.width(name)
        in_columns = (per_row > 0) & (self.threads % np.maximum(per_row, 1) == 0)
        alike = self.threads // np.maximum(per_row, 1) % 8 == 0
        each = np.where(in_columns, np.where(alike, 0, 1), 3)
        each = each + np.where(np.asarray(self.v[f"copy_{name}"]) == "shift", 12, 0)
        return each * pieces

    @cached_property
    def split(self) -> SplitWorkspace:
        """Of one θ only."""
        v = self.v
        return split_workspace(
            self.w, self.blocks, self.bm * self.bn, v["split_k"], v["split_mode"]
        )

    @cached_property
    def repacked_parts(self) -> tuple[int, ...]:
        """Bytes of each repacked operand, of one θ only."""
        operands = (self.a, "copy_a"), (self.b, "copy_b")
        return tuple(
            operand.repacked_bytes(self.w.batch)
            for operand, copy in operands
            if self.v[copy] == "repack"
        )

    @property
    def repacked(self) -> int:
        """Bytes of all repacked operands in the workspace, of one θ only."""
        return sum(round_up(size, 256) for size in self.repacked_parts)

    @property
    def workspace_bytes(self) -> int:
        """Of one θ only."""
        return self.split.bytes + self.repacked

    def repack_launch(self, vectors: int, early: bool) -> Launch:
        return repack_launch(vectors, early)

    def launches(self) -> tuple[Launch, ...]:
        """Of one θ only."""
        v = self.v
        vectors = sum(self.repacked_parts) // 16
        grid = (self.blocks * v["split_k"], 1, 1)
        early, block = bool(v["early"]), (self.threads, 1, 1)
        shared = int(self.shared_bytes)
        main = Launch("kt_kernel", grid, block, shared_bytes=shared, early=early)
        launches = [main]
        if vectors:
            launches.insert(0, self.repack_launch(vectors, early))
        if v["split_k"] > 1 and v["split_mode"] == "kernel":
            launches.append(reduce_launch(self.w, early))
        return tuple(launches)
