"""Planted races: `mma` kernels from whose text one barrier or one wait was removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kt.spaces.gemm.mma import GemmMma
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import Target
from kt.spaces.theta import Value
from kt.spaces.workload import parse

TEXT = "gemm 512x512x2048 dtype=bf16"
SMALL = "gemm 128x128x256 dtype=bf16"
"""For the sanitizer, which is slow and needs no luck."""
_PLAIN: Mapping[str, Value] = {
    "tile.bm": 64, "tile.bn": 64, "tile.bk": 32, "mem.stages": 2, "mem.layout": "swizzle",
    "mem.prefetch": 0, "mem.store": "direct", "perm.raster": "m", "perm.group": 1,
    "fusion.split_k": 1, "unroll.fragments": 1, "unroll.k": 1,
    "map.warps_m": 2, "map.warps_n": 2, "map.warps_k": 1, "map.blocks": 2, "sync.stagger": False,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """`old` of the kernel's text becomes `new`, in the schedule that `knobs` change."""

    old: str
    new: str
    knobs: Mapping[str, Value]
    by_numbers: bool
    """Whether repeated verification is certain to see it; else only the sanitizer is."""
    by_racecheck: bool = True
    """Whether it is a race on shared memory, which is all that racecheck looks at."""


_LOOP = """        if (!DOUBLE) {
            kt_copy_wait<STAGES - 2>();
            __syncthreads();
        }
"""
_NEXT = """                    read = kt_next_stage(read);
                    kt_copy_wait<STAGES - 2>();
                    __syncthreads();
"""
_JOINED = """        __syncthreads();
        if (group < half)
"""
_ARRIVE = """    team.sync();
    if (!team.any("""
_DOUBLE: Mapping[str, Value] = {"unroll.fragments": 2}
_SPLIT: Mapping[str, Value] = {"fusion.split_k": 4, "fusion.split_mode": "last"}

MUTANTS: Mapping[str, Mutant] = {
    "no wait before a stage is read": Mutant(
        _LOOP, _LOOP.replace("            kt_copy_wait<STAGES - 2>();\n", ""), {}, True
    ),
    "a wait for one stage too few": Mutant(_LOOP, _LOOP.replace("- 2", "- 1"), {}, True),
    "no barrier before a stage is read": Mutant(
        _LOOP, _LOOP.replace("            __syncthreads();\n", ""), {}, True
    ),
    "no barrier before the next fragments": Mutant(
        _NEXT, _NEXT.replace("                    __syncthreads();\n", ""), _DOUBLE, True
    ),
    "no barrier before warps along k add up": Mutant(
        _JOINED, _JOINED.replace("        __syncthreads();\n", ""),
        {"map.warps_m": 1, "map.warps_k": 2}, True,
    ),
    "no barrier between the ring and a staged store": Mutant(
        "if (KT_STORE == KT_STORE_STAGED) __syncthreads();", "", {"mem.store": "staged"}, False
    ),
    "an arrival that does not wait for the other warps": Mutant(
        _ARRIVE, _ARRIVE.replace("    team.sync();\n", ""), _SPLIT, False, by_racecheck=False
    ),
    "a counter that is not reset": Mutant(
        "if (owner == 0) *counter = 0;", "", _SPLIT, True, by_racecheck=False
    ),
}  # fmt: skip


def sound(target: Target, name: str, text: str = TEXT) -> Kernel:
    """The kernel before its text is changed. Raises SpaceError for a schedule that is not legal."""
    space = Space(parse(text), target, [GemmMma()])
    part = space.parts[0]
    flat = {**space.theta(int(space.defaults()[0])).flat(), **_PLAIN, **MUTANTS[name].knobs}
    point = part.point(flat)
    space.check("mma", space.theta(point))
    return space.kernel(point)


def mutant(target: Target, name: str, text: str = TEXT) -> Kernel:
    """The kernel with its race."""
    kernel, change = sound(target, name, text), MUTANTS[name]
    assert kernel.source.count(change.old) == 1, f"'{name}' no longer fits the source"
    return replace(kernel, source=kernel.source.replace(change.old, change.new))
