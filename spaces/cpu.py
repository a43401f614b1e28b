"""What the CPU families share: the stub's common lines, vector lengths, thread counts."""

from __future__ import annotations

from kt.spaces.target import Target
from kt.spaces.workload import DTYPE_BYTES, EPILOGUE_OPERANDS, Workload

_SMALL_FLOPS = 4_000_000
"""Below this much work a core, fewer threads than cores may win."""


def cpu_defines(workload: Workload, target: Target) -> dict[str, int | str]:
    """The stub's lines that every CPU kernel has: instruction set, element type, epilogue."""
    ops = workload.epilogue
    return {
        "KT_ISA": f"KT_ISA_{target.arch.upper()}",
        "KT_VEC_BYTES": target.simd_bytes,
        "KT_DOUBLE": int(workload.dtype == "fp64"),
        "KT_HAS_EPILOGUE": int(bool(ops)),
        "KT_EPILOGUE": " ".join(f"KT_OP_{op.upper()}" for op in ops),
        **{f"KT_HAS_{op.upper()}": int(op in ops) for op in EPILOGUE_OPERANDS},
    }


def refuses_cpu(workload: Workload, target: Target, operator: type[Workload]) -> str | None:
    """Why no CPU family of `operator` can serve the workload, or None."""
    if not isinstance(workload, operator) or target.kind != "cpu":
        return f"serves {operator.OPERATOR} on the CPU"
    if workload.dtype not in ("fp32", "fp64"):
        return f"computes in fp32 or fp64, not {workload.dtype}"
    return None


def lanes(dtype: str, target: Target) -> int:
    """Elements of one vector."""
    return target.simd_bytes // DTYPE_BYTES[dtype]


def thread_counts(flops: int, target: Target) -> tuple[int, ...]:
    """Thread counts worth trying: all cores, and fewer where there is little to do."""
    cores = target.cores
    if flops > _SMALL_FLOPS * cores:
        return (cores,)
    return tuple(sorted({2**i for i in range(cores.bit_length())} | {cores}))


def part_counts(extent: int, limit: int) -> tuple[int, ...]:
    """Numbers of parts up to `extent`: powers of two, and the limit over powers of two."""
    powers = [2**i for i in range(limit.bit_length())]
    counts = {*powers, *(limit // p for p in powers if limit % p == 0)}
    return tuple(sorted(c for c in counts if c <= extent))
