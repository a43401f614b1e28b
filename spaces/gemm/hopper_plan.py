"""What the knobs of a product on wgmma imply: tiles, registers, memory, work, launches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from kt.spaces.cuda import VECTOR, acc_bytes, alignment, output_bytes
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.kernel import Launch, TensorMap
from kt.spaces.target import Target
from kt.spaces.workload import MOST_UNPROMOTED, Gemm

from .cuda import SplitWorkspace, reduce_launch, repack_launch, split_workspace
from .mma_plan import Operand, operands

WARPGROUP = 128
MOST_AT_LAUNCH = 248
MOST_REGISTERS = 232
"""Of a consumer, unless its accumulators need more."""
LARGE_REGISTERS = 240
MANY_SUMS = 160
INSTRUCTION_REGISTERS = 26
"""What one instruction needs at launch besides its accumulators, says the compiler."""
PROMOTIONS = (128, MOST_UNPROMOTED)
"""Elements of k after which sums of fp8 products go on in fp32."""
OTHER_REGISTERS = 28
"""Of a consumer besides accumulators and the epilogue's operands."""
SWIZZLE = 128  # bytes of the widest
_PAIRED = 2
"""CTAs of a cluster that find room on every device: its SMs come in pairs."""
_UNGROUPED = 8
"""One SM of so many is left over where SMs come in groups that hold whole larger clusters."""


class HopperPlan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    arguments = (0, 1)
    """Where the operands of the product are among the kernel's pointers."""
    streams = False
    """Whether the time is that of reading an operand once."""

    def __init__(self, w: Gemm, target: Target, values: Mapping[str, Any]) -> None:
        self.w, self.target, self.v = w, target, values
        self.a, self.b = operands(w)

    # -- knobs, looked at only by what depends on them ----------------------------------------

    @property
    def bm(self) -> Any:
        return self.v["bm"]

    @property
    def bn(self) -> Any:
        return self.v["bn"]

    @property
    def bk(self) -> Any:
        return self.v["bk"]

    @property
    def consumers(self) -> Any:
        return self.v["consumers"]

    @property
    def blocks_sm(self) -> Any:
        return self.v["blocks"]

    @property
    def pingpong(self) -> Any:
        return np.asarray(self.v["pingpong"])

    @property
    def persistent(self) -> Any:
        return np.asarray(self.v["persistent"])

    # -- threads and registers --------------------------------------------------------------

    @cached_property
    def exchange(self) -> Any:
        """Whether the producer is a whole warpgroup, which gives registers to the consumers."""
        return np.asarray(self.v["producer"]) == "warpgroup"

    @cached_property
    def producer_warps(self) -> Any:
        return np.where(self.exchange, 4, 1)

    @cached_property
    def threads(self) -> Any:
        return WARPGROUP * self.consumers + 32 * self.producer_warps

    @cached_property
    def readers(self) -> Any:
        """Warpgroups that share the rows of a tile."""
        return np.where(self.pingpong, 1, self.consumers)

    @cached_property
    def group_m(self) -> Any:
        """Rows of a warpgroup."""
        return self.bm // self.readers

    @cached_property
    def accumulators(self) -> Any:
        return self.group_m * self.bn // WARPGROUP

    @cached_property
    def all_accumulators(self) -> Any:
        """Those of the instructions besides the sums that they are added to in fp32."""
        return self.accumulators * (2 if promotes(self.w) else 1)

    @cached_property
    def launch_registers(self) -> Any:
        """Of every thread when a CTA starts; an SM gives them to four warps at a time."""
        threads = self.blocks_sm * round_up(self.threads, WARPGROUP)
        return np.minimum(self.target.registers_sm // threads // 8 * 8, MOST_AT_LAUNCH)

    @cached_property
    def producer_registers(self) -> Any:
        tight = (self.consumers == 2) & ((self.all_accumulators > MANY_SUMS) | (self.blocks_sm > 1))
        return np.where(self.consumers == 3, 32, np.where(tight, 24, 40))

    @cached_property
    def consumer_registers(self) -> Any:
        """What a consumer has once the producer gave its own away."""
        c = self.consumers
        all_registers = (c + 1) * self.launch_registers
        most = np.where(self.all_accumulators > MANY_SUMS, LARGE_REGISTERS, MOST_REGISTERS)
        share = (all_registers - self.producer_registers) // c // 8 * 8
        return np.where(self.exchange, np.minimum(share, most), self.launch_registers)

    @cached_property
    def needed_registers(self) -> Any:
        """What a consumer keeps in registers; fitted to the compiler's reports.

        Parts of split-K that are on their way take what is left beyond that.
        """
        v, ops = self.v, self.w.epilogue
        columns = sum(op in ops for op in ("bias", "scale", "shift"))
        held = np.where(self.by_boxes | self.by_rows, self.held_columns, 2)
        residual = np.where(self.by_boxes | self.by_rows, 8 * ("residual" in ops), 0)
        joined = 24 * ((np.asarray(v["split_k"]) > 1) & (np.asarray(v["split_mode"]) != "kernel"))
        shared = np.where(self.exchange, 0, 8)  # the producer's own are not told apart
        sums = self.all_accumulators
        return sums + OTHER_REGISTERS + columns * held + residual + joined + shared

    @property
    def held_columns(self) -> Any:
        """Columns of a thread that are stored at once; held for all blocks of 64 rows."""
        wide = np.where(self.by_boxes, self.box_n, self.strip_n)
        return np.where(self.group_m > 64, wide // 4, wide // 8)

    @cached_property
    def parts_n(self) -> Any:
        """Instructions side by side along n: the registers at launch must hold one."""
        return np.where(self.bn // 2 + INSTRUCTION_REGISTERS <= self.launch_registers, 1, 2)

    # -- memory -----------------------------------------------------------------------------

    @cached_property
    def strided(self) -> Any:
        """Whether rows of A that start anywhere are read in place, class by class."""
        return np.asarray(self.v.get("copy_a", "repack")) == "strided"

    @cached_property
    def swizzle_b(self) -> Any:
        """Bytes of a row of B's slabs."""
        return self.row_bytes if self.b.along_k else self.v["swizzle_b"]

    @property
    def row_bytes(self) -> Any:
        """Bytes of a row of K-major slabs."""
        return np.minimum(self.bk * self.a.bytes, SWIZZLE)

    @cached_property
    def loaded_n(self) -> Any:
        """Columns of B in a stage: whole slabs."""
        return self.bn if self.b.along_k else round_up(self.bn, self.swizzle_b // self.b.bytes)

    @cached_property
    def loaded_bytes(self) -> Any:
        return (self.bm + self.loaded_n) * self.bk * self.a.bytes

    @property
    def fills_boxes(self) -> Any:
        """Whether the instructions that fill boxes or rows of C take the columns."""
        return self.bn % 16 == 0

    @cached_property
    def box_n(self) -> Any:
        """Columns of the product in a box of C; it has 64 rows."""
        return np.where(self.bn % 64 == 0, 64, np.where(self.bn % 32 == 0, 32, 16))

    @property
    def box_row(self) -> Any:
        """Bytes of a row of a box in C."""
        return self.box_n * output_bytes(self.w)

    @cached_property
    def strip_n(self) -> Any:
        """Columns of a strip of rows that are stored at once."""
        return np.where(self.bn % 128 == 0, 128, self.box_n)

    @cached_property
    def by_boxes(self) -> Any:
        """Whether C is stored by the TMA."""
        return np.asarray(self.v["store"]) == "tma"

    @cached_property
    def by_rows(self) -> Any:
        return np.asarray(self.v["store"]) == "rows"

    @cached_property
    def boxes(self) -> Any:
        """Boxes of a warpgroup's tile of C."""
        return self.group_m // 64 * (self.bn // self.box_n)

    @cached_property
    def shared_bytes(self) -> Any:
        size = output_bytes(self.w)
        boxes = self.v["buffers"] * 64 * self.box_n * size
        strip = np.where(self.by_rows, 64 * (self.strip_n * size + 16), 0)
        store = self.consumers * np.where(self.by_boxes, boxes, strip)
        sums = np.where(self.v["cluster_k"] > 1, self.bm * self.bn * acc_bytes(self.w), 0)
        stages = self.v["stages"]
        return stages * round_up(self.loaded_bytes, 1024) + store + sums + 8 * (2 * stages + 2)

    # -- work -------------------------------------------------------------------------------

    @cached_property
    def cluster(self) -> Any:
        """CTAs of a cluster."""
        return self.v["cluster_m"] * self.v["cluster_n"] * self.v["cluster_k"]

    @cached_property
    def classes(self) -> Any:
        """Classes of A's rows, each with tiles of its own."""
        return np.where(self.strided, row_classes(self.w), 1)

    @cached_property
    def m_blocks(self) -> Any:
        """Tiles of a class along m."""
        return ceil_div(ceil_div(self.w.m, self.classes), self.bm)

    @cached_property
    def n_blocks(self) -> Any:
        return ceil_div(self.w.n, self.bn)

    @cached_property
    def m_clusters(self) -> Any:
        return ceil_div(self.m_blocks, self.v["cluster_m"]) * self.classes

    @cached_property
    def n_clusters(self) -> Any:
        return ceil_div(self.n_blocks, self.v["cluster_n"])

    @cached_property
    def tiles(self) -> Any:
        """Tiles of C over all batches, with those beyond its edges that clusters add."""
        wide, high = self.v["cluster_m"], self.v["cluster_n"]
        return self.m_clusters * wide * self.n_clusters * high * self.w.batch

    @cached_property
    def units(self) -> Any:
        """What clusters take one after the other."""
        return self.m_clusters * self.n_clusters * self.w.batch * self.v["split_k"]

    @cached_property
    def k_tiles(self) -> Any:
        return ceil_div(self.w.k + np.where(self.strided, most_shift(self.w), 0), self.bk)

    @cached_property
    def k_parts(self) -> Any:
        """Parts of k that different CTAs work on."""
        return self.v["split_k"] * self.v["cluster_k"]

    @cached_property
    def split_tiles(self) -> Any:
        """The most tiles of k of one CTA in one unit."""
        return ceil_div(self.k_tiles, self.k_parts)

    @cached_property
    def at_once(self) -> Any:
        """CTAs that the device holds, in whole clusters."""
        held = self.target.cores * self.blocks_sm // self.cluster
        return np.maximum(held, 1) * self.cluster

    @cached_property
    def ctas(self) -> Any:
        work = self.units * self.cluster
        return np.where(self.persistent, np.minimum(work, self.at_once), work)

    @cached_property
    def turns(self) -> Any:
        """Units that the busiest CTA works on, one after the other."""
        return ceil_div(self.units * self.cluster, self.ctas)

    @cached_property
    def repacked(self) -> tuple[Any, int]:
        """Bytes of the copies of A and B in the workspace; 0 for what is read in place."""
        return np.where(self.strided, 0, self._copied(self.a)), self._copied(self.b)

    def _copied(self, operand: Operand) -> int:
        return operand.repacked_bytes(self.w.batch) if unaligned(operand) else 0

    # -- of one θ only ----------------------------------------------------------------------

    @cached_property
    def split(self) -> SplitWorkspace:
        v = self.v
        parts, sums = int(self.tiles) * int(self.readers), int(self.group_m) * self.bn
        return split_workspace(self.w, parts, sums, v["split_k"], v["split_mode"])

    @property
    def workspace_bytes(self) -> int:
        return self.split.bytes + sum(int(round_up(size, 256)) for size in self.repacked)

    @cached_property
    def repack(self) -> Launch | None:
        """The kernel that copies operands, if any."""
        vectors = int(sum(self.repacked)) // VECTOR
        return repack_launch(vectors, self.v["early"]) if vectors else None

    def launches(self) -> tuple[Launch, ...]:
        v = self.v
        launches = [self.repack] if self.repack else []
        launches.append(
            Launch(
                "kt_kernel", (int(self.ctas), 1, 1), (int(self.threads), 1, 1),
                (int(self.cluster), 1, 1), int(self.shared_bytes), v["early"],
                resident=bool(v["persistent"]) and int(self.cluster) > _PAIRED, maps=self.maps(),
            )
        )  # fmt: skip
        if v["split_k"] > 1 and v["split_mode"] == "kernel":
            launches.append(reduce_launch(self.stored, early=v["early"]))
        return tuple(launches)

    @property
    def stored(self) -> Gemm:
        """The product whose C lies in memory."""
        return self.w

    @property
    def box(self) -> tuple[int, int]:
        """Columns and rows of a box of C in memory."""
        return int(self.box_n), 64

    def maps(self) -> tuple[TensorMap, ...]:
        """Of A, B and, where the TMA stores it, C; of A and C each class of rows."""
        v, w = self.v, self.stored
        first, second = self.arguments
        copied_a, copied_b = map(int, self.repacked)
        swizzle_a = int(self.row_bytes) if self.a.along_k else SWIZZLE
        a = self._class_maps() if self.strided else (
            self._map(first, self.a, copied_a, self.split.bytes, self.bm // v["cluster_n"],
                      v["cluster_n"], swizzle_a),
        )  # fmt: skip
        at_b = self.split.bytes + round_up(copied_a, 256)
        b = self._map(second, self.b, copied_b, at_b, self.bn // v["cluster_m"],
                      v["cluster_m"], int(self.swizzle_b))  # fmt: skip
        if v["store"] != "tma":
            return *a, b
        row, classes = w.n * output_bytes(w), int(self.classes)
        c = (
            TensorMap(
                len(w.inputs()), first * row, w.out_dtype,
                (w.n, ceil_div(w.m - first, classes), w.batch), (classes * row, w.m * row),
                (*self.box, 1), self.box[0] * output_bytes(w),
            )
            for first in range(classes)
        )  # fmt: skip
        return *a, b, *c

    def _class_maps(self) -> tuple[TensorMap, ...]:
        """For each class c the rows c, c + q, c + 2 q … of A, q being the number of classes.

        A map begins where row c does, rounded down to 16 bytes: k is shifted by the difference.
        """
        w, pitch, size, q = self.w, self.a.pitch_bytes, self.a.bytes, row_classes(self.w)
        swizzle, rows = int(self.row_bytes), self.bm // self.v["cluster_n"]
        return tuple(
            TensorMap(
                0, c * pitch // 16 * 16, w.dtype,
                (w.k + c * pitch % 16 // size, ceil_div(w.m - c, q), w.batch),
                (q * pitch, round_up(w.m * pitch, 16)), (swizzle // size, rows, 1), swizzle,
            )
            for c in range(q)
        )  # fmt: skip

    def _map(
        self, argument: int, operand: Operand, copied: int, offset: int, rows: int, shares: int,
        swizzle: int,
    ) -> TensorMap:  # fmt: skip
        """An operand [batch, outer, inner]; a CTA of a cluster loads `rows` or a share of k."""
        inner, outer = (operand.k, operand.rows) if operand.along_k else (operand.rows, operand.k)
        pitch = round_up(inner * operand.bytes, 16)
        height = rows if operand.along_k else self.bk // shares
        return TensorMap(
            -1 if copied else argument, offset if copied else 0, self.w.dtype,
            (inner, outer, self.w.batch), (pitch, outer * pitch),
            (swizzle // operand.bytes, height, 1), swizzle,
        )  # fmt: skip


def surely_at_once(target: Target, blocks: Any, cluster: Any) -> Any:
    """CTAs, `blocks` an SM, that a device holds in whole clusters however its SMs are grouped."""
    slots = target.cores * blocks
    held = np.where(cluster > _PAIRED, slots - slots // _UNGROUPED, slots) // cluster
    return np.maximum(held, 1) * cluster


def unaligned(operand: Operand) -> bool:
    """Whether rows start where the TMA cannot read them, or run where no instruction does."""
    return operand.pitch_bytes % VECTOR != 0 or operand.transposed_by_repack


def row_classes(w: Gemm) -> int:
    """Residue classes of A's rows whose members start alike, a multiple of 16 bytes apart.

    1 where A is read as it lies, or must be repacked. The k of a class is shifted, and that of B
    with it, so that k must be B's outer dimension: along the inner one boxes begin at multiples of
    16 bytes. B has no classes: their columns of C would not be stored side by side.
    """
    a, b = operands(w)
    classes = VECTOR // alignment(a.pitch_bytes)
    batches_alike = w.batch == 1 or w.m * a.pitch_bytes % VECTOR == 0
    served = a.k_major and not b.along_k and batches_alike and classes <= w.m
    return classes if served else 1


def most_shift(w: Gemm) -> int:
    """Elements of k by which a class of A's rows is shifted at most."""
    return (VECTOR - VECTOR // row_classes(w)) // operands(w)[0].bytes


def promotes(w: Gemm) -> bool:
    """Whether sums leave the tensor cores on the way, which add products of fp8 less exactly."""
    return w.dtype in ("fp8_e4m3", "fp8_e5m2") and w.acc == "fp32"
