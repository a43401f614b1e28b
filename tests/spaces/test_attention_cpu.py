"""The CPU attention families: every legal θ computes softmax(q kᵀ) v, and touches nothing else."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cpu_kernels import (
    DTYPES,
    TARGETS,
    Array,
    Fenced,
    Loaded,
    build,
    compile_alone,
    inputs_of,
    needs_compiler,
)

from kt.spaces.attention.cpu import AttentionCpu
from kt.spaces.attention.cpu_decode import AttentionCpuDecode
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import Attention, Gemm, parse

PANELS, DECODE = AttentionCpu(), AttentionCpuDecode()
SOURCES = Path(AttentionCpu.kernel.__code__.co_filename).parent
LENGTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 129, 200)
DIMS = (1, 2, 5, 8, 16, 24, 33, 64, 80)
TOLERANCE = {"fp32": 1e-6, "fp64": 2e-15}
"""Of the whole result, relative, for each unit of the largest logit."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attention")


# -- what is right ------------------------------------------------------------------------------


def attention(text: str) -> Attention:
    workload = parse(f"attention {text}")
    assert isinstance(workload, Attention)
    return workload


def by_head(w: Attention, x: Array) -> Array:
    """[B, heads, length, dim], one key/value head for each query head."""
    x = x.swapaxes(1, 2) if w.layout == "bshd" else x
    return np.repeat(x, w.h // x.shape[1], axis=1).astype(np.float64)


def visible(w: Attention) -> Array:
    """[S, kv_len]: whether query i sees key j."""
    ahead = np.arange(w.kv_len)[None] - (np.arange(w.s)[:, None] + w.kv_len - w.s)
    return ((ahead <= 0) | (not w.causal)) & ((ahead > -w.window) | (w.window == 0))


def reference(w: Attention, inputs: list[Array]) -> tuple[Array, Array, float]:
    """o as it is stored, the log-sum-exp [B, H, S], and the largest logit (at least 1)."""
    q, k, v = (by_head(w, x) for x in inputs)
    logits = q @ k.swapaxes(-1, -2) * (w.scale or 1 / math.sqrt(w.d))
    size = max(1.0, float(np.abs(logits).max()))
    if w.softcap:
        logits = w.softcap * np.tanh(logits / w.softcap)
    logits = np.where(visible(w), logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    o = weights @ v / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top, 0) + np.log(total)
    return (o.swapaxes(1, 2) if w.layout == "bshd" else o), lse[..., 0], size


def outputs_of(w: Attention) -> list[Array]:
    return [np.full(x.shape, np.nan, DTYPES[x.dtype]) for x in w.outputs()]


def assert_right(w: Attention, inputs: list[Array], outputs: list[Array]) -> None:
    o, lse, size = reference(w, inputs)
    assert np.isfinite(outputs[0]).all()
    error = np.linalg.norm(outputs[0] - o) / max(np.linalg.norm(o), 1e-30)
    assert error < TOLERANCE[w.dtype] * size, error
    if w.lse:
        seen = np.isfinite(lse)
        np.testing.assert_array_equal(outputs[1][~seen], -np.inf)
        np.testing.assert_allclose(outputs[1][seen], lse[seen], rtol=1e-6, atol=2e-6 * size)


# -- kernels ------------------------------------------------------------------------------------


def default_kernel(
    w: Attention, cores: int = 2, family: AttentionCpu | AttentionCpuDecode = PANELS, **changes: Any
) -> Kernel:
    """The default for some cores, with some knobs (`component__knob`) changed."""
    space = Space(w, msgspec.structs.replace(TARGETS[0], cores=cores), [family])
    theta = space.theta(int(space.defaults()[0]))
    for path, value in changes.items():
        component, knob = path.split("__")
        theta = msgspec.structs.replace(
            theta, **{component: getattr(theta, component) | {knob: value}}
        )
    return space.kernel(space.check(family.name, theta))


def run_between_fences(kernel: Kernel, w: Attention, inputs: list[Array], folder: Path) -> None:
    """Launches with operands that end, and then that begin, at a page that may not be touched."""
    loaded = Loaded(build(kernel, folder))
    for end in (True, False):
        with Fenced([*inputs, *outputs_of(w)], end=end) as fenced:
            loaded.launch(*fenced.arrays)
            outputs = [x.copy() for x in fenced.arrays[3:]]
            assert fenced.intact()
            for before, after in zip(inputs, fenced.arrays, strict=False):
                np.testing.assert_array_equal(before, after)
        assert_right(w, inputs, outputs)
    loaded.close()


def random_workload(rng: np.random.Generator) -> Attention:
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 5]))
    return Attention(
        b=int(rng.integers(1, 3)), h=kv_heads * group, kv_heads=kv_heads,
        s=int(rng.choice(LENGTHS)), kv_len=int(rng.choice(LENGTHS)),
        d=int(rng.choice(DIMS)), value_dim=int(rng.choice(DIMS)),
        causal=bool(rng.integers(2)), window=int(rng.choice([0, 0, 1, 5, 40])),
        scale=float(rng.choice([0, 0, 0.3, 2])), softcap=float(rng.choice([0, 0, 3, 30])),
        lse=bool(rng.integers(2)), layout=str(rng.choice(["bshd", "bhsd"])),
        dtype=str(rng.choice(["fp32", "fp32", "fp64"])),
    )  # fmt: skip


def with_few_rows(w: Attention, rng: np.random.Generator) -> Attention:
    return replace(w, s=int(rng.integers(1, 1 + 16 * w.kv_heads // w.h)))


@needs_compiler
@pytest.mark.parametrize("family", [PANELS, DECODE], ids=lambda family: family.name)
@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_compute_attention(
    seed: int, family: AttentionCpu | AttentionCpuDecode, folder: Path
) -> None:
    rng = np.random.default_rng(seed)
    w = random_workload(rng)
    w = with_few_rows(w, rng) if family is DECODE else w
    target = msgspec.structs.replace(TARGETS[rng.integers(len(TARGETS))], cores=3)
    space = Space(w, target, [family])
    kernel = space.kernel(int(space.sample(rng, 1)[0]))
    run_between_fences(kernel, w, inputs_of(w, rng), folder)


EDGES = (
    "1x1x1x1 lse=true",  # one query, one key, one dimension
    "2x3x70x16 kv-len=1",
    "1x2x1x64 kv-len=333",
    "2x4x1x128 kv-heads=2 kv-len=70 lse=true",
    "1x8x2x72 kv-heads=1 kv-len=1 value-dim=136",
    "1x3x9x5 kv-len=4 causal=true lse=true",
    "1x1x16x64 kv-len=200 causal=true window=3 softcap=2",
    "1x2x33x40 value-dim=1",
    "1x2x33x1 value-dim=40",
    "1x2x90x32 kv-len=50 causal=true lse=true",  # the first 40 rows see nothing
    "1x2x50x32 kv-len=90 causal=true",
    "1x2x90x32 causal=true window=1 lse=true",
    "1x2x90x32 window=1",
    "1x2x90x32 kv-len=40 causal=true window=7 lse=true",
    "1x2x40x32 kv-len=90 window=7",
    "2x12x37x32 kv-heads=4 causal=true lse=true",
    "2x12x37x32 kv-heads=1 causal=true layout=bhsd",
    "1x4x60x32 softcap=5",
    "1x4x60x32 softcap=100000",
    "1x4x60x32 scale=3.5",
    "1x2x300x64 causal=true dtype=fp64 lse=true",
)


@needs_compiler
@pytest.mark.parametrize("text", EDGES)
def test_edges(text: str, folder: Path) -> None:
    w = attention(text)
    for family in (PANELS, DECODE):
        if family.refuses(w, TARGETS[0]) is None:
            kernel = default_kernel(w, family=family)
            run_between_fences(kernel, w, inputs_of(w, np.random.default_rng(1)), folder)


@needs_compiler
@pytest.mark.parametrize("kv_len", [31, 32, 33, 47, 48, 49, 127, 128, 129])
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_around_blocks_and_splits(kv_len: int, splits: int, folder: Path) -> None:
    w = Attention(b=1, h=1, s=19, d=20, kv_len=kv_len, causal=True, lse=True)
    kernel = default_kernel(
        w, 3, tile__block_k=min(32, kv_len), map__splits=min(splits, -(-kv_len // 32)),
        map__threads=1, sync__schedule="static",
    )  # fmt: skip
    run_between_fences(kernel, w, inputs_of(w, np.random.default_rng(kv_len)), folder)


@needs_compiler
@pytest.mark.parametrize("options", ["", "scale=2", "softcap=2000 scale=1", "causal=true"])
@pytest.mark.parametrize("family", [PANELS, DECODE], ids=lambda family: family.name)
def test_huge_logits_do_not_overflow(
    family: AttentionCpu | AttentionCpuDecode, options: str, folder: Path
) -> None:
    w = attention(f"1x2x{40 if family is PANELS else 10}x64 kv-len=70 lse=true {options}")
    q, k, v = inputs_of(w, np.random.default_rng(5))
    run_between_fences(default_kernel(w, family=family), w, [60 * q, 60 * k, v], folder)


@needs_compiler
@pytest.mark.parametrize("family", [PANELS, DECODE], ids=lambda family: family.name)
def test_a_nan_reaches_the_rows_that_see_it_only(
    family: AttentionCpu | AttentionCpuDecode, folder: Path
) -> None:
    w = attention("1x1x16x16 kv-len=60 causal=true window=9 layout=bhsd")
    q, k, v = inputs_of(w, np.random.default_rng(6))
    k[0, 0, 50, 3] = np.nan
    loaded, (o,) = Loaded(build(default_kernel(w, family=family), folder)), outputs_of(w)
    loaded.launch(q, k, v, o)
    loaded.close()
    np.testing.assert_array_equal(np.isnan(o[0, 0]).all(axis=1), visible(w)[:, 50])


@needs_compiler
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("family", [PANELS, DECODE], ids=lambda family: family.name)
def test_concurrent_callers(
    family: AttentionCpu | AttentionCpuDecode, splits: int, folder: Path
) -> None:
    w = Attention(b=2, h=2, s=16, d=24, kv_len=150, causal=True)
    changes: dict[str, Any] = {"map__threads": 2, "map__splits": splits}
    if family is PANELS:
        changes["sync__schedule"] = "static"
    loaded = Loaded(build(default_kernel(w, family=family, **changes), folder))
    inputs = [inputs_of(w, np.random.default_rng(i)) for i in range(4)]
    errors: list[BaseException] = []

    def call(i: int) -> None:
        try:
            for _ in range(30):
                outputs = outputs_of(w)
                loaded.launch(*inputs[i], *outputs)
                assert_right(w, inputs[i], outputs)
        except BaseException as error:  # reported by the main thread
            errors.append(error)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    loaded.close()
    assert not errors


# -- sources and declarations -------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", ["cpu.c", "cpu_decode.c"])
def test_a_kernel_file_compiles_on_its_own(name: str, tmp_path: Path) -> None:
    compile_alone(SOURCES / name, tmp_path / "kernel.o")


@pytest.mark.parametrize("seed", range(20))
def test_defaults_are_legal_and_features_finite(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = replace(random_workload(rng), s=int(rng.choice([1, 100, 5000])))
    for target in TARGETS:
        for cores in (1, 2, 6, 64):
            narrow = msgspec.structs.replace(target, cores=cores)
            for family, workload in ((PANELS, w), (DECODE, with_few_rows(w, rng))):
                space = Space(workload, narrow, [family])
                assert all(space.why_illegal(int(point)) is None for point in space.defaults())
                assert np.isfinite(space.encode(space.sample(rng, 64))).all()


def test_rules_give_reasons() -> None:
    space = Space(attention("1x8x4096x128 causal=true"), TARGETS[0], [PANELS])
    part, rng = space.parts[0], np.random.default_rng(0)
    reasons = {part.why_illegal(int(point)) for point in part.draw(rng, 500)} - {None}
    assert any("vector registers" in str(reason) for reason in reasons)
    assert any("exceeds the" in str(reason) for reason in reasons)


@pytest.mark.parametrize("family", [PANELS, DECODE], ids=lambda family: family.name)
def test_a_family_refuses_what_it_cannot_compute(family: AttentionCpu | AttentionCpuDecode) -> None:
    w = attention("1x1x8x8")
    assert family.refuses(w, TARGETS[0]) is None
    assert "fp16" in str(family.refuses(replace(w, dtype="fp16", acc="fp32"), TARGETS[0]))
    assert family.refuses(w, CUDA_TARGETS["h200"]) is not None
    assert family.refuses(Gemm(m=8, n=8, k=8), TARGETS[0]) is not None


def test_the_decode_family_refuses_many_rows() -> None:
    assert "not 17" in str(DECODE.refuses(attention("1x1x17x8"), TARGETS[0]))
    assert "not 24" in str(DECODE.refuses(attention("1x24x2x8 kv-heads=2"), TARGETS[0]))
