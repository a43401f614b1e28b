"""What every attention kernel is told of the problem: extents, strides, the mask, the numerics."""

from __future__ import annotations

import math

from kt.spaces.workload import Attention, Workload


def as_attention(workload: Workload) -> Attention:
    """The workload, as families declare their methods for any one."""
    assert isinstance(workload, Attention)
    return workload


def group(w: Attention) -> int:
    """Query heads that share one key/value head; query head h uses key/value head h // group."""
    return w.h // w.kv_heads


def scale(w: Attention) -> float:
    """The factor of q·k before softcap and softmax; 0 in the workload means 1/sqrt(D)."""
    return w.scale or 1 / math.sqrt(w.d)


def shift(w: Attention) -> int:
    """The key on the diagonal of query 0: query i sees keys j <= i + shift when causal, and
    j > i + shift - window with a window. Negative when there are fewer keys than queries."""
    return w.kv_len - w.s


def strides(w: Attention, length: int, heads: int, dim: int) -> tuple[int, int, int]:
    """Elements between batch entries, heads and positions of a [B, length, heads, dim] operand."""
    if w.layout == "bshd":
        return length * heads * dim, dim, heads * dim
    return heads * length * dim, length * dim, dim


def problem_defines(w: Attention) -> dict[str, int | str]:
    """The stub's lines that say what is computed, whatever the device."""
    operands = {
        "Q": (w.s, w.h, w.d), "K": (w.kv_len, w.kv_heads, w.d),
        "V": (w.kv_len, w.kv_heads, w.value_dim), "O": (w.s, w.h, w.value_dim),
    }  # fmt: skip
    steps = {
        f"KT_{name}_{axis}_STRIDE": step
        for name, extents in operands.items()
        for axis, step in zip(("BATCH", "HEAD", "ROW"), strides(w, *extents), strict=True)
    }
    return {
        "KT_B": w.b, "KT_H": w.h, "KT_KV_HEADS": w.kv_heads, "KT_GROUP": group(w),
        "KT_S": w.s, "KT_KV_LEN": w.kv_len, "KT_D": w.d, "KT_VALUE_DIM": w.value_dim,
        "KT_CAUSAL": int(w.causal), "KT_WINDOW": w.window,
        "KT_SCALE": repr(float(scale(w))), "KT_SOFTCAP": repr(float(w.softcap)),
        "KT_LSE": int(w.lse), "KT_BHSD": int(w.layout == "bhsd"),
        **steps,
    }  # fmt: skip
