"""What the header of a run says about the machine it ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from kt.spaces.target import Target

Facts = dict[str, str | int | float | bool]

_PACKAGES = ("numpy", "scipy", "msgspec")
_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "CC")


def plain(text: str) -> str:
    """Text of the system as a log can hold it: bytes that are not UTF-8 become escapes."""
    return text.encode(errors="backslashreplace").decode()


def describe(target: Target, compiler: str) -> Facts:
    """Processor, clocks, load, versions and the variables that change a result."""
    facts: Facts = {
        "processor": target.processor, "arch": target.arch, "cores": target.cores,
        "machine": platform.machine(), "kernel": platform.release(), "compiler": plain(compiler),
        "libc": "-".join(platform.libc_ver()), "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }  # fmt: skip
    facts |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    facts |= {f"env_{name}": plain(os.environ[name]) for name in _VARIABLES if name in os.environ}
    return facts | _clocks()


def _clocks() -> Facts:
    folder = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    try:
        return {
            "governor": (folder / "scaling_governor").read_text().strip(),
            "clock_mhz": int((folder / "scaling_cur_freq").read_text()) // 1000,
        }
    except (OSError, ValueError):
        return {}  # virtual machines show neither


def current_clock_mhz() -> float:
    """The first core's clock now, 0 where the system does not tell."""
    clock = _clocks().get("clock_mhz", 0)
    return float(clock) if isinstance(clock, int) else 0.0
