"""The registry of kernel families: one literal dict, and the space it makes of a workload."""

from __future__ import annotations

from collections.abc import Mapping

from .family import Family
from .gemm.cpu import GemmCpu
from .gemm.cpu_skinny import GemmCpuSkinny
from .space import Space
from .target import Target
from .workload import Workload

FAMILIES: Mapping[tuple[str, str], tuple[Family, ...]] = {
    ("gemm", "cpu"): (GemmCpu(), GemmCpuSkinny()),
}


def space_of(workload: Workload, target: Target) -> Space:
    """The union of the families that serve `workload` on `target`."""
    return Space(workload, target, FAMILIES.get((workload.OPERATOR, target.kind), ()))
