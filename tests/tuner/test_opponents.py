"""Opponents on CUDA without a GPU: what each computes, what it cannot, and how that is said."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kt.spaces.workload import Attention, Conv2d, Gemm, Workload, parse
from kt.tuner.backend import cuda_vendor, vendor_conv, vendor_sdpa, vendor_torch
from kt.tuner.backend.cuda_vendor import COMPILED, OPPONENTS, opponent, opponents_of
from kt.tuner.backend.vendor_torch import Unavailable

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Any]

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch, which kt does not"
)


# -- without torch --------------------------------------------------------------------------------


def test_every_operator_has_its_opponents() -> None:
    gemm, conv, attention = (
        parse(f"{text} dtype=bf16")
        for text in ("gemm 8x8x8", "conv2d 1x8x8x8,8x3x3", "attention 1x2x8x8")
    )
    assert opponents_of(gemm) == ("torch", "torch-scaled-mm", "cublaslt-tuned", "inductor-triton")
    assert opponents_of(conv) == ("cudnn", "inductor")
    assert opponents_of(attention) == ("cudnn", "fa3", "fa2", "flex")
    assert set(OPPONENTS) >= COMPILED


def test_an_opponent_without_the_operator_says_so() -> None:
    with pytest.raises(Unavailable, match="flex has no gemm"):
        opponent("flex", parse("gemm 8x8x8 dtype=bf16"), [], None)


def test_without_torch_there_is_no_opponent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_torch.importlib.util, "find_spec", lambda name: None)
    for text in ("gemm 8x8x8", "conv2d 1x8x8x8,8x3x3", "attention 1x2x8x8"):
        workload = parse(f"{text} dtype=bf16")
        assert cuda_vendor.vendor_library(workload, []) is None
        for name in set(opponents_of(workload)) - {"cublaslt-tuned"}:
            with pytest.raises(Unavailable, match="torch is not installed"):
                opponent(name, workload, [], None)


def test_what_cublaslt_does_not_fuse() -> None:
    workload = parse("gemm 8x8x8 epilogue=bias+silu dtype=bf16")
    with pytest.raises(Unavailable, match=r"fuses no bias\+silu"):
        opponent("cublaslt-tuned", workload, [], None)


class Torch:
    """As much of torch as choosing a form needs; launches take no time."""

    __version__ = "9"

    def __init__(self, times: Mapping[str, float]) -> None:
        self._times, self._now = dict(times), ""
        torch = self

        class Graph:
            def replay(self) -> None:
                torch._now = self.name

            def reset(self) -> None:
                pass

            name = ""

        class Recording:
            def __init__(self, graph: Graph) -> None:
                self._graph = graph

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                self._graph.name = torch._now

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                pass

            def record(self) -> None:
                self._name = torch._now

            def elapsed_time(self, later: Event) -> float:
                return torch._times[later._name]

        self.cuda = SimpleNamespace(
            synchronize=lambda: None, CUDAGraph=Graph, graph=Recording, Event=Event
        )

    def form(self, name: str) -> Callable[[Any], None]:
        def launch(_: Any) -> None:
            if name not in self._times:
                raise RuntimeError(f"no {name}\n" * 3)
            self._now = name

        return launch


def chosen(times: Mapping[str, float], *names: str) -> str:
    torch = Torch(times)
    forms = {name: torch.form(name) for name in names}
    made = vendor_torch.TorchOpponent(torch, parse("gemm 8x8x8"), [], "what", forms)
    return made.describe()


def test_the_fastest_form_runs_and_the_others_are_accounted_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vendor_torch, "_WARM", 0)
    monkeypatch.setattr(vendor_torch.TorchOpponent, "_warm", lambda self, form: form({}))
    assert chosen({"slow": 2.0, "fast": 1.0}, "slow", "fast") == "torch 9: what, fast"
    told = "torch 9: what, slow; not other (RuntimeError: no other)"
    assert chosen({"slow": 2.0}, "slow", "other") == told
    with pytest.raises(Unavailable, match=r"^a: RuntimeError: no a; b: RuntimeError: no b$"):
        chosen({}, "a", "b")


# -- what they compute, on torch's CPU ------------------------------------------------------------


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Workload], dict[str, Any]]:
    """An opponent's forms, uncompiled, where torch has no GPU."""
    torch = importlib.import_module("torch")

    def of(name: str, workload: Workload) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def keep(torch: Any, workload: Any, sets: Any, what: str, forms: dict[str, Any]) -> Any:
            found.update(forms)

        for module in (cuda_vendor, vendor_conv, vendor_sdpa):
            monkeypatch.setattr(module, "TorchOpponent", keep)
            if hasattr(module, "compiled"):
                monkeypatch.setattr(module, "compiled", lambda torch, function, *_: function)
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        mask = flex.create_block_mask
        monkeypatch.setattr(flex, "create_block_mask", lambda *a, device: mask(*a, device="cpu"))
        backends = torch.nn.attention.SDPBackend
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            monkeypatch.setattr(backends, backend, backends.MATH)
        monkeypatch.setattr(vendor_sdpa, "_imported", lambda name: FlashAttention3)
        OPPONENTS[name](workload, [], None)
        return found

    return of


class FlashAttention3:
    """flash_attn_func as its documentation defines it, in float64."""

    @staticmethod
    def flash_attn_func(
        q: Any, k: Any, v: Any, *, softmax_scale: float | None, causal: bool, softcap: float,
        window_size: tuple[int, int], num_splits: int = 1, pack_gqa: bool | None = None,
    ) -> Any:  # fmt: skip
        torch = importlib.import_module("torch")
        q, k, v = (x.double().numpy() for x in (q, k, v))
        s, keys, d = q.shape[1], k.shape[1], q.shape[3]
        middle = np.arange(s)[:, None] + keys - s
        j = np.arange(keys)[None]
        left, right = window_size
        sees = (j >= middle - left if left >= 0 else j >= 0) & (
            j <= middle + right if right >= 0 else j >= 0
        )
        assert causal == (right == 0)
        return torch.from_numpy(attend(q, k, v, sees, softmax_scale or d**-0.5, softcap))


def attend(q: Array, k: Array, v: Array, sees: Array, scale: float, cap: float) -> Array:
    """BSHD attention over the keys that `sees` leaves; zeros where it leaves none."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    logits = scale * np.einsum("bihd,bjhd->bhij", q, k)
    logits = cap * np.tanh(logits / cap) if cap else logits
    weights = np.where(sees, np.exp(logits), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bhij,bjhd->bihd", weights, v)


def operands(workload: Workload) -> tuple[dict[str, Array], Tensors]:
    """Random operands and poisoned outputs, as float64 and as torch tensors."""
    torch = importlib.import_module("torch")
    rng = np.random.default_rng(0)
    arrays = {o.name: rng.standard_normal(o.shape) for o in workload.inputs()}
    tensors = {name: torch.from_numpy(x).float() for name, x in arrays.items()}
    for operand in workload.outputs():
        tensors[operand.name] = torch.full(operand.shape, torch.nan)
    return arrays, tensors


def fused(workload: Workload, x: Array, arrays: Mapping[str, Array]) -> Array:
    """The epilogue by its definition, channels last."""
    erf = np.vectorize(importlib.import_module("math").erf)
    for op in workload.epilogue:
        match op:
            case "bias" | "residual" | "shift":
                x = x + arrays[op]
            case "scale" | "tensor_scale":
                x = x * arrays[op]
            case "relu":
                x = np.maximum(x, 0)
            case "gelu":
                x = x / 2 * (1 + erf(x / 2**0.5))
            case "silu":
                x = x / (1 + np.exp(-x))
    return x


EPILOGUES = (
    "",
    "bias+relu",
    "tensor_scale+bias",
    "scale+shift",
    "bias+silu+residual",
    "gelu+bias+scale",
)


@needs_torch
@pytest.mark.parametrize("chain", EPILOGUES)
@pytest.mark.parametrize("name", ["torch", "inductor-triton"])
def test_products(forms: Any, name: str, chain: str) -> None:
    workload = parse(f"gemm 5x7x9 batch=2 layout=tt epilogue={chain} dtype=fp32")
    assert isinstance(workload, Gemm)
    arrays, tensors = operands(workload)
    want = fused(workload, arrays["A"].swapaxes(1, 2) @ arrays["B"].swapaxes(1, 2), arrays)
    for form in forms(name, workload).values():
        np.testing.assert_allclose(form(tensors).numpy(), want, rtol=1e-4, atol=1e-4)


@needs_torch
@pytest.mark.parametrize("chain", EPILOGUES)
@pytest.mark.parametrize("name", ["cudnn", "inductor"])
def test_convolutions(forms: Any, name: str, chain: str) -> None:
    text = f"conv2d 2x9x8x6,4x3x2 stride=2x1 pad=1x0 dilation=1x2 groups=2 epilogue={chain}"
    workload = parse(f"{text} dtype=fp32")
    assert isinstance(workload, Conv2d)
    arrays, tensors = operands(workload)
    x = np.pad(arrays["x"], ((0, 0), (1, 1), (0, 0), (0, 0)))
    p, q = workload.out_size
    y = np.zeros((2, p, q, 4))
    for r in range(3):
        for s in range(2):
            part = x[:, r : r + 2 * p : 2, 2 * s : 2 * s + q]
            for g in range(2):
                channels, filters = slice(3 * g, 3 * g + 3), slice(2 * g, 2 * g + 2)
                y[..., filters] += part[..., channels] @ arrays["w"][filters, r, s].T
    want = fused(workload, y, arrays)
    for form in forms(name, workload).values():
        found = form(tensors)
        assert found.permute(0, 2, 3, 1).is_contiguous()  # as NHWC is stored
        found = found.permute(0, 2, 3, 1).numpy()
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


MASKS = (
    "", "causal=true", "causal=true window=3", "window=3", "kv-len=11 causal=true window=4",
    "kv-heads=1 kv-len=11", "scale=0.5 softcap=2 causal=true",
)  # fmt: skip


@needs_torch
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["cudnn", "fa2", "fa3", "flex"])
def test_attentions(forms: Any, name: str, mask: str, layout: str) -> None:
    workload = parse(f"attention 2x4x7x16 {mask} layout={layout} dtype=fp32")
    assert isinstance(workload, Attention)
    if name in ("cudnn", "fa2") and (workload.window or workload.softcap):
        direct = name == "fa2" and not workload.softcap  # a function that only CUDA has
        if not direct:
            with pytest.raises(Unavailable):
                forms(name, workload)
        return
    arrays, tensors = operands(workload)
    q, k, v = (x if layout == "bshd" else x.swapaxes(1, 2) for x in map(arrays.get, "qkv"))  # type: ignore[union-attr]
    i, j = np.ogrid[:7, : workload.kv_len]
    last = i + workload.kv_len - 7
    sees = (j <= last) | (not workload.causal)
    sees = sees & ((j > last - workload.window) | (not workload.window))
    want = attend(q, k, v, sees, workload.scale or 16**-0.5, workload.softcap)
    found = forms(name, workload)
    assert found
    for form in found.values():
        o = form(tensors).numpy()
        o = o if name == "fa3" else o.swapaxes(1, 2)
        np.testing.assert_allclose(o, want, rtol=1e-4, atol=1e-5)
