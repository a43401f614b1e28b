"""Builds many CUDA kernels, runs them on the device and judges what they write: for tests in gpu/.

Each kernel runs three times over one workspace into poisoned outputs between guard zones, and must
write the same bits wherever its sums have a fixed order.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gemm_cases
import numpy as np
from gemm_cases import Array

from kt.spaces.kernel import Kernel
from kt.spaces.target import CUDA_TARGETS, Target

GUARD = 1024
LAUNCHES = 3
SPLIT_ATOMIC = "atomic"


@dataclass(frozen=True)
class Case:
    """One kernel to be run, with the seed of its inputs."""

    kernel: Kernel
    seed: int


Judge = Callable[[Case, bytes], tuple[float, str]]
"""Runs a kernel's cubin; (its error, what is wrong: empty when nothing is)."""


def device_target() -> Target:
    """The named target of GPU 0, or a relative that builds for it."""
    from kt.tuner.backend.driver import Device

    name = Device(0).name
    return next((t for t in CUDA_TARGETS.values() if t.processor == name), CUDA_TARGETS["a100"])


# -- building -------------------------------------------------------------------------------


def compile_source(source: str, arch: str, most_spill_bytes: int = 0) -> bytes | str:
    """The cubin, or the compiler's message, or nothing where more spills, as tuning refuses.

    Runs in a pool of processes.
    """
    from kt.logs.record import Failure
    from kt.tuner.backend.nvrtc import find_nvrtc

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "kernel.cu").write_text(source)
        facts = find_nvrtc().compile(directory, arch, 120.0)
        if isinstance(facts, Failure):
            return f"{facts.message}\n{facts.detail}"
        if facts.spill_bytes > most_spill_bytes:
            return ""
        return (directory / "kernel.cubin").read_bytes()


def load_oracle(arch: str, directory: Path) -> Any:
    """The device's own references, for GPU 0; `directory` must last."""
    from kt.tuner.backend.cuda_data import SOURCE, Oracle
    from kt.tuner.backend.driver import Device

    image = compile_source(SOURCE.read_text(), arch, most_spill_bytes=1 << 20)
    assert isinstance(image, bytes), image
    (directory / "oracle.cubin").write_bytes(image)
    return Oracle(Device(0), directory / "oracle.cubin")


def check(cases: Sequence[Case], arch: str, judge: Judge, pool: Executor | None = None) -> int:
    """Builds and judges every kernel, prints a table, fails on wrong ones; returns how many ran."""
    table: dict[tuple[str, str], list[float]] = defaultdict(list)
    failures, refused = [], 0
    compilers = max(1, (os.cpu_count() or 2) - 1)
    with pool or ProcessPoolExecutor(compilers, get_context("spawn")) as builders:
        images = builders.map(
            compile_source,
            [case.kernel.source for case in cases],
            [arch] * len(cases),
            [case.kernel.most_spill_bytes for case in cases],
            chunksize=4,
        )
        for case, image in zip(cases, images, strict=True):
            w = case.kernel.workload
            name = f"{case.kernel.family} {w}: {case.kernel.theta}"
            if not image:
                refused += 1
                continue
            if isinstance(image, str):
                failures.append(f"{name}\n    {image}")
                continue
            error, wrong = judge(case, image)
            table[case.kernel.family, w.dtype].append(error)
            if wrong:
                failures.append(f"{name}\n    {wrong}")
    for failure in failures[:20]:
        print(failure)
    print(f"\n{'family':10} {'dtype':6} {'kernels':>8} {'worst error':>12}")
    for (family, dtype), errors in sorted(table.items()):
        print(f"{family:10} {dtype:6} {len(errors):8} {max(errors):12.3g}")
    print(f"{refused} of {len(cases)} spill registers and are refused")
    assert not failures, f"{len(failures)} of {len(cases)} kernels are wrong"
    assert refused <= max(1, len(cases) // 50)
    return sum(map(len, table.values()))


# -- judges ---------------------------------------------------------------------------------


class Judged:
    """The judge that asks the device's own float64 reference; errors are relative."""

    def __init__(self, oracle: Any, directory: Path) -> None:
        self._oracle, self._path = oracle, directory / "kernel.cubin"

    def __call__(self, case: Case, image: bytes) -> tuple[float, str]:
        from kt.tuner.backend.cuda_data import POISON, Dataset, Guarded
        from kt.tuner.backend.driver import Module, launch
        from kt.tuner.backend.load import Refused

        kernel, device = case.kernel, self._oracle.device
        self._path.write_bytes(image)
        module = Module(self._path)
        data = Dataset(self._oracle, kernel.workload, case.seed)
        workspace = Guarded(max(kernel.workspace_bytes, 1))
        workspace.fill(POISON)
        workspace.fill(0, kernel.zeroed_bytes)
        written, error, wrong = set(), 0.0, []
        for _ in range(LAUNCHES):
            for output in data.outputs:
                output.fill(POISON)
            for step in kernel.launches:
                launch(module, step, [*data.arguments(), workspace.address], device.stream)
            device.synchronize()
            try:
                error = max(error, data.judge(workspace))
            except Refused as refused:
                wrong.append(str(refused))
            written.add(b"".join(_read(o.address, o.size) for o in data.outputs))
        if any(_read(workspace.address, kernel.zeroed_bytes)):
            wrong.append("left the workspace not zero")
        if _ordered(kernel) and len(written) > 1:
            wrong.append("results differ between launches")
        module.unload()
        return error, ", ".join(wrong)


def judge_gemm(case: Case, image: bytes, directory: Path) -> tuple[float, str]:
    """The judge that computes GEMM with NumPy; errors are in units of what is allowed."""
    from kt.tuner.backend.driver import Device, Module, launch

    device, kernel = Device(0), case.kernel
    w: Any = kernel.workload
    inputs = gemm_cases.inputs(w, np.random.default_rng(case.seed))
    reference, poison = gemm_cases.reference(w, inputs), gemm_cases.poison(w)
    (directory / "kernel.cubin").write_bytes(image)
    module = Module(directory / "kernel.cubin")
    buffers = [_Buffer(x.nbytes) for x in inputs]
    out, workspace = _Buffer(poison.nbytes), _Buffer(kernel.workspace_bytes)
    for buffer, x in zip(buffers, inputs, strict=True):
        buffer.put(x)
    workspace.zero(kernel.zeroed_bytes)
    arguments = [b.address for b in (*buffers, out, workspace)]
    written, worst, wrong = set(), 0.0, []
    for _ in range(LAUNCHES):
        out.put(poison)
        for step in kernel.launches:
            launch(module, step, arguments, device.stream)
        device.synchronize()
        written.add(got := out.get())
        result = np.frombuffer(got, poison.dtype).reshape(poison.shape)
        worst = max(worst, reference.worst(w, result))
    if not worst <= 1:
        wrong.append(f"error {worst:.3g} of the allowed")
    if not all(b.intact() for b in (*buffers, out, workspace)):
        wrong.append("wrote into a guard zone")
    if kernel.zeroed_bytes and any(workspace.get()[: kernel.zeroed_bytes]):
        wrong.append("left the workspace not zero")
    if _ordered(kernel) and len(written) > 1:
        wrong.append("results differ between launches")
    module.unload()
    return worst, ", ".join(wrong)


def _ordered(kernel: Kernel) -> bool:
    """Whether its sums have a fixed order."""
    return kernel.theta.fusion.get("split_mode") != SPLIT_ATOMIC


def _read(address: int, size: int) -> bytes:
    """Device memory; waits."""
    from kt.tuner.backend.driver import call

    host = np.empty(size, np.uint8)
    if size:
        call("cuMemcpyDtoH", host.ctypes.data, address, size)
    return host.tobytes()


class _Buffer:
    """Device memory between guard zones."""

    def __init__(self, size: int) -> None:
        from kt.tuner.backend.driver import Memory

        self.size, self._memory = size, Memory(size + 2 * GUARD)
        self._memory.fill(0xA5)
        self.address = self._memory.address + GUARD

    def put(self, content: Array) -> None:
        from kt.tuner.backend.driver import call

        host = np.ascontiguousarray(content)
        call("cuMemcpyHtoD", self.address, host.ctypes.data, host.nbytes)

    def zero(self, size: int) -> None:
        self._memory.fill(0, GUARD, size)

    def get(self) -> bytes:
        return self._memory.read(self.size, GUARD)

    def intact(self) -> bool:
        low = self._memory.read(GUARD)
        return low + self._memory.read(GUARD, GUARD + self.size) == b"\xa5" * (2 * GUARD)
