"""`cpu`: convolution as an implicit matrix product (source: `cpu.c`)."""

from __future__ import annotations

from pathlib import Path

from kt.spaces.cpu import cpu_defines, refuses_cpu
from kt.spaces.cpu_blocked import Blocked, Product
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.target import Target
from kt.spaces.theta import Theta
from kt.spaces.workload import MAX_EXTENT, Conv2d, Workload

_SPLIT_N = 4
"""Transposing an element of a filter costs about what copying four of x does."""


def conv2d_defines(workload: Conv2d) -> dict[str, int | str]:
    """The stub's lines that say which convolution is computed."""
    w, (p, q) = workload, workload.out_size
    return {
        "KT_IMAGES": w.n, "KT_HEIGHT": w.h, "KT_WIDTH": w.w, "KT_CHANNELS": w.c,
        "KT_FILTERS": w.k, "KT_R": w.r, "KT_S": w.s,
        "KT_STRIDE_H": w.stride[0], "KT_STRIDE_W": w.stride[1],
        "KT_PAD_H": w.pad[0], "KT_PAD_W": w.pad[1],
        "KT_DILATION_H": w.dilation[0], "KT_DILATION_W": w.dilation[1],
        "KT_GROUPS": w.groups, "KT_EXPECT_P": p, "KT_EXPECT_Q": q,
    }  # fmt: skip


def refuses_cpu_conv2d(workload: Workload, target: Target) -> str | None:
    """Why no CPU convolution family can serve the workload, or None."""
    why = refuses_cpu(workload, target, Conv2d)
    if why or not isinstance(workload, Conv2d):
        return why
    elements = workload.r * workload.s * (workload.c // workload.groups)
    if elements > MAX_EXTENT:
        return f"a filter of {elements} elements exceeds {MAX_EXTENT}"
    return None


class Conv2dCpu(Blocked):
    """Pixels by filters, the pixels gathered a register tile at a time."""

    name = "cpu"

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return refuses_cpu_conv2d(workload, target)

    def product(self, workload: Workload) -> Product:
        """M output pixels by N filters of a group, over K taps and channels of a group."""
        assert isinstance(workload, Conv2d)
        w, (p, q) = workload, workload.out_size
        plain = w.r == w.s == 1 and w.stride == (1, 1) and w.pad == (0, 0)
        return Product(
            w.n * p * q, w.k // w.groups, w.r * w.s * (w.c // w.groups), w.groups, w.dtype,
            ways_a=("none", "rows") if plain else ("rows",), ways_b=("panel",),
            near_a=plain, near_b=False, split_n=_SPLIT_N,
        )  # fmt: skip

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        assert isinstance(workload, Conv2d)
        defines = {
            **cpu_defines(workload, target),
            **conv2d_defines(workload),
            **self.blocking_defines(theta),
        }
        source = stub(defines) + expand(Path(__file__).with_suffix(".c"))
        return Kernel(workload, self.name, theta, "c", source)
