"""Opponents on the device: what each one computes is right, in a graph too, or it says why not.

PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -m gpu tests/gpu/test_opponents.py -s
"""

from __future__ import annotations

from typing import Any

import pytest

from kt.spaces.workload import Attention, Conv2d, Gemm, Workload, parse
from kt.tuner.backend.cuda_vendor import OPPONENTS, opponents_of, vendor_library
from kt.tuner.backend.driver import Device
from kt.tuner.backend.vendor_torch import TorchOpponent, Unavailable

pytestmark = pytest.mark.gpu

WORKLOADS = (
    "gemm 192x320x256 epilogue=bias+silu+residual dtype=bf16",
    "gemm 65x33x127 batch=3 layout=tn epilogue=scale+shift dtype=fp16",
    "gemm 192x320x256 layout=nt dtype=fp8_e4m3",
    "gemm 128x96x512 layout=nt epilogue=tensor_scale+bias+silu dtype=fp8_e4m3",
    "conv2d 4x28x28x64,96x3x3 pad=1 dtype=bf16",
    "conv2d 4x28x28x64,96x3x3 stride=2 pad=1 epilogue=bias+residual+relu dtype=bf16",
    "conv2d 2x28x28x48,48x5x5 pad=2 groups=48 epilogue=bias+silu dtype=fp16",
    "conv2d 2x20x20x12,40x3x3 pad=1 epilogue=bias+relu+scale+shift dtype=bf16",
    "attention 2x8x512x64 dtype=bf16",
    "attention 2x8x512x128 causal=true dtype=bf16",
    "attention 2x8x384x80 causal=true layout=bhsd dtype=bf16",
    "attention 1x8x1024x128 causal=true window=256 dtype=bf16",
    "attention 1x8x256x64 kv-len=1024 causal=true dtype=bf16",
    "attention 4x32x1x128 kv-heads=8 kv-len=2048 dtype=bf16",
    "attention 2x8x512x64 causal=true softcap=20 scale=0.2 dtype=bf16",
)


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch")
    found.zeros(1, device="cuda")
    return found


@pytest.fixture(scope="module")
def device(torch: Any) -> Device:
    return Device(0)


def operands(torch: Any, workload: Workload, seed: int) -> dict[str, Any]:
    """N(0,1) inputs and poisoned outputs."""
    torch.manual_seed(seed)
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
             "fp8_e4m3": torch.float8_e4m3fn}  # fmt: skip
    made = {
        o.name: torch.randn(o.shape, device="cuda").to(types[o.dtype]) for o in workload.inputs()
    }
    for o in workload.outputs():
        made[o.name] = torch.full(o.shape, torch.nan, dtype=types[o.dtype], device="cuda")
    return made


def expected(torch: Any, workload: Workload, named: dict[str, Any]) -> Any:
    """The workload in float64, by its definition, in the workload's own layout."""
    x = {name: tensor.double() for name, tensor in named.items()}
    match workload:
        case Gemm():
            a, b = x["A"], x["B"]
            a = a.transpose(-1, -2) if workload.layout[0] == "t" else a
            b = b.transpose(-1, -2) if workload.layout[1] == "t" else b
            return fused(torch, workload, a @ b, x)
        case Conv2d():
            y = torch.nn.functional.conv2d(
                x["x"].permute(0, 3, 1, 2), x["w"].permute(0, 3, 1, 2), None, workload.stride,
                workload.pad, workload.dilation, workload.groups,
            )  # fmt: skip
            return fused(torch, workload, y.permute(0, 2, 3, 1), x)
        case Attention():
            return attended(torch, workload, x)
    raise AssertionError(workload)


def fused(torch: Any, workload: Workload, y: Any, x: dict[str, Any]) -> Any:
    for op in workload.epilogue:
        if op in ("scale", "tensor_scale"):
            y = y * x[op]
        elif op in x:
            y = y + x[op]
        else:
            y = getattr(torch.nn.functional, op)(y)
    return y


def attended(torch: Any, workload: Attention, x: dict[str, Any]) -> Any:
    q, k, v = (x[n] if workload.layout == "bhsd" else x[n].transpose(1, 2) for n in "qkv")
    k, v = (t.repeat_interleave(workload.h // workload.kv_heads, dim=1) for t in (k, v))
    logits = q @ k.transpose(-1, -2) * (workload.scale or workload.d**-0.5)
    if workload.softcap:
        logits = workload.softcap * torch.tanh(logits / workload.softcap)
    i = torch.arange(workload.s, device="cuda")[:, None] + workload.kv_len - workload.s
    j = torch.arange(workload.kv_len, device="cuda")[None]
    hidden = (j > i) & workload.causal
    if workload.window:
        hidden |= j <= i - workload.window
    o = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1).nan_to_num() @ v
    return o if workload.layout == "bhsd" else o.transpose(1, 2)


def as_stored(workload: Workload, named: dict[str, Any], found: Any) -> Any:
    """An opponent's output in the workload's layout."""
    out = workload.output()
    if tuple(found.shape) == out.shape:
        return found
    order = (0, 2, 3, 1) if isinstance(workload, Conv2d) else (0, 2, 1, 3)
    return found.permute(order)


CASES = [(name, text) for text in WORKLOADS for name in opponents_of(parse(text))]


@pytest.mark.parametrize(("name", "text"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_an_opponent_computes_the_workload(
    torch: Any, device: Device, name: str, text: str
) -> None:
    workload = parse(text)
    sets = [operands(torch, workload, seed) for seed in range(2)]
    addresses = [[named[o.name].data_ptr() for o in workload.operands()] for named in sets]
    try:
        rival = OPPONENTS[name](workload, addresses, device.stream)
    except Unavailable as why:
        print(f"\n{name}, {text}: {why}")
        pytest.skip(str(why))
    print(f"\n{name}, {text}: {rival.describe()}")
    assert rival.warm_us() > 0
    graph = rival.graph(4)
    graph.replay(device.stream)
    device.synchronize()
    graph.destroy()
    if not isinstance(rival, TorchOpponent):
        return  # cuBLASLt, whose operands may be in another order
    for named, found in zip(sets, rival.outputs(), strict=True):
        want = expected(torch, workload, named)
        found = as_stored(workload, named, found).double()
        error = float((found - want).norm() / want.norm())
        assert error < 0.01, error


@pytest.mark.parametrize("text", WORKLOADS)
@pytest.mark.filterwarnings("ignore")
def test_the_library_that_tuning_shows(torch: Any, device: Device, text: str) -> None:
    workload = parse(text)
    named = operands(torch, workload, 0)
    library = vendor_library(workload, [[named[o.name].data_ptr() for o in workload.operands()]])
    softcap = isinstance(workload, Attention) and workload.softcap
    assert (library is None) == bool(softcap)
    if library:
        print(f"\n{text}: {library.describe()}")
