"""Opponents of an attention: FlashAttention 3 and 2, cuDNN, and FlexAttention through Inductor.

None but FlashAttention's own interface has a log-sum-exp or takes an output: outputs come from
torch's allocator, and a workload's `lse` is left out, to the opponents' gain.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from kt.spaces.workload import Attention

from .vendor_torch import Form, TorchOpponent, Unavailable, compiled, import_torch

Sets = Sequence[Sequence[int]]

_OWN_OUTPUT = "output allocated by torch"
_FA3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")
"""Where FlashAttention 3 may be: built from source, or the wheel of its forward part."""


def cudnn_attention(workload: Attention, sets: Sets, stream: Any) -> TorchOpponent:
    """scaled_dot_product_attention restricted to cuDNN."""
    torch = import_torch(workload)
    what = f"scaled_dot_product_attention, {_OWN_OUTPUT}"
    return TorchOpponent(torch, workload, sets, what, {"cuDNN": _cudnn(torch, workload)})


def fa2(workload: Attention, sets: Sets, stream: Any) -> TorchOpponent:
    """FlashAttention 2 as it is in torch."""
    torch = import_torch(workload)
    what = f"FlashAttention 2, {_OWN_OUTPUT}"
    return TorchOpponent(torch, workload, sets, what, {"flash": _flash(torch, workload)})


def best_sdpa(workload: Attention, sets: Sets) -> TorchOpponent:
    """The faster of cuDNN and FlashAttention 2, by measurement."""
    torch = import_torch(workload)
    forms: dict[str, Form] = {}
    for name, make in (("cuDNN", _cudnn), ("flash", _flash)):
        try:
            forms[name] = make(torch, workload)
        except Unavailable:
            continue
    if not forms:
        raise Unavailable("scaled_dot_product_attention has no such mask")
    what = f"scaled_dot_product_attention, {_OWN_OUTPUT}"
    return TorchOpponent(torch, workload, sets, what, forms)


def fa3(workload: Attention, sets: Sets, stream: Any) -> TorchOpponent:
    """FlashAttention 3, where it is installed, with its best split of the keys."""
    torch = import_torch(workload)
    module = next(filter(None, map(_imported, _FA3_MODULES)), None)
    if module is None:
        raise Unavailable("FlashAttention 3 is not installed: pip install fa3-fwd")
    options: dict[str, Any] = {
        "softmax_scale": workload.scale or None, "causal": workload.causal,
        "softcap": workload.softcap, "window_size": _window(workload),
    }  # fmt: skip

    def form(**splits: Any) -> Form:
        def launch(named: Any) -> Any:
            q, k, v = (_ordered(workload, named[name], "bshd") for name in "qkv")
            return module.flash_attn_func(q, k, v, **options, **splits)

        return launch

    forms = {f"num_splits={n}": form(num_splits=n) for n in (1, 0)}  # 0: its own heuristic
    if workload.kv_heads < workload.h:
        packed = {f"{name} pack_gqa": form(num_splits=i, pack_gqa=True)
                  for i, name in ((1, "num_splits=1"), (0, "num_splits=0"))}  # fmt: skip
        forms |= packed
    what = f"{module.__name__}.flash_attn_func, {_OWN_OUTPUT}"
    return TorchOpponent(torch, workload, sets, what, forms)


def flex(workload: Attention, sets: Sets, stream: Any) -> TorchOpponent:
    """FlexAttention compiled in max-autotune mode, with a block mask of just the right keys."""
    torch = import_torch(workload)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sees, cap = _mask(workload), workload.softcap
    size = (workload.s, workload.kv_len)
    mask = create_block_mask(sees, None, None, *size, device="cuda") if sees else None

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return cap * torch.tanh(score / cap)

    run = compiled(torch, flex_attention)

    def launch(named: Any) -> Any:
        q, k, v = (_ordered(workload, named[name], "bhsd") for name in "qkv")
        return run(
            q, k, v, score_mod=capped if cap else None, block_mask=mask,
            scale=workload.scale or None, enable_gqa=workload.kv_heads < workload.h,
        )  # fmt: skip

    what = f"torch.compile(flex_attention), {_OWN_OUTPUT}"
    return TorchOpponent(torch, workload, sets, what, {"max-autotune": launch})


# -- parts ----------------------------------------------------------------------------------------


def _cudnn(torch: Any, workload: Attention) -> Form:
    from torch.nn.attention import SDPBackend

    if workload.window or workload.softcap:
        raise Unavailable("scaled_dot_product_attention has neither windows nor caps")
    if workload.causal and workload.s != workload.kv_len:
        raise Unavailable("scaled_dot_product_attention aligns causal masks at the top left")
    return _sdpa(torch, workload, SDPBackend.CUDNN_ATTENTION)


def _flash(torch: Any, workload: Attention) -> Form:
    """Through SDPA, or the function behind it where SDPA lacks the mask (or its alignment)."""
    from torch.nn.attention import SDPBackend

    if workload.softcap:
        raise Unavailable("torch's FlashAttention 2 has no cap of logits")
    if not workload.window and not (workload.causal and workload.s != workload.kv_len):
        return _sdpa(torch, workload, SDPBackend.FLASH_ATTENTION)
    left, right = _window(workload)

    def launch(named: Any) -> Any:
        q, k, v = (_ordered(workload, named[name], "bshd") for name in "qkv")
        return torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, workload.s, workload.kv_len, 0.0, workload.causal, False,
            scale=workload.scale or None, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip

    return launch


def _sdpa(torch: Any, workload: Attention, backend: Any) -> Form:
    from torch.nn.attention import sdpa_kernel

    function = torch.nn.functional.scaled_dot_product_attention

    def launch(named: Any) -> Any:
        q, k, v = (_ordered(workload, named[name], "bhsd") for name in "qkv")
        with sdpa_kernel(backend):
            return function(
                q, k, v, is_causal=workload.causal, scale=workload.scale or None,
                enable_gqa=workload.kv_heads < workload.h,
            )  # fmt: skip

    return launch


def _ordered(workload: Attention, x: Any, layout: str) -> Any:
    """A tensor as a view in the order of axes that a library wants."""
    return x if workload.layout == layout else x.transpose(1, 2)


def _window(workload: Attention) -> tuple[int, int]:
    """Keys before and after a query's own, as FlashAttention counts them; -1: all."""
    return workload.window - 1 if workload.window else -1, 0 if workload.causal else -1


def _mask(workload: Attention) -> Callable[..., Any] | None:
    """Which keys a query sees, for FlexAttention; None: all."""
    shift, window = workload.kv_len - workload.s, workload.window

    def before_end(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i + shift

    def in_window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j > i + shift - window

    def both(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i + shift) & (j > i + shift - window)

    if workload.causal:
        return both if window else before_end
    return in_window if window else None


def _imported(name: str) -> Any:
    """A module, or None where it is not installed or does not load with this torch."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None
