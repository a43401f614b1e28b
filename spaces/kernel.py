"""Kernels: source made of real files plus a stub of `#define`s, and how to launch it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .theta import Theta
from .workload import Workload

DEVICE_HEADERS = Path(__file__).parent / "device"
_INCLUDE = re.compile(r'^#include "([\w.]+)"[^\n]*\n', re.MULTILINE)


MAP_TYPES: Mapping[str, int] = {
    "int8": 0, "fp8_e4m3": 0, "fp8_e5m2": 0, "int32": 3, "fp16": 6, "fp32": 7, "fp64": 8, "bf16": 9,
    "tf32": 11,
}  # fmt: skip
"""CUtensorMapDataType by element type. Loads of tf32 round fp32 on the way."""
MAP_SWIZZLES: Mapping[int, int] = {0: 0, 32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle by the bytes that it spans."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor that a kernel reads or writes in boxes through TMA (cuTensorMapEncodeTiled).

    Extents, strides and boxes are listed innermost first. Outside the tensor is zero.
    """

    argument: int
    """Which pointer it begins at: among inputs and outputs in order, or -1, the workspace."""
    offset: int  # bytes from there
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes, of the dimensions after the innermost."""
    box: tuple[int, ...]
    swizzle: int = 0  # bytes
    steps: tuple[int, ...] = ()
    """Distance of neighbours in a box, elements; 1 where left out."""

    @property
    def all_steps(self) -> tuple[int, ...]:
        return self.steps or (1,) * len(self.extents)


@dataclass(frozen=True)
class Launch:
    """How one CUDA kernel of a source is started.

    Every entry takes the same pointers: the workload's inputs in order, its outputs, the workspace;
    then its tensor maps by value.
    """

    entry: str
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    early: bool = False
    """Programmatic dependent launch: may start while the kernel before it in the stream ends."""
    resident: bool = False
    """CTAs take work in turns: the grid may be cut to the clusters that are held at once."""
    maps: tuple[TensorMap, ...] = ()


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
    most_spill_bytes: int = 0
    """Stores and loads of spilled registers, in bytes of code, beyond which a build is refused."""

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


def maps_define(maps: Sequence[TensorMap]) -> str:
    """An initialiser for `kt_map_plan[]` of `tensor_maps.cuh`, which encodes the maps."""

    def braces(values: Sequence[int]) -> str:
        return "{" + ", ".join(map(str, values)) + "}"

    rows = (
        f"{{{m.argument}, {m.offset}ull, {MAP_TYPES[m.dtype]}, {len(m.extents)}, "
        f"{braces(m.extents)}, {braces(m.strides)}, {braces(m.box)}, {braces(m.all_steps)}, "
        f"{MAP_SWIZZLES[m.swizzle]}}}"
        for m in maps
    )
    return "{" + ", ".join(rows) + "}"


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
