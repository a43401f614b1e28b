"""The opponent `numpy` of attention on the CPU: two batched products and a softmax in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.workload import Attention, Workload

from .reference import NUMPY

Array = NDArray[Any]

Operator = Callable[[Sequence[Array]], None]
"""Computes a workload on the arrays of its inputs and outputs, in argument order."""

_SCORE_BYTES = (2 * 2**20, 8 * 2**20, 64 * 2**20)
"""Scores computed at a time: few stay in cache, many make the products large."""
_TRIES = 3


def attention(workload: Workload) -> Operator:
    """The fastest way to part the scores, found at the first launch."""
    assert isinstance(workload, Attention)
    parts = dict.fromkeys(_part(workload, size) for size in _SCORE_BYTES)
    masks = _masks(workload, NUMPY[workload.dtype])
    ways = [_by_parts(workload, masks, *part) for part in parts]

    def launch(arrays: Sequence[Array]) -> None:
        if len(ways) > 1:
            ways[:] = [min(ways, key=lambda way: _seconds(way, arrays))]
        ways[0](arrays)

    return launch


def _seconds(way: Operator, arrays: Sequence[Array]) -> float:
    """The shortest of a few launches."""
    times = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        way(arrays)
        times.append(time.perf_counter() - begin)
    return min(times)


def _by_parts(w: Attention, masks: Array | None, heads: int, rows: int) -> Operator:
    """Attention by parts of some key/value heads and query rows: two batched products with the
    softmax in place between them. Scores live in memory that is kept between launches; masks are
    added, and nothing is skipped."""
    dtype, group = NUMPY[w.dtype], w.h // w.kv_heads
    scale = dtype(w.scale or w.d**-0.5)
    scores = np.empty((heads, group, rows, w.kv_len), dtype)
    scaled = np.empty((heads, group, rows, w.d), dtype)
    means = np.empty((heads, group, rows, w.value_dim), dtype)

    def launch(arrays: Sequence[Array]) -> None:
        q, o = (_by_group(w, x, group) for x in (arrays[0], arrays[3]))
        k, v = (_by_group(w, x, 1) for x in arrays[1:3])
        lse = arrays[4].reshape(w.b, w.kv_heads, group, w.s) if w.lse else None
        for b, head, row in _parts(w, heads, rows):
            these, part = slice(head, head + heads), slice(row, row + rows)
            s, x, y = (
                scratch[: min(heads, w.kv_heads - head), :, : min(rows, w.s - row)]
                for scratch in (scores, scaled, means)
            )
            np.multiply(q[b, these, :, part], scale, out=x)
            np.matmul(x, k[b, these].swapaxes(-1, -2), out=s)
            if w.softcap:
                np.multiply(s, dtype(1 / w.softcap), out=s)
                np.tanh(s, out=s)
                np.multiply(s, dtype(w.softcap), out=s)
            if masks is not None:
                np.add(s, masks[part], out=s)
            top, total = _softmax(s)
            np.matmul(s, v[b, these], out=y)
            np.divide(y, np.where(total > 0, total, dtype(1)), out=o[b, these, :, part])
            if lse is not None:
                with np.errstate(divide="ignore"):
                    lse[b, these, :, part] = (top + np.log(total))[..., 0]

    return launch


def _softmax(s: Array) -> tuple[Array, Array]:
    """Scores become exp(score - maximum of the row); returns the maxima and the sums."""
    top = s.max(axis=-1, keepdims=True)
    np.maximum(top, np.finfo(s.dtype).min, out=top)  # a row that sees nothing stays at -inf
    np.subtract(s, top, out=s)
    np.exp(s, out=s)
    return top, s.sum(axis=-1, keepdims=True)


def _part(w: Attention, size: int) -> tuple[int, int]:
    """Key/value heads and query rows whose scores take up to `size` bytes."""
    row = w.h // w.kv_heads * w.kv_len * np.dtype(NUMPY[w.dtype]).itemsize
    rows = min(w.s, max(1, size // row))
    return min(w.kv_heads, max(1, size // (row * rows))), rows


def _parts(w: Attention, heads: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Batch entry, first key/value head and first query row of each pass."""
    for b in range(w.b):
        for head in range(0, w.kv_heads, heads):
            for row in range(0, w.s, rows):
                yield b, head, row


def _by_group(w: Attention, x: Array, group: int) -> Array:
    """The operand as [B, key/value heads, group, length, dim], a view."""
    if w.layout == "bhsd":
        return x.reshape(w.b, w.kv_heads, group, *x.shape[2:])
    return x.reshape(w.b, x.shape[1], w.kv_heads, group, x.shape[3]).transpose(0, 2, 3, 1, 4)


def _masks(w: Attention, dtype: type[np.floating[Any]]) -> Array | None:
    """[S, kv_len], 0 where a query sees a key and -inf where not; None where all see all."""
    if not w.causal and not w.window:
        return None
    last, keys = np.arange(w.s)[:, None] + w.kv_len - w.s, np.arange(w.kv_len)[None]
    seen = keys <= last if w.causal else np.full((w.s, w.kv_len), True)
    if w.window:
        seen = seen & (keys > last - w.window)
    return np.where(seen, dtype(0), dtype(-np.inf))
