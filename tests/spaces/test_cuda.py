"""What all CUDA families rely on: limits of an SM, their rules and reasons, early launches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from kt.spaces import cuda
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import parse

H200, A100, RTX = (CUDA_TARGETS[name] for name in ("h200", "a100", "rtx4090"))


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [(0b1010000, 16, 16), (24, 16, 8), (6, 16, 2), (7, 16, 1), (64, 4, 4)],
)
def test_alignment_is_the_largest_power_that_divides(size: int, most: int, expected: int) -> None:
    assert cuda.alignment(size, most) == expected


def test_registers_are_shared_by_the_threads_of_an_sm() -> None:
    # 65536 registers an SM, given out in units of 8 a thread, never more than 255.
    threads, blocks = np.array([64, 128, 256, 256, 512]), np.array([1, 4, 1, 2, 2])
    found = cuda.register_limit(H200, threads, blocks)
    np.testing.assert_array_equal(found, [255, 128, 255, 128, 64])


def test_occupancy_is_the_scarcest_of_three_and_at_least_one() -> None:
    def ctas(threads: int, shared: int, registers: int) -> int:
        arrays = (np.array([x]) for x in (threads, shared, registers))
        return int(cuda.occupancy(H200, *arrays)[0])

    assert ctas(128, 0, 32) == 16  # 2048 threads an SM
    assert ctas(128, 0, 128) == 4  # 65536 registers
    assert ctas(128, 100 * 1024, 32) == 2  # 228 KiB, one of them the system's for each CTA
    assert ctas(128, 227 * 1024, 255) == 1
    assert ctas(1024, 400 * 1024, 255) == 1  # what does not fit is for the rules to refuse


def test_residency_rules_name_the_number_that_is_exceeded() -> None:
    def broken(blocks: int, threads: int, shared: int, registers: int) -> dict[str, str]:
        values = {"blocks": blocks}
        plan = SimpleNamespace(threads=threads, shared_bytes=shared, registers=registers)
        rules = cuda.residency_rules(H200, lambda v: plan)
        columns = {"blocks": np.array([blocks])}
        return {r.name: r.why(values) for r in rules if not bool(np.all(r.ok(columns)))}

    assert broken(1, 256, 227 * 1024, 255) == {}
    assert broken(1, 256, 227 * 1024 + 16, 100) == {
        "shared": "shared memory 232464 B exceeds 232448 B of sm_90a with 1 CTAs an SM"
    }
    assert broken(2, 256, 1024, 129) == {"registers": "about 129 registers a thread exceed 128"}
    assert set(broken(5, 512, 1024, 16)) == {"threads"}


def test_families_say_why_they_cannot_serve() -> None:
    w = parse("gemm 8x8x8 dtype=bf16")
    old = replace(A100, arch="sm_75", name="t4")
    assert cuda.refuses_cuda(w, A100, ("bf16",), "computes in") is None
    assert cuda.refuses_cuda(w, A100, ("fp32", "fp64"), "computes in") == (
        "computes in fp32, fp64, not bf16"
    )
    assert "sm_80" in (cuda.refuses_cuda(w, old, ("bf16",), "") or "")


def test_only_hopper_and_later_start_early() -> None:
    assert cuda.early_knob(H200).choices == (False, True)
    for target in (A100, RTX):
        assert not cuda.early_launch(target)
        assert cuda.early_knob(target).choices == (False,)


def test_an_epilogue_names_its_operations_in_order() -> None:
    defines = cuda.epilogue_defines(parse("gemm 8x8x8 epilogue=scale+relu+shift dtype=bf16"))
    assert defines["KT_EPILOGUE"] == "KT_OP_SCALE KT_OP_RELU KT_OP_SHIFT"
    assert (defines["KT_HAS_SCALE"], defines["KT_HAS_SHIFT"], defines["KT_HAS_BIAS"]) == (1, 1, 0)
