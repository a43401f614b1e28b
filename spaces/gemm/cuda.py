"""What the CUDA GEMM families share: the stub of the workload, split-K, raster, occupancy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.family import Columns, Rule
from kt.spaces.kernel import Launch
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.workload import DTYPE_BYTES, Gemm, Workload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

OLDEST = 80
"""cp.async and the matrix instructions used here begin with sm_80."""
MAX_REGISTERS = 255
MAX_THREADS = 1024
MAX_BLOCKS = 2**31 - 1
CTA_SHARED_BYTES = 1024
"""Shared memory that the system takes of every CTA."""
VECTOR = 16
"""Bytes of the widest memory access."""

SPLIT_K = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
SPLIT_MODES = ("last", "atomic", "kernel")
GROUPS = (1, 2, 4, 8, 16, 32)
HINTS = ("none", "first", "last")
_SPLIT_WAVES = 4
"""A product with this many waves of tiles keeps the device busy without split-K."""


def ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)


def round_up(a: Any, b: Any) -> Any:
    return ceil_div(a, b) * b


def alignment(size: int, most: int = VECTOR) -> int:
    """The largest power of two, at most `most`, that divides `size`."""
    return min(size & -size, most)


def sm_version(target: Target) -> int:
    """80 for sm_80, 90 for sm_90a."""
    return int("".join(c for c in target.arch if c.isdigit()))


def refuses_cuda_gemm(
    workload: Workload, target: Target, dtypes: Sequence[str], reach: str
) -> str | None:
    """Why a CUDA GEMM family for `dtypes` cannot serve the workload, or None."""
    if not isinstance(workload, Gemm) or target.kind != "cuda":
        return "serves gemm on CUDA"
    if sm_version(target) < OLDEST:
        return f"needs sm_{OLDEST} or later, {target.name} is {target.arch}"
    if workload.dtype not in dtypes:
        return f"{reach} {', '.join(dtypes)}, not {workload.dtype}"
    return None


def as_gemm(workload: Workload) -> Gemm:
    """The workload of a family that has not refused it."""
    assert isinstance(workload, Gemm)
    return workload


def element_bytes(w: Gemm) -> int:
    return DTYPE_BYTES[w.dtype]


def acc_bytes(w: Gemm) -> int:
    return 8 if w.dtype == "fp64" else 4


def output_bytes(w: Gemm) -> int:
    return DTYPE_BYTES[w.out_dtype]


def output_group(w: Gemm) -> int:
    """Outputs in one store of at most 16 bytes that every row of C allows."""
    return alignment(w.n * output_bytes(w)) // output_bytes(w)


def problem_defines(w: Gemm) -> dict[str, int | str]:
    """The stub's lines that say what is computed."""
    ops = w.epilogue
    return {
        "KT_DTYPE": f"KT_{w.dtype.upper()}",
        "KT_M": w.m, "KT_N": w.n, "KT_K": w.k, "KT_BATCH": w.batch,
        "KT_TRANS_A": int(w.layout[0] == "t"), "KT_TRANS_B": int(w.layout[1] == "t"),
        "KT_HAS_EPILOGUE": int(bool(ops)),
        "KT_EPILOGUE": " ".join(f"KT_OP_{op.upper()}" for op in ops),
        **{f"KT_HAS_{op.upper()}": int(op in ops) for op in ("bias", "residual", "scale")},
    }  # fmt: skip


# -- rules ----------------------------------------------------------------------------------


def rule(name: str, ok: Callable[[Columns], Any], why: str | Callable[[Any], str]) -> Rule:
    """A rule whose reason is a text, or a function of the point's values."""
    text = why if callable(why) else lambda _: why
    return Rule(name, lambda v: np.asarray(ok(v), dtype=bool), text)


def is_legal(rules: Sequence[Rule], values: Mapping[str, Any]) -> bool:
    """Whether the values of one θ break no rule."""
    columns = {name: np.array([value]) for name, value in values.items()}
    return all(bool(r.ok(columns)[0]) for r in rules)


# -- split-K --------------------------------------------------------------------------------


def most_splits(k_tiles: int, smallest_grid: int, target: Target) -> int:
    """Splits worth trying: none where the largest tiles already keep the device busy."""
    return 1 if smallest_grid >= _SPLIT_WAVES * target.cores else k_tiles


def split_knobs(most: int) -> list[Knob]:
    """Split-K factors up to `most`, and where their sums meet."""
    splits = tuple(s for s in SPLIT_K if s <= most)
    modes = SPLIT_MODES if len(splits) > 1 else SPLIT_MODES[:1]
    return [Ordinal("fusion", "split_k", splits), Categorical("fusion", "split_mode", modes)]


def split_rules(blocks: Callable[[Columns], Any], k_tiles: Callable[[Columns], Any]) -> list[Rule]:
    """`blocks`: tiles of C over all batches; `k_tiles`: tiles along k."""
    return [
        rule(
            "split-k-tiles",
            lambda v: v["split_k"] <= k_tiles(v),
            lambda v: f"{v['split_k']} splits of {k_tiles(v)} tiles along k",
        ),
        rule(
            "split-mode",
            lambda v: (v["split_k"] > 1) | (v["split_mode"] == SPLIT_MODES[0]),
            lambda v: f"without split-K its mode is {SPLIT_MODES[0]}",
        ),
        rule(
            "grid",
            lambda v: blocks(v) * v["split_k"] <= MAX_BLOCKS,
            lambda v: f"{blocks(v) * v['split_k']} CTAs exceed {MAX_BLOCKS}",
        ),
    ]


def split_waves_rule(target: Target, blocks: Callable[[Columns], Any]) -> Rule:
    """No split-K where its tiles fill the device several times without it."""
    full = _SPLIT_WAVES * target.cores
    return rule(
        "split-waves",
        lambda v: (v["split_k"] == 1) | (blocks(v) < full),
        lambda v: f"{blocks(v)} tiles fill {target.cores} SMs without split-K",
    )


@dataclass(frozen=True)
class SplitWorkspace:
    """Bytes that split-K needs (the layout is that of `split_k.cuh`)."""

    counters: int
    sums: int
    zeroed: int

    @property
    def bytes(self) -> int:
        return self.counters + self.sums


def split_workspace(
    w: Gemm, blocks: int, tile_sums: int, split_k: int, mode: str
) -> SplitWorkspace:
    """`blocks` tiles of C over all batches, of `tile_sums` accumulators each."""
    if split_k == 1:
        return SplitWorkspace(0, 0, 0)
    if mode == "kernel":
        sums = split_k * w.batch * w.m * w.n * acc_bytes(w)
        return SplitWorkspace(0, round_up(sums, 256), 0)
    counters = round_up(blocks * 4, 256)
    sums = blocks * tile_sums * acc_bytes(w) * (split_k if mode == "last" else 1)
    sums = round_up(sums, 256)
    return SplitWorkspace(counters, sums, counters + (sums if mode == "atomic" else 0))


def split_traffic(w: Gemm, values: Columns) -> Floats:
    """Bytes of sums that split-K writes and reads."""
    sums = float(w.batch * w.m * w.n * acc_bytes(w))
    split = np.asarray(values["split_k"])
    return np.where(split > 1, 2.0 * sums * split, 0.0)


def split_defines(values: Mapping[str, Any]) -> dict[str, int | str]:
    return {
        "KT_SPLIT_K": values["split_k"],
        "KT_SPLIT_MODE": f"KT_SPLIT_{values['split_mode'].upper()}",
    }


def reduce_launch(w: Gemm) -> Launch:
    """The kernel that adds the sums of all splits."""
    threads = 128
    blocks = ceil_div(w.batch * w.m * w.n, output_group(w) * threads)
    return Launch("kt_reduce", (blocks, 1, 1), (threads, 1, 1))


# -- raster ---------------------------------------------------------------------------------


def raster_knobs(m_blocks: int, n_blocks: int) -> list[Knob]:
    """`m_blocks` and `n_blocks`: the most tiles along each axis."""
    flat = min(m_blocks, n_blocks) == 1
    groups = tuple(g for g in GROUPS if g == 1 or g < 2 * max(m_blocks, n_blocks))
    return [
        Categorical("perm", "raster", ("m",) if flat else ("m", "n")),
        Ordinal("perm", "group", (1,) if flat else groups),
    ]


def raster_rules(
    m_blocks: Callable[[Columns], Any], n_blocks: Callable[[Columns], Any]
) -> list[Rule]:
    """Only orders that differ."""

    def across(v: Any) -> Any:
        return np.where(np.asarray(v["raster"]) == "m", m_blocks(v), n_blocks(v))

    return [
        rule(
            "raster-group",
            lambda v: (v["group"] == 1) | (v["group"] < 2 * across(v)),
            lambda v: f"groups of {v['group']} tiles where there are {int(across(v))}",
        ),
        rule(
            "raster-line",
            lambda v: (
                (np.minimum(m_blocks(v), n_blocks(v)) > 1)
                | ((v["raster"] == "m") & (v["group"] == 1))
            ),
            "the tiles are one line, which has one order",
        ),
    ]


def raster_defines(values: Mapping[str, Any]) -> dict[str, int | str]:
    return {"KT_RASTER_M": int(values["raster"] == "m"), "KT_GROUP": values["group"]}


def wave_footprint(
    values: Columns, m_blocks: Any, n_blocks: Any, bm: Any, bn: Any, at_once: Any
) -> Floats:
    """Rows of A plus columns of B that one wave of `at_once` CTAs touches."""
    by_m = np.asarray(values["raster"]) == "m"
    across = np.minimum(np.where(by_m, m_blocks, n_blocks), values["group"])
    along = ceil_div(np.maximum(np.minimum(at_once, m_blocks * n_blocks), 1), across)
    rows, columns = np.where(by_m, across, along), np.where(by_m, along, across)
    found: Floats = (rows * bm + columns * bn).astype(np.float64)
    return found


# -- residency ------------------------------------------------------------------------------


def register_limit(target: Target, threads: Any, blocks: Any) -> Any:
    """Registers that the compiler may give a thread when `blocks` CTAs must fit one SM."""
    limit = target.registers_sm // (threads * blocks) // 8 * 8
    return np.minimum(limit, MAX_REGISTERS)


def residency_rules(
    target: Target,
    threads: Callable[[Columns], Any],
    shared: Callable[[Columns], Any],
    registers: Callable[[Columns], Any],
) -> list[Rule]:
    """CTAs must fit the SM as often as knob `blocks` promises, without spilling."""

    def limit(v: Any) -> Any:
        return register_limit(target, threads(v), v["blocks"])

    def shared_limit(v: Any) -> Any:
        each = target.shared_bytes_sm // v["blocks"] - CTA_SHARED_BYTES
        return np.minimum(each, target.shared_bytes)

    return [
        rule(
            "shared",
            lambda v: shared(v) <= shared_limit(v),
            lambda v: (
                f"shared memory {int(shared(v))} B exceeds {int(shared_limit(v))} B of "
                f"{target.arch} with {v['blocks']} CTAs an SM"
            ),
        ),
        rule(
            "threads",
            lambda v: threads(v) * v["blocks"] <= target.threads_sm,
            lambda v: f"{int(threads(v) * v['blocks'])} threads exceed {target.threads_sm} an SM",
        ),
        rule(
            "registers",
            lambda v: registers(v) <= limit(v),
            lambda v: f"about {int(registers(v))} registers a thread exceed {int(limit(v))}",
        ),
    ]


def occupancy(target: Target, threads: Any, shared: Any, registers: Any) -> Ints:
    """CTAs that one SM holds."""
    by_shared = target.shared_bytes_sm // (shared + CTA_SHARED_BYTES)
    by_registers = target.registers_sm // (
        round_up(np.minimum(registers, MAX_REGISTERS), 8) * threads
    )
    found: Ints = np.clip(
        np.minimum(np.minimum(by_shared, by_registers), target.threads_sm // threads), 1, 32
    )
    return found
