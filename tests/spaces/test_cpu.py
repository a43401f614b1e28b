"""What the CPU families share."""

from __future__ import annotations

import msgspec
import pytest

from kt.spaces.cpu import cpu_defines, lanes, part_counts, refuses_cpu, thread_counts
from kt.spaces.target import detect_cpu, named_target
from kt.spaces.workload import Conv2d, Gemm, Workload, parse

HERE = msgspec.structs.replace(detect_cpu(), arch="avx2", simd_bytes=32, cores=6)


def test_the_stub_says_what_and_for_which_machine() -> None:
    workload = parse("gemm 8x8x8 epilogue=bias+relu+shift dtype=fp64")
    defines = cpu_defines(workload, HERE)
    assert defines["KT_ISA"] == "KT_ISA_AVX2" and defines["KT_DOUBLE"] == 1
    assert defines["KT_EPILOGUE"] == "KT_OP_BIAS KT_OP_RELU KT_OP_SHIFT"
    given = {name: defines[f"KT_HAS_{name}"] for name in ("BIAS", "RESIDUAL", "SCALE", "SHIFT")}
    assert given == {"BIAS": 1, "RESIDUAL": 0, "SCALE": 0, "SHIFT": 1}


@pytest.mark.parametrize(
    ("text", "target", "operator", "word"),
    [
        ("gemm 8x8x8 dtype=bf16", HERE, Gemm, "bf16"),
        ("gemm 8x8x8 dtype=fp32", HERE, Conv2d, "conv2d"),
        ("gemm 8x8x8 dtype=fp32", named_target("h200"), Gemm, "CPU"),
    ],
)
def test_refusals_say_why(text: str, target: object, operator: type[Workload], word: str) -> None:
    why = refuses_cpu(parse(text), target, operator)  # type: ignore[arg-type]
    assert why is not None and word in why


def test_counts() -> None:
    assert lanes("fp32", HERE) == 8 and lanes("fp64", HERE) == 4
    assert thread_counts(10**9, HERE) == (6,)
    assert thread_counts(10**6, HERE) == (1, 2, 4, 6)
    assert part_counts(100, 6) == (1, 2, 3, 4, 6)
    assert part_counts(3, 6) == (1, 2, 3)
