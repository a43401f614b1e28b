"""A sample of the CUDA families under compute-sanitizer, or one planted race.

    PYTHONPATH=<folder with kt>:tests compute-sanitizer --tool memcheck \
        --error-exitcode 9 python3 tests/gpu/sanitize.py [DRAWS]

Also with `--tool racecheck`. The kernels are the random draws of test_gemm_kernels, fewer of them.
With `--race NAME` only that mutant of tests/mutants.py is launched, with `--sound NAME` the kernel
that it was made of: racecheck must flag the first and not the second.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from mutants import MUTANTS, SMALL, mutant, sound

from kt.spaces.kernel import Kernel
from kt.spaces.target import CUDA_TARGETS, Target

SOURCE = Path(__file__).with_name("test_gemm_kernels.py")


def run_draws(draws: int) -> None:
    """Runs the random kernels; an error of the sanitizer or a wrong result ends with a code."""
    spec = importlib.util.spec_from_file_location("kernels", SOURCE)
    assert spec and spec.loader
    kernels = importlib.util.module_from_spec(spec)
    sys.modules["kernels"] = kernels
    spec.loader.exec_module(kernels)
    kernels.DRAWS = dict.fromkeys(kernels.DRAWS, draws)
    kernels.NAMED = dict.fromkeys(kernels.NAMED, ())
    kernels.LARGER = kernels.gemm_cases.EDGES
    # The sanitizer and a pool of compiling processes do not get along.
    kernels.ProcessPoolExecutor = lambda *_, **__: ThreadPoolExecutor(4)
    with tempfile.TemporaryDirectory() as name:
        kernels.run_draws(Path(name))


def device_target() -> Target:
    """The named target of GPU 0, or a relative that builds for it."""
    from kt.tuner.backend.driver import Device

    name = Device(0).name
    return next((t for t in CUDA_TARGETS.values() if t.processor == name), CUDA_TARGETS["a100"])


def launch_once(kernel: Kernel, target: Target) -> None:
    """One launch on operands of N(0,1); whether the result is right is not looked at."""
    from kt.tuner.backend.driver import Device, Memory, Module, call, launch
    from kt.tuner.backend.nvrtc import find_nvrtc

    device, rng = Device(0), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "kernel.cu").write_text(kernel.source)
        find_nvrtc().compile(directory, target.arch, 120.0)
        module = Module(directory / "kernel.cubin")
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
