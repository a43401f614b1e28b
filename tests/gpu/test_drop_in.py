"""Emitted modules in the place of torch's functions, on the device.

PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -m gpu tests/gpu/test_drop_in.py
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_log import write_log

from kt.spaces.errors import SpaceError
from kt.spaces.target import Target
from kt.tuner import apply

pytestmark = pytest.mark.gpu

Load = Callable[[str], Any]


def here() -> Target:
    from kt.tuner.devices import detect_gpu

    return detect_gpu("the test")


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch")
    found.manual_seed(0)
    return found


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The emitted module of a workload's default θ."""

    def loaded(text: str) -> Any:
        try:
            log = write_log(tmp_path / "log.jsonl", text, None, here())
        except SpaceError as why:
            pytest.skip(str(why))
        path = tmp_path / "emitted.py"
        path.write_text(apply(log, form="python"))
        spec = importlib.util.spec_from_file_location("emitted", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


def close(found: Any, expected: Any) -> bool:
    return bool((found.double() - expected.double()).norm() < 0.01 * expected.double().norm())


CONVOLUTIONS = [
    ("conv2d 4x28x28x64,96x3x3 pad=1 dtype=bf16", {"padding": 1}),
    ("conv2d 4x29x27x64,96x3x3 stride=2x1 pad=1x2 epilogue=bias dtype=bf16",
     {"stride": (2, 1), "padding": (1, 2)}),
    ("conv2d 4x28x28x64,256x1x1 dtype=fp16", {}),
    ("conv2d 2x28x28x48,48x5x5 pad=2 groups=48 dtype=fp16", {"padding": 2, "groups": 48}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options"), CONVOLUTIONS)
def test_conv2d(torch: Any, load: Load, text: str, options: dict[str, Any]) -> None:
    n, h, w, c, k, r, s = map(int, re.findall(r"\d+", text.split()[1]))
    dtype = torch.bfloat16 if "bf16" in text else torch.float16
    last = {"memory_format": torch.channels_last}
    x = torch.randn(n, c, h, w, device="cuda", dtype=dtype).to(**last)
    weight = torch.randn(k, c // options.get("groups", 1), r, s, device="cuda", dtype=dtype)
    weight = weight.to(**last)
    bias = torch.randn(k, device="cuda", dtype=dtype) if "bias" in text else None
    module = load(text)
    y = module.conv2d(x, weight, bias, **options)
    assert y.is_contiguous(**last) and y.dtype == dtype
    assert close(y, torch.nn.functional.conv2d(x, weight, bias, **options))
    with pytest.raises(ValueError, match="channels_last"):
        module.conv2d(x.contiguous(), weight, bias, **options)
    with pytest.raises(TypeError, match="requires a gradient"):
        module.conv2d(x, weight.detach().requires_grad_(), bias, **options)


def test_a_model_uses_it(torch: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of torch.nn.functional.conv2d, inside nn.Conv2d."""
    module = load("conv2d 4x28x28x64,96x3x3 pad=1 epilogue=bias dtype=bf16")
    layer = torch.nn.Conv2d(64, 96, 3, padding=1).cuda().bfloat16()
    layer = layer.to(memory_format=torch.channels_last)
    x = torch.randn(4, 64, 28, 28, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    with torch.no_grad():
        want = layer(x)
        calls = []
        monkeypatch.setattr(
            torch.nn.functional, "conv2d", lambda *a, **k: calls.append(a) or module.conv2d(*a, **k)
        )
        assert close(layer(x), want) and len(calls) == 1


def test_a_fused_convolution(torch: Any, load: Load) -> None:
    module = load("conv2d 4x28x28x64,96x3x3 pad=1 epilogue=bias+residual+relu dtype=bf16")
    last = {"memory_format": torch.channels_last}
    x, weight, skip = (
        torch.randn(shape, device="cuda").bfloat16().to(**last)
        for shape in ((4, 64, 28, 28), (96, 64, 3, 3), (4, 96, 28, 28))
    )
    bias = torch.randn(96, device="cuda").bfloat16()
    y = module.conv2d(x, weight, bias, padding=1, residual=skip, epilogue="bias+residual+relu")
    conv = torch.nn.functional.conv2d(x.float(), weight.float(), bias.float(), padding=1)
    assert close(y, torch.relu(conv + skip.float()))


ATTENTIONS = [
    "attention 2x8x384x64 dtype=bf16",
    "attention 2x8x384x128 causal=true layout=bhsd dtype=bf16",
    "attention 2x8x1x128 kv-heads=2 kv-len=1000 dtype=bf16",
    "attention 2x4x200x80 causal=true scale=0.3 lse=true layout=bhsd dtype=fp16",
]


@pytest.mark.parametrize("text", ATTENTIONS)
def test_attention(torch: Any, load: Load, text: str) -> None:
    b, h, s, d = map(int, text.split()[1].split("x"))
    options = dict(word.split("=") for word in text.split()[2:])
    dtype = torch.bfloat16 if options["dtype"] == "bf16" else torch.float16
    heads, keys = int(options.get("kv-heads", h)), int(options.get("kv-len", s))
    bshd = "layout" not in options

    def tensor(length: int, heads: int) -> Any:
        shape = (b, length, heads, d) if bshd else (b, heads, length, d)
        made = torch.randn(shape, device="cuda", dtype=dtype)
        return made.transpose(1, 2) if bshd else made

    q, k, v = tensor(s, h), tensor(keys, heads), tensor(keys, heads)
    given = {"is_causal": "causal" in options, "enable_gqa": heads < h}
    given |= {"scale": float(options["scale"])} if "scale" in options else {}
    module = load(text)
    o = module.scaled_dot_product_attention(q, k, v, **given)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, **given)
    assert o.dtype == dtype and close(o, want)
    assert (o.transpose(1, 2) if bshd else o).is_contiguous()
    if "lse" in options:
        o, lse = module.launch(q, k, v)
        logits = q.float() @ k.float().transpose(-1, -2) * float(options["scale"])
        logits.masked_fill_(torch.ones(s, s, device="cuda").triu(1).bool(), -torch.inf)
        assert close(o, want) and torch.allclose(lse, logits.logsumexp(-1), atol=1e-2)


def test_rows_that_see_no_key(torch: Any, load: Load) -> None:
    """launch() gives zeros and -inf; torch's function would align the mask otherwise."""
    module = load("attention 1x2x64x64 kv-len=32 causal=true lse=true layout=bhsd dtype=bf16")
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda").bfloat16() for n in (64, 32, 32))
    o, lse = module.launch(q, k, v)
    assert not o[:, :, :32].any() and torch.isinf(lse[:, :, :32]).all()
    assert torch.isfinite(lse[:, :, 32:]).all()
    with pytest.raises(ValueError, match="bottom right"):
        module.scaled_dot_product_attention(q, k, v, is_causal=True)
