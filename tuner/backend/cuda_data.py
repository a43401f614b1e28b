"""Data of a CUDA measurement, made and judged on the device by the kernels of oracle.cu."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kt.spaces.kernel import Launch
from kt.spaces.workload import Attention, Conv2d, Gemm, Operand, Workload

from .driver import Device, Memory, Module, call, launch
from .load import Refused
from .tolerance import TINY_WEIGHT, Tolerance, tolerances

SOURCE = Path(__file__).with_name("oracle.cu")
ELEMENT = {"fp64": 0, "fp32": 1, "tf32": 1, "fp16": 2, "bf16": 3, "int8": 4, "int32": 5,
           "fp8_e4m3": 6, "fp8_e5m2": 7}  # fmt: skip
"""Element types as oracle.cu numbers them."""
EPILOGUE = {"bias": 0, "relu": 1, "gelu": 2, "silu": 3, "residual": 4, "scale": 5,
            "shift": 6, "tensor_scale": 7}  # fmt: skip
GUARD = 4096
CANARY, POISON = 0xA5, 0xFF
_BLOCK = 256
_RESULT = struct.Struct("dddQQ")


def needed_bytes(workload: Workload) -> int:
    """Device memory that measuring and checking takes: operands four times, a float64 reference."""
    copies = 2 if isinstance(workload, Attention) else 1  # its gain has as many elements
    return 4 * workload.bytes + 8 * copies * workload.output().elements


class Oracle:
    """The loaded oracle kernels of one device."""

    def __init__(self, device: Device, path: Path) -> None:
        self.device, self._module = device, Module(path)
        self._most = 32 * device.attribute("MULTIPROCESSOR_COUNT")

    def start(self, entry: str, count: int, *arguments: int | float) -> None:
        """Starts a grid-stride kernel over `count` elements."""
        blocks = min(self._most, -(-count // _BLOCK))
        self._start(entry, (max(blocks, 1), 1, 1), arguments)

    def reference_gemm(self, workload: Gemm, operands: Mapping[str, Memory], out: Memory) -> None:
        """The product in float64."""
        m, n, k = workload.m, workload.n, workload.k
        a = (1, m) if workload.layout[0] == "t" else (k, 1)
        b = (1, k) if workload.layout[1] == "t" else (n, 1)
        grid = (-(-n // 128), -(-m // 128), workload.batch)
        self._start(
            "kt_reference_gemm", grid,
            (out.address, operands["A"].address, operands["B"].address, ELEMENT[workload.dtype],
             m, n, k, *a, *b),
        )  # fmt: skip

    def reference_conv2d(self, w: Conv2d, operands: Mapping[str, Memory], out: Memory) -> None:
        """The convolution in float64."""
        p, q = w.out_size
        shape = _upload(struct.pack(
            "16q", w.n, w.h, w.w, w.c // w.groups, w.k // w.groups, w.r, w.s, p, q, w.groups,
            *w.stride, *w.pad, *w.dilation,
        ))  # fmt: skip
        grid = (-(-w.n * p * q // 64) * w.groups, -(-w.k // w.groups // 64), 1)
        self._start(
            "kt_reference_conv2d", grid,
            (out.address, operands["x"].address, operands["w"].address, ELEMENT[w.dtype],
             shape.address),
        )  # fmt: skip
        self.device.synchronize()  # `shape` is freed here

    def reference_attention(
        self, w: Attention, operands: Mapping[str, Memory], o: Memory, gain: Memory, lse: Memory
    ) -> None:
        """Output, its gain and the log-sum-exp in float64."""
        shape = _upload(struct.pack(
            "21q3d", w.b, w.h, w.kv_heads, w.s, w.kv_len, w.d, w.value_dim,
            *_strides(w, w.s, w.h, w.d), *_strides(w, w.kv_len, w.kv_heads, w.d),
            *_strides(w, w.kv_len, w.kv_heads, w.value_dim), *_strides(w, w.s, w.h, w.value_dim),
            w.causal, w.window, w.scale or w.d**-0.5, w.softcap, TINY_WEIGHT,
        ))  # fmt: skip
        grid = (-(-w.s // 32) * w.b * w.h, -(-w.value_dim // 64), 1)
        self._start(
            "kt_reference_attention", grid,
            (o.address, gain.address, lse.address, *(operands[x].address for x in "qkv"),
             ELEMENT[w.dtype], shape.address),
        )  # fmt: skip
        self.device.synchronize()

    def _start(self, entry: str, grid: tuple[int, int, int], arguments: Sequence[object]) -> None:
        step = Launch(entry, grid, (_BLOCK, 1, 1))
        launch(self._module, step, arguments, self.device.stream, SIGNATURES[entry])


SIGNATURES: Mapping[str, str] = {
    "kt_fill_normal": "PliL",
    "kt_reference_gemm": "PPPilllllll",
    "kt_reference_conv2d": "PPPiP",
    "kt_reference_attention": "PPPPPPiP",
    "kt_reference_epilogue": "PlliPi",
    "kt_compare": "PiPPllddP",
    "kt_count_changed": "PlBP",
    "kt_count_differing": "PPlP",
    "kt_read": "PlP",
}
"""Parameter types: P pointer, i int, l long, L unsigned long, d double, B byte."""


def _strides(w: Attention, rows: int, heads: int, width: int) -> tuple[int, int, int]:
    """Elements from one row, head and batch entry to the next."""
    by_row, by_head = (heads * width, width) if w.layout == "bshd" else (width, rows * width)
    return by_row, by_head, rows * heads * width


def _upload(content: bytes) -> Memory:
    """Device memory that holds `content`."""
    to = Memory(len(content))
    call("cuMemcpyHtoD", to.address, content, len(content))
    return to


class Guarded:
    """A device buffer between two canary zones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = Memory(size + 2 * GUARD)
        self.address = self._memory.address + GUARD
        self._memory.fill(CANARY)

    def fill(self, byte: int, size: int | None = None) -> None:
        self._memory.fill(byte, GUARD, self.size if size is None else size)

    def changed(self, oracle: Oracle, counter: Memory) -> int:
        """Bytes of the zones that were written to; repairs them."""
        counter.fill(0)
        after = self.address + self.size
        for zone in (self.address - GUARD, after):
            oracle.start("kt_count_changed", GUARD, zone, GUARD, CANARY, counter.address)
        count = int.from_bytes(counter.read(8), "little")
        if count:
            self._memory.fill(CANARY, 0, GUARD)
            self._memory.fill(CANARY, GUARD + self.size, GUARD)
        return count


@dataclass(frozen=True)
class Expected:
    """What one output must be, on the device in float64; as `reference.Expected`."""

    operand: Operand
    value: Memory
    gain: Memory
    columns: int
    tolerance: Tolerance


class Dataset:
    """Operands, references and judge of one workload and seed, on the device."""

    def __init__(self, oracle: Oracle, workload: Workload, seed: int) -> None:
        self.oracle, self.workload = oracle, workload
        self.inputs = {o.name: Guarded(o.bytes) for o in workload.inputs()}
        self._pristine = {o.name: Memory(o.bytes) for o in workload.inputs()}
        for i, operand in enumerate(workload.inputs()):
            self._fill(operand, zlib.crc32(f"{seed} {workload} {i}".encode()))
        self.outputs = [Guarded(o.bytes) for o in workload.outputs()]
        self._result, self._counter = Memory(_RESULT.size), Memory(8)
        self._expected = self._make_expected()

    def _fill(self, operand: Operand, seed: int) -> None:
        to, count = self._pristine[operand.name], operand.elements
        self.oracle.start(
            "kt_fill_normal", -(-count // 2), to.address, count, ELEMENT[operand.dtype], seed
        )
        self.restore(operand.name)

    def restore(self, name: str) -> None:
        """Copies an input's pristine values into its guarded buffer."""
        to, source = self.inputs[name], self._pristine[name]
        call("cuMemcpyDtoDAsync", to.address, source.address, source.size, 0)

    def pristine(self, name: str) -> Memory:
        return self._pristine[name]

    def _make_expected(self) -> tuple[Expected, ...]:
        workload = self.workload
        outputs, bounds = workload.outputs(), tolerances(workload)
        made = self._attention() if isinstance(workload, Attention) else (self._product(),)
        return tuple(
            Expected(operand, value, gain, columns, bound)
            for operand, (value, gain, columns), bound in zip(outputs, made, bounds, strict=False)
        )

    def _attention(self) -> tuple[tuple[Memory, Memory, int], ...]:
        workload = self.workload
        assert isinstance(workload, Attention)
        count, rows = workload.output().elements, workload.b * workload.h * workload.s
        o, gain, lse = Memory(8 * count), Memory(8 * count), Memory(8 * rows)
        self.oracle.reference_attention(workload, self._pristine, o, gain, lse)
        return (o, gain, count), (lse, _upload(struct.pack("d", 1.0)), 1)

    def _product(self) -> tuple[Memory, Memory, int]:
        """Value and gain by column of a product with its epilogue."""
        workload, out = self.workload, self.workload.output()
        count, columns = out.elements, out.shape[-1]
        value = Memory(8 * count)
        if isinstance(workload, Conv2d):
            self.oracle.reference_conv2d(workload, self._pristine, value)
        else:
            assert isinstance(workload, Gemm)
            self.oracle.reference_gemm(workload, self._pristine, value)
        gain = [1.0] * columns
        types = {operand.name: ELEMENT[operand.dtype] for operand in workload.inputs()}
        for op in workload.epilogue:
            operand = self._pristine.get(op)
            self.oracle.start(
                "kt_reference_epilogue", count, value.address, count, columns, EPILOGUE[op],
                operand.address if operand else 0, types.get(op, 0),
            )  # fmt: skip
            if op == "scale":
                scales = self._floats(op, columns, types[op])
                gain = [g * abs(s) for g, s in zip(gain, scales, strict=True)]
            elif op == "tensor_scale":
                (scale,) = self._floats(op, 1, types[op])
                gain = [g * abs(scale) for g in gain]
            elif op in ("gelu", "silu"):
                gain = [1.13 * g for g in gain]
        return value, _upload(struct.pack(f"{columns}d", *gain)), columns

    def _floats(self, name: str, count: int, element: int) -> list[float]:
        """A vector operand's values, through the comparison-free route of a float64 copy."""
        copy = Memory(8 * count)
        copy.fill(0)
        self.oracle.start(
            "kt_reference_epilogue", count, copy.address, count, count, EPILOGUE["bias"],
            self._pristine[name].address, element,
        )  # fmt: skip
        return list(struct.unpack(f"{count}d", copy.read(8 * count)))

    # -- judging ------------------------------------------------------------------------------

    def arguments(self) -> list[int]:
        """Addresses in argument order."""
        return [b.address for b in (*self.inputs.values(), *self.outputs)]

    def judge(self, workspace: Guarded | None) -> float:
        """The relative error of the output; raises Refused for anything wrong."""
        problems = []
        names = [operand.name for operand in self.workload.outputs()]
        zones = {**self.inputs, **dict(zip(names, self.outputs, strict=True))}
        if workspace is not None:
            zones["workspace"] = workspace
        for name, zone in zones.items():
            if changed := zone.changed(self.oracle, self._counter):
                problems.append(f"wrote {changed} bytes outside {name}")
        for name, source in self._pristine.items():
            self._counter.fill(0)
            self.oracle.start(
                "kt_count_differing", source.size, self.inputs[name].address, source.address,
                source.size, self._counter.address,
            )  # fmt: skip
            if int.from_bytes(self._counter.read(8), "little"):
                problems.append(f"modified its input {name}")
                self.restore(name)
        if problems:
            raise Refused("wrong_result", "check", "; ".join(problems))
        checked = zip(self.outputs, self._expected, strict=True)
        return max(self._error(output, want) for output, want in checked)

    def _error(self, output: Guarded, want: Expected) -> float:
        """The output's relative error; raises Refused when it is outside its bounds."""
        bound, count = want.tolerance, want.operand.elements
        self._result.fill(0)
        self._result.fill(0xFF, 32, 8)  # first_bad: none yet
        self.oracle.start(
            "kt_compare", count, output.address, ELEMENT[want.operand.dtype], want.value.address,
            want.gain.address, count, want.columns, bound.absolute, bound.relative,
            self._result.address,
        )  # fmt: skip
        errors, squares, gains, bad, first = _RESULT.unpack(self._result.read(_RESULT.size))
        scale = max(math.sqrt(squares), bound.typical * math.sqrt(gains))
        error = math.sqrt(errors) / (scale or 1.0)  # zero: every element is infinite
        detail = (
            f"; {bad} of {count} elements of {want.operand.name} are wrong, the first at {first}"
            if bad
            else ""
        )
        if not error <= bound.norm:
            message = f"relative error {error:.3g} exceeds {bound.norm:.3g}{detail}"
            raise Refused("wrong_result", "check", message)
        if bad:
            message = f"relative error {error:.3g} is small but not everywhere{detail}"
            raise Refused("wrong_result", "check", message)
        return error
