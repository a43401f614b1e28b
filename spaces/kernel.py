"""Kernels: source made of real files plus a stub of `#define`s, and how to launch it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .theta import Theta
from .workload import Workload

DEVICE_HEADERS = Path(__file__).parent / "device"
_INCLUDE = re.compile(r'^#include "([\w.]+)"[^\n]*\n', re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """How one CUDA kernel of a source is started.

    Every entry takes the same pointers: the workload's inputs in order, its output, the workspace.
    """

    entry: str
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0


@dataclass(frozen=True)
class Kernel:
    """One candidate's complete source text; `source` is what is hashed, built and emitted."""

    workload: Workload
    family: str
    theta: Theta
    language: str  # "c" | "cuda"
    source: str
    launches: tuple[Launch, ...] = ()
    """CUDA kernels in stream order; none for the CPU, whose `kt_launch` does all itself."""
    workspace_bytes: int = 0
    zeroed_bytes: int = 0
    """Leading bytes of the workspace that must be zero before the first launch; each launch leaves
    them zero."""

    @property
    def launch(self) -> Launch:
        """The launch of a kernel that has exactly one."""
        (only,) = self.launches
        return only

    @property
    def digest(self) -> str:
        """SHA-256 of the source text."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def stub(defines: Mapping[str, int | str]) -> str:
    """`#define` lines that set a kernel file's compile-time parameters."""
    return "".join(f"#define {name} {value}\n" for name, value in defines.items())


def expand(path: Path, headers: Path = DEVICE_HEADERS) -> str:
    """The text of `path` with our own headers expanded once each, where first included."""
    seen: set[str] = set()

    def inline(text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            name = match[1]
            if name in seen:
                return ""
            seen.add(name)
            return inline((headers / name).read_text())

        return _INCLUDE.sub(replace, text)

    return inline(path.read_text())
