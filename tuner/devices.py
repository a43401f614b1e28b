"""Which device a command is about: `--target` becomes a target that this machine can tune on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kt.spaces.errors import SettingsError, TargetError
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


def devices_like(target: Target) -> list[Target]:
    """This machine's devices of the same kind, the GPUs by index; empty without any."""
    if target.kind == "cpu":
        return [detect_cpu()]
    if not has_nvidia_driver():
        return []
    from .backend.query import gpus, target_of

    try:
        return [target_of(gpu) for gpu in gpus()]
    except TargetError:
        return []


def chosen_gpus(target: Target, given: Sequence[int] | None) -> tuple[int, ...]:
    """The GPUs to measure on: those `given`, else all that are like the target.

    Raises SettingsError for one that is not there or is another device. The CPU has none.
    """
    if target.kind == "cpu":
        if given is not None:
            raise SettingsError(f"--gpus is for CUDA targets: this one is {target.processor}")
        return ()
    found = devices_like(target)
    alike = tuple(i for i, device in enumerate(found) if device.same_device(target))
    if given is None:
        return alike or (0,)
    if wrong := [index for index in given if index not in alike]:
        raise SettingsError(
            f"--gpus {_joined(given)}: no {target.processor} at {_joined(wrong)}; accepts "
            f"{_joined(alike) or 'none'}"
        )
    return tuple(given)


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def described_target(name: str) -> Target:
    """The target of a command that measures nothing: any named one."""
    name = name.lower()
    if name == "cuda":
        raise TargetError("--target cuda: name the GPU, for example --target h200")
    return detect_cpu() if name == "auto" else named_target(name)
