"""Every CUDA GEMM family on the device: random workloads and θ at every edge, against float64.

    PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -s -m gpu tests/gpu/test_gemm_kernels.py

Outputs are poisoned and lie between guard zones, like every operand; each kernel runs three times
over one workspace, and must write the same bits wherever its sums have a fixed order. A table is
printed last.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gemm_cases
import numpy as np
import pytest
from numpy.typing import NDArray

from kt.spaces.gemm.mma import GemmMma
from kt.spaces.gemm.simt import GemmSimt
from kt.spaces.gemm.stream import GemmStream
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import Gemm, parse

pytestmark = pytest.mark.gpu
Array = NDArray[Any]

GUARD = 1024
SPLIT_ATOMIC = "atomic"
FAMILIES = {f.name: f for f in (GemmMma(), GemmSimt(), GemmStream())}
DRAWS = {"mma": 200, "simt": 70, "stream": 110}
DTYPES = {
    "mma": ("bf16", "fp16", "tf32", "int8"), "simt": ("fp32", "fp64"),
    "stream": ("bf16", "fp16", "fp32"),
}  # fmt: skip
LARGER = (*gemm_cases.EDGES, 191, 193, 255, 256, 257, 300, 509, 511, 513, 588, 700)
NAMED = {
    "mma": (
        "gemm 1000x1000x1000 dtype=bf16", "gemm 64x64x16384 dtype=bf16",
        "gemm 511x509x8192 dtype=fp16", "gemm 300x5000x700 epilogue=bias+gelu dtype=bf16",
        "gemm 64x48x80 batch=300 dtype=bf16", "gemm 1x1x1 dtype=int8",
    ),
    "simt": ("gemm 1000x1000x1000 dtype=fp32", "gemm 257x129x2049 layout=tt dtype=fp64"),
    "stream": (
        "gemm 1x4096x4096 dtype=bf16", "gemm 16x1024x14336 dtype=bf16",
        "gemm 4097x3x1025 layout=tn dtype=fp16", "gemm 5x2048x2048 layout=nt dtype=fp32",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kernel to be run, with the seed of its inputs."""

    kernel: Kernel
    seed: int


def _target() -> Target:
    from kt.tuner.backend.driver import Device

    name = Device(0).name
    return next((t for t in CUDA_TARGETS.values() if t.processor == name), CUDA_TARGETS["a100"])


def _cases(family: str, target: Target) -> list[Case]:
    cases = []
    for i in range(DRAWS[family] + 3 * len(NAMED[family])):
        rng = np.random.default_rng([2026, i, len(family)])
        if i < DRAWS[family]:
            draw = gemm_cases.draw_thin if family == "stream" else gemm_cases.draw
            w: Any = draw(rng, DTYPES[family], LARGER if i % 3 == 0 else gemm_cases.EDGES)
        else:
            w = parse(NAMED[family][(i - DRAWS[family]) // 3])
        space = Space(w, target, [FAMILIES[family]])
        default = int(space.defaults()[0])
        point = default if i % 10 == 0 else int(space.sample(rng, 1)[0])
        cases.append(Case(space.kernel(point), i))
    return cases


def compile_source(source: str, arch: str) -> bytes | str:
    """The cubin, or the compiler's message, or nothing where registers spill, as tuning refuses.

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
        if facts.spill_bytes:
            return ""
        return (directory / "kernel.cubin").read_bytes()


class _Buffer:
    """A device buffer between guard zones."""

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


def _run(case: Case, image: bytes, directory: Path) -> tuple[float, str]:
    """(worst error in units of what is allowed, what else is wrong)."""
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
    outs, worst = [], 0.0
    for _ in range(3):
        out.put(poison)
        for step in kernel.launches:
            launch(module, step, arguments, device.stream)
        device.synchronize()
        outs.append(out.get())
        result = np.frombuffer(outs[-1], poison.dtype).reshape(poison.shape)
        worst = max(worst, reference.worst(w, result))
    wrong = []
    if not all(b.intact() for b in (*buffers, out, workspace)):
        wrong.append("wrote into a guard zone")
    if kernel.zeroed_bytes and any(workspace.get()[: kernel.zeroed_bytes]):
        wrong.append("left the workspace not zero")
    ordered = kernel.theta.fusion["split_mode"] != SPLIT_ATOMIC
    if ordered and len(set(outs)) > 1:
        wrong.append("results differ between launches")
    module.unload()
    return worst, ", ".join(wrong)


def test_random_kernels_agree_with_float64(tmp_path: Path) -> None:
    assert run_draws(tmp_path) >= 300


def run_draws(tmp_path: Path) -> int:
    """Checks every drawn kernel, prints the table, and returns how many ran."""
    target = _target()
    cases = [case for family in FAMILIES for case in _cases(family, target)]
    table: dict[tuple[str, str], list[float]] = defaultdict(list)
    failures, spilled = [], 0
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), get_context("spawn")) as pool:
        sources = [case.kernel.source for case in cases]
        images = pool.map(compile_source, sources, [target.arch] * len(cases), chunksize=4)
        for case, image in zip(cases, images, strict=True):
            w: Any = case.kernel.workload
            name = f"{case.kernel.family} {w}: {case.kernel.theta}"
            if not image:
                spilled += 1
                continue
            if isinstance(image, str):
                failures.append(f"{name}\n    {image}")
                continue
            worst, wrong = _run(case, image, tmp_path)
            table[case.kernel.family, w.dtype].append(worst)
            if wrong or not worst <= 1:
                failures.append(f"{name}\n    error {worst:.3g} of the allowed; {wrong}")
    for failure in failures[:20]:
        print(failure)
    print(f"\n{'family':8} {'dtype':6} {'kernels':>8} {'worst error / allowed':>22}")
    for (family, dtype), errors in sorted(table.items()):
        print(f"{family:8} {dtype:6} {len(errors):8} {max(errors):22.3f}")
    print(f"{spilled} of {len(cases)} spill registers and are refused")
    assert not failures, f"{len(failures)} of {len(cases)} kernels are wrong"
    assert 50 * spilled <= len(cases)
    return sum(map(len, table.values()))


def test_fp16_accumulation_is_told_apart(tmp_path: Path) -> None:
    """A kernel that accumulates in fp16 must fail where the workload asks for fp32."""
    target = _target()
    wanted = Gemm(dtype="fp16", m=128, n=128, k=8192)
    cheap = Gemm(dtype="fp16", m=128, n=128, k=8192, acc="fp16")
    worst = {}
    for w in (wanted, cheap):
        space = Space(w, target, [GemmMma()])
        point = space.parts[0].point(
            {**space.theta(int(space.defaults()[0])).flat(), "fusion.split_k": 1}
        )
        kernel = space.kernel(point)
        image = compile_source(kernel.source, target.arch)
        assert isinstance(image, bytes), image
        judged = Kernel(
            wanted, kernel.family, kernel.theta, kernel.language, kernel.source,
            kernel.launches, kernel.workspace_bytes, kernel.zeroed_bytes,
        )  # fmt: skip
        worst[w.acc], _ = _run(Case(judged, 5), image, tmp_path)
    assert worst["fp32"] <= 1 < worst["fp16"], worst
