"""The families on wgmma on a Hopper GPU: random workloads and θ, every special path, float64.

    PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -s -m gpu tests/gpu/test_wgmma_kernels.py

Kernels run in child processes: one that hangs is killed and named, and the others go on. Outputs
are poisoned and lie between guard zones, like every operand; each kernel runs three times over one
workspace, and must write the same bits wherever its sums have a fixed order.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gemm_cases
import numpy as np
import pytest
import wgmma_cases
from device_kernels import Case, Judged, compile_source, judge_gemm, load_oracle

from kt.spaces.gemm.wgmma import GemmWgmma
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.workload import Gemm, parse

pytestmark = pytest.mark.gpu

DRAWS, SWAPPED_DRAWS = 200, 120
SECONDS = 40.0
"""A kernel that says nothing for so long, its reference included, hangs."""
EMITTED = (
    "rows of odd length", "clusters of 4 x 2", "sums by a kernel", "boxes of C",
    "8 classes of rows", "boxes of classes", "classes in clusters",
    "swapped, boxes of C", "swapped, odd sums by a kernel",
)  # fmt: skip
COMPILERS = max(1, (os.cpu_count() or 2) - 2)


@dataclass(frozen=True)
class Job:
    """One kernel to be built and run, with the seed of its inputs."""

    name: str
    kernel: Kernel
    seed: int
    library: bool = False
    """Built by nvcc and called through `kt_launch`, which encodes the maps itself."""


def _jobs() -> list[Job]:
    named = [Job(name, kernel, i) for i, (name, kernel) in enumerate(wgmma_cases.named_kernels())]
    special = [
        Job(f"{name} #{i}", kernel, 1000 + i)
        for name in wgmma_cases.PROPERTIES
        for i, kernel in enumerate(wgmma_cases.kernels_with(name))
    ]
    drawn = []
    for i in range(DRAWS):
        extents = gemm_cases.EDGES if i % 3 else wgmma_cases.LARGER
        drawn.append(Job(f"draw {i}", wgmma_cases.random_kernel(i, extents), 2000 + i))
    for i in range(SWAPPED_DRAWS):
        extents = gemm_cases.EDGES if i % 3 else wgmma_cases.LARGER
        kernel = wgmma_cases.random_swapped_kernel(i, extents)
        drawn.append(Job(f"swapped draw {i}", kernel, 4000 + i))
    emitted = [
        Job(f"nvcc, {name}", wgmma_cases.kernels_with(name, count=1)[0], 3000 + i, True)
        for i, name in enumerate(EMITTED)
    ]
    return named + special + drawn + emitted


# -- the child's side -----------------------------------------------------------------------


def _build(directory: Path, first: int, step: int) -> None:
    """Builds every `step`th job; what does not build leaves its message."""
    jobs = pickle.loads((directory / "jobs").read_bytes())
    for i in range(first, len(jobs), step):
        kernel, _, library = jobs[i]
        compiled = _library if library else compile_source
        image = compiled(kernel.source, wgmma_cases.H200.arch)
        if isinstance(image, bytes):
            (directory / f"{i}.cubin").write_bytes(image)
        else:
            (directory / f"{i}.message").write_text(image)


def _library(source: str, arch: str) -> bytes | str:
    """The shared library that nvcc makes, or its message."""
    from kt.logs.record import Failure
    from kt.tuner.backend.nvcc import find_nvcc

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "kernel.cu").write_text(source)
        facts = find_nvcc().compile(Path(name), arch, 300.0)
        if isinstance(facts, Failure):
            return f"{facts.message}\n{facts.detail}"
        return (Path(name) / "kernel.so").read_bytes()


def _launched_by_library(kernel: Kernel, image: bytes, seed: int, path: Path) -> tuple[float, str]:
    """(worst error in units of what is allowed, what else is wrong) of an emitted library."""
    from kt.tuner.backend.cuda_program import Program, load
    from kt.tuner.backend.driver import Device, Memory, call

    device, w = Device(0), kernel.workload
    assert isinstance(w, Gemm)
    inputs = gemm_cases.inputs(w, np.random.default_rng(seed))
    poison = gemm_cases.poison(w)
    path.write_bytes(image)
    loaded = load(Program(str(path), (), 0, 0), device)
    loaded.reset()
    held = [np.ascontiguousarray(x) for x in (*inputs, poison)]
    memory = [Memory(x.nbytes) for x in held]
    for there, x in zip(memory, held, strict=True):
        call("cuMemcpyHtoD", there.address, x.ctypes.data, x.nbytes)
    loaded.launch([there.address for there in memory])
    device.synchronize()
    out = np.frombuffer(memory[-1].read(poison.nbytes), poison.dtype).reshape(poison.shape)
    return gemm_cases.reference(w, inputs).worst(w, out), ""


def _run(directory: Path, indices: Sequence[int]) -> None:
    """Runs jobs; a line as each begins and ends."""
    jobs = pickle.loads((directory / "jobs").read_bytes())
    for i in indices:
        print(json.dumps([i]), flush=True)
        image = (directory / f"{i}.cubin").read_bytes()
        kernel, seed, library = jobs[i]
        if library:
            error, wrong = _launched_by_library(kernel, image, seed, directory / f"{i}.so")
        else:
            error, wrong = judge_gemm(Case(kernel, seed), image, directory)
        print(json.dumps([i, error, wrong]), flush=True)


# -- the test's side ------------------------------------------------------------------------


def _child(*words: object, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.Popen(command, env=environment, text=True, **options)


def _lines(child: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """What the child prints, and None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _run_some(directory: Path, todo: list[int], results: dict[int, tuple[float, str]]) -> None:
    """Runs jobs in one child until all are done or one of them ends it."""
    child = _child("run", directory, *todo, stdout=subprocess.PIPE)
    lines, current = _lines(child), todo[0]
    while True:
        try:
            line = lines.get(timeout=SECONDS)
        except queue.Empty:
            child.kill()
            results[current] = (float("inf"), "hangs")
            break
        if line is None:
            if child.wait():
                results.setdefault(current, (float("inf"), f"ended with code {child.returncode}"))
            break
        if not line.startswith("["):
            continue
        current, *result = json.loads(line)
        if result:
            results[current] = (result[0], result[1])
    child.wait()


def check(jobs: Sequence[Job], directory: Path) -> dict[str, str]:
    """What is wrong, by job; builds and runs all."""
    (directory / "jobs").write_bytes(
        pickle.dumps([(job.kernel, job.seed, job.library) for job in jobs])
    )
    builders = [_child("build", directory, i, COMPILERS) for i in range(COMPILERS)]
    for child in builders:
        assert child.wait(timeout=1200) == 0, "a compiling process failed"
    failures: dict[str, str] = {}
    built: list[int] = []
    for i, job in enumerate(jobs):
        message = directory / f"{i}.message"
        if message.exists():
            if not message.read_text():
                continue  # registers spill: tuning refuses it too
            failures[f"{job.name}: {job.kernel.workload} {job.kernel.theta}"] = message.read_text()
        else:
            built.append(i)
    results: dict[int, tuple[float, str]] = {}
    while todo := [i for i in built if i not in results]:
        _run_some(directory, todo, results)
    for i, (error, wrong) in results.items():
        if wrong or not error <= 1:
            job = jobs[i]
            failures[f"{job.name}: {job.kernel.workload} {job.kernel.theta}"] = (
                f"error {error:.3g} of the allowed; {wrong}"
            )
    errors = [error for error, _ in results.values()]
    print(f"\n{len(jobs)} kernels, {len(built)} built, worst error / allowed {max(errors):.3f}")
    return failures


def test_kernels_agree_with_float64(tmp_path: Path) -> None:
    failures = check(_jobs(), tmp_path)
    for name, what in list(failures.items())[:40]:
        print(f"{name}\n    {what}")
    assert not failures, f"{len(failures)} kernels are wrong"


@pytest.mark.parametrize("k", [4096, 16384])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_sums_of_fp8_are_as_exact_as_the_workload_says(dtype: str, k: int, tmp_path: Path) -> None:
    """Kernels that stay in fp22 pass where they may, and fail where acc=fp32 is asked for."""
    judge = Judged(load_oracle(wgmma_cases.H200.arch, tmp_path), tmp_path)
    text = f"gemm 1024x1024x{k} layout=nt dtype={dtype}"
    exact, fast = parse(text), parse(f"{text} acc=fp22")
    kernels = {f"promoted every {n}": _unsplit(exact, promote=n) for n in (128, 256)}
    kernels["fp22"] = _unsplit(fast)
    for name, kernel in kernels.items():
        image = compile_source(kernel.source, wgmma_cases.H200.arch)
        assert isinstance(image, bytes), image
        for asked in (exact, fast):
            judged = dataclasses.replace(kernel, workload=asked)
            error, wrong = judge(Case(judged, 5), image)
            print(f"\n{text}, {name} judged as {asked.acc}: {error:.3g} {wrong}")
            assert bool(wrong) == (name == "fp22" and asked is exact), wrong


def _unsplit(w: Any, **changed: int) -> Kernel:
    """The default kernel with all of k in one CTA."""
    space = Space(w, wgmma_cases.H200, [GemmWgmma()])
    values = space.theta(int(space.defaults()[0])).flat()
    values |= {"fusion.split_k": 1, "fusion.split_mode": "last", "map.cluster_k": 1}
    values |= {f"unroll.{name}": value for name, value in changed.items()}
    point = space.parts[0].point(values)
    assert space.why_illegal(point) is None
    return space.kernel(point)


def main() -> None:
    what, directory, *numbers = sys.argv[1:]
    if what == "build":
        _build(Path(directory), int(numbers[0]), int(numbers[1]))
    else:
        _run(Path(directory), [int(x) for x in numbers])


if __name__ == "__main__":
    main()
