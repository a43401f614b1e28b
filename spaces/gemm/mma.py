"""`mma`: tensor-core matrix product for sm_80 and later (source: `mma.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kt.spaces.family import Columns, Family, Rule
from kt.spaces.kernel import Kernel, Launch, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Gemm, Workload

from .cuda import (
    GROUPS,
    HINTS,
    Floats,
    SplitWorkspace,
    acc_bytes,
    alignment,
    ceil_div,
    element_bytes,
    most_splits,
    occupancy,
    output_bytes,
    output_group,
    problem_defines,
    raster_defines,
    raster_knobs,
    raster_rules,
    reduce_launch,
    refuses_cuda_gemm,
    register_limit,
    residency_rules,
    round_up,
    rule,
    split_defines,
    split_knobs,
    split_rules,
    split_traffic,
    split_waves_rule,
    split_workspace,
    wave_footprint,
)

_BLOCK = (16, 32, 48, 64, 96, 128, 160, 192, 256)
_STEP_BYTES = 32
"""Bytes of k that one matrix instruction takes, whatever the type."""
_BLOCK_K_BYTES = (32, 64, 128, 256)
_STAGES = (2, 3, 4, 5, 6, 8, 10)
_WARPS = 8
_STORES = ("direct", "wide", "staged")
_REPACK_THREADS = 256
_COPY_BYTES = {"async16": 16, "async8": 8, "async4": 4, "shift": 0, "repack": 16}
_ADDRESS_REGISTERS = 40
_MOST_PIECES = 32
"""Copies of one operand that a thread may start for a tile: more cost more than the math."""


@dataclass(frozen=True)
class _Operand:
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


def _operands(w: Gemm) -> tuple[_Operand, _Operand]:
    size = element_bytes(w)
    return (
        _Operand(w.m, w.k, w.layout[0] == "n", size),
        _Operand(w.n, w.k, w.layout[1] == "t", size),
    )


class _Plan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, w: Gemm, values: Mapping[str, Any]) -> None:
        self.w, self.v = w, values
        self.a, self.b = _operands(w)
        self.bm, self.bn, self.bk = values["bm"], values["bn"], values["bk"]

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
        return ceil_div(self.w.k, self.bk)

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

    def _tile_bytes(self, operand: _Operand, rows: Any) -> Any:
        outer, inner = (rows, self.bk) if operand.along_k else (self.bk, rows)
        inner = inner * operand.bytes
        swizzled = (np.asarray(self.v["layout"]) == "swizzle") & (not operand.by_words)
        pad = np.where(swizzled, 0, 32 if operand.by_words else 16)
        return round_up(outer * (inner + pad), 128)

    @cached_property
    def shared_bytes(self) -> Any:
        w = self.w
        slab = self.warps_mn * 16 * (self.bn // self.v["warps_n"] + 8) * acc_bytes(w)
        staged = np.where(np.asarray(self.v["store"]) == "staged", slab, 0)
        joined = self.v["warps_k"] // 2 * self.bm * self.bn * acc_bytes(w)
        return np.maximum(self.v["stages"] * self.stage_bytes, np.maximum(staged, joined))

    @cached_property
    def accumulators(self) -> Any:
        return self.bm * self.bn // (32 * self.warps_mn)

    @cached_property
    def registers(self) -> Any:
        """What the compiler needs to keep everything in registers; fitted to its reports."""
        v = self.v
        m_tiles, n_pairs = self.bm // v["warps_m"] // 16, ceil_div(self.bn // v["warps_n"], 16)
        copies = self._copy_registers(self.a, "a", self.bm)
        copies = copies + self._copy_registers(self.b, "b", self.bn)
        direct = np.where(np.asarray(v["store"]) == "direct", m_tiles, 0)
        rounding = 12 * (self.w.dtype == "tf32")
        doubles = 40 * (self.w.dtype == "int8" and bool(self.w.epilogue))
        sums = self.accumulators + self.accumulators // 16
        fragments = 4 * (m_tiles + n_pairs) * v["fragments"]
        return sums + fragments + copies + direct + rounding + doubles + _ADDRESS_REGISTERS

    def pieces(self, operand: _Operand, name: str, rows: Any) -> Any:
        """Copies that a thread starts for one tile of an operand."""
        return ceil_div(rows * self.bk * operand.bytes, self._width(name) * self.threads)

    def _width(self, name: str) -> Any:
        copy = np.asarray(self.v[f"copy_{name}"])
        return np.where(copy == "async4", 4, np.where(copy == "async8", 8, 16))

    def _copy_registers(self, operand: _Operand, name: str, rows: Any) -> Any:
        """Registers of addresses, and of vectors on their way into shared memory."""
        pieces = self.pieces(operand, name, rows)
        per_row = (self.bk if operand.along_k else rows) * operand.bytes // self._width(name)
        in_columns = (per_row > 0) & (self.threads % np.maximum(per_row, 1) == 0)
        alike = self.threads // np.maximum(per_row, 1) % 8 == 0
        each = np.where(in_columns, np.where(alike, 0, 1), 3)
        each = each + np.where(np.asarray(self.v[f"copy_{name}"]) == "shift", 11, 0)
        return each * pieces + 2 * (np.asarray(self.v[f"hint_{name}"]) != "none")

    @cached_property
    def split(self) -> SplitWorkspace:
        """Of one θ only."""
        v = self.v
        return split_workspace(
            self.w, self.blocks, self.bm * self.bn, v["split_k"], v["split_mode"]
        )

    @cached_property
    def repacked(self) -> int:
        """Bytes of repacked operands, of one θ only."""
        return sum(
            round_up(operand.repacked_bytes(self.w.batch), 256)
            for operand, copy in ((self.a, "copy_a"), (self.b, "copy_b"))
            if self.v[copy] == "repack"
        )

    def launches(self) -> tuple[Launch, ...]:
        """Of one θ only."""
        v, w = self.v, self.w
        vectors = sum(
            operand.repacked_bytes(w.batch) // 16
            for operand, copy in ((self.a, "copy_a"), (self.b, "copy_b"))
            if v[copy] == "repack"
        )
        grid = (self.blocks * v["split_k"], 1, 1)
        main = Launch("kt_kernel", grid, (self.threads, 1, 1), shared_bytes=int(self.shared_bytes))
        launches = [main]
        if vectors:
            blocks = ceil_div(vectors, _REPACK_THREADS)
            launches.insert(0, Launch("kt_repack", (blocks, 1, 1), (_REPACK_THREADS, 1, 1)))
        if v["split_k"] > 1 and v["split_mode"] == "kernel":
            launches.append(reduce_launch(w))
        return tuple(launches)


class GemmMma(Family):
    """Tiles of C by mma.sync, operands through a ring of cp.async stages."""

    name = "mma"
    operator = "gemm"
    target_kind = "cuda"
    empty: Mapping[str, str] = {}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return refuses_cuda_gemm(
            workload, target, ("fp16", "bf16", "tf32", "int8"), "the tensor cores multiply"
        )

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = _gemm(workload)
        a, b = _operands(w)
        bms, bns = _blocks(w.m), _blocks(w.n)
        bks = _block_ks(w)
        grid = ceil_div(w.m, bms[-1]) * ceil_div(w.n, bns[-1]) * w.batch
        k_tiles = ceil_div(w.k, bks[0])
        by_words_only = a.by_words and b.by_words
        return [
            Ordinal("tile", "bm", bms),
            Ordinal("tile", "bn", bns),
            Ordinal("tile", "bk", bks),
            Ordinal("mem", "stages", tuple(s for s in _STAGES if s == 2 or s <= k_tiles + 1)),
            Categorical("mem", "layout", ("padded",) if by_words_only else ("swizzle", "padded")),
            Categorical("mem", "copy_a", a.copies),
            Categorical("mem", "copy_b", b.copies),
            Categorical("mem", "hint_a", HINTS),
            Categorical("mem", "hint_b", HINTS),
            Categorical("mem", "store", _stores(w)),
            *raster_knobs(ceil_div(w.m, bms[0]), ceil_div(w.n, bns[0])),
            *split_knobs(most_splits(k_tiles, grid, target)),
            Ordinal("unroll", "fragments", (1, 2)),
            Ordinal("unroll", "k", (1, 2, 4)),
            Ordinal("map", "warps_m", (1, 2, 4, 8)),
            Ordinal("map", "warps_n", (1, 2, 4, 8)),
            Ordinal("map", "warps_k", (1, 2, 4)),
            Ordinal("map", "blocks", (1, 2, 3, 4)),
            Categorical("sync", "stagger", (False, True)),
        ]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = _gemm(workload)

        def plan(v: Any) -> _Plan:
            return _Plan(w, v)

        return [
            rule(
                "warps",
                lambda v: plan(v).threads <= 32 * _WARPS,
                lambda v: f"{plan(v).threads // 32} warps exceed {_WARPS}",
            ),
            rule(
                "warp-tile",
                lambda v: (
                    (v["bm"] % (16 * v["warps_m"]) == 0) & (v["bn"] % (8 * v["warps_n"]) == 0)
                ),
                lambda v: (
                    f"{v['warps_m']} x {v['warps_n']} warps do not divide {v['bm']} x {v['bn']} "
                    "into tiles of 16 x 8"
                ),
            ),
            rule(
                "steps",
                lambda v: plan(v).steps >= 1,
                lambda v: f"bk {v['bk']} is too short for {v['warps_k']} warps along k",
            ),
            rule(
                "fragments",
                lambda v: (v["fragments"] == 1) | (plan(v).steps >= 2),
                "one step along k has no next fragments to load",
            ),
            rule(
                "stagger",
                lambda v: (
                    ~v["stagger"] | (plan(v).steps >= 2)
                    if isinstance(v["stagger"], np.ndarray)
                    else not v["stagger"] or plan(v).steps >= 2
                ),
                "one step along k has no middle for the copies of B",
            ),
            rule(
                "stages",
                lambda v: (v["stages"] == 2) | (v["stages"] <= plan(v).split_tiles + 1),
                lambda v: f"{v['stages']} stages for {plan(v).split_tiles} tiles along k",
            ),
            rule(
                "unroll",
                lambda v: v["k"] <= plan(v).split_tiles,
                lambda v: f"unrolled {v['k']} times, {plan(v).split_tiles} tiles along k",
            ),
            rule(
                "copies",
                lambda v: _most_pieces(plan(v)) <= _MOST_PIECES,
                lambda v: f"{int(_most_pieces(plan(v)))} copies a thread exceed {_MOST_PIECES}",
            ),
            rule(
                "wide-stores",
                lambda v: (v["store"] != "wide") | (v["bn"] // v["warps_n"] % _exchange(w) == 0),
                lambda v: (
                    f"16-byte stores need warp tiles of {_exchange(w)} columns, "
                    f"not {v['bn'] // v['warps_n']}"
                ),
            ),
            *raster_rules(lambda v: plan(v).m_blocks, lambda v: plan(v).n_blocks),
            *split_rules(lambda v: plan(v).blocks, lambda v: plan(v).k_tiles),
            split_waves_rule(target, lambda v: plan(v).blocks),
            *residency_rules(
                target,
                lambda v: plan(v).threads,
                lambda v: plan(v).shared_bytes,
                lambda v: plan(v).registers,
            ),
        ]

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return _default(_gemm(workload), target, self)

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = _gemm(workload)
        p = _Plan(w, values)
        resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
        ctas = p.blocks * values["split_k"]
        waves = ctas / (resident * target.cores)
        size = element_bytes(w)
        loaded = (p.bm + p.bn) * p.bk * size
        footprint = wave_footprint(
            values, p.m_blocks, p.n_blocks, p.bm, p.bn, resident * target.cores
        )
        padded = p.m_blocks * p.bm * p.n_blocks * p.bn * round_up(w.k, p.bk)
        found = {
            "threads": p.threads,
            "shared_bytes": p.shared_bytes,
            "registers": p.registers,
            "register_share": p.registers / register_limit(target, p.threads, values["blocks"]),
            "accumulators": p.accumulators,
            "resident_ctas": resident,
            "resident_warps": resident * p.threads // 32,
            "waves": waves,
            "wave_efficiency": waves / np.ceil(waves),
            "padding": padded / (w.m * w.n * w.k),
            "intensity": p.bm * p.bn / ((p.bm + p.bn) * size),
            "warp_intensity": _warp_intensity(p),
            "bytes_in_flight": resident * (values["stages"] - 1) * loaded,
            "wave_bytes": footprint * w.k * size / values["split_k"],
            "wave_l2": footprint * p.bk * size * values["stages"] / target.l2_bytes,
            "l2_bytes": ctas * p.split_tiles * loaded,
            "split_bytes": split_traffic(w, values),
            "k_tiles": p.split_tiles,
        }
        return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = _gemm(workload)
        v = {name: value for _, name, value in theta.items()}
        p = _Plan(w, v)
        workspace = p.split.bytes + p.repacked
        defines = {
            **problem_defines(w),
            "KT_ACC_HALF": int(w.acc == "fp16"),
            "KT_BM": v["bm"], "KT_BN": v["bn"], "KT_BK": v["bk"],
            "KT_STAGES": v["stages"], "KT_SWIZZLE": int(v["layout"] == "swizzle"),
            **_copy_defines(v, "a"), **_copy_defines(v, "b"),
            "KT_STORE": f"KT_STORE_{str(v['store']).upper()}",
            **raster_defines(v), **split_defines(v),
            "KT_FRAGMENT_STAGES": v["fragments"], "KT_UNROLL": v["k"],
            "KT_WARPS_M": v["warps_m"], "KT_WARPS_N": v["warps_n"], "KT_WARPS_K": v["warps_k"],
            "KT_BLOCKS": v["blocks"], "KT_STAGGER": int(v["stagger"]),
            "KT_EXPECT_SHARED_BYTES": int(p.shared_bytes),
            "KT_EXPECT_WORKSPACE_BYTES": workspace,
            "KT_EXPECT_ZEROED_BYTES": p.split.zeroed,
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("mma.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source,
            launches=p.launches(), workspace_bytes=workspace, zeroed_bytes=p.split.zeroed,
        )  # fmt: skip


def _gemm(workload: Workload) -> Gemm:
    assert isinstance(workload, Gemm)
    return workload


def _copy_defines(v: Mapping[str, Any], operand: str) -> dict[str, int | str]:
    copy, name = v[f"copy_{operand}"], operand.upper()
    return {
        f"KT_COPY_{name}": _COPY_BYTES[copy],
        f"KT_REPACK_{name}": int(copy == "repack"),
        f"KT_HINT_{name}": HINTS.index(v[f"hint_{operand}"]),
    }


def _blocks(extent: int) -> tuple[int, ...]:
    """Tile extents up to the first that covers `extent`."""
    first = next((i for i, b in enumerate(_BLOCK) if b >= extent), len(_BLOCK) - 1)
    return _BLOCK[: first + 1]


def _block_ks(w: Gemm) -> tuple[int, ...]:
    choices = tuple(b // element_bytes(w) for b in _BLOCK_K_BYTES)
    first = next((i for i, b in enumerate(choices) if b >= w.k), len(choices) - 1)
    return choices[: first + 1]


def _stores(w: Gemm) -> tuple[str, ...]:
    aligned = output_group(w) * output_bytes(w) == 16
    return _STORES if aligned else tuple(s for s in _STORES if s != "wide")


def _exchange(w: Gemm) -> int:
    """Columns of a warp's tile that are put together in one 16-byte store per lane."""
    return 32 if output_bytes(w) == 2 else 16


def _most_pieces(p: _Plan) -> Any:
    return np.maximum(p.pieces(p.a, "a", p.bm), p.pieces(p.b, "b", p.bn))


def _warp_intensity(p: _Plan) -> Any:
    """Multiply-adds of a warp for each byte it reads from shared memory."""
    m, n = p.bm // p.v["warps_m"], p.bn // p.v["warps_n"]
    return m * n / ((m + n) * p.a.bytes)


# Tiles that people use, largest first: bm, bn, warps_m, warps_n.
_SHAPES = (
    (128, 256, 2, 4), (256, 128, 4, 2), (128, 128, 2, 2), (128, 64, 2, 2), (64, 128, 2, 2),
    (64, 64, 2, 2), (32, 128, 1, 4), (128, 32, 4, 1), (32, 64, 1, 4), (64, 32, 2, 2),
    (16, 128, 1, 4), (16, 64, 1, 4), (128, 16, 4, 1), (64, 16, 4, 1), (32, 32, 2, 2),
    (16, 32, 1, 2), (32, 16, 2, 1), (16, 16, 1, 1),
)  # fmt: skip


def _default(w: Gemm, target: Target, family: GemmMma) -> Mapping[str, Value]:
    """The tile with the least modelled time, and as many stages as shared memory holds."""
    knobs = {k.name: k.choices for k in family.knobs(w, target)}
    rules = family.rules(w, target)
    best: tuple[float, dict[str, Value]] | None = None
    for bm, bn, warps_m, warps_n in _SHAPES:
        if bm not in knobs["bm"] or bn not in knobs["bn"]:
            continue
        found = _complete(w, target, knobs, rules, bm, bn, warps_m, warps_n)
        if found and (best is None or found[0] < best[0]):
            best = found
    assert best is not None, f"no default tile for '{w}' on {target.name}"
    return best[1]


def _complete(
    w: Gemm, target: Target, knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule],
    bm: int, bn: int, warps_m: int, warps_n: int,
) -> tuple[float, dict[str, Value]] | None:  # fmt: skip
    """(modelled time, values) of a tile: split-K fills the SMs, stages fill shared memory."""
    blocks = ceil_div(w.m, bm) * ceil_div(w.n, bn) * w.batch
    bk = max(b for b in knobs["bk"] if b * element_bytes(w) <= 128 or b == knobs["bk"][0])
    if bm * bn >= 128 * 256:
        bk = min(bk, max(64 // element_bytes(w), knobs["bk"][0]))
    k_tiles = ceil_div(w.k, bk)
    wanted = min(target.cores // blocks, k_tiles // 4) if blocks < target.cores else 1
    split = max((s for s in knobs["split_k"] if s <= max(wanted, 1)), default=1)
    values: dict[str, Any] = {
        "bm": bm, "bn": bn, "bk": bk, "layout": knobs["layout"][0],
        "copy_a": _default_copy(knobs["copy_a"], w), "copy_b": _default_copy(knobs["copy_b"], w),
        "hint_a": "none", "hint_b": "none", "store": "staged",
        "raster": "m", "group": 1, "split_k": split, "split_mode": "last",
        "fragments": 2, "k": 1, "warps_m": warps_m, "warps_n": warps_n, "warps_k": 1,
        "blocks": 1, "stagger": False,
    }  # fmt: skip
    p = _Plan(w, values)
    if int(p.steps) < 2:
        values["fragments"] = 1
    values["group"] = max(
        g for g in GROUPS if g in knobs["group"] and (g == 1 or (g < 2 * p.m_blocks and g <= 8))
    )
    if min(p.m_blocks, p.n_blocks) == 1:
        values["group"] = 1
    for stages in sorted((s for s in knobs["stages"] if s <= 5), reverse=True):
        values["stages"] = stages
        if all(bool(np.all(r.ok({k: np.array([x]) for k, x in values.items()}))) for r in rules):
            return _modelled_time(w, target, values), values
    return None


def _default_copy(copies: Sequence[str], w: Gemm) -> str:
    """Unaligned operands are repacked when they are read often enough to pay for it."""
    worth = min(w.m, w.n) >= 512 or copies == ("repack",)
    return "repack" if worth and "repack" in copies else copies[0]


def _modelled_time(w: Gemm, target: Target, values: Mapping[str, Any]) -> float:
    """Waves of tiles, each limited by the tensor cores or by reading its operands from L2."""
    p = _Plan(w, values)
    ctas = p.blocks * values["split_k"]
    waves = ceil_div(ctas, target.cores)
    depth = p.split_tiles * p.bk
    math = p.bm * p.bn * depth
    moved = (p.bm + p.bn) * depth * 60 * p.a.bytes / 2
    return float(waves * (max(math, moved) + 40_000))
