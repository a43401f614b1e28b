"""What GPUs this machine has, asked in a child process: the parent never touches CUDA."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.target import CUDA_TARGETS, Target

_SECONDS = 60.0
_ARCHITECTURE_SPECIFIC = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}


class Gpu(msgspec.Struct, frozen=True):
    """Attributes of one device; sizes in bytes, clocks in MHz."""

    name: str
    capability: tuple[int, int]
    sms: int
    clock_mhz: int
    memory_bytes: int
    memory_clock_mhz: int
    bus_bits: int
    l2_bytes: int
    shared_bytes: int
    shared_bytes_sm: int
    registers_sm: int
    threads_sm: int
    driver: int

    @property
    def arch(self) -> str:
        major, minor = self.capability
        return _ARCHITECTURE_SPECIFIC.get(self.capability, f"sm_{major}{minor}")


@functools.cache
def gpus() -> list[Gpu]:
    """Every visible GPU; raises TargetError with the driver's words when there is none."""
    command = [sys.executable, "-m", "kt.tuner.backend.query"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise TargetError(f"the NVIDIA driver did not answer within {_SECONDS:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise TargetError(f"no usable GPU: {lines[-1] if lines else 'the driver query failed'}")
    return msgspec.json.decode(done.stdout, type=list[Gpu])


def target_of(gpu: Gpu) -> Target:
    """The target of a device: datasheet peaks where it is known, else scaled from a relative."""
    known = next((t for t in CUDA_TARGETS.values() if t.processor == gpu.name), None)
    relative = known or _relative(gpu)
    scale = 1.0 if known else gpu.sms * gpu.clock_mhz / (relative.cores * relative.clock_mhz)
    name = known.name if known else "cuda"
    return Target(
        name=name, kind="cuda", arch=gpu.arch, processor=gpu.name, cores=gpu.sms,
        clock_mhz=gpu.clock_mhz, memory_bytes=gpu.memory_bytes,
        bandwidth=known.bandwidth if known else 2e6 * gpu.memory_clock_mhz * gpu.bus_bits / 8,
        peak={dtype: scale * peak for dtype, peak in relative.peak.items()},
        l1_bytes=gpu.shared_bytes_sm, l2_bytes=gpu.l2_bytes, shared_bytes=gpu.shared_bytes,
        shared_bytes_sm=gpu.shared_bytes_sm, registers_sm=gpu.registers_sm,
        threads_sm=gpu.threads_sm,
    )  # fmt: skip


def _relative(gpu: Gpu) -> Target:
    """The named target of the nearest architecture, for a device that is not in the table."""
    number = 10 * gpu.capability[0] + gpu.capability[1]
    if number < 80:
        raise TargetError(f"{gpu.name} is {gpu.arch}: kt's CUDA kernels need sm_80 or later")
    return min(CUDA_TARGETS.values(), key=lambda t: abs(int(t.arch.strip("sm_a")) - number))


_ATTRIBUTES: Mapping[str, str] = {
    "sms": "MULTIPROCESSOR_COUNT",
    "l2_bytes": "L2_CACHE_SIZE",
    "shared_bytes": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_bytes_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "registers_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "threads_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
    "bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
}


def main() -> None:
    """Prints the GPUs as JSON; a driver error ends the process with its name."""
    from .driver import CudaError, Device, call

    try:
        call("cuInit", 0)
        version = int(call("cuDriverGetVersion"))
        found = []
        for index in range(int(call("cuDeviceGetCount"))):
            device = Device(index)
            khz = device.attribute("CLOCK_RATE"), device.attribute("MEMORY_CLOCK_RATE")
            found.append(
                Gpu(
                    name=device.name,
                    capability=(
                        device.attribute("COMPUTE_CAPABILITY_MAJOR"),
                        device.attribute("COMPUTE_CAPABILITY_MINOR"),
                    ),
                    clock_mhz=khz[0] // 1000,
                    memory_clock_mhz=khz[1] // 1000,
                    memory_bytes=int(call("cuDeviceTotalMem", device.handle)),
                    driver=version,
                    **{field: device.attribute(name) for field, name in _ATTRIBUTES.items()},
                )
            )
    except (CudaError, ToolchainError, RuntimeError) as error:  # the last: no libcuda.so.1
        sys.exit(str(error))
    if not found:
        sys.exit("the driver sees none")
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
