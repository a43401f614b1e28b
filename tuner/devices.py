"""Which device a command is about: `--target` becomes a target that this machine can tune on."""

from __future__ import annotations

from pathlib import Path

from kt.spaces.errors import TargetError
from kt.spaces.target import Target, detect_cpu, named_target

# Present wherever the NVIDIA kernel driver is loaded; the second one is WSL's.
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded. Touches no GPU."""
    return any(path.exists() for path in _DRIVERS)


def tuning_target(name: str) -> Target:
    """The target to measure on; raises TargetError when this machine cannot.

    `auto` is the GPU when there is one that works, else the CPU.
    """
    name = name.lower()
    if name == "cpu":
        return detect_cpu()
    if name == "auto":
        try:
            return detect_gpu("--target auto")
        except TargetError:
            return detect_cpu()
    asked = f"--target {name}"
    if name != "cuda":
        asked += f" ({named_target(name).processor})"
    found = detect_gpu(asked)
    if name not in ("cuda", found.name):
        raise TargetError(f"{asked}: this machine has {found.processor}; accepts --target cuda")
    return found


def detect_gpu(asked: str) -> Target:
    """The first GPU, found in a child process; raises TargetError saying what was `asked`."""
    if not has_nvidia_driver():
        raise TargetError(f"{asked}: this machine has no NVIDIA driver; accepts --target cpu")
    from .backend.query import gpus, target_of

    return target_of(gpus()[0])


def described_target(name: str) -> Target:
    """The target of a command that measures nothing: any named one."""
    name = name.lower()
    if name == "cuda":
        raise TargetError("--target cuda: name the GPU, for example --target h200")
    return detect_cpu() if name == "auto" else named_target(name)
