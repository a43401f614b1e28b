"""What the CUDA families of convolutions share: the stub of the convolution, and its product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kt.spaces.cuda import epilogue_defines, refuses_cuda
from kt.spaces.errors import WorkloadError
from kt.spaces.target import Target
from kt.spaces.workload import MAX_EXTENT, Conv2d, Gemm, Workload

_LONGEST_AXIS = 2**30
"""Of x, so that a place in its padding fits 32 bits."""


def as_conv(workload: Workload) -> Conv2d:
    """The workload of a family that has not refused it."""
    assert isinstance(workload, Conv2d)
    return workload


def refuses_cuda_conv(
    workload: Workload, target: Target, dtypes: Sequence[str], reach: str
) -> str | None:
    """Why a CUDA convolution family for `dtypes` cannot serve the workload, or None."""
    if not isinstance(workload, Conv2d) or target.kind != "cuda":
        return "serves conv2d on CUDA"
    w, (p, q) = workload, workload.out_size
    if w.n * p * q > MAX_EXTENT:
        return f"{w.n * p * q} output pixels exceed {MAX_EXTENT}"
    if max(w.h, w.w) > _LONGEST_AXIS:
        return f"an axis of {max(w.h, w.w)} pixels exceeds {_LONGEST_AXIS}"
    return refuses_cuda(workload, target, dtypes, reach)


def group_channels(w: Conv2d) -> int:
    return w.c // w.groups


def group_filters(w: Conv2d) -> int:
    return w.k // w.groups


def out_pixels(w: Conv2d) -> int:
    p, q = w.out_size
    return w.n * p * q


def product_of(w: Conv2d) -> Gemm | None:
    """The product that a convolution is, groups as its batch; None where it is too large."""
    try:
        return Gemm(
            dtype=w.dtype, acc=w.acc, epilogue=w.epilogue, m=out_pixels(w), n=group_filters(w),
            k=w.r * w.s * group_channels(w), batch=w.groups, layout="nt",
        )  # fmt: skip
    except WorkloadError:
        return None


def with_product(workload: Workload) -> tuple[Conv2d, Gemm]:
    """A convolution whose product is not too large, and that product."""
    w = as_conv(workload)
    product = product_of(w)
    assert product is not None
    return w, product


def conv_defines(w: Conv2d) -> dict[str, int | str]:
    """The stub's lines that say what is computed."""
    return {
        "KT_DTYPE": f"KT_{w.dtype.upper()}",
        "KT_IMAGES": w.n, "KT_HEIGHT": w.h, "KT_WIDTH": w.w, "KT_CHANNELS": w.c,
        "KT_FILTERS": w.k, "KT_R": w.r, "KT_S": w.s, "KT_GROUPS": w.groups,
        "KT_STRIDE_H": w.stride[0], "KT_STRIDE_W": w.stride[1],
        "KT_PAD_H": w.pad[0], "KT_PAD_W": w.pad[1],
        "KT_DILATION_H": w.dilation[0], "KT_DILATION_W": w.dilation[1],
        **epilogue_defines(w),
    }  # fmt: skip


def patch_pixels(w: Conv2d, rows: Any, columns: Any) -> tuple[Any, Any]:
    """Rows and columns of x that a tile of `rows` x `columns` output pixels sees."""
    height = (rows - 1) * w.stride[0] + (w.r - 1) * w.dilation[0] + 1
    width = (columns - 1) * w.stride[1] + (w.s - 1) * w.dilation[1] + 1
    return height, width


def up_to(choices: Sequence[int], extent: int) -> tuple[int, ...]:
    """Choices up to the first that covers `extent`."""
    first = next((i for i, n in enumerate(choices) if n >= extent), len(choices) - 1)
    return tuple(choices[: first + 1])
