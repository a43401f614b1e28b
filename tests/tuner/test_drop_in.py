"""Emitted modules as drop-ins for torch's functions: what they take, what they refuse, by what."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest

from kt.logs.query import Best
from kt.logs.record import Seconds, Timing, TrialRecord
from kt.spaces.kernel import Kernel, Launch
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.theta import Theta
from kt.spaces.workload import parse
from kt.tuner.emit import source_text
from kt.tuner.emit_python import module_text

H200 = CUDA_TARGETS["h200"]
CONV = "conv2d 2x9x8x16,24x3x5 stride=2x1 pad=1x2 groups=2 dtype=bf16"
TYPES = {"bf16": "<u2", "fp16": "<f2", "fp32": "<f4"}

Load = Callable[[str], Any]


def made(text: str) -> tuple[Best, Kernel]:
    """A record and a kernel of a workload: one launch that is never looked into."""
    workload, theta = parse(text), Theta()
    trial = TrialRecord(
        run="abc", trial=0, batch=0, workload=text, family="fake", theta=theta,
        outcome=Timing((5.0,), 5.0), seconds=Seconds(), time="now",
    )  # fmt: skip
    kernel = Kernel(workload, "fake", theta, "cuda", "", (Launch("kt_kernel", (4, 1, 1)),), 512)
    return Best(text, H200, trial, 5.0, None, None), kernel


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Gpu:
    found = fake_cupy.Gpu()
    monkeypatch.setitem(sys.modules, "cupy", found.cupy())
    return found


@pytest.fixture
def load(tmp_path: Path, gpu: fake_cupy.Gpu) -> Load:
    """Imports the module of a workload from a folder where kt cannot help it."""

    def loaded(text: str) -> Any:
        best, kernel = made(text)
        path = tmp_path / "emitted.py"
        path.write_text(module_text(best, kernel, kernel.workload, b"\x7fELF", "log"))
        spec = importlib.util.spec_from_file_location("emitted", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module._driver = lambda: gpu  # type: ignore[attr-defined]
        return module

    return loaded


def tensor(shape: tuple[int, ...], dtype: str = "bf16") -> fake_cupy.Tensor:
    return fake_cupy.tensor(shape, TYPES[dtype])


def nchw(shape: tuple[int, ...]) -> fake_cupy.Tensor:
    """Of this logical shape, in channels_last memory."""
    n, c, h, w = shape
    return tensor((n, h, w, c)).transpose((0, 3, 1, 2))


def bhsd(shape: tuple[int, ...]) -> fake_cupy.Tensor:
    """Of this shape, as the transposed view of a contiguous [B, S, H, D]."""
    b, h, s, d = shape
    return tensor((b, s, h, d)).transpose((0, 2, 1, 3))


def refused(call: Callable[[], Any], *says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message and "tuned for" in message, message
    for text in says:
        assert text in message


# -- the module -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CONV, "attention 1x4x6x8 lse=true dtype=fp16"])
def test_a_module_is_one_tidy_file(load: Load, text: str) -> None:
    source = Path(load(text).__file__).read_text()
    tree = ast.parse(source)
    assert source.isascii() and "kt.spaces" not in source and "TYPE_CHECKING" not in source
    modules = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert {*modules, *names} <= {*sys.stdlib_module_names, "__future__", "collections.abc", "cupy"}
    assert len(names) == len(set(names))


# -- convolutions ---------------------------------------------------------------------------------


def test_conv2d_has_the_signature_of_torch(load: Load) -> None:
    given = inspect.signature(load(CONV).conv2d).parameters.values()
    torch_has = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert torch_has == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]


def test_conv2d(load: Load, gpu: fake_cupy.Gpu) -> None:
    module = load(CONV)
    x, w = nchw((2, 16, 9, 8)), nchw((24, 8, 3, 5))
    y = module.conv2d(x, w, stride=(2, 1), padding=(1, 2), groups=2)
    assert y.shape == (2, 24, 5, 8)
    assert y.array.transpose(0, 2, 3, 1).flags.c_contiguous  # channels_last, like the input
    assert gpu.launches[0].arguments[:3] == [x.address, w.address, y.address]
    nhwc = module.launch(x.transpose((0, 2, 3, 1)), w.transpose((0, 2, 3, 1)))
    assert nhwc.shape == (2, 5, 8, 24)


def test_a_fused_epilogue_is_named(load: Load, gpu: fake_cupy.Gpu) -> None:
    text = "conv2d 1x4x4x16,24x1x1 epilogue=bias+residual+relu+scale+shift dtype=bf16"
    conv2d = load(text).conv2d
    x, w, skip = nchw((1, 16, 4, 4)), nchw((24, 16, 1, 1)), nchw((1, 24, 4, 4))
    bias, scale, shift = (tensor((24,)) for _ in range(3))
    chain = "bias+residual+relu+scale+shift"
    refused(lambda: conv2d(x, w, bias), f'no epilogue: pass epilogue="{chain}"')
    refused(lambda: conv2d(x, w, bias, epilogue=chain, scale=scale, shift=shift), "no residual")
    y = conv2d(x, w, bias, residual=skip, scale=scale, shift=shift, epilogue=chain)
    wanted = [t.address for t in (x, w, bias, skip, scale, shift, y)]
    assert gpu.launches[0].arguments[:7] == wanted


def test_a_bias_alone_is_conv2ds_own(load: Load, gpu: fake_cupy.Gpu) -> None:
    conv2d = load("conv2d 1x4x4x16,24x1x1 epilogue=bias dtype=bf16").conv2d
    x, w = nchw((1, 16, 4, 4)), nchw((24, 16, 1, 1))
    conv2d(x, w, tensor((24,)))
    refused(lambda: conv2d(x, w), "no bias")
    assert len(gpu.launches) == 1


def test_paddings_by_name(load: Load, gpu: fake_cupy.Gpu) -> None:
    conv2d = load("conv2d 1x8x8x8,8x3x3 pad=2 dilation=2 dtype=bf16").conv2d
    x, w = nchw((1, 8, 8, 8)), nchw((8, 8, 3, 3))
    assert conv2d(x, w, padding="same", dilation=2).shape == (1, 8, 8, 8)
    refused(lambda: conv2d(x, w, padding="valid", dilation=2), "padding=valid")
    conv2d = load("conv2d 1x8x8x8,8x3x3 dtype=bf16").conv2d
    assert conv2d(x, w, padding="valid", stride=[1]).shape == (1, 8, 6, 6)
    refused(lambda: conv2d(x, w, padding="same"), "padding=same")


def test_what_a_convolution_was_not_tuned_for(load: Load, gpu: fake_cupy.Gpu) -> None:
    conv2d = load(CONV).conv2d
    x, w = nchw((2, 16, 9, 8)), nchw((24, 8, 3, 5))
    right = {"stride": (2, 1), "padding": (1, 2), "groups": 2}
    refused(lambda: conv2d(x, w), "stride=1", CONV)
    refused(lambda: conv2d(x, w, **right | {"padding": (2, 1)}), "padding=(2, 1)")
    refused(lambda: conv2d(x, w, **right, dilation=2), "dilation=2")
    refused(lambda: conv2d(x, w, **right | {"groups": 1}), "groups=1")
    refused(lambda: conv2d(x, w, tensor((24,)), **right), "conv2d with bias")
    refused(lambda: conv2d(nchw((1, 16, 9, 8)), w, **right), "input has shape (1, 16, 9, 8)")
    dense = tensor((2, 16, 9, 8))
    refused(lambda: conv2d(dense, w, **right), "input is not in channels_last memory")
    refused(lambda: conv2d(x, tensor((24, 8, 3, 5)), **right), "weight is not in channels_last")
    refused(lambda: conv2d(x, w.array, **right), "weight is not on a CUDA device")
    half = fake_cupy.tensor((24, 3, 5, 8), "<f2").transpose((0, 3, 1, 2))
    refused(lambda: conv2d(x, half, **right), "weight is not bf16")
    assert not gpu.launches


# -- attention ------------------------------------------------------------------------------------


def test_attention_has_the_signature_of_torch(load: Load) -> None:
    function = load("attention 1x4x6x8 dtype=fp16").scaled_dot_product_attention
    assert list(inspect.signature(function).parameters) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_attention(load: Load, gpu: fake_cupy.Gpu, layout: str) -> None:
    text = f"attention 2x4x6x8 kv-heads=2 kv-len=10 value-dim=16 layout={layout} dtype=bf16"
    module = load(text)
    view = bhsd if layout == "bshd" else tensor
    q, k, v = view((2, 4, 6, 8)), view((2, 2, 10, 8)), view((2, 2, 10, 16))
    o = module.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert o.shape == (2, 4, 6, 16)
    inner = o.array.transpose(0, 2, 1, 3) if layout == "bshd" else o.array
    assert inner.flags.c_contiguous
    assert gpu.launches[0].arguments[:4] == [x.address for x in (q, k, v, o)]
    other = tensor if layout == "bshd" else bhsd
    refused(
        lambda: module.scaled_dot_product_attention(other(q.shape), k, v, enable_gqa=True),
        "query is not contiguous",
    )


def test_log_sum_exps_come_second(load: Load, gpu: fake_cupy.Gpu) -> None:
    module = load("attention 2x4x6x8 causal=true lse=true dtype=fp16")
    q, k, v = (tensor((2, 6, 4, 8), "fp16") for _ in range(3))
    assert "# lse        float [B, H, S] whatever the element type" in inspect.getsource(module)
    assert "lse[2, 4, 6] fp32" in module.launch.__doc__
    o, lse = module.launch(q, k, v)
    assert (o.shape, lse.shape, str(lse.dtype)) == ((2, 6, 4, 8), (2, 4, 6), "float32")
    assert gpu.launches[0].arguments[3:5] == [o.address, lse.address]
    outs = (tensor((2, 6, 4, 8), "fp16"), tensor((2, 4, 6), "fp32"))
    assert module.launch(q, k, v, out=outs) is outs
    with pytest.raises(TypeError, match=r"out: accepts a tuple of 2 tensors \(o, lse\)"):
        module.launch(q, k, v, out=outs[0])
    with pytest.raises(TypeError, match="out: accepts a tuple of 2"):
        module.launch(q, k, v, out=outs[:1])
    with pytest.raises(TypeError, match="lse is not fp32"):
        module.launch(q, k, v, out=(outs[0], tensor((2, 4, 6), "fp16")))
    with pytest.raises(ValueError, match="o overlaps k"):
        module.launch(q, k, v, out=(k, outs[1]))
    with pytest.raises(ValueError, match="lse overlaps o"):
        same = np.zeros(4096, np.uint8)
        first = fake_cupy.Tensor(same[:768].view("<f2").reshape(2, 6, 4, 8), "<f2", 0)
        module.launch(q, k, v, out=(first, fake_cupy.Tensor(
            same[:192].view("<f4").reshape(2, 4, 6), "<f4", 0)))  # fmt: skip
    views = [fake_cupy.Tensor(x.array.transpose(0, 2, 1, 3), "<f2", 0) for x in (q, k, v)]
    o = module.scaled_dot_product_attention(*views, is_causal=True)
    assert o.shape == (2, 4, 6, 8)


def test_what_an_attention_was_not_tuned_for(load: Load, gpu: fake_cupy.Gpu) -> None:
    sdpa = load("attention 2x4x6x16 kv-heads=2 layout=bhsd dtype=bf16").scaled_dot_product_attention
    q, k = tensor((2, 4, 6, 16)), tensor((2, 2, 6, 16))
    refused(lambda: sdpa(q, k, k), "enable_gqa=False")
    refused(lambda: sdpa(q, k, k, q, enable_gqa=True), "attn_mask")
    refused(lambda: sdpa(q, k, k, dropout_p=0.5, enable_gqa=True), "dropout_p=0.5")
    refused(lambda: sdpa(q, k, k, is_causal=True, enable_gqa=True), "is_causal=True")
    refused(lambda: sdpa(q, k, k, scale=0.5, enable_gqa=True), "scale=0.5")
    sdpa(q, k, k, scale=0.25, enable_gqa=True)
    assert len(gpu.launches) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("kv-len=8 causal=true", "aligns a causal mask at the top left, the kernel at the bottom"),
        ("causal=true window=3", "a window of 3 keys"),
        ("softcap=30", "caps logits at 30"),
    ],
)
def test_what_torch_has_no_words_for(load: Load, options: str, says: str) -> None:
    text = str(parse(f"attention 1x4x6x8 {options} layout=bhsd dtype=bf16"))
    sdpa = load(text).scaled_dot_product_attention
    q = tensor((1, 4, 6, 8))
    refused(lambda: sdpa(q, q, q, is_causal="causal" in options), says, "launch()", text)


def test_a_window_over_all_keys_is_none(load: Load, gpu: fake_cupy.Gpu) -> None:
    sdpa = load("attention 1x4x6x8 window=6 layout=bhsd dtype=bf16").scaled_dot_product_attention
    q = tensor((1, 4, 6, 8))
    sdpa(q, q, q)
    assert len(gpu.launches) == 1


# -- sources --------------------------------------------------------------------------------------


def test_a_source_names_every_argument() -> None:
    best, kernel = made("attention 2x4x6x8 lse=true dtype=fp16")
    source = source_text(best, kernel, kernel.workload, "log")
    for says in ("const fp16 q[2][6][4][8]", "const fp16 v[2][6][4][8], fp16 o[2][6][4][8], float "
                 "lse[2][4][6]", "a query that sees no key gets o = 0 and lse = -inf",
                 "lse        float [B, H, S] whatever the element type"):  # fmt: skip
        assert says in source
    best, kernel = made(CONV)
    source = source_text(best, kernel, kernel.workload, "log")
    assert "const bf16 w[24][3][5][8], bf16 y[2][5][8][24]" in source and "w KRSC" in source
