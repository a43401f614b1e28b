"""What a workload's text alone says: shapes of its arguments, and its outputs in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shapes = list[tuple[int, ...]]

EXTRA = ("bias", "residual", "scale", "shift", "tensor_scale")  # in the order of the arguments


def shapes(text: str) -> tuple[Shapes, Shapes]:
    """Of the inputs and of the outputs, in argument order."""
    operator, size, words = _read(text)
    inputs, outputs = _SHAPES[operator](size, words)
    chain = words.get("epilogue", "").split("+")
    out = outputs[0]
    extra = {name: out if name == "residual" else out[-1:] for name in EXTRA} | {
        "tensor_scale": (1,)
    }
    return [*inputs, *(extra[name] for name in EXTRA if name in chain)], outputs


def expected(text: str, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of a workload, from its inputs in argument order."""
    operator, size, words = _read(text)
    chain = words.get("epilogue", "").split("+")
    names = [name for name in EXTRA if name in chain]
    arrays = [one.astype(np.float64) for one in inputs]
    count = len(arrays) - len(names)
    extra = dict(zip(names, arrays[count:], strict=True))
    out, *others = _OUTPUTS[operator](size, words, *arrays[:count])
    for step in filter(None, chain):
        out = _step(step, out, extra)
    return [out, *others]


def _read(text: str) -> tuple[str, str, dict[str, str]]:
    operator, size, *words = text.split()
    return operator, size, dict(word.split("=") for word in words)


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("x")
    return int(first), int(second or first)


def _step(step: str, x: Array, extra: dict[str, Array]) -> Array:
    if step in ("bias", "residual", "shift"):
        return x + extra[step]
    if step in ("scale", "tensor_scale"):
        return x * extra[step]
    if step == "relu":
        return np.maximum(x, 0)
    if step == "gelu":
        return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x / (1 + np.exp(-x))


# -- gemm -----------------------------------------------------------------------------------------


def _gemm_shapes(size: str, words: dict[str, str]) -> tuple[Shapes, Shapes]:
    m, n, k = map(int, size.split("x"))
    batch = (int(words["batch"]),) if "batch" in words else ()
    layout = words.get("layout", "nn")
    a = (m, k) if layout[0] == "n" else (k, m)
    b = (k, n) if layout[1] == "n" else (n, k)
    return [(*batch, *a), (*batch, *b)], [(*batch, m, n)]


def _gemm(size: str, words: dict[str, str], a: Array, b: Array) -> list[Array]:
    layout = words.get("layout", "nn")
    a = a.swapaxes(-1, -2) if layout[0] == "t" else a
    return [a @ (b.swapaxes(-1, -2) if layout[1] == "t" else b)]


# -- conv2d ---------------------------------------------------------------------------------------


def _conv_steps(words: dict[str, str]) -> list[tuple[int, int]]:
    """Stride, padding and dilation."""
    given = (("stride", "1"), ("pad", "0"), ("dilation", "1"))
    return [_pair(words.get(name, usual)) for name, usual in given]


def _conv_shapes(size: str, words: dict[str, str]) -> tuple[Shapes, Shapes]:
    image, _, filters = size.partition(",")
    n, h, w, c = map(int, image.split("x"))
    k, r, s = map(int, filters.split("x"))
    stride, pad, dilation = _conv_steps(words)
    p, q = (
        (extent + 2 * pad[i] - (taps - 1) * dilation[i] - 1) // stride[i] + 1
        for i, (extent, taps) in enumerate(((h, r), (w, s)))
    )
    return [(n, h, w, c), (k, r, s, c // int(words.get("groups", "1")))], [(n, p, q, k)]


def _conv(size: str, words: dict[str, str], x: Array, w: Array) -> list[Array]:
    (_, p, q, k), groups = _conv_shapes(size, words)[1][0], int(words.get("groups", "1"))
    stride, pad, dilation = _conv_steps(words)
    x = np.pad(x, ((0, 0), (pad[0],) * 2, (pad[1],) * 2, (0, 0)))
    y = np.zeros((len(x), p, q, groups, k // groups))
    x = x.reshape(*x.shape[:3], groups, -1)
    w = w.reshape(groups, k // groups, *w.shape[1:])
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            i, j = r * dilation[0], s * dilation[1]
            rows = slice(i, i + (p - 1) * stride[0] + 1, stride[0])
            columns = slice(j, j + (q - 1) * stride[1] + 1, stride[1])
            y += np.einsum("npqgc,gkc->npqgk", x[:, rows, columns], w[:, :, r, s])
    return [y.reshape(*y.shape[:3], k)]


# -- attention ------------------------------------------------------------------------------------


def _attention_shapes(size: str, words: dict[str, str]) -> tuple[Shapes, Shapes]:
    b, h, s, d = map(int, size.split("x"))
    heads, length = int(words.get("kv-heads", h)), int(words.get("kv-len", s))
    value = int(words.get("value-dim", d))
    found = [(b, s, h, d), (b, length, heads, d), (b, length, heads, value), (b, s, h, value)]
    if words.get("layout") == "bhsd":
        found = [(x[0], x[2], x[1], x[3]) for x in found]
    return found[:3], [found[3], *([(b, h, s)] if "lse" in words else [])]


def _attention(size: str, words: dict[str, str], q: Array, k: Array, v: Array) -> list[Array]:
    if words.get("layout") != "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    group, (s, d), length = q.shape[1] // k.shape[1], q.shape[2:], k.shape[2]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    logits = (q @ k.swapaxes(2, 3)) * (float(words.get("scale", "0")) or d**-0.5)
    if cap := float(words.get("softcap", "0")):
        logits = cap * np.tanh(logits / cap)
    i, j = np.ogrid[length - s : length, :length]
    if "causal" in words:
        logits = np.where(j <= i, logits, -np.inf)
    if window := int(words.get("window", "0")):
        logits = np.where(j > i - window, logits, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(logits).sum(-1))
    weights = np.exp(logits - np.where(np.isinf(lse), 0, lse)[..., None])
    o = weights @ v
    o = o if words.get("layout") == "bhsd" else o.swapaxes(1, 2)
    return [o, *([lse] if "lse" in words else [])]


_SHAPES = {"gemm": _gemm_shapes, "conv2d": _conv_shapes, "attention": _attention_shapes}
_OUTPUTS = {"gemm": _gemm, "conv2d": _conv, "attention": _attention}
