"""Workloads: what is computed, and the canonical text that names it everywhere.

    gemm 33x17x65 batch=512 layout=nt epilogue=bias+gelu dtype=fp16
    conv2d 32x56x56x64,64x3x3 pad=1 dtype=bf16
    attention 4x16x4096x128 kv-heads=4 causal=true dtype=bf16

`parse` reads such a text (options in any order) and `str(workload)` prints it: operator, shape,
then `key=value` in the order of `OPTIONS`, defaults left out, dtype always there.
"""

from __future__ import annotations

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import WorkloadError

DTYPE_BYTES: Mapping[str, int] = {
    "fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
    "int32": 4,
}  # fmt: skip
INPUT_DTYPES = tuple(name for name in DTYPE_BYTES if name != "int32")
DEFAULT_ACC: Mapping[str, str] = {
    "fp64": "fp64", "fp32": "fp32", "tf32": "fp32", "fp16": "fp32", "bf16": "fp32",
    "fp8_e4m3": "fp32", "fp8_e5m2": "fp32", "int8": "int32",
}  # fmt: skip
OUTPUT_DTYPE: Mapping[str, str] = {
    "tf32": "fp32", "fp8_e4m3": "bf16", "fp8_e5m2": "bf16", "int8": "int32",
}  # fmt: skip
EPILOGUE_OPS = ("bias", "relu", "gelu", "silu", "residual", "scale", "shift", "tensor_scale")
EPILOGUE_OPERANDS = ("bias", "residual", "scale", "shift", "tensor_scale")
"""Operations that take an operand of that name, in argument order."""
CHEAPER_ACC: Mapping[str, str] = {"fp16": "fp16", "fp8_e4m3": "fp22", "fp8_e5m2": "fp22"}
"""A less exact accumulator that may be asked for. fp22 (8 bits of exponent, 13 of mantissa) is what
tensor cores add products of fp8 in."""
MOST_UNPROMOTED = 256
"""With acc=fp32, products of fp8 that may meet in fp22 before their sum is added in fp32."""
LAYOUTS = ("nn", "nt", "tn", "tt")
MAX_EXTENT = 2**31 - 1
MAX_ELEMENTS = 2**38
MAX_STEP = 2**15
LOGIT_FACTORS = (1e-9, 1e9)
"""Of a softmax's scale and softcap: their quotients and products with sums are numbers in fp32."""


@dataclass(frozen=True)
class Operand:
    """One tensor of a workload: its name, row-major shape and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Option:
    """One `key=value` of a workload's text; `kind` says how the value is read and printed."""

    key: str
    kind: str  # "int" | "pair" | "float" | "flag" | "choice" | "chain"
    help: str
    choices: tuple[str, ...] = ()
    least: int = 1
    """Of an "int" or a "pair"."""

    @property
    def field(self) -> str:
        return self.key.replace("-", "_")

    @property
    def accepts(self) -> str:
        """What a value may be, for messages."""
        match self.kind:
            case "int":
                return f"a whole number, {self.least} or more"
            case "pair":
                return f"a whole number or HxW, {self.least} or more"
            case "float":
                return "a number"
            case "flag":
                return "true or false"
            case "choice":
                return ", ".join(self.choices)
            case _:
                return "none, or a +-chain of " + ", ".join(self.choices)

    def read(self, text: str) -> object:
        """The value that `text` stands for; raises WorkloadError naming the key."""
        text = text.strip().lower()
        value = self._value(text)
        if value is None:
            raise WorkloadError(f"{self.key}={text}: accepts {self.accepts}")
        self.refuse_other(value)
        return value

    def refuse_other(self, value: Any) -> None:
        """Raises WorkloadError for a value outside the choices, or with one of them twice."""
        given = value if self.kind == "chain" else (value,)
        if self.choices and value and not set(given) <= set(self.choices):
            raise WorkloadError(f"{self.key}={self.show(value)}: accepts {self.accepts}")
        if self.kind == "chain" and (again := [op for op in value if value.count(op) > 1]):
            raise WorkloadError(f"{self.key}={self.show(value)}: {again[0]} is repeated")

    def _value(self, text: str) -> object:
        match self.kind:
            case "int":
                return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None
            case "pair":
                return _pair(text)
            case "float":
                return _finite(text)
            case "flag":
                return {"true": True, "false": False}.get(text)
            case "choice":
                return text if text in self.choices else None
            case _:
                return _chain(text, self.choices)

    def show(self, value: object) -> str:
        """The canonical text of `value`."""
        match value:
            case bool():
                return "true" if value else "false"
            case tuple():
                if self.kind == "chain":
                    return "+".join(value)
                return str(value[0]) if value[0] == value[1] else f"{value[0]}x{value[1]}"
            case float():
                return repr(value)
            case _:
                return str(value)


def _pair(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"([0-9]{1,10})(?:x([0-9]{1,10}))?", text)
    return (int(match[1]), int(match[2] or match[1])) if match else None


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _chain(text: str, ops: tuple[str, ...]) -> tuple[str, ...] | None:
    chain = tuple(text.split("+")) if text not in ("", "none") else ()
    return chain if all(op in ops for op in chain) else None


_EPILOGUE = Option(
    "epilogue", "chain", "operations fused after the product, in order", EPILOGUE_OPS
)
_DTYPE = Option(
    "dtype", "choice", "element type of the inputs; without it fp32 on the CPU, bf16 on CUDA",
    INPUT_DTYPES,
)  # fmt: skip
_ACC = Option("acc", "choice", "accumulator type", ("fp64", "fp32", "fp22", "fp16", "int32"))


@dataclass(frozen=True)
class Workload(ABC):
    """Base of the three templates. Subclasses are plain frozen values that check themselves."""

    OPERATOR: ClassVar[str]
    SHAPE: ClassVar[str]
    OPTIONS: ClassVar[tuple[Option, ...]]

    dtype: str = "fp32"
    acc: str = ""
    epilogue: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in self.OPTIONS:
            option.refuse_other(getattr(self, option.field))
        if not self.acc:
            object.__setattr__(self, "acc", DEFAULT_ACC[self.dtype])
        default = DEFAULT_ACC[self.dtype]
        accepted = {default, CHEAPER_ACC.get(self.dtype, default)}
        if self.acc not in accepted:
            self._refuse(
                "acc",
                f"{self.dtype} accumulates in {' or '.join(sorted(accepted))}, not {self.acc}",
            )
        for name, extent in self._extents().items():
            if not 1 <= extent <= MAX_EXTENT:
                self._refuse(name, f"{extent} is not between 1 and {MAX_EXTENT}")
        self._check()
        for operand in self.operands():
            if operand.elements > MAX_ELEMENTS:
                self._refuse(operand.name, f"{operand.elements} elements exceed {MAX_ELEMENTS}")

    def _refuse(self, field: str, why: str) -> None:
        raise WorkloadError(f"{self.OPERATOR} {field}: {why}")

    @abstractmethod
    def _extents(self) -> dict[str, int]: ...

    def _check(self) -> None:  # noqa: B027 (many have nothing more to refuse)
        """Refuses shapes that cannot exist."""

    @property
    @abstractmethod
    def shape_text(self) -> str: ...

    @abstractmethod
    def inputs(self) -> tuple[Operand, ...]:
        """The inputs in argument order: operands as the operator names them, then epilogue ones."""

    @abstractmethod
    def outputs(self) -> tuple[Operand, ...]:
        """The outputs, last arguments."""

    def output(self) -> Operand:
        """The first output."""
        return self.outputs()[0]

    def operands(self) -> tuple[Operand, ...]:
        """Every argument, in order."""
        return (*self.inputs(), *self.outputs())

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of the product (a multiply-add counts two)."""

    @property
    def bytes(self) -> int:
        """Compulsory traffic: every operand once."""
        return sum(operand.bytes for operand in self.operands())

    @abstractmethod
    def descriptors(self) -> dict[str, float]:
        """Numbers that describe the workload to the cost model."""

    @property
    def out_dtype(self) -> str:
        return OUTPUT_DTYPE.get(self.dtype, self.dtype)

    def __str__(self) -> str:
        words = [self.OPERATOR, self.shape_text]
        for option in self.OPTIONS:
            value = getattr(self, option.field)
            if option.key == "dtype" or value != self._default(option.field):
                words.append(f"{option.key}={option.show(value)}")
        return " ".join(words)

    def _default(self, field: str) -> object:
        if field == "acc":
            return DEFAULT_ACC[self.dtype]
        return next(f.default for f in dataclasses.fields(self) if f.name == field)


@dataclass(frozen=True)
class Gemm(Workload):
    """C[b, m, n] = epilogue(A · B). Layout `t` means that operand is stored transposed."""

    OPERATOR: ClassVar[str] = "gemm"
    SHAPE: ClassVar[str] = "MxNxK"
    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option("batch", "int", "independent products"),
        Option("layout", "choice", "storage of A and B; t = stored transposed", LAYOUTS),
        _EPILOGUE, _DTYPE, _ACC,
    )  # fmt: skip

    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    layout: str = "nn"

    @classmethod
    def shape_fields(cls, text: str) -> dict[str, int] | None:
        return _dims(text, "m", "n", "k")

    def _extents(self) -> dict[str, int]:
        return {"M": self.m, "N": self.n, "K": self.k, "batch": self.batch}

    @property
    def shape_text(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    def inputs(self) -> tuple[Operand, ...]:
        batch = (self.batch,) if self.batch > 1 else ()
        a = (self.k, self.m) if self.layout[0] == "t" else (self.m, self.k)
        b = (self.n, self.k) if self.layout[1] == "t" else (self.k, self.n)
        extra = _epilogue_operands(self, self.n, (*batch, self.m, self.n))
        return (Operand("A", batch + a, self.dtype), Operand("B", batch + b, self.dtype), *extra)

    def outputs(self) -> tuple[Operand, ...]:
        batch = (self.batch,) if self.batch > 1 else ()
        return (Operand("C", (*batch, self.m, self.n), self.out_dtype),)

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    def descriptors(self) -> dict[str, float]:
        return {"m": self.m, "n": self.n, "k": self.k, "batch": self.batch,
                "a_transposed": self.layout[0] == "t", "b_transposed": self.layout[1] == "t",
                "epilogue_ops": len(self.epilogue)}  # fmt: skip


@dataclass(frozen=True)
class Conv2d(Workload):
    """NHWC × KRSC → NPQK; pairs are (height, width)."""

    OPERATOR: ClassVar[str] = "conv2d"
    SHAPE: ClassVar[str] = "NxHxWxC,KxRxS"
    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option("stride", "pair", "step of the filter"),
        Option("pad", "pair", "zeros around the input", least=0),
        Option("dilation", "pair", "distance between filter taps"),
        Option("groups", "int", "independent channel groups"),
        _EPILOGUE, _DTYPE, _ACC,
    )  # fmt: skip

    n: int = 0
    h: int = 0
    w: int = 0
    c: int = 0
    k: int = 0
    r: int = 0
    s: int = 0
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @classmethod
    def shape_fields(cls, text: str) -> dict[str, int] | None:
        image, comma, filters = text.partition(",")
        first, second = _dims(image, "n", "h", "w", "c"), _dims(filters, "k", "r", "s")
        return {**first, **second} if comma and first and second else None

    def _extents(self) -> dict[str, int]:
        return {"N": self.n, "H": self.h, "W": self.w, "C": self.c, "K": self.k, "R": self.r,
                "S": self.s, "groups": self.groups}  # fmt: skip

    def _check(self) -> None:
        for name, channels in (("C", self.c), ("K", self.k)):
            if channels % self.groups:
                self._refuse("groups", f"{self.groups} does not divide {name}={channels}")
        for name, pair, least in (
            ("stride", self.stride, 1), ("pad", self.pad, 0), ("dilation", self.dilation, 1)
        ):  # fmt: skip
            if not least <= min(pair) <= max(pair) <= MAX_STEP:
                self._refuse(name, f"{pair[0]}x{pair[1]} is not between {least} and {MAX_STEP}")
        for axis, size, taps, i in (("H", self.h, self.r, 0), ("W", self.w, self.s, 1)):
            padded, reach = size + 2 * self.pad[i], (taps - 1) * self.dilation[i] + 1
            if reach > padded:
                self._refuse(
                    axis, f"a filter that reaches {reach} exceeds the padded input {padded}"
                )

    @property
    def out_size(self) -> tuple[int, int]:
        """Output height and width (P, Q)."""
        p, q = (
            (size + 2 * self.pad[i] - (taps - 1) * self.dilation[i] - 1) // self.stride[i] + 1
            for i, (size, taps) in enumerate(((self.h, self.r), (self.w, self.s)))
        )
        return p, q

    @property
    def shape_text(self) -> str:
        return f"{self.n}x{self.h}x{self.w}x{self.c},{self.k}x{self.r}x{self.s}"

    def inputs(self) -> tuple[Operand, ...]:
        x = Operand("x", (self.n, self.h, self.w, self.c), self.dtype)
        w = Operand("w", (self.k, self.r, self.s, self.c // self.groups), self.dtype)
        return (x, w, *_epilogue_operands(self, self.k, self.output().shape))

    def outputs(self) -> tuple[Operand, ...]:
        return (Operand("y", (self.n, *self.out_size, self.k), self.out_dtype),)

    @property
    def flops(self) -> int:
        p, q = self.out_size
        return 2 * self.n * p * q * self.k * self.r * self.s * (self.c // self.groups)

    def descriptors(self) -> dict[str, float]:
        p, q = self.out_size
        return {"n": self.n, "p": p, "q": q, "c": self.c, "k": self.k, "r": self.r, "s": self.s,
                "stride": self.stride[0], "dilation": self.dilation[0], "groups": self.groups,
                "epilogue_ops": len(self.epilogue)}  # fmt: skip


@dataclass(frozen=True)
class Attention(Workload):
    """softmax(scale · q kᵀ) v. BSHD unless `layout=bhsd`; causal masks align bottom-right."""

    OPERATOR: ClassVar[str] = "attention"
    SHAPE: ClassVar[str] = "BxHxSxD"
    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option("kv-heads", "int", "key/value heads (grouped- or multi-query)"),
        Option("kv-len", "int", "keys"),
        Option("value-dim", "int", "head dimension of v"),
        Option("causal", "flag", "mask keys after the query, aligned at the last one"),
        Option(
            "window", "int", "keys a query sees up to its own position, that included, and with no "
            "causal mask all later ones too; 0 = all", least=0,
        ),
        Option("scale", "float", "softmax scale; 0 = 1/sqrt(D)"),
        Option("softcap", "float", "logits become c·tanh(logits/c); 0 = off"),
        Option(
            "lse", "flag", "also return each row's natural log-sum-exp, float [B, H, S] whatever "
            "the dtype",
        ),
        Option("layout", "choice", "order of the axes", ("bshd", "bhsd")),
        _DTYPE, _ACC,
    )  # fmt: skip

    b: int = 0
    h: int = 0
    s: int = 0
    d: int = 0
    kv_heads: int = -1
    kv_len: int = -1
    value_dim: int = -1
    causal: bool = False
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    lse: bool = False
    layout: str = "bshd"

    def __post_init__(self) -> None:
        for field, same in (("kv_heads", self.h), ("kv_len", self.s), ("value_dim", self.d)):
            if getattr(self, field) == -1:
                object.__setattr__(self, field, same)
        super().__post_init__()

    @classmethod
    def shape_fields(cls, text: str) -> dict[str, int] | None:
        return _dims(text, "b", "h", "s", "d")

    def _default(self, field: str) -> object:
        same = {"kv_heads": self.h, "kv_len": self.s, "value_dim": self.d}
        return same[field] if field in same else super()._default(field)

    def _extents(self) -> dict[str, int]:
        return {"B": self.b, "H": self.h, "S": self.s, "D": self.d, "kv-heads": self.kv_heads,
                "kv-len": self.kv_len, "value-dim": self.value_dim}  # fmt: skip

    def _check(self) -> None:
        if self.h % self.kv_heads:
            self._refuse("kv-heads", f"{self.kv_heads} does not divide H={self.h}")
        if not 0 <= self.window <= MAX_EXTENT:
            self._refuse("window", f"{self.window} is not between 0 and {MAX_EXTENT}")
        least, most = LOGIT_FACTORS
        for field in ("scale", "softcap"):
            value = getattr(self, field)
            if value and not least <= value <= most:
                self._refuse(field, f"{value} is neither 0 nor between {least:g} and {most:g}")

    @property
    def shape_text(self) -> str:
        return f"{self.b}x{self.h}x{self.s}x{self.d}"

    def _axes(self, s: int, h: int, d: int) -> tuple[int, ...]:
        return (self.b, s, h, d) if self.layout == "bshd" else (self.b, h, s, d)

    def inputs(self) -> tuple[Operand, ...]:
        return (
            Operand("q", self._axes(self.s, self.h, self.d), self.dtype),
            Operand("k", self._axes(self.kv_len, self.kv_heads, self.d), self.dtype),
            Operand("v", self._axes(self.kv_len, self.kv_heads, self.value_dim), self.dtype),
        )

    def outputs(self) -> tuple[Operand, ...]:
        """o, and with `lse` the natural log-sum-exp of each row, -inf where it sees no key."""
        o = Operand("o", self._axes(self.s, self.h, self.value_dim), self.out_dtype)
        lse = (Operand("lse", (self.b, self.h, self.s), "fp32"),) if self.lse else ()
        return (o, *lse)

    @property
    def visible(self) -> int:
        """Query-key pairs that the mask leaves, for one head of one batch entry."""
        shift = self.kv_len - self.s

        def keys_before(offset: int) -> int:
            """Sum over queries i of clamp(i + offset, 0, kv_len)."""
            full = min(max(0, self.s + offset - self.kv_len), self.s)
            first = min(max(0, -offset), self.s - full)
            count = self.s - full - first
            return full * self.kv_len + count * (2 * (first + offset) + count - 1) // 2

        end = keys_before(shift + 1) if self.causal else self.s * self.kv_len
        return end - (keys_before(shift - self.window + 1) if self.window else 0)

    @property
    def flops(self) -> int:
        return 2 * self.b * self.h * self.visible * (self.d + self.value_dim)

    def descriptors(self) -> dict[str, float]:
        return {"b": self.b, "h": self.h, "s": self.s, "d": self.d, "kv_heads": self.kv_heads,
                "kv_len": self.kv_len, "value_dim": self.value_dim, "causal": self.causal,
                "window": self.window}  # fmt: skip


def _epilogue_operands(
    workload: Workload, columns: int, out: tuple[int, ...]
) -> tuple[Operand, ...]:
    """Vectors and residual of the output's type; `tensor_scale` is one fp32 number."""
    operands = {
        name: Operand(name, out if name == "residual" else (columns,), workload.out_dtype)
        for name in EPILOGUE_OPERANDS
    } | {"tensor_scale": Operand("tensor_scale", (1,), "fp32")}
    return tuple(operands[name] for name in EPILOGUE_OPERANDS if name in workload.epilogue)


def _dims(text: str, *names: str) -> dict[str, int] | None:
    parts = text.lower().split("x")
    if len(parts) != len(names) or not all(re.fullmatch(r"-?[0-9]{1,18}", p) for p in parts):
        return None
    return dict(zip(names, map(int, parts), strict=True))


OPERATORS: Mapping[str, type[Gemm] | type[Conv2d] | type[Attention]] = {
    "gemm": Gemm, "conv2d": Conv2d, "attention": Attention,
}  # fmt: skip


def parse(text: str | Sequence[str], default_dtype: str = "fp32") -> Workload:
    """The workload that `text` names; WorkloadError says in one line what is accepted."""
    words = text.split() if isinstance(text, str) else [w for part in text for w in part.split()]
    if not words or words[0].lower() not in OPERATORS:
        given = words[0] if words else ""
        raise WorkloadError(f"unknown operator '{given}': accepts {', '.join(OPERATORS)}")
    kind = OPERATORS[words[0].lower()]
    if len(words) < 2 or (shape := kind.shape_fields(words[1])) is None:
        given = words[1] if len(words) > 1 else ""
        raise WorkloadError(
            f"{kind.OPERATOR} shape '{given}': accepts {kind.SHAPE} in whole numbers"
        )
    fields: dict[str, object] = {"dtype": default_dtype, **shape}
    options = {option.key: option for option in kind.OPTIONS}
    seen: set[str] = set()
    for word in words[2:]:
        key, equals, value = word.partition("=")
        key = key.lower().replace("_", "-")
        if not equals or key not in options:
            raise WorkloadError(
                f"{kind.OPERATOR} option '{word}': accepts {', '.join(f'{k}=' for k in options)}"
            )
        if key in seen:
            raise WorkloadError(f"{kind.OPERATOR} option '{key}' is given twice")
        seen.add(key)
        fields[options[key].field] = options[key].read(value)
    return kind(**fields)  # type: ignore[arg-type]
