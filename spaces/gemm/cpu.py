"""`cpu`: a blocked, packed matrix product for CPUs with vector units (source: `cpu.c`)."""

from __future__ import annotations

from pathlib import Path

from kt.spaces.cpu import cpu_defines, refuses_cpu
from kt.spaces.cpu_blocked import Blocked, Product
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.target import Target
from kt.spaces.theta import Theta
from kt.spaces.workload import Gemm, Workload


def gemm_defines(workload: Gemm) -> dict[str, int | str]:
    """The stub's lines that say which product is computed."""
    return {
        "KT_M": workload.m, "KT_N": workload.n, "KT_K": workload.k, "KT_BATCH": workload.batch,
        "KT_TRANS_A": int(workload.layout[0] == "t"),
        "KT_TRANS_B": int(workload.layout[1] == "t"),
    }  # fmt: skip


class GemmCpu(Blocked):
    """The product of two stored matrices."""

    name = "cpu"

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return refuses_cpu(workload, target, Gemm)

    def product(self, workload: Workload) -> Product:
        assert isinstance(workload, Gemm)
        w, a, b = workload, workload.layout[0], workload.layout[1]
        return Product(
            w.m, w.n, w.k, w.batch, w.dtype, near_a=a == "n", near_b=b == "n",
            ways_a=("none", "panel"), ways_b=("panel",) if b == "t" else ("none", "panel"),
        )  # fmt: skip

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        assert isinstance(workload, Gemm)
        defines = {
            **cpu_defines(workload, target),
            **gemm_defines(workload),
            **self.blocking_defines(theta),
        }
        source = stub(defines) + expand(Path(__file__).with_suffix(".c"))
        return Kernel(workload, self.name, theta, "c", source)
