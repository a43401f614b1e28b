"""Every CUDA convolution family on the device: random shapes, options and θ, against float64.

    PYTHONPATH=<folder with kt>:tests python3 -m pytest -qs -m gpu tests/gpu/test_conv2d_kernels.py

Operands lie between guard zones, and the reference is the oracle's. Each kernel runs three times
over one workspace into a poisoned output, and must write the same bits wherever its sums have a
fixed order. A table is printed last.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import conv_cases
import numpy as np
import pytest

from kt.spaces.conv2d.direct import Conv2dDirect
from kt.spaces.conv2d.grouped import Conv2dGrouped
from kt.spaces.conv2d.mma import Conv2dMma
from kt.spaces.conv2d.patch import Conv2dPatch
from kt.spaces.conv2d.pointwise import Pointwise
from kt.spaces.family import Family
from kt.spaces.gemm.mma import GemmMma
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import Conv2d, parse

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (Conv2dMma(), Conv2dPatch(), Conv2dGrouped(), Conv2dDirect(), Pointwise(GemmMma()))
}
DTYPES = {
    "mma": ("bf16", "fp16", "tf32", "int8"), "patch": ("bf16", "fp16"),
    "grouped": ("bf16", "fp16"), "direct": ("bf16", "fp16", "fp32"), "gemm_mma": ("bf16",),
}  # fmt: skip
DRAWS = {"mma": 160, "patch": 110, "grouped": 70, "direct": 90, "gemm_mma": 0}
KINDS = {"mma": ("any", "any", "grouped"), "patch": ("wide",), "grouped": ("grouped",),
         "direct": ("depthwise", "grouped")}  # fmt: skip
NAMED = (
    "conv2d 8x56x56x64,64x3x3 pad=1 epilogue=bias+relu", "conv2d 4x28x28x512,128x1x1",
    "conv2d 8x56x56x128,128x3x3 stride=2 pad=1 epilogue=bias+residual+relu",
    "conv2d 32x7x7x512,512x3x3 pad=1 epilogue=bias+relu+scale+shift",
    "conv2d 1x64x64x320,320x3x3 pad=1 epilogue=bias+silu", "conv2d 1x16x16x1280,640x3x3 pad=1",
    "conv2d 4x224x224x3,64x7x7 stride=2 pad=3", "conv2d 4x224x224x3,96x4x4 stride=4",
    "conv2d 8x56x56x60,60x3x3 pad=1", "conv2d 2x112x112x12,40x3x3 pad=1",
    "conv2d 4x28x28x100,100x3x3 pad=1", "conv2d 8x112x112x32,32x3x3 pad=1 groups=32",
    "conv2d 8x56x56x144,144x3x3 stride=2 pad=1 groups=144",
    "conv2d 8x28x28x240,240x5x5 pad=2 groups=240", "conv2d 8x56x56x96,96x7x7 pad=3 groups=96",
    "conv2d 8x56x56x128,128x3x3 pad=1 groups=32", "conv2d 8x28x28x256,256x3x3 pad=1 groups=32",
    "conv2d 8x14x14x512,512x3x3 pad=1 groups=32",
)  # fmt: skip
POINTS_OF_NAMED = 4
LARGEST = 4_000_000


@dataclass(frozen=True)
class Case:
    """One kernel to be run, with the seed of its inputs."""

    kernel: Kernel
    seed: int


def _target() -> Target:
    from kt.tuner.backend.driver import Device

    name = Device(0).name
    return next((t for t in CUDA_TARGETS.values() if t.processor == name), CUDA_TARGETS["a100"])


def _texts(family: str) -> Iterator[tuple[Conv2d, int]]:
    """Convolutions for a family, and how many points of each are run."""
    for i in range(DRAWS[family]):
        rng = np.random.default_rng([2027, i, len(family)])
        kind = KINDS[family][i % len(KINDS[family])]
        most = LARGEST if i % 4 == 0 else 60_000
        yield conv_cases.draw(rng, DTYPES[family], kind, most), 1
    for i, text in enumerate((*conv_cases.EDGES, *NAMED)):
        w = parse(f"{text} dtype={DTYPES[family][i % len(DTYPES[family])]}")
        assert isinstance(w, Conv2d)
        yield w, POINTS_OF_NAMED if text in NAMED else 2


def cases(target: Target) -> list[Case]:
    """All kernels; the first of a named convolution, and every tenth drawn, is the default."""
    found = []
    for name, family in FAMILIES.items():
        for i, (w, count) in enumerate(_texts(name)):
            if family.refuses(w, target):
                continue
            space, rng = Space(w, target, [family]), np.random.default_rng([i, len(name)])
            points = [int(p) for p in space.sample(rng, count)]
            if count > 1 or i % 10 == 0:
                points[0] = int(space.defaults()[0])
            found += [Case(space.kernel(p), i) for p in points]
    return found


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


def _oracle(arch: str, directory: Path) -> Any:
    from kt.tuner.backend.cuda_data import SOURCE, Oracle
    from kt.tuner.backend.driver import Device

    image = compile_source(SOURCE.read_text(), arch)
    assert isinstance(image, bytes), image
    (directory / "oracle.cubin").write_bytes(image)
    return Oracle(Device(0), directory / "oracle.cubin")


def _run(case: Case, image: bytes, oracle: Any, directory: Path) -> tuple[float, str]:
    """(relative error, what is wrong)."""
    from kt.tuner.backend.cuda_data import POISON, Dataset, Guarded
    from kt.tuner.backend.driver import Memory, Module, call, launch
    from kt.tuner.backend.load import Refused

    kernel = case.kernel
    (directory / "kernel.cubin").write_bytes(image)
    module = Module(directory / "kernel.cubin")
    data = Dataset(oracle, kernel.workload, case.seed)
    workspace = Guarded(max(kernel.workspace_bytes, 1))
    workspace.fill(POISON)
    if kernel.zeroed_bytes:
        workspace.fill(0, kernel.zeroed_bytes)
    (out,) = data.outputs
    copy, outs, worst, wrong = Memory(out.size), set(), 0.0, ""
    for _ in range(3):
        out.fill(POISON)
        for step in kernel.launches:
            launch(module, step, [*data.arguments(), workspace.address], oracle.device.stream)
        oracle.device.synchronize()
        try:
            worst = max(worst, data.judge(workspace))
        except Refused as refused:
            wrong = str(refused.args[-1] if refused.args else refused)
        call("cuMemcpyDtoD", copy.address, out.address, out.size)
        outs.add(hash(copy.read(out.size)))
    if kernel.theta.fusion.get("split_mode") != "atomic" and len(outs) > 1:
        wrong += " results differ between launches"
    module.unload()
    return worst, wrong


def run_cases(found: Sequence[Case], target: Target, tmp_path: Path) -> int:
    """Checks every kernel, prints the table, and returns how many ran."""
    oracle = _oracle(target.arch, tmp_path)
    table: dict[tuple[str, str], list[float]] = defaultdict(list)
    failures, spilled = [], 0
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), get_context("spawn")) as pool:
        sources = [case.kernel.source for case in found]
        images = pool.map(compile_source, sources, [target.arch] * len(found), chunksize=4)
        for case, image in zip(found, images, strict=True):
            w = case.kernel.workload
            name = f"{case.kernel.family} {w}: {case.kernel.theta}"
            if not image:
                spilled += 1
                continue
            if isinstance(image, str):
                failures.append(f"{name}\n    {image}")
                continue
            error, wrong = _run(case, image, oracle, tmp_path)
            table[case.kernel.family, w.dtype].append(error)
            if wrong:
                failures.append(f"{name}\n    {wrong}")
    for failure in failures[:20]:
        print(failure)
    print(f"\n{'family':10} {'dtype':6} {'kernels':>8} {'worst relative error':>21}")
    for (family, dtype), errors in sorted(table.items()):
        print(f"{family:10} {dtype:6} {len(errors):8} {max(errors):21.3g}")
    print(f"{spilled} of {len(found)} spill registers and are refused")
    assert not failures, f"{len(failures)} of {len(found)} kernels are wrong"
    assert 50 * spilled <= len(found)
    return sum(map(len, table.values()))


def test_random_kernels_agree_with_float64(tmp_path: Path) -> None:
    target = _target()
    assert run_cases(cases(target), target, tmp_path) >= 300
