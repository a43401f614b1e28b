"""Opponents of a convolution: cuDNN through torch, and what Inductor makes of the same code.

Images and filters are channels_last views of NHWC and KRSC buffers. torch's convolutions take no
output, so that one comes from torch's allocator, which a graph gives the same place every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kt.spaces.workload import Conv2d

from .vendor_torch import (
    Tensors,
    TorchOpponent,
    compiled,
    epilogue,
    epilogue_in_place,
    import_torch,
)

_CHANNELS = 1
_OWN_OUTPUT = "output allocated by torch"


def cudnn_conv2d(workload: Conv2d, sets: Sequence[Sequence[int]], stream: Any) -> TorchOpponent:
    """torch.nn.functional.conv2d in cuDNN's benchmark mode, the epilogue in torch's operations."""
    torch = import_torch(workload)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0  # every algorithm

    def eager(named: Tensors) -> Any:
        y, rest = _product(torch, workload, named)
        return epilogue_in_place(torch, rest, y, _viewed(named), _CHANNELS)

    version = torch.backends.cudnn.version()
    what = f"cuDNN {version}, channels_last, {_OWN_OUTPUT}"
    return TorchOpponent(torch, workload, sets, what, {"conv2d": eager})


def inductor_conv2d(workload: Conv2d, sets: Sequence[Sequence[int]], stream: Any) -> TorchOpponent:
    """The same function compiled in max-autotune mode: cuDNN's or Triton's product, fused."""
    torch = import_torch(workload)
    torch.backends.cudnn.benchmark = True

    def chain(named: Tensors) -> Any:
        y, rest = _product(torch, workload, named)
        return epilogue(torch, rest, y, _viewed(named), _CHANNELS)

    forms = {"max-autotune": compiled(torch, chain)}
    what = f"torch.compile, channels_last, {_OWN_OUTPUT}"
    return TorchOpponent(torch, workload, sets, what, forms)


def _product(torch: Any, workload: Conv2d, named: Tensors) -> tuple[Any, tuple[str, ...]]:
    """The convolution with its bias, and what is left of the epilogue."""
    biased = workload.epilogue[:1] == ("bias",)
    y = torch.nn.functional.conv2d(
        _nchw(named["x"]), _nchw(named["w"]), named["bias"] if biased else None,
        workload.stride, workload.pad, workload.dilation, workload.groups,
    )  # fmt: skip
    return y, workload.epilogue[biased:]


def _viewed(named: Tensors) -> dict[str, Any]:
    """Epilogue operands as they go with a channels_last output."""
    return {name: _nchw(x) if x.dim() == 4 else x for name, x in named.items()}


def _nchw(x: Any) -> Any:
    return x.permute(0, 3, 1, 2)
