"""Whether a kernel is right: poisoned outputs, guarded buffers, two kinds of error bound."""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any

import msgspec
import numpy as np

from kt.spaces.workload import Workload

from .buffers import Guarded, address
from .load import LoadedKernel, Refused
from .reference import Dataset, Expected
from .timing import Comparison

# Launches of a verification, and for how many times its seconds they go on.
_LAUNCHES = ((2, math.inf), (4, 10.0), (64, 1.0))


class Verified(msgspec.Struct, frozen=True):
    """Result of repeated checks: launches made, largest relative error; `failure` when unsound."""

    launches: int
    error: float
    failure: str = ""


class _Arguments:
    """One guarded copy of all operands and the argument array that points to them."""

    def __init__(self, workload: Workload, dataset: Dataset, edge: bool) -> None:
        self.names = [operand.name for operand in workload.operands()]
        sizes = [operand.bytes for operand in workload.operands()]
        self.buffers = [Guarded(size, edge=edge) for size in sizes]
        self.pointers = (ctypes.c_void_p * len(sizes))(*(b.address for b in self.buffers))
        self.address = ctypes.addressof(self.pointers)
        for buffer, array in zip(self.buffers, dataset.inputs, strict=False):
            ctypes.memmove(buffer.address, address(array), buffer.size)
        self.outputs = self.buffers[len(dataset.inputs) :]


class Checker:
    """Checks kernels of one workload against its dataset. `library` is the built timing.c."""

    def __init__(self, library: Any, workload: Workload, dataset: Dataset) -> None:
        self._workload, self._dataset = workload, dataset
        self._library = library
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._plain = _Arguments(workload, dataset, edge=False)
        self._edged: _Arguments | None = None

    def check(self, kernel: LoadedKernel, workspace: Guarded) -> float:
        """Launches once and returns the relative error; raises Refused for a wrong kernel."""
        return self._launch(kernel, workspace, self._plain)

    def repeat(self, kernel: LoadedKernel, workspace: Guarded, seconds: float) -> Verified:
        """Launches for about `seconds`, every second time with operands at the edge of a page.

        An error that comes and goes is a race. Slow kernels are launched four times, or twice.
        """
        if self._edged is None:
            self._edged = _Arguments(self._workload, self._dataset, edge=True)
        wrong: list[str] = []
        worst, launches, begin = 0.0, 0, time.monotonic()
        while _again(launches, time.monotonic() - begin, seconds):
            arguments = self._edged if launches % 2 else self._plain
            launches += 1
            try:
                worst = max(worst, self._launch(kernel, workspace, arguments))
            except Refused as refused:
                wrong.append(f"{refused.failure.failure}: {refused}")
        if not wrong:
            return Verified(launches, worst)
        if len(wrong) == launches:
            return Verified(launches, worst, wrong[0])
        message = f"race: {len(wrong)} of {launches} launches failed, first with {wrong[0]}"
        return Verified(launches, worst, message)

    def _launch(self, kernel: LoadedKernel, workspace: Guarded, arguments: _Arguments) -> float:
        for output in arguments.outputs:
            output.poison()
        workspace.poison()
        code = kernel.launch(arguments.address, workspace.address)
        self._inspect_memory(arguments, workspace)
        if code:
            raise Refused("launch_error", "check", f"kt_launch returned {code}")
        checked = zip(
            self._workload.outputs(), arguments.outputs, self._dataset.expected, strict=True
        )
        return max(self._error(operand.dtype, output, want) for operand, output, want in checked)

    def _inspect_memory(self, arguments: _Arguments, workspace: Guarded) -> None:
        """Refuses writes to inputs and outside of buffers, and undoes them for the next kernel."""
        problems = []
        named = zip([*arguments.names, "workspace"], [*arguments.buffers, workspace], strict=True)
        for name, buffer in named:
            where = buffer.trespass()
            if where:
                problems.append(f"wrote outside {name}, {where}")
        for name, buffer, array in zip(
            arguments.names, arguments.buffers, self._dataset.inputs, strict=False
        ):
            if self._memcmp(buffer.address, address(array), buffer.size):
                ctypes.memmove(buffer.address, address(array), buffer.size)
                problems.append(f"modified its input {name}")
        if problems:
            raise Refused("wrong_result", "check", "; ".join(problems))

    def _error(self, dtype: str, output: Guarded, want: Expected) -> float:
        """The output's relative error; raises Refused when it is outside its bounds."""
        bound, columns = want.tolerance, want.gain.size
        found = Comparison()
        getattr(self._library, f"kt_compare_{dtype}")(
            output.address, address(want.value), address(want.gain), want.value.size // columns,
            columns, bound.absolute, bound.relative, ctypes.byref(found),
        )  # fmt: skip
        typical = bound.typical * math.sqrt(found.gain_squares)
        scale = max(math.sqrt(found.reference_squares), typical)
        # NaN when any element is; a scale of zero is an output whose every element is infinite.
        error = math.sqrt(found.error_squares) / (scale or 1.0)
        if not error <= bound.norm:
            detail = _worst(found, want) if found.bad else ""
            message = f"relative error {error:.3g} exceeds {bound.norm:.3g}{detail}"
            raise Refused("wrong_result", "check", message)
        if found.bad:
            message = f"relative error {error:.3g} is small but not everywhere{_worst(found, want)}"
            raise Refused("wrong_result", "check", message)
        return error


def _worst(found: Comparison, want: Expected) -> str:
    at = np.unravel_index(found.worst, want.value.shape)
    where = ", ".join(str(int(i)) for i in at)
    return (
        f"; {found.bad} of {want.value.size} elements are wrong, e.g. "
        f"{want.name}[{where}] is {found.worst_value:.6g}, not {found.worst_reference:.6g}"
    )


def _again(launches: int, elapsed: float, seconds: float) -> bool:
    return any(launches < most and elapsed < times * seconds for most, times in _LAUNCHES)
