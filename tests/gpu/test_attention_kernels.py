"""Every CUDA attention family for sm_80 on the device: random workloads and θ, against float64.

    PYTHONPATH=<folder with kt>:tests \\
        python3 -m pytest -q -s -m gpu tests/gpu/test_attention_kernels.py

The device's own reference judges (guard zones, inputs untouched, errors element by element); each
kernel runs three times over one workspace and must write the same bits. A table is printed last.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attention_cases
import numpy as np
import pytest

from kt.spaces.attention.mma import AttentionMma
from kt.spaces.attention.split_kv import AttentionSplitKv
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import parse

pytestmark = pytest.mark.gpu

FAMILIES = {f.name: f for f in (AttentionMma(), AttentionSplitKv())}
DRAWS = {"mma": 160, "split_kv": 100}
POINTS_OF_EDGES = 4
EDGES = {
    "mma": (
        "1x2x100x64 kv-len=37 causal=true lse=true", "2x3x257x128 kv-len=129 causal=true lse=true",
        "1x4x200x64 scale=7.5 lse=true", "1x2x130x128 scale=5.3 causal=true",
        "1x2x65x64 kv-len=1 lse=true", "1x1x1x8", "1x1x1x2 kv-len=1 lse=true",
        "1x2x127x72 value-dim=40 window=1 lse=true", "1x2x300x80 window=64",
        "1x2x500x64 causal=true window=63 softcap=20", "1x6x129x96 kv-heads=2 layout=bhsd",
        "2x2x191x256 causal=true", "1x2x100x250 value-dim=6 lse=true",
        "4x16x1024x128 causal=true", "2x16x1024x64 lse=true", "1x8x2048x128 kv-heads=1",
    ),
    "split_kv": (
        "1x32x1x128 kv-heads=8 kv-len=1024", "2x32x1x128 kv-heads=8 kv-len=65536 lse=true",
        "64x32x1x128 kv-heads=8 kv-len=4096", "1x8x8x64 kv-heads=1 kv-len=5 causal=true lse=true",
        "3x4x1x64 kv-len=1 lse=true", "1x8x16x128 kv-heads=1 kv-len=1000 causal=true window=100",
        "2x2x1x96 kv-len=2049 scale=6.1 lse=true", "1x16x2x256 kv-heads=2 kv-len=777 softcap=30",
        "1x1x1x2 kv-len=3 lse=true", "2x14x5x42 kv-heads=2 kv-len=400 value-dim=250 layout=bhsd",
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
    edges = [e for e in EDGES[family] for _ in range(POINTS_OF_EDGES)]
    for i in range(DRAWS[family] + len(edges)):
        rng = np.random.default_rng([2027, i, len(family)])
        if i < DRAWS[family]:
            lengths, dims = attention_cases.LONGER, attention_cases.LARGER_DIMS
            w: Any = attention_cases.draw(rng, lengths, dims, few_queries=family == "split_kv")
        else:
            dtype = "bf16" if i % 2 else "fp16"
            w = parse(f"attention {edges[i - DRAWS[family]]} dtype={dtype}")
        space = Space(w, target, [FAMILIES[family]])
        default = i % 10 == 0 or (i >= DRAWS[family] and (i - DRAWS[family]) % POINTS_OF_EDGES == 0)
        point = int(space.defaults()[0]) if default else int(space.sample(rng, 1)[0])
        cases.append(Case(space.kernel(point), i))
    return cases


def compile_source(source: str, arch: str) -> tuple[bytes, int] | str:
    """The cubin and its spilled bytes, or the compiler's message; runs in a pool of processes."""
    from kt.logs.record import Failure
    from kt.tuner.backend.nvrtc import find_nvrtc

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "kernel.cu").write_text(source)
        facts = find_nvrtc().compile(directory, arch, 120.0)
        if isinstance(facts, Failure):
            return f"{facts.message}\n{facts.detail}"
        return (directory / "kernel.cubin").read_bytes(), facts.spill_bytes


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    from kt.tuner.backend.cuda_data import SOURCE, Oracle
    from kt.tuner.backend.driver import Device

    image = compile_source(SOURCE.read_text(), _target().arch)
    assert isinstance(image, tuple), image
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "oracle.cubin"
        path.write_bytes(image[0])
        yield Oracle(Device(0), path)


def _read(address: int, size: int) -> bytes:
    """Device memory; waits."""
    from kt.tuner.backend.driver import call

    host = ctypes.create_string_buffer(max(size, 1))
    if size:
        call("cuMemcpyDtoH", ctypes.addressof(host), address, size)
    return host.raw[:size]


def _run(case: Case, image: bytes, oracle: Any, directory: Path) -> tuple[float, str]:
    """(relative error, what is wrong)."""
    from kt.tuner.backend.cuda_data import POISON, Dataset, Guarded
    from kt.tuner.backend.driver import Module, launch
    from kt.tuner.backend.load import Refused

    kernel, device = case.kernel, oracle.device
    (directory / "kernel.cubin").write_bytes(image)
    module = Module(directory / "kernel.cubin")
    data, workspace = Dataset(oracle, kernel.workload, case.seed), Guarded(kernel.workspace_bytes)
    workspace.fill(POISON)
    workspace.fill(0, kernel.zeroed_bytes)
    bits, error, wrong = set(), 0.0, ""
    for _ in range(3):
        for output in data.outputs:
            output.fill(POISON)
        for step in kernel.launches:
            launch(module, step, [*data.arguments(), workspace.address], device.stream)
        device.synchronize()
        try:
            error = max(error, data.judge(workspace))
        except Refused as refused:
            wrong = str(refused)
        bits.add(b"".join(_read(o.address, o.size) for o in data.outputs))
    if any(_read(workspace.address, kernel.zeroed_bytes)):
        wrong += " left the workspace not zero"
    if len(bits) > 1:
        wrong += " results differ between launches"
    module.unload()
    return error, wrong


def test_random_kernels_agree_with_float64(oracle: Any, tmp_path: Path) -> None:
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
            if isinstance(image, str):
                failures.append(f"{name}\n    {image}")
                continue
            spilled += image[1] > 0
            error, wrong = _run(case, image[0], oracle, tmp_path)
            table[case.kernel.family, w.dtype].append(error)
            if wrong:
                failures.append(f"{name}\n    {wrong}")
    for failure in failures[:20]:
        print(failure)
    print(f"\n{'family':8} {'dtype':6} {'kernels':>8} {'worst relative error':>22}")
    for (family, dtype), errors in sorted(table.items()):
        print(f"{family:8} {dtype:6} {len(errors):8} {max(errors):22.2e}")
    print(f"{spilled} of {len(cases)} kernels spill registers")
    assert not failures, f"{len(failures)} of {len(cases)} kernels are wrong"
    assert len(cases) >= 300
