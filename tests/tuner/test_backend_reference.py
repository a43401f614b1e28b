"""Inputs, references and bounds, against sums done another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from c_kernels import gemm

from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.workload import parse
from kt.tuner.backend import reference
from kt.tuner.backend.reference import load_dataset, make_dataset, make_inputs

SHAPE = "gemm 13x11x37"


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_product_of_every_layout(tmp_path: Path, layout: str, batch: int, dtype: str) -> None:
    workload = gemm(f"{SHAPE} batch={batch} layout={layout} dtype={dtype}")
    make_dataset(workload, 7, tmp_path / "data")
    dataset = load_dataset(workload, tmp_path / "data")
    a, b = (x.reshape(batch, *x.shape[-2:]).astype(np.longdouble) for x in dataset.inputs)
    a = a.transpose(0, 2, 1) if layout[0] == "t" else a
    b = b.transpose(0, 2, 1) if layout[1] == "t" else b
    expected = (a[:, :, :, None] * b[:, None, :, :]).sum(axis=2)
    assert dataset.reference.shape == workload.output().shape
    np.testing.assert_allclose(dataset.reference.reshape(expected.shape), expected, atol=1e-13)
    assert all(x.dtype == {"fp32": "f4", "fp64": "f8"}[dtype] for x in dataset.inputs)


def test_blocks_of_rows_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = gemm(f"{SHAPE} dtype=fp32")
    inputs = make_inputs(workload, 0)
    whole = reference._gemm(workload, inputs)
    monkeypatch.setattr(reference, "_BLOCK_BYTES", 3 * 8 * workload.k)
    np.testing.assert_allclose(reference._gemm(workload, inputs), whole, rtol=1e-13)


def test_the_epilogue_runs_in_chain_order() -> None:
    workload = gemm(f"{SHAPE} epilogue=scale+bias+relu+residual dtype=fp32")
    inputs = make_inputs(workload, 3)
    x = reference._gemm(workload, inputs)
    expected = np.maximum(x * inputs["scale"] + inputs["bias"], 0) + inputs["residual"]
    np.testing.assert_allclose(reference.epilogue(workload, x, inputs), expected)


def test_activations_are_exact() -> None:
    import math

    x = np.array([-30.0, -6.0, -1.0, 0.0, 0.5, 6.0])
    gelu = reference._apply("gelu", x, {})
    silu = reference._apply("silu", x, {})
    for value, g, s in zip(x, gelu, silu, strict=True):
        assert g == pytest.approx(value * math.erfc(-value / math.sqrt(2)) / 2, rel=1e-13)
        assert s == pytest.approx(value / (1 + math.exp(-value)), rel=1e-13)
    assert np.isnan(reference._apply("relu", np.array([np.nan]), {})).all()


def test_inputs_are_standard_normal_and_a_function_of_the_seed() -> None:
    workload = gemm("gemm 256x200x300 dtype=fp32")
    first, again, other = (make_inputs(workload, seed) for seed in (1, 1, 2))
    for name, x in first.items():
        assert (x == again[name]).all() and (x != other[name]).mean() > 0.99
        assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02 and (x == 0).sum() < 3
    assert not np.array_equal(first["A"].ravel()[:100], first["B"].ravel()[:100])


def test_a_wrong_blas_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        out[:] = np.einsum("mk,kn->mn", a, b)
        out[2, 2] += 1e-3

    workload = gemm(f"{SHAPE} dtype=fp64")
    inputs = make_inputs(workload, 0)
    monkeypatch.setattr(np, "matmul", wrong)
    with pytest.raises(ToolchainError, match="matrix product is wrong"):
        reference._gemm(workload, inputs)


@pytest.mark.parametrize("k", [1, 64, 4096, 65536])
def test_bounds_leave_room_for_sequential_sums_and_none_for_tf32(k: int) -> None:
    workload = gemm(f"gemm 64x64x{k} dtype=fp32")
    bound = reference.tolerance(workload, np.ones(64))
    rng = np.random.default_rng(k)
    a, b = rng.standard_normal((2, 1024, min(k, 4096))).astype(np.float32)
    products = a * b
    partial = np.cumsum(products, axis=1, dtype=np.float32)[:, -1].astype(np.float64)
    exact = (a.astype(np.float64) * b.astype(np.float64)).sum(axis=1)
    if k <= 4096:
        error = np.linalg.norm(partial - exact) / np.linalg.norm(exact)
        assert error < bound.norm / 2
        assert (np.abs(partial - exact) <= bound.absolute + bound.relative * np.abs(exact)).all()
    assert bound.norm < 1e-4 < 2e-4  # an operand rounded to tf32 is off by 2e-4
    assert bound.norm < 0.01 / k**0.5  # one dropped product is off by 1 / sqrt(k)


def test_a_tiny_result_by_cancellation_is_not_held_to_its_own_size() -> None:
    workload = gemm("gemm 1x1x65536 dtype=fp32")
    assert reference.tolerance(workload, np.ones(1)).typical == 256.0


def test_scale_widens_the_bound_of_its_column() -> None:
    workload = gemm("gemm 4x3x8 epilogue=gelu+scale dtype=fp32")
    gain = reference._gain(workload, {"scale": np.array([0.0, -2.0, 1.0], dtype=np.float32)})
    np.testing.assert_allclose(gain, [0.0, 2.26, 1.13])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gemm 8x8x8 dtype=bf16", "measures fp32, fp64, not 'bf16'"),
        ("conv2d 1x8x8x8,8x3x3 dtype=fp32", "no CPU reference for operator 'conv2d'"),
        ("gemm 8192x8192x8192 dtype=fp64", r"needs 6\.0 GiB .* 1\.0 GiB may be used"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(TargetError, match=reason) as refusal:
        reference.refuse_unmeasurable(parse(text), 2**30)
    assert "\n" not in str(refusal.value)
