"""A sample of the CUDA families under compute-sanitizer, or one planted race.

    PYTHONPATH=<folder with kt>:tests compute-sanitizer --tool memcheck \
        --error-exitcode 9 python3 tests/gpu/sanitize.py [DRAWS] [--of conv2d]

Also with `--tool racecheck`. The kernels are those of the tests beside this file, fewer of them.
With `--race NAME` only that mutant of tests/mutants.py is launched, with `--sound NAME` the kernel
that it was made of: racecheck must flag the first and not the second.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gemm_cases
import numpy as np
import test_attention_kernels
import test_conv2d_kernels
import test_gemm_kernels
import wgmma_cases
from device_kernels import (
    Case,
    Judged,
    check,
    compile_source,
    device_target,
    judge_gemm,
    load_oracle,
)
from mutants import MUTANTS, SMALL, mutant, sound

from kt.spaces.kernel import Kernel
from kt.spaces.target import Target

LARGEST_FLOPS = 3e9
"""What the sanitizer slows down a thousandfold must be small."""


def run_gemm(directory: Path, draws: int) -> None:
    """Random kernels of the families for sm_80."""
    test_gemm_kernels.run_draws(
        directory,
        draws=dict.fromkeys(test_gemm_kernels.FAMILIES, draws),
        named=dict.fromkeys(test_gemm_kernels.FAMILIES, ()),
        larger=gemm_cases.EDGES,
        pool=_pool(),
    )


def run_wgmma(directory: Path, draws: int) -> None:
    """Random kernels of sm_90a, and one of every special path."""
    special = [
        kernel
        for name in wgmma_cases.PROPERTIES
        for kernel in wgmma_cases.kernels_with(name, count=1)
    ]
    drawn = [wgmma_cases.random_kernel(i, gemm_cases.EDGES) for i in range(draws)]
    cases = [Case(kernel, i) for i, kernel in enumerate(special + drawn)]
    judge = partial(judge_gemm, directory=directory)
    check(_small(cases, len(cases)), wgmma_cases.H200.arch, judge, _pool())


def run_conv2d(directory: Path, draws: int) -> None:
    """Kernels of every convolution family, evenly chosen."""
    _run_of_families(test_conv2d_kernels.cases(device_target()), directory, draws)


def run_attention(directory: Path, draws: int) -> None:
    """Kernels of every attention family, evenly chosen."""
    _run_of_families(test_attention_kernels.cases(device_target()), directory, draws)


RUNS: Mapping[str, Callable[[Path, int], None]] = {
    "gemm": run_gemm, "wgmma": run_wgmma, "conv2d": run_conv2d, "attention": run_attention,
}  # fmt: skip


def _pool() -> Executor:
    """The sanitizer and a pool of compiling processes do not get along."""
    return ThreadPoolExecutor(4)


def _small(cases: Sequence[Case], count: int) -> list[Case]:
    """At most `count` of the cases that are not large, evenly spaced."""
    small = [case for case in cases if case.kernel.workload.flops <= LARGEST_FLOPS]
    return small[:: max(1, len(small) // count)][:count]


def _run_of_families(cases: Sequence[Case], directory: Path, draws: int) -> None:
    target, families = device_target(), {case.kernel.family for case in cases}
    chosen = [
        case
        for family in sorted(families)
        for case in _small([c for c in cases if c.kernel.family == family], draws)
    ]
    check(chosen, target.arch, Judged(load_oracle(target.arch, directory), directory), _pool())


def launch_once(kernel: Kernel, target: Target) -> None:
    """One launch on operands of N(0,1); whether the result is right is not looked at."""
    from kt.tuner.backend.driver import Device, Memory, Module, call, launch

    device, rng = Device(0), np.random.default_rng(0)
    image = compile_source(kernel.source, target.arch)
    assert isinstance(image, bytes), image
    with tempfile.TemporaryDirectory() as name:
        (path := Path(name) / "kernel.cubin").write_bytes(image)
        module = Module(path)
    buffers = []
    for operand in kernel.workload.inputs():
        values = rng.standard_normal(operand.elements, dtype=np.float32)
        bits = np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))  # bf16
        buffers.append(Memory(operand.bytes))
        call("cuMemcpyHtoD", buffers[-1].address, bits.ctypes.data, bits.nbytes)
    buffers += [Memory(kernel.workload.output().bytes), Memory(kernel.workspace_bytes)]
    buffers[-1].fill(0)
    for step in kernel.launches:
        launch(module, step, [buffer.address for buffer in buffers], device.stream)
    device.synchronize()


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draws", type=int, nargs="?", default=8, help="of each family")
    parser.add_argument("--of", choices=list(RUNS), default="gemm", help="whose kernels")
    parser.add_argument("--race", choices=list(MUTANTS))
    parser.add_argument("--sound", choices=list(MUTANTS))
    given = parser.parse_args()
    if name := given.race or given.sound:
        target = device_target()
        launch_once((mutant if given.race else sound)(target, name, SMALL), target)
        return
    with tempfile.TemporaryDirectory() as name:
        RUNS[given.of](Path(name), given.draws)


if __name__ == "__main__":
    main()
