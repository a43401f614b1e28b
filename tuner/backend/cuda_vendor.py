"""The opponents on CUDA, by name: libraries' best modes on the same rotating argument sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from kt.spaces.workload import Attention, Conv2d, Gemm, Workload

from .cublaslt import cublaslt_tuned
from .driver import Replayable
from .vendor_conv import cudnn_conv2d, inductor_conv2d
from .vendor_sdpa import best_sdpa, cudnn_attention, fa2, fa3, flex
from .vendor_torch import (
    TORCH_FP8,
    Form,
    TorchOpponent,
    Unavailable,
    compiled,
    epilogue,
    epilogue_in_place,
    import_torch,
)

Sets = Sequence[Sequence[int]]
"""Device addresses of a workload's operands in order, once a set."""


class Opponent(Protocol):
    """A library's operator on given argument sets."""

    def warm_us(self) -> float:
        """Time of one launch, roughly, microseconds; graphs may be captured after it."""

    def graph(self, count: int) -> Replayable:
        """`count` launches over the sets as one graph."""

    def describe(self) -> str:
        """Library, version and what of it runs."""


Make = Callable[[Any, Sets, Any], Opponent]
"""From a workload, its argument sets and a stream; raises Unavailable."""


def vendor_library(workload: Workload, sets: Sets) -> Opponent | None:
    """The library that tuning is shown against; None without one for this workload."""
    try:
        match workload:
            case Gemm():
                product = torch_scaled_mm if workload.dtype in TORCH_FP8 else torch_matmul
                return product(workload, sets, None)
            case Conv2d():
                return cudnn_conv2d(workload, sets, None)
            case Attention():
                return best_sdpa(workload, sets)
    except Unavailable:
        pass
    return None


def torch_matmul(workload: Gemm, sets: Sets, stream: Any) -> TorchOpponent:
    """`torch.matmul(out=)` (cuBLAS) and the epilogue as a torch user writes it."""
    torch = import_torch(workload)

    def eager(named: Any) -> Any:
        a, b = _operands(workload, named)
        c = torch.matmul(a, b, out=named["C"])
        return epilogue_in_place(torch, workload.epilogue, c, named)

    return TorchOpponent(torch, workload, sets, "torch.matmul(out=)", {"eager": eager})


def torch_scaled_mm(workload: Gemm, sets: Sets, stream: Any) -> TorchOpponent:
    """`torch._scaled_mm(out=)` with one scale a tensor, sums as exact as fp32 or not.

    It applies a `tensor_scale` that comes first, and a bias after it; torch does the rest.
    """
    torch = import_torch(workload, TORCH_FP8)
    if not hasattr(torch, "_scaled_mm"):
        raise Unavailable("this torch has no _scaled_mm")
    one = torch.ones(1, device="cuda")
    scaled = workload.epilogue[:1] == ("tensor_scale",)
    rest = workload.epilogue[scaled:]
    biased = rest[:1] == ("bias",)

    def form(fast: bool) -> Form:
        def product(named: Any) -> Any:
            a, b = _operands(workload, named)
            c = torch._scaled_mm(
                a, b, scale_a=named["tensor_scale"] if scaled else one, scale_b=one,
                bias=named["bias"] if biased else None, out_dtype=torch.bfloat16,
                use_fast_accum=fast, out=named["C"],
            )  # fmt: skip
            return epilogue_in_place(torch, rest[biased:], c, named)

        return product

    forms = {f"use_fast_accum={fast}": form(fast) for fast in (True, False)}
    return TorchOpponent(torch, workload, sets, "torch._scaled_mm(out=)", forms)


def inductor_triton(workload: Gemm, sets: Sets, stream: Any) -> TorchOpponent:
    """The same function compiled in max-autotune mode, with Triton as the only backend."""
    torch = import_torch(workload)

    def chain(named: Any) -> Any:
        return epilogue(torch, workload.epilogue, torch.matmul(*_operands(workload, named)), named)

    forms = {"max-autotune, Triton only": compiled(torch, chain, "TRITON")}
    what = "torch.compile, output allocated by torch"
    return TorchOpponent(torch, workload, sets, what, forms)


def _operands(workload: Gemm, named: Any) -> tuple[Any, Any]:
    a, b = named["A"], named["B"]
    return (
        a.transpose(-1, -2) if workload.layout[0] == "t" else a,
        b.transpose(-1, -2) if workload.layout[1] == "t" else b,
    )


_MAKERS: Mapping[str, Mapping[type[Workload], Make]] = {
    "torch": {Gemm: torch_matmul},
    "torch-scaled-mm": {Gemm: torch_scaled_mm},
    "cublaslt-tuned": {Gemm: cublaslt_tuned},
    "inductor-triton": {Gemm: inductor_triton},
    "cudnn": {Conv2d: cudnn_conv2d, Attention: cudnn_attention},
    "inductor": {Conv2d: inductor_conv2d},
    "fa3": {Attention: fa3},
    "fa2": {Attention: fa2},
    "flex": {Attention: flex},
}
COMPILED = frozenset({"inductor-triton", "inductor", "flex"})
"""Those that tune themselves when made, for up to minutes."""


def opponents_of(workload: Workload) -> tuple[str, ...]:
    """The opponents that know a workload's operator."""
    return tuple(name for name, makers in _MAKERS.items() if type(workload) in makers)


def opponent(name: str, workload: Workload, sets: Sets, stream: Any) -> Opponent:
    """The opponent, ready to run; raises Unavailable with the reason where it cannot take part."""
    make = _MAKERS[name].get(type(workload))
    if make is None:
        raise Unavailable(f"{name} has no {workload.OPERATOR}")
    return make(workload, sets, stream)


OPPONENTS: Mapping[str, Callable[[Workload, Sets, Any], Opponent]] = {
    name: partial(opponent, name) for name in _MAKERS
}
"""By name, from a workload, its argument sets and a stream; raises Unavailable."""
