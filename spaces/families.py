"""The registry of kernel families: one literal dict, and the space it makes of a workload."""

from __future__ import annotations

from collections.abc import Mapping

from .attention.cpu import AttentionCpu
from .attention.cpu_decode import AttentionCpuDecode
from .attention.mma import AttentionMma
from .attention.split_kv import AttentionSplitKv
from .conv2d.cpu import Conv2dCpu
from .conv2d.cpu_direct import Conv2dCpuDirect
from .conv2d.direct import Conv2dDirect
from .conv2d.grouped import Conv2dGrouped
from .conv2d.mma import Conv2dMma
from .conv2d.patch import Conv2dPatch
from .conv2d.pointwise import Pointwise
from .errors import SettingsError
from .family import Family
from .gemm.cpu import GemmCpu
from .gemm.cpu_skinny import GemmCpuSkinny
from .gemm.mma import GemmMma
from .gemm.simt import GemmSimt
from .gemm.stream import GemmStream
from .gemm.wgmma import GemmWgmma
from .gemm.wgmma_swapped import GemmWgmmaSwapped
from .space import Space
from .target import Target
from .workload import Workload

_GEMM_CUDA: tuple[Family, ...] = (
    GemmMma(), GemmWgmma(), GemmWgmmaSwapped(), GemmSimt(), GemmStream(),
)  # fmt: skip

FAMILIES: Mapping[tuple[str, str], tuple[Family, ...]] = {
    ("gemm", "cpu"): (GemmCpu(), GemmCpuSkinny()),
    ("gemm", "cuda"): _GEMM_CUDA,
    ("conv2d", "cpu"): (Conv2dCpuDirect(), Conv2dCpu()),
    ("conv2d", "cuda"): (
        Conv2dMma(), Conv2dPatch(), Conv2dGrouped(), Conv2dDirect(),
        *(Pointwise(f) for f in _GEMM_CUDA),
    ),
    ("attention", "cpu"): (AttentionCpu(), AttentionCpuDecode()),
    ("attention", "cuda"): (AttentionMma(), AttentionSplitKv()),
}  # fmt: skip


def space_of(workload: Workload, target: Target, only: str = "all") -> Space:
    """The union of the families that serve `workload` on `target`.

    `only` restricts it to some of them, by names joined by commas; raises SettingsError for a name
    that no family has.
    """
    families = FAMILIES.get((workload.OPERATOR, target.kind), ())
    if only != "all":
        names = [name.strip() for name in only.split(",")]
        known = [family.name for family in families]
        if unknown := [name for name in names if name not in known]:
            raise SettingsError(
                f"--family {unknown[0]}: {workload.OPERATOR} on {target.kind} has "
                f"{', '.join(known) or 'none'}"
            )
        families = tuple(family for family in families if family.name in names)
    return Space(workload, target, families)
