"""Inputs, references and bounds, against sums done another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from c_kernels import gemm

from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.workload import Attention, Conv2d, parse
from kt.tuner.backend import reference
from kt.tuner.backend.reference import load_dataset, make_dataset, make_inputs
from kt.tuner.backend.tolerance import tolerances

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
    (found,) = dataset.expected
    assert found.value.shape == workload.output().shape
    np.testing.assert_allclose(found.value.reshape(expected.shape), expected, atol=1e-13)
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
    (bound,) = tolerances(workload)
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


def _cut(x: np.ndarray, bits: int = 24) -> np.ndarray:
    """Toward zero, to so many significant bits."""
    unit = 2.0 ** (np.frexp(x)[1] - bits)
    return np.trunc(x / unit) * unit


@pytest.mark.parametrize("away", [0.0, 4.0, 6.0])
@pytest.mark.parametrize(
    ("dtype", "at_once"), [("fp16", 8), ("fp16", 16), ("bf16", 8), ("tf32", 4)]
)
def test_bounds_leave_room_for_sums_that_tensor_cores_cut(
    dtype: str, at_once: int, away: float
) -> None:
    """Sums of 16384 products that end `away` standard deviations from zero, as a few of 10^8 do.

    An element between two fp16 numbers uses all that their distance allows, so that 16384 x 12288
    elements found what a bound without this error refused.
    """
    k = 16384
    (bound,) = tolerances(parse(f"gemm 64x64x{k} dtype={dtype} layout=nt"))
    steps = np.random.default_rng(at_once).standard_normal((k // at_once, 2000)) * at_once**0.5
    steps += (away * k**0.5 - steps.sum(axis=0)) / len(steps) if away else 0.0
    exact, total = steps.sum(axis=0), np.zeros(steps.shape[1])
    for step in steps:
        total = _cut(total + step)
    off = np.abs(total - exact)
    stored = {"fp16": 2.0**-11, "bf16": 2.0**-8, "tf32": 2.0**-24}[dtype]
    assert (off <= bound.absolute + (bound.relative - stored) * np.abs(exact)).all()
    size = np.linalg.norm(exact) if away else (k * len(exact)) ** 0.5
    assert np.linalg.norm(off) < (bound.norm - stored) * size
    assert not away or (off > 2.0**-24 * 6 * k).any()  # what rounded sums would not exceed


@pytest.mark.parametrize("k", [4096, 16384])
def test_bounds_leave_none_for_sums_in_fp16_or_a_product_left_out(k: int) -> None:
    (bound,) = tolerances(parse(f"gemm 64x64x{k} dtype=fp16"))
    products = np.prod(np.random.default_rng(1).standard_normal((2, k, 2000)), axis=0)
    exact, half = products.sum(axis=0), np.zeros(2000, dtype=np.float16)
    for product in products.astype(np.float16):
        half += product
    assert np.linalg.norm(half - exact) > 4 * bound.norm * np.linalg.norm(exact)
    limit = bound.absolute + bound.relative * np.abs(exact)
    assert np.mean(np.abs(products[0]) > limit) > 0.7


def test_sums_that_no_tensor_core_makes_have_no_more_room_for_it() -> None:
    fp32, fp16 = (tolerances(parse(f"gemm 64x64x16384 dtype={d}"))[0] for d in ("fp32", "fp16"))
    assert fp32.absolute == pytest.approx(2.0**-24 * (6 * 16384 + 32)) and fp16.absolute > 0.05


def test_a_tiny_result_by_cancellation_is_not_held_to_its_own_size() -> None:
    workload = gemm("gemm 1x1x65536 dtype=fp32")
    assert tolerances(workload)[0].typical == 256.0


def test_scale_widens_the_bound_of_its_column() -> None:
    workload = gemm("gemm 4x3x8 epilogue=gelu+scale dtype=fp32")
    gain = reference._gain(workload, {"scale": np.array([0.0, -2.0, 1.0], dtype=np.float32)})
    np.testing.assert_allclose(gain, [0.0, 2.26, 1.13])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gemm 8x8x8 dtype=bf16", "measures fp32, fp64, not 'bf16'"),
        ("conv2d 1x8x8x8,8x3x3 dtype=fp16", "measures fp32, fp64, not 'fp16'"),
        ("gemm 8192x8192x8192 dtype=fp64", r"needs 6\.0 GiB .* 1\.0 GiB may be used"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(TargetError, match=reason) as refusal:
        reference.refuse_unmeasurable(parse(text), 2**30)
    assert "\n" not in str(refusal.value)


def _direct_conv2d(workload: Conv2d, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Every output as a sum over its own window, with bounds asked for at each tap."""
    p, q = workload.out_size
    per_group, filters = workload.c // workload.groups, workload.k // workload.groups
    out = np.zeros((workload.n, p, q, workload.k))
    for n, i, j, k in np.ndindex(out.shape):
        first = k // filters * per_group
        for r, s in np.ndindex(workload.r, workload.s):
            row = i * workload.stride[0] - workload.pad[0] + r * workload.dilation[0]
            column = j * workload.stride[1] - workload.pad[1] + s * workload.dilation[1]
            if 0 <= row < workload.h and 0 <= column < workload.w:
                seen = x[n, row, column, first : first + per_group].astype(np.float64)
                out[n, i, j, k] += seen @ w[k, r, s].astype(np.float64)
    return out


@pytest.mark.parametrize(
    "text",
    [
        "conv2d 2x7x6x4,6x3x2 pad=1x2",
        "conv2d 1x9x9x6,4x3x3 stride=2x3 pad=2 dilation=2x1 groups=2",
        "conv2d 2x5x5x4,8x5x5 pad=3 groups=4 stride=4",
        "conv2d 1x1x1x3,2x3x3 pad=1",
    ],
)
def test_convolutions_of_every_kind(text: str) -> None:
    workload = parse(text)
    assert isinstance(workload, Conv2d)
    inputs = make_inputs(workload, 5)
    expected = _direct_conv2d(workload, inputs["x"], inputs["w"])
    np.testing.assert_allclose(reference._conv2d(workload, inputs), expected, atol=1e-12)


def _row_by_row(w: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Output and log-sum-exp, a query at a time over just the keys that it sees."""
    if w.layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    o, lse = np.zeros((w.b, w.h, w.s, w.value_dim)), np.full((w.b, w.h, w.s), -np.inf)
    for b, h, i in np.ndindex(w.b, w.h, w.s):
        end = i + 1 + w.kv_len - w.s if w.causal else w.kv_len
        begin = max(0, i + 1 + w.kv_len - w.s - w.window) if w.window else 0
        if end > begin:
            keys = k[b, h * w.kv_heads // w.h, begin:end].astype(np.float64)
            logits = keys @ q[b, h, i].astype(np.float64) * (w.scale or w.d**-0.5)
            logits = w.softcap * np.tanh(logits / w.softcap) if w.softcap else logits
            lse[b, h, i] = np.logaddexp.reduce(logits)
            weights = np.exp(logits - lse[b, h, i])
            o[b, h, i] = weights @ v[b, h * w.kv_heads // w.h, begin:end].astype(np.float64)
    return [o.swapaxes(1, 2) if w.layout == "bshd" else o, lse]


@pytest.mark.parametrize(
    "text",
    [
        "attention 2x4x5x8 kv-heads=2 kv-len=9 value-dim=6 lse=true",
        "attention 1x2x9x4 kv-len=5 causal=true lse=true layout=bhsd",
        "attention 1x2x9x4 causal=true window=3 softcap=2.0 lse=true",
        "attention 1x1x4x4 kv-len=8 window=2 scale=3.0 lse=true",
        "attention 1x2x3x16 kv-len=1",
    ],
)
def test_attention_of_every_kind(text: str, tmp_path: Path) -> None:
    workload = parse(text)
    assert isinstance(workload, Attention)
    make_dataset(workload, 9, tmp_path / "data")
    dataset = load_dataset(workload, tmp_path / "data")
    expected = _row_by_row(workload, *dataset.inputs)
    assert [e.name for e in dataset.expected] == ["o", "lse"][: len(workload.outputs())]
    for found, want in zip(dataset.expected, expected, strict=False):
        np.testing.assert_allclose(found.value, want, atol=1e-12)
        assert (found.gain >= 0).all()


@pytest.mark.parametrize(("rows", "keys"), [(64, 256), (8, 4096)])
def test_weights_rounded_to_sixteen_bits_keep_the_bounds_and_a_lost_key_does_not(
    rows: int, keys: int
) -> None:
    workload = parse(f"attention 1x1x{rows}x64 kv-len={keys} dtype=bf16")
    assert isinstance(workload, Attention)
    bound, _ = tolerances(parse(f"{workload} lse=true"))
    rng = np.random.default_rng(keys)
    q, k, v = (rng.standard_normal((1, n, 1, 64)) for n in (rows, keys, keys))
    ((value, gain),) = reference._attention(workload, {"q": q, "k": k, "v": v})
    logits = q[0, :, 0] @ k[0, :, 0].T / 8
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    total = weights.sum(axis=1, keepdims=True)

    def within(p: np.ndarray) -> bool:
        """Whether the output under weights `p`, rounded as bf16 stores it, keeps the bounds."""
        out = _bf16(_bf16(p) @ v[0, :, 0] / total)
        off, want = np.abs(out - value[0, :, 0]), np.abs(value[0, :, 0])
        whole = np.linalg.norm(off) <= bound.norm * max(np.linalg.norm(want), np.linalg.norm(gain))
        each = (off <= bound.absolute * gain[0, :, 0] + bound.relative * want).all()
        return bool(whole and each)

    def _bf16(x: np.ndarray) -> np.ndarray:
        return np.round(x * (s := 2.0 ** (8 - np.frexp(x)[1]))) / s

    assert within(weights)
    lost = weights.copy()
    lost[:, -keys // 64 :] = 0  # a tile of keys in 64 left out
    assert not within(lost)
