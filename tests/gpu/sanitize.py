"""A sample of the CUDA families under compute-sanitizer, or one planted race.

    PYTHONPATH=<folder with kt>:tests compute-sanitizer --tool memcheck \
        --error-exitcode 9 python3 tests/gpu/sanitize.py [DRAWS]

Also with `--tool racecheck`. The kernels are the random draws of test_gemm_kernels, fewer of them.
With `--race NAME` only that mutant of tests/mutants.py is launched, with `--sound NAME` the kernel
that it was made of: racecheck must flag the first and not the second.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gemm_cases
import numpy as np
import test_gemm_kernels
from device_kernels import compile_source, device_target
from mutants import MUTANTS, SMALL, mutant, sound

from kt.spaces.kernel import Kernel
from kt.spaces.target import Target


def run_draws(draws: int) -> None:
    """Runs the random kernels; an error of the sanitizer or a wrong result ends with a code."""
    with tempfile.TemporaryDirectory() as name:
        test_gemm_kernels.run_draws(
            Path(name),
            draws=dict.fromkeys(test_gemm_kernels.FAMILIES, draws),
            named=dict.fromkeys(test_gemm_kernels.FAMILIES, ()),
            larger=gemm_cases.EDGES,
            # The sanitizer and a pool of compiling processes do not get along.
            pool=ThreadPoolExecutor(4),
        )


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
    parser.add_argument("--race", choices=list(MUTANTS))
    parser.add_argument("--sound", choices=list(MUTANTS))
    given = parser.parse_args()
    if name := given.race or given.sound:
        target = device_target()
        launch_once((mutant if given.race else sound)(target, name, SMALL), target)
    else:
        run_draws(given.draws)


if __name__ == "__main__":
    main()
