"""The registry of kernel families: one literal dict, and the space it makes of a workload."""

from __future__ import annotations

from collections.abc import Mapping

from .family import Family
from .gemm.cpu import GemmCpu
from .gemm.cpu_skinny import GemmCpuSkinny
from .gemm.mma import GemmMma
from .gemm.simt import GemmSimt
from .gemm.stream import GemmStream
from .space import Space
from .target import Target
from .workload import Workload

FAMILIES: Mapping[tuple[str, str], tuple[Family, ...]] = {
    ("gemm", "cpu"): (GemmCpu(), GemmCpuSkinny()),
    ("gemm", "cuda"): (GemmMma(), GemmSimt(), GemmStream()),
}


def space_of(workload: Workload, target: Target) -> Space:
    """The union of the families that serve `workload` on `target`."""
    return Space(workload, target, FAMILIES.get((workload.OPERATOR, target.kind), ()))
