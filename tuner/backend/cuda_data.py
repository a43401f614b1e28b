"""Data of a CUDA measurement, made and judged on the device by the kernels of oracle.cu."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from kt.spaces.errors import TargetError
from kt.spaces.kernel import Launch
from kt.spaces.workload import Gemm, Operand, Workload

from .driver import Device, Memory, Module, launch
from .load import Refused

SOURCE = Path(__file__).with_name("oracle.cu")
ELEMENT = {"fp64": 0, "fp32": 1, "tf32": 1, "fp16": 2, "bf16": 3, "int8": 4, "int32": 5,
           "fp8_e4m3": 6, "fp8_e5m2": 7}  # fmt: skip
"""Element types as oracle.cu numbers them."""
EPILOGUE = {"bias": 0, "relu": 1, "gelu": 2, "silu": 3, "residual": 4, "scale": 5}
ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8,
            "int32": 0.0}  # fmt: skip
"""Half a unit in the last place, relative."""
TF32_ROUNDOFF = 2.0**-11
GUARD = 4096
CANARY, POISON = 0xA5, 0xFF
_BLOCK = 256
_RESULT = struct.Struct("ddQQ")


def needed_bytes(workload: Workload) -> int:
    """Device memory that measuring and checking takes: operands four times, a float64 reference."""
    return 4 * workload.bytes + 8 * workload.output().elements


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
        grid = (-(-n // 64), -(-m // 64), workload.batch)
        self._start(
            "kt_reference_gemm", grid,
            (out.address, operands["A"].address, operands["B"].address, ELEMENT[workload.dtype],
             m, n, k, *a, *b),
        )  # fmt: skip

    def _start(self, entry: str, grid: tuple[int, int, int], arguments: Sequence[object]) -> None:
        step = Launch(entry, grid, (_BLOCK, 1, 1))
        launch(self._module, step, arguments, self.device.stream, SIGNATURES[entry])


SIGNATURES: Mapping[str, str] = {
    "kt_fill_normal": "PliL",
    "kt_reference_gemm": "PPPilllllll",
    "kt_reference_epilogue": "PlliPi",
    "kt_compare": "PiPPllddP",
    "kt_count_changed": "PlBP",
    "kt_count_differing": "PPlP",
    "kt_read": "PlP",
}
"""Parameter types: P pointer, i int, l long, L unsigned long, d double, B byte."""


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


class Tolerance:
    """Error bounds of a result, as `kt.tuner.backend.reference.Tolerance` derives them."""

    def __init__(self, workload: Gemm) -> None:
        out = ROUNDOFF[workload.out_dtype]
        acc = {"fp16": 2.0**-11, "int32": 0.0}.get(workload.acc, ROUNDOFF.get(workload.acc, 0.0))
        k = workload.k
        self.absolute = acc * (4 * k + 32)
        self.relative = 1.02 * out + 16 * acc  # one rounding of a result that is nearly exact
        self.norm = out + acc * (2 * k**0.5 + 16)
        if workload.dtype == "tf32":
            # Both operands are rounded: each product is off by about 2^-11 of itself.
            self.absolute += TF32_ROUNDOFF * 8 * k**0.5
            self.norm += 2 * TF32_ROUNDOFF
        if workload.dtype == "int8":
            self.absolute, self.relative, self.norm = 0.5, 0.0, 1e-9


class Dataset:
    """Operands, reference and judge of one workload and seed, on the device."""

    def __init__(self, oracle: Oracle, workload: Workload, seed: int) -> None:
        if not isinstance(workload, Gemm):
            raise TargetError(f"no CUDA reference for operator '{workload.OPERATOR}'")
        self.oracle, self.workload = oracle, workload
        self.inputs = {o.name: Guarded(o.bytes) for o in workload.inputs()}
        self._pristine = {o.name: Memory(o.bytes) for o in workload.inputs()}
        for i, operand in enumerate(workload.inputs()):
            self._fill(operand, zlib.crc32(f"{seed} {workload} {i}".encode()))
        self.output = Guarded(workload.output().bytes)
        self._columns = workload.output().shape[-1]
        self._count = workload.output().elements
        self._reference, self._gain = Memory(8 * self._count), Memory(8 * self._columns)
        self._result, self._counter = Memory(_RESULT.size), Memory(8)
        self._tolerance = Tolerance(workload)
        self._make_reference()

    def _fill(self, operand: Operand, seed: int) -> None:
        to, count = self._pristine[operand.name], operand.elements
        self.oracle.start(
            "kt_fill_normal", -(-count // 2), to.address, count, ELEMENT[operand.dtype], seed
        )
        self.restore(operand.name)

    def restore(self, name: str) -> None:
        """Copies an input's pristine values into its guarded buffer."""
        from .driver import call

        to, source = self.inputs[name], self._pristine[name]
        call("cuMemcpyDtoDAsync", to.address, source.address, source.size, 0)

    def pristine(self, name: str) -> Memory:
        return self._pristine[name]

    def _make_reference(self) -> None:
        workload, columns = self.workload, self._columns
        assert isinstance(workload, Gemm)
        self.oracle.reference_gemm(workload, self._pristine, self._reference)
        gain = [1.0] * columns
        for op in workload.epilogue:
            operand = self._pristine.get(op)
            element = ELEMENT[workload.out_dtype]
            self.oracle.start(
                "kt_reference_epilogue", self._count, self._reference.address, self._count,
                columns, EPILOGUE[op], operand.address if operand else 0, element,
            )  # fmt: skip
            if op == "scale":
                gain = [g * abs(s) for g, s in zip(gain, self._floats(op, columns), strict=True)]
            elif op in ("gelu", "silu"):
                gain = [1.13 * g for g in gain]
        self._upload(self._gain, gain)
        rows = self._count // columns
        norm = math.sqrt(sum(g * g for g in gain))
        self._typical = math.sqrt(workload.k * rows) * norm

    def _floats(self, name: str, count: int) -> list[float]:
        """A vector operand's values, through the comparison-free route of a float64 copy."""
        copy = Memory(8 * count)
        copy.fill(0)
        element = ELEMENT[self.workload.out_dtype]
        self.oracle.start(
            "kt_reference_epilogue", count, copy.address, count, count, EPILOGUE["bias"],
            self._pristine[name].address, element,
        )  # fmt: skip
        return list(struct.unpack(f"{count}d", copy.read(8 * count)))

    @staticmethod
    def _upload(to: Memory, values: Sequence[float]) -> None:
        import ctypes

        from .driver import call

        host = (ctypes.c_double * len(values))(*values)
        call("cuMemcpyHtoD", to.address, ctypes.addressof(host), ctypes.sizeof(host))

    # -- judging ------------------------------------------------------------------------------

    def arguments(self) -> list[int]:
        """Addresses in argument order."""
        return [b.address for b in self.inputs.values()] + [self.output.address]

    def judge(self, workspace: Guarded | None) -> float:
        """The relative error of the output; raises Refused for anything wrong."""
        problems = []
        zones = {**self.inputs, self.workload.output().name: self.output}
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
        return self._error()

    def _error(self) -> float:
        bound, out = self._tolerance, self.workload.output()
        self._result.fill(0)
        self._result.fill(0xFF, 24, 8)  # first_bad: none yet
        self.oracle.start(
            "kt_compare", self._count, self.output.address, ELEMENT[out.dtype],
            self._reference.address, self._gain.address, self._count, self._columns,
            bound.absolute, bound.relative, self._result.address,
        )  # fmt: skip
        errors, squares, bad, first = _RESULT.unpack(self._result.read(_RESULT.size))
        error = math.sqrt(errors) / max(math.sqrt(squares), self._typical)
        detail = f"; {bad} of {self._count} elements are wrong, the first at {first}" if bad else ""
        if not error <= bound.norm:
            message = f"relative error {error:.3g} exceeds {bound.norm:.3g}{detail}"
            raise Refused("wrong_result", "check", message)
        if bad:
            message = f"relative error {error:.3g} is small but not everywhere{detail}"
            raise Refused("wrong_result", "check", message)
        return error
