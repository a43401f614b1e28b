"""What the CUDA attention families for sm_80 share: whom they serve, tiles, registers, traffic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kt.spaces.cuda import VECTOR, alignment, element_bytes, refuses_cuda
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.target import Target
from kt.spaces.workload import Attention, Workload

from .problem import problem_defines

MOST_DIM = 256
"""Head dimensions beyond this leave too few registers for the sums of a row."""
MOST_LENGTH = 2**30
"""Positions of queries and keys are added in 32-bit integers."""
RESCALES = ("lazy", "each")
"""When sums follow a new maximum: once it has grown by 2^8, or with every tile of keys."""
MOST_COPIES = 64
"""Copies of one operand that a thread may start for a tile: more cost more than the math."""
COPY_BYTES = 4
"""The narrowest cp.async: rows begin at multiples of it."""


def refuses_mma_attention(workload: Workload, target: Target) -> str | None:
    """Why attention by mma.sync cannot serve the workload on the target, or None."""
    if not isinstance(workload, Attention):
        return "serves attention on CUDA"
    why = refuses_cuda(workload, target, ("fp16", "bf16"), "the tensor cores multiply")
    if why is not None:
        return why
    w = workload
    if w.acc != "fp32":
        return f"accumulates in fp32, not {w.acc}"
    for name, dim in (("D", w.d), ("value-dim", w.value_dim)):
        if dim > MOST_DIM:
            return f"serves {name} up to {MOST_DIM}, not {dim}"
        if dim * element_bytes(w) % COPY_BYTES:
            return f"copies whole words: {name}={dim} is odd"
    if max(w.s, w.kv_len) > MOST_LENGTH:
        return f"serves up to {MOST_LENGTH} queries or keys, not {max(w.s, w.kv_len)}"
    return None


def dim(w: Attention) -> int:
    """Head dimension of q and k as the matrix instructions take it."""
    return int(round_up(w.d, 16))


def out_dim(w: Attention) -> int:
    """Head dimension of v and o as the matrix instructions make it."""
    return int(round_up(w.value_dim, 8))


def window(w: Attention) -> int:
    """The window, 0 when it cuts nothing."""
    return w.window if w.window < w.kv_len else 0


def wide_rows(w: Attention) -> bool:
    """Whether every row of o begins at a multiple of 16 bytes."""
    return alignment(w.value_dim * element_bytes(w)) == 16


def tile_bytes(w: Attention, rows: Any, columns: int, padded: Any = False) -> Any:
    """Shared memory of a tile; padded rows have an odd number of 16-byte chunks."""
    row = columns * element_bytes(w)
    pad = VECTOR if row // VECTOR % 2 == 0 else 0
    return round_up(rows * (row + np.where(padded, pad, 0)), 128)


def narrowest_copy(w: Attention) -> int:
    """Bytes of one cp.async that rows of q, k and v allow."""
    return min(alignment(extent * element_bytes(w)) for extent in (w.d, w.value_dim))


def copies(w: Attention, rows: Any, threads: Any) -> Any:
    """cp.async of a thread for a tile of `rows` keys, of K or V, whichever has more of them."""
    size = element_bytes(w)
    pieces = max(
        -(-columns * size // alignment(exact * size))
        for columns, exact in ((dim(w), w.d), (out_dim(w), w.value_dim))
    )
    return ceil_div(rows * pieces, threads)


def fragments(w: Attention, m_tiles: Any, keys: Any, logits: Any, held: Any) -> Any:
    """Registers of sums of o, of `logits` sets of logits, and of q where it is held."""
    sums = m_tiles * (out_dim(w) // 8) * 4
    return sums + logits * m_tiles * (keys // 8) * 4 + np.where(held, m_tiles * dim(w) // 4, 0)


def attention_defines(w: Attention) -> dict[str, int | str]:
    """The stub's lines that say what is computed."""
    return {"KT_DTYPE": f"KT_{w.dtype.upper()}", **problem_defines(w)}


def rescale_define(values: Mapping[str, Any]) -> dict[str, int | str]:
    return {"KT_LAZY_RESCALE": int(values["rescale"] == "lazy")}
