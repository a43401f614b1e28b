"""The device's float64 references against NumPy's, output by output, gains included.

PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -s -m gpu tests/gpu/test_oracle.py
"""

from __future__ import annotations

from typing import Any

import gemm_cases
import numpy as np
import pytest
from device_kernels import device_target, load_oracle
from numpy.typing import NDArray

from kt.spaces.workload import Operand, parse
from kt.tuner.backend import reference
from kt.tuner.backend.reference import NUMPY

pytestmark = pytest.mark.gpu

WORKLOADS = (
    "gemm 37x70x129 layout=tn batch=2 epilogue=bias+gelu dtype=fp32",
    "gemm 65x3x16 layout=nt epilogue=scale+residual dtype=fp64",
    "gemm 40x33x65 epilogue=tensor_scale+relu dtype=fp32",
    "gemm 70x66x48 layout=nt epilogue=bias+tensor_scale dtype=fp8_e4m3",
    "gemm 33x17x129 layout=tn batch=2 dtype=fp8_e5m2",
    "conv2d 2x9x7x5,6x3x2 pad=1 dtype=fp32",
    "conv2d 1x16x15x8,70x3x3 stride=2x1 pad=2x0 dilation=1x2 groups=2 dtype=fp32",
    "conv2d 3x12x12x6,12x5x5 pad=2 groups=6 epilogue=bias+relu+scale+shift dtype=fp32",
    "conv2d 1x2x2x3,4x5x5 pad=3 epilogue=silu dtype=fp64",
    "attention 2x4x37x40 dtype=fp32",
    "attention 1x4x70x64 kv-heads=2 kv-len=100 value-dim=72 causal=true lse=true dtype=fp32",
    "attention 1x2x40x16 kv-len=9 causal=true lse=true layout=bhsd dtype=fp32",
    "attention 2x2x65x24 window=7 softcap=5.0 scale=2.0 lse=true dtype=fp32",
    "attention 1x8x1x128 kv-heads=1 kv-len=333 causal=true window=65 lse=true dtype=fp32",
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_oracle(device_target().arch, tmp_path_factory.mktemp("oracle"))


def _read(memory: Any, count: int, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(memory.read(count * np.dtype(dtype).itemsize), dtype=dtype)


def _values(memory: Any, operand: Operand) -> NDArray[Any]:
    """An input's values, of types that NumPy lacks in float64."""
    dtype = operand.dtype
    held = NUMPY.get(dtype) or (np.uint8 if operand.bytes == operand.elements else np.uint16)
    found = _read(memory, operand.elements, held).reshape(operand.shape)
    return found if dtype in NUMPY else gemm_cases.from_bits(found, dtype)


@pytest.mark.parametrize("text", WORKLOADS)
def test_references_agree(oracle: Any, text: str) -> None:
    from kt.tuner.backend.cuda_data import Dataset

    workload = parse(text)
    dataset = Dataset(oracle, workload, seed=3)
    oracle.device.synchronize()
    inputs = {o.name: _values(dataset.pristine(o.name), o) for o in workload.inputs()}
    if "fp8" in workload.dtype:
        assert 0.9 < np.std(inputs["A"]) < 1.1 and np.abs(inputs["A"]).max() < 8
    wanted = reference._REFERENCES[type(workload)](workload, inputs)
    for found, (value, gain) in zip(dataset._expected, wanted, strict=True):
        scale = float(np.abs(value[np.isfinite(value)]).max(initial=1.0))
        on_device = _read(found.value, value.size, np.float64)
        np.testing.assert_allclose(on_device, value.ravel(), rtol=1e-9, atol=1e-11 * scale)
        # Spacing near zero counts from the maximum so far on the device, from the last in NumPy.
        close = 5e-3 if workload.OPERATOR == "attention" else 1e-9
        on_device = _read(found.gain, gain.size, np.float64)
        np.testing.assert_allclose(on_device, gain.ravel(), rtol=close, atol=1e-12)
        assert found.columns == gain.size
