"""Workloads: canonical text, refusals, and the numbers that follow from a shape."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt.spaces.errors import WorkloadError
from kt.spaces.workload import (
    CHEAPER_ACC,
    DEFAULT_ACC,
    EPILOGUE_OPS,
    INPUT_DTYPES,
    LAYOUTS,
    LOGIT_FACTORS,
    Attention,
    Conv2d,
    Gemm,
    Workload,
    parse,
)

SMALL = st.integers(1, 4096)
DTYPES = st.sampled_from(INPUT_DTYPES)
CHAINS = st.permutations(EPILOGUE_OPS).flatmap(
    lambda ops: st.integers(0, len(ops)).map(lambda n: tuple(ops[:n]))
)
PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def accumulators(draw: st.DrawFn) -> dict[str, str]:
    dtype = draw(DTYPES)
    default = DEFAULT_ACC[dtype]
    accs = ["", default, CHEAPER_ACC.get(dtype, default)]
    return {"dtype": dtype, "acc": draw(st.sampled_from(accs))}


@st.composite
def gemms(draw: st.DrawFn) -> Gemm:
    return Gemm(
        m=draw(SMALL), n=draw(SMALL), k=draw(SMALL), batch=draw(st.integers(1, 64)),
        layout=draw(st.sampled_from(LAYOUTS)), epilogue=draw(CHAINS), **draw(accumulators()),
    )  # fmt: skip


@st.composite
def convolutions(draw: st.DrawFn) -> Conv2d:
    groups, r, s = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    dilation = draw(PAIRS)
    return Conv2d(
        n=draw(st.integers(1, 32)), h=(r - 1) * dilation[0] + draw(st.integers(1, 64)),
        w=(s - 1) * dilation[1] + draw(st.integers(1, 64)), c=groups * draw(st.integers(1, 64)),
        k=groups * draw(st.integers(1, 64)), r=r, s=s, stride=draw(PAIRS), dilation=dilation,
        pad=draw(st.tuples(st.integers(0, 3), st.integers(0, 3))), groups=groups,
        epilogue=draw(CHAINS), **draw(accumulators()),
    )  # fmt: skip


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    kv_heads, factor = draw(st.integers(1, 8)), st.just(0.0) | st.floats(*LOGIT_FACTORS)
    return Attention(
        b=draw(st.integers(1, 16)), h=kv_heads * draw(st.integers(1, 8)), s=draw(SMALL),
        d=draw(st.integers(1, 256)), kv_heads=kv_heads, kv_len=draw(SMALL),
        value_dim=draw(st.integers(1, 256)), causal=draw(st.booleans()),
        window=draw(st.integers(0, 512)), scale=draw(factor), softcap=draw(factor),
        lse=draw(st.booleans()), layout=draw(st.sampled_from(("bshd", "bhsd"))),
        **draw(accumulators()),
    )  # fmt: skip


@given(st.one_of(gemms(), convolutions(), attentions()))
def test_the_canonical_text_reads_back_as_the_same_workload(workload: Workload) -> None:
    text = str(workload)
    assert parse(text) == workload
    assert str(parse(text)) == text
    assert "dtype=" in text and "\n" not in text


@given(st.one_of(gemms(), convolutions(), attentions()), st.randoms(use_true_random=False))
def test_options_are_read_in_any_order_and_case(workload: Workload, random: object) -> None:
    operator, shape, *options = str(workload).split()
    random.shuffle(options)  # type: ignore[attr-defined]
    assert parse([operator.upper(), shape, *options]) == workload
    assert parse(" ".join([operator, shape.upper(), *options])) == workload


@given(st.one_of(gemms(), convolutions(), attentions()))
def test_bytes_are_the_operands_once(workload: Workload) -> None:
    sizes = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int32": 4,
             "fp8_e4m3": 1, "fp8_e5m2": 1}  # fmt: skip
    operands = workload.operands()
    assert workload.bytes == sum(math.prod(o.shape) * sizes[o.dtype] for o in operands)
    assert len({o.name for o in operands}) == len(operands)
    assert all(math.isfinite(v) for v in workload.descriptors().values())


BENCHMARKED = {  # operator and options: shapes
    "attention * causal=true dtype=bf16": """
        16x16x1024x128 16x32x512x64 1x16x16384x128 2x32x8192x64 2x8x4096x256 32x16x512x128
        4x16x2048x112 4x16x2048x160 4x16x2048x192 4x16x2048x72 4x16x2048x80 4x16x2048x96
        4x16x4096x128 8x16x1024x64 8x32x2048x64
        """,
    "attention * causal=true dtype=fp32": "1x8x1024x64",
    "attention * causal=true window=1024 dtype=bf16": "1x16x8192x128",
    "attention * causal=true window=4096 dtype=bf16": "1x16x16384x128",
    "attention * causal=true window=512 dtype=bf16": "2x32x8192x64",
    "attention * dtype=bf16": """
        16x16x1024x128 16x32x512x64 1x16x16384x128 2x32x8192x64 2x8x4096x256 32x16x512x128
        4x16x2048x112 4x16x2048x160 4x16x2048x192 4x16x2048x72 4x16x2048x80 4x16x2048x96
        4x16x4096x128 8x16x1024x64 8x32x2048x64
        """,
    "attention * dtype=fp32": "1x16x512x128 1x8x1024x64",
    "attention * kv-heads=8 kv-len=1024 dtype=bf16": "1x32x1x128",
    "attention * kv-heads=8 kv-len=4096 dtype=bf16": "16x32x1x128 64x32x1x128",
    "attention * kv-heads=8 kv-len=65536 dtype=bf16": "1x32x1x128",
    "attention * kv-heads=8 kv-len=8192 dtype=bf16": "1x32x1x128 32x64x1x128",
    "conv2d * dtype=bf16": """
        32x14x14x1024,256x1x1 32x28x28x512,128x1x1 32x56x56x256,64x1x1 32x56x56x64,256x1x1
        32x7x7x2048,512x1x1
        """,
    "conv2d * dtype=fp32": "1x14x14x1024,256x1x1 1x56x56x64,256x1x1",
    "conv2d * epilogue=bias+relu dtype=bf16": """
        32x14x14x1024,256x1x1 32x28x28x512,128x1x1 32x56x56x256,64x1x1 32x56x56x64,256x1x1
        """,
    "conv2d * epilogue=bias+residual+relu dtype=bf16": """
        32x14x14x256,1024x1x1 32x56x56x64,256x1x1
        """,
    "conv2d * pad=1 dtype=bf16": """
        128x28x28x256,256x3x3 16x28x28x100,100x3x3 16x32x32x640,640x3x3 1x16x16x1280,1280x3x3
        1x32x32x640,640x3x3 1x64x64x320,320x3x3 2x64x64x320,320x3x3 32x14x14x256,256x3x3
        32x28x28x128,128x3x3 32x56x56x60,60x3x3 32x56x56x64,64x3x3 32x7x7x512,512x3x3
        64x56x56x256,256x3x3 8x112x112x12,40x3x3 8x16x16x1280,1280x3x3
        """,
    "conv2d * pad=1 dtype=fp32": """
        1x14x14x256,256x3x3 1x28x28x128,128x3x3 1x56x56x64,64x3x3 1x7x7x512,512x3x3
        """,
    "conv2d * pad=1 epilogue=bias+relu dtype=bf16": """
        32x14x14x256,256x3x3 32x28x28x128,128x3x3 32x56x56x64,64x3x3
        """,
    "conv2d * pad=1 epilogue=bias+silu dtype=bf16": """
        16x32x32x640,640x3x3 1x16x16x1280,1280x3x3 1x32x32x640,640x3x3 1x64x64x320,320x3x3
        2x64x64x320,320x3x3 8x16x16x1280,1280x3x3
        """,
    "conv2d * pad=1 groups=32 dtype=bf16": """
        32x112x112x32,32x3x3 32x14x14x512,512x3x3 32x28x28x256,256x3x3 32x56x56x128,128x3x3
        """,
    "conv2d * pad=2 groups=240 dtype=bf16": "32x28x28x240,240x5x5",
    "conv2d * pad=3 groups=384 dtype=bf16": "32x14x14x384,384x7x7",
    "conv2d * pad=3 groups=96 dtype=bf16": "32x56x56x96,96x7x7",
    "conv2d * stride=2 pad=1 dtype=bf16": "32x56x56x128,128x3x3",
    "conv2d * stride=2 pad=1 epilogue=bias+relu dtype=bf16": "32x56x56x128,128x3x3",
    "conv2d * stride=2 pad=1 groups=144 dtype=bf16": "32x56x56x144,144x3x3",
    "conv2d * stride=2 pad=3 dtype=bf16": "1x224x224x3,64x7x7 32x224x224x3,64x7x7",
    "conv2d * stride=2 pad=3 dtype=fp32": "1x224x224x3,64x7x7",
    "conv2d * stride=4 dtype=bf16": "32x224x224x3,96x4x4",
    "gemm * batch=1024 dtype=bf16": "64x48x80",
    "gemm * batch=128 dtype=bf16": "128x512x64",
    "gemm * batch=256 dtype=bf16": "64x64x64",
    "gemm * batch=32 dtype=bf16": "512x512x512",
    "gemm * batch=512 dtype=bf16": "128x128x128",
    "gemm * batch=64 dtype=bf16": "256x256x256",
    "gemm * batch=64 dtype=fp32": "64x64x64",
    "gemm * dtype=bf16": """
        1000x1000x1000 1024x1024x1024 1024x1024x4096 1024x16384x4096 1024x2048x2048 1024x4096x4096
        128x128x65536 128x2048x1024 128x4096x4096 128x7168x16384 1536x1536x1536 16384x1024x4096
        16x2048x2048 16x4096x14336 16x4096x4096 16x7168x1024 1x2048x2048 1x4096x14336 1x4096x4096
        1x7168x1024 1x8192x28672 2047x2049x2046 2048x2048x2048 2048x4096x4096 256x1024x1024
        256x16384x4096 256x2048x7168 256x256x256 300x5000x700 4095x4096x4097 4096x14336x4096
        4096x4096x1024 4096x4096x4090 4096x4096x4096 4x14336x4096 4x2048x2048 512x512x512
        512x8192x8192 64x1024x512 64x4096x4096 64x64x16384 64x8192x4096 8191x8191x8191
        8192x256x8192 8192x8192x2048 8192x8192x8192 8x1024x7168 8x28672x8192 9477x1152x588
        """,
    "gemm * dtype=fp16": """
        1024x1024x1024 1024x12288x12288 1024x12288x512 1024x128x1024 1024x16384x8192
        1024x2048x12288 1024x2048x512 1024x512x64 1024x64x12288 12288x1024x1024 12288x1024x16384
        12288x1024x8192 12288x12288x12288 12288x12288x4096 12288x128x12288 12288x16384x128
        12288x16384x4096 12288x256x1024 12288x256x16384 12288x256x256 12288x4096x1024
        12288x4096x64 12288x64x256 12288x64x512 12288x8192x64 128x1024x2048 128x1024x256
        128x1024x512 128x16384x2048 128x2048x64 128x64x128 128x64x512 16384x1024x64
        16384x12288x1024 16384x12288x12288 16384x128x128 16384x128x512 16384x256x16384
        16384x256x512 16384x256x64 16384x4096x64 16384x512x1024 16384x512x128 16384x64x16384
        2048x1024x2048 2048x12288x128 2048x128x4096 2048x16384x8192 2048x2048x4096 2048x256x512
        2048x256x64 2048x4096x128 2048x4096x2048 2048x512x512 2048x64x2048 2048x8192x512
        256x1024x1024 256x1024x16384 256x12288x12288 256x2048x4096 256x256x512 256x256x8192
        256x4096x2048 256x4096x4096 256x64x16384 4096x1024x64 4096x12288x1024 4096x128x4096
        4096x2048x2048 4096x256x2048 4096x256x4096 4096x4096x4096 4096x512x512 512x1024x128
        512x128x64 512x128x8192 512x16384x1024 512x256x512 512x256x8192 512x4096x256 512x4096x4096
        512x512x12288 512x512x512 64x1024x128 64x12288x256 64x128x1024 64x16384x2048 64x16384x512
        64x16384x8192 64x4096x1024 64x4096x512 64x64x128 64x8192x2048 8192x1024x8192 8192x256x256
        8192x256x64 8192x256x8192 8192x512x4096 8192x64x64 8192x8192x4096 8192x8192x512
        8192x8192x8192
        """,
    "gemm * dtype=fp32": """
        1000x1000x1000 1024x1024x1024 128x128x8192 1536x1536x1536 1x4096x4096 2048x2048x2048
        256x256x256 37x1411x811 4095x4096x4097 4096x4096x4096 4096x64x1024 511x767x1023
        512x512x512 64x4096x1024
        """,
    "gemm * epilogue=bias+gelu dtype=bf16": "128x14336x4096 4096x14336x4096",
    "gemm * epilogue=bias+relu dtype=bf16": "2048x2048x2048",
    "gemm * epilogue=bias+silu+residual dtype=bf16": "1024x4096x4096",
    "gemm * layout=nt dtype=fp8_e4m3": "1024x8192x4096 4096x4096x4096 8192x8192x8192",
}
CANONICAL = [
    pattern.replace("*", shape) for pattern, found in BENCHMARKED.items() for shape in found.split()
] + [
    "gemm 33x17x65 batch=512 layout=nt epilogue=bias+gelu dtype=fp16",
    "gemm 512x512x512 dtype=fp16 acc=fp16",
    "gemm 512x512x512 layout=nt epilogue=tensor_scale+bias dtype=fp8_e5m2 acc=fp22",
    "conv2d 8x112x112x12,40x3x3 stride=2x1 pad=1x2 dilation=2 dtype=fp16",
    "attention 4x16x4096x128 kv-heads=4 causal=true dtype=bf16",
    "attention 1x8x1024x64 value-dim=128 scale=0.5 softcap=30.0 lse=true layout=bhsd dtype=fp32",
]


def test_the_texts_of_the_benchmarks_and_of_the_manual_are_canonical() -> None:
    assert len(set(CANONICAL)) == len(CANONICAL) > 250
    assert [str(parse(text)) for text in CANONICAL] == CANONICAL


def test_the_default_dtype_is_the_callers_and_defaults_are_left_out() -> None:
    assert str(parse("gemm 8x8x8", "bf16")) == "gemm 8x8x8 dtype=bf16"
    assert str(parse("gemm 8x8x8 batch=1 layout=nn epilogue= acc=fp32")) == "gemm 8x8x8 dtype=fp32"
    said = "attention 1x8x32x64 kv-heads=8 kv_len=32 value-dim=64 causal=false dtype=fp16"
    assert str(parse(said)) == "attention 1x8x32x64 dtype=fp16"
    assert str(parse("conv2d 1x9x9x4,4x3x3 stride=1x1 pad=2x2")) == (
        "conv2d 1x9x9x4,4x3x3 pad=2 dtype=fp32"
    )


REFUSED = {
    "": ("operator", "gemm, conv2d, attention"),
    "gem 1x1x1": ("gem", "gemm, conv2d, attention"),
    "gemm": ("shape", "MxNxK"),
    "gemm 1x1": ("shape '1x1'", "MxNxK"),
    "gemm 1x1x1x1": ("shape", "MxNxK"),
    "gemm axbxc": ("shape", "MxNxK"),
    "gemm 1.5x1x1": ("shape", "MxNxK"),
    "gemm ²x1x1": ("shape", "MxNxK"),
    "gemm 0x8x8": ("gemm M", "between 1 and 2147483647"),
    "gemm 8x-3x8": ("gemm N", "between 1 and"),
    "gemm 8x8x99999999999": ("gemm K", "between 1 and"),
    f"gemm 8x8x{'9' * 40}": ("shape", "MxNxK"),
    "gemm 8x8x8 batch=0": ("batch", "between 1 and"),
    "gemm 8x8x8 batch=x": ("batch=x", "a whole number"),
    "gemm 8x8x8 layout=xy": ("layout=xy", "nn, nt, tn, tt"),
    "gemm 8x8x8 epilogue=bias+tanh": ("epilogue=bias+tanh", "bias, relu, gelu"),
    "gemm 8x8x8 epilogue=bias+bias": ("epilogue=bias+bias", "bias is repeated"),
    "gemm 8x8x8 dtype=fp8": ("dtype=fp8", "fp8_e4m3"),
    "gemm 8x8x8 dtype=": ("dtype=", "fp64, fp32"),
    "gemm 8x8x8 dtype=bf16 acc=fp16": ("gemm acc", "bf16 accumulates in fp32"),
    "gemm 8x8x8 dtype=fp16 acc=fp22": ("gemm acc", "fp16 accumulates in fp16 or fp32"),
    "gemm 8x8x8 dtype=fp8_e4m3 acc=fp16": ("gemm acc", "fp8_e4m3 accumulates in fp22 or fp32"),
    "gemm 8x8x8 dtype=int8 acc=fp32": ("gemm acc", "int8 accumulates in int32"),
    "gemm 8x8x8 acc=bf16": ("acc=bf16", "fp64, fp32, fp22, fp16, int32"),
    "gemm 8x8x8 dtype=fp16 dtype=fp32": ("'dtype'", "twice"),
    "gemm 8x8x8 fast": ("option 'fast'", "layout="),
    "gemm 8x8x8 pad=1": ("option 'pad=1'", "batch="),
    "gemm 2147483647x2147483647x1": ("gemm C", "elements exceed"),
    "gemm 2147483647x1x2147483647": ("gemm A", "elements exceed"),
    "conv2d 1x8x8x4": ("shape", "NxHxWxC,KxRxS"),
    "conv2d 1x8x8x4,4x3": ("shape", "NxHxWxC,KxRxS"),
    "conv2d 1x8x8x4,4x3x3 stride=0": ("conv2d stride", "between 1 and 32768"),
    "conv2d 1x8x8x4,4x3x3 dilation=0x1": ("conv2d dilation", "between 1 and 32768"),
    "conv2d 1x8x8x4,4x3x3 pad=99999": ("conv2d pad", "between 0 and 32768"),
    "conv2d 1x8x8x4,4x3x3 pad=-1": ("pad=-1", "a whole number or HxW"),
    "conv2d 1x8x8x4,4x3x3 pad=1x2x3": ("pad=1x2x3", "a whole number or HxW"),
    "conv2d 1x8x8x4,4x3x3 groups=3": ("groups", "does not divide C=4"),
    "conv2d 1x8x8x4,6x3x3 groups=4": ("groups", "does not divide K=6"),
    "conv2d 1x2x8x4,4x3x3": ("conv2d H", "exceeds the padded input 2"),
    "conv2d 1x8x8x4,4x3x3 dilation=1x4": ("conv2d W", "reaches 9"),
    "conv2d 1x8x8x0,4x3x3": ("conv2d C", "between 1 and"),
    "attention 1x8x64": ("shape", "BxHxSxD"),
    "attention 1x8x64x64 kv-heads=3": ("kv-heads", "does not divide H=8"),
    "attention 1x8x64x64 kv-heads=0": ("kv-heads", "between 1 and"),
    "attention 1x8x64x64 kv-len=0": ("kv-len", "between 1 and"),
    "attention 1x8x64x64 causal=yes": ("causal=yes", "true or false"),
    "attention 1x8x64x64 window=9999999999": ("window", "between 0 and"),
    "attention 1x8x64x64 scale=-1": ("scale", "neither 0 nor between 1e-09 and 1e+09"),
    "attention 1x8x64x64 scale=1e-320": ("scale", "neither 0 nor between 1e-09 and 1e+09"),
    "attention 1x8x64x64 softcap=1e300": ("softcap", "neither 0 nor between 1e-09 and 1e+09"),
    "attention 1x8x64x64 scale=nan": ("scale=nan", "a number"),
    "attention 1x8x64x64 softcap=inf": ("softcap=inf", "a number"),
    "attention 1x8x64x64 layout=nn": ("layout=nn", "bshd, bhsd"),
    "attention 1x8x64x64 epilogue=bias": ("epilogue=bias", "kv-heads="),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_refusal_is_one_line_with_the_field_and_what_is_accepted(text: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse(text)
    message = str(caught.value)
    field, accepted = REFUSED[text]
    assert field in message and accepted in message
    assert "\n" not in message


def test_a_workload_made_by_hand_is_checked_too() -> None:
    with pytest.raises(WorkloadError, match="dtype=fp12: accepts fp64"):
        Gemm(m=1, n=1, k=1, dtype="fp12")
    with pytest.raises(WorkloadError, match="layout=no: accepts nn"):
        Gemm(m=1, n=1, k=1, layout="no")
    with pytest.raises(WorkloadError, match=r"epilogue=tanh: accepts none, or a \+-chain of bias"):
        Gemm(m=1, n=1, k=1, epilogue=("tanh",))
    with pytest.raises(WorkloadError, match="pad: -1x0 is not between 0"):
        Conv2d(n=1, h=8, w=8, c=1, k=1, r=1, s=1, pad=(-1, 0))
    with pytest.raises(WorkloadError, match="dtype=what"):
        parse("gemm 8x8x8", default_dtype="what")


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for words in (text, f"gemm {text}", f"gemm 8x8x8 {text}", f"attention 1x1x1x1 {text}"):
        try:
            workload = parse(words)
        except WorkloadError as error:
            assert "\n" not in str(error)
        else:
            assert parse(str(workload)) == workload


def shapes(workload: Workload) -> dict[str, tuple[int, ...]]:
    return {o.name: o.shape for o in workload.operands()}


def test_gemm_operands_follow_layout_batch_and_epilogue() -> None:
    assert shapes(parse("gemm 2x3x5")) == {"A": (2, 5), "B": (5, 3), "C": (2, 3)}
    assert shapes(parse("gemm 2x3x5 layout=tt")) == {"A": (5, 2), "B": (3, 5), "C": (2, 3)}
    wide = parse("gemm 2x3x5 batch=7 layout=nt epilogue=scale+residual+bias dtype=int8")
    assert list(shapes(wide).items()) == [
        ("A", (7, 2, 5)), ("B", (7, 3, 5)), ("bias", (3,)), ("residual", (7, 2, 3)),
        ("scale", (3,)), ("C", (7, 2, 3)),
    ]  # fmt: skip
    assert [o.dtype for o in wide.inputs()] == ["int8", "int8", "int32", "int32", "int32"]
    assert wide.output().dtype == "int32"
    assert wide.flops == 2 * 7 * 2 * 3 * 5
    small = parse("gemm 2x3x5 layout=nt epilogue=tensor_scale+bias dtype=fp8_e4m3")
    assert [(o.name, o.shape, o.dtype) for o in small.operands()[2:]] == [
        ("bias", (3,), "bf16"), ("tensor_scale", (1,), "fp32"), ("C", (2, 3), "bf16"),
    ]  # fmt: skip


def test_convolution_operands_follow_stride_pad_dilation_and_groups() -> None:
    conv = parse("conv2d 2x9x7x4,6x3x2 stride=2x1 pad=1x0 dilation=2x3 groups=2 epilogue=bias")
    p = len(range(0, 9 + 2 * 1 - 2 * 2, 2))  # every legal start of the filter, counted
    q = len(range(0, 7 + 2 * 0 - 1 * 3, 1))
    assert shapes(conv) == {"x": (2, 9, 7, 4), "w": (6, 3, 2, 2), "bias": (6,), "y": (2, p, q, 6)}
    assert conv.flops == 2 * (2 * p * q * 6) * (3 * 2 * 2)


def test_attention_operands_follow_the_layout_and_the_head_counts() -> None:
    attention = parse("attention 2x8x5x64 kv-heads=2 kv-len=9 value-dim=32 dtype=fp16")
    assert shapes(attention) == {
        "q": (2, 5, 8, 64), "k": (2, 9, 2, 64), "v": (2, 9, 2, 32), "o": (2, 5, 8, 32)
    }  # fmt: skip
    assert attention.flops == 2 * 2 * 8 * (5 * 9) * (64 + 32)
    assert shapes(parse("attention 2x8x5x64 layout=bhsd"))["k"] == (2, 8, 5, 64)


@given(
    st.integers(1, 12), st.integers(1, 12), st.booleans(), st.integers(0, 14)
)  # fmt: skip
def test_visible_pairs_agree_with_counting_them(
    queries: int, keys: int, causal: bool, window: int
) -> None:
    workload = Attention(b=1, h=1, s=queries, d=8, kv_len=keys, causal=causal, window=window)
    counted = 0
    for query in range(queries):
        own = query + keys - queries  # the last query stands at the last key
        for key in range(keys):
            hidden = (causal and key > own) or (window > 0 and key <= own - window)
            counted += not hidden
    assert workload.visible == counted
    assert workload.flops == 2 * counted * (8 + 8)


def test_an_epilogue_of_none_is_no_epilogue() -> None:
    assert parse("gemm 8x8x8 epilogue=none dtype=fp32") == parse("gemm 8x8x8 dtype=fp32")
    with pytest.raises(WorkloadError, match="epilogue=none\\+relu: accepts none, or a "):
        parse("gemm 8x8x8 epilogue=none+relu dtype=fp32")
