"""What a file of many tuned matrix products adds to their kernels: any extents, and the dispatch.

Its products differ in their extents (M, N, K and the batch) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kt.spaces.cpu import cpu_defines
from kt.spaces.cuda import VECTOR, epilogue_defines
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.target import Target
from kt.spaces.together import reached
from kt.spaces.workload import DTYPE_BYTES, Gemm

_HERE = Path(__file__).parent
_ALIGNMENT = 256
DTYPES = {
    "cpu": ("fp32", "fp64"),
    "cuda": ("fp64", "fp32", "tf32", "fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"),
}
"""Element types that the kernel for any extents computes in, by kind of target."""


def any_source(workload: Gemm, target: Target) -> str:
    """The kernel for any extents, in all else as `workload`; exports nothing that is launched."""
    layout = {"KT_TRANS_A": int(workload.layout[0] == "t"),
              "KT_TRANS_B": int(workload.layout[1] == "t")}  # fmt: skip
    if target.kind == "cpu":
        defines = {**cpu_defines(workload, target), **layout, "KT_THREADS": target.cores}
        return stub(defines) + expand(_HERE / "any.c")
    defines = {"KT_DTYPE": f"KT_{workload.dtype.upper()}", **layout, **epilogue_defines(workload)}
    return stub(defines) + expand(_HERE / "any.cuh")


def zeroed_bytes(kernels: Sequence[Kernel]) -> int:
    """Leading bytes of a workspace for all kernels that must be zero before its first launch."""
    assert all(kernel.zeroed_bytes % _ALIGNMENT == 0 for kernel in kernels)
    return max(kernel.zeroed_bytes for kernel in kernels)


def dispatch_source(
    kernels: Sequence[Kernel],
    prefixes: Sequence[str],
    any_prefix: str,
    described: str,
    target: Target,
) -> str:
    """The entry points, for kernels that were set apart under `prefixes` (`together.py`).

    `described` is a C string literal. Kernels share one workspace: each one's zeroed bytes end
    where those of all end, so that no kernel's scratch lies on another's counters.
    """  # fmt: skip
    zeroed = zeroed_bytes(kernels)
    rows = []
    for kernel, prefix in zip(kernels, prefixes, strict=True):
        w = kernel.workload
        assert isinstance(w, Gemm)
        functions = ", ".join(
            reached(prefix, name, kernel.language)
            for name in ("kt_workspace_bytes", "kt_launch", "kt_describe")
        )
        extents = f"{w.m}, {w.n}, {w.k}, {w.batch}"
        rows.append(f"    {{{extents}, {zeroed - kernel.zeroed_bytes}, {functions}}}, \\\n")
    first, operands = kernels[0], kernels[0].workload.operands()
    on_cpu = target.kind == "cpu"
    defines: dict[str, int | str] = {
        "KT_CUDA": int(not on_cpu),
        "KT_ARGUMENTS": len(operands),
        "KT_ALIGNMENT": min(DTYPE_BYTES[o.dtype] for o in operands) if on_cpu else VECTOR,
        "KT_ZEROED_BYTES": zeroed,
        "KT_ANY": reached(any_prefix, "kt_launch_any", first.language),
        "KT_DESCRIBE": described,
    }
    shapes = "".join(rows)
    return stub(defines) + f"#define KT_SHAPES {{ \\\n{shapes}}}\n" + expand(_HERE / "dispatch.h")
