"""The opponent on the CPU computes what it is compared for."""

from __future__ import annotations

import conv_cases
import gemm_cases
import numpy as np
import pytest

from kt.spaces.workload import Conv2d, Gemm, parse
from kt.tuner.backend.buffers import RotatingSets
from kt.tuner.backend.timing import Order
from kt.tuner.backend.vendor import NumpyLauncher, serves

CONVOLUTIONS = (
    "conv2d 2x7x6x5,4x1x1 dtype=fp32", "conv2d 1x9x8x3,5x4x3 stride=2x3 pad=2x1 dtype=fp32",
    "conv2d 2x9x9x4,6x3x3 dilation=2x3 pad=3 dtype=fp64", "conv2d 1x5x5x4,4x1x1 pad=1 dtype=fp32",
    "conv2d 1x8x8x12,6x3x2 groups=3 pad=1 epilogue=bias+relu+scale+shift dtype=fp32",
    "conv2d 2x5x5x6,6x1x1 groups=6 epilogue=gelu+residual dtype=fp32",
)  # fmt: skip


def launched(workload: Gemm | Conv2d, inputs: list[gemm_cases.Array]) -> list[gemm_cases.Array]:
    """The outputs of two sets after three launches."""
    sets = RotatingSets(inputs, [workload.output().bytes], cache_bytes=1, limit_bytes=2**24)
    launcher = NumpyLauncher(workload, sets)
    us = launcher(Order(1, least=3, most=3, budget_us=0.0))
    assert len(us) == 3
    like = [(operand.shape, inputs[0].dtype) for operand in workload.operands()]
    return [arrays[-1] for arrays in sets.arrays(like)]


@pytest.mark.parametrize("text", CONVOLUTIONS)
def test_a_convolution(text: str) -> None:
    workload = parse(text)
    assert isinstance(workload, Conv2d) and serves(workload)
    inputs = gemm_cases.inputs(workload, np.random.default_rng(0))
    reference = conv_cases.reference(workload, inputs)
    for output in launched(workload, inputs):
        assert reference.worst(workload, output) <= 1


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_a_product(layout: str) -> None:
    workload = Gemm(m=5, n=7, k=9, batch=2, layout=layout, epilogue=("scale", "silu"))
    inputs = gemm_cases.inputs(workload, np.random.default_rng(0))
    reference = gemm_cases.reference(workload, inputs)
    for output in launched(workload, inputs):
        assert reference.worst(workload, output) <= 1


def test_what_numpy_lacks() -> None:
    assert not serves(parse("gemm 8x8x8 dtype=bf16"))
