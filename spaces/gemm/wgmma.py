"""`wgmma`: matrix product by TMA and the warpgroup instructions of sm_90a (source: `wgmma.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kt.spaces.cuda import Floats
from kt.spaces.family import Columns, Family, Rule, once
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Knob
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Gemm, Workload

from .cuda import as_gemm, problem_defines, refuses_cuda_gemm
from .hopper import hopper_defines, hopper_knobs, hopper_rules
from .hopper_default import default_values
from .hopper_model import hopper_features
from .hopper_plan import HopperPlan
from .mma_plan import operands

_MOST_SPILL_BYTES = 64
"""A few words at the end of a tile, which the compiler may put aside though registers are free."""
ARCH = "sm_90a"
"""The instructions are of this architecture alone, not of later ones."""


class GemmWgmma(Family):
    """Tiles of C by wgmma; a producer warp keeps a ring of stages full by TMA."""

    name = "wgmma"
    empty: Mapping[str, str] = {}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        why = refuses_cuda_gemm(
            workload, target, ("fp16", "bf16", "tf32"), "the warpgroup instructions multiply"
        )
        if why:
            return why
        if target.arch != ARCH:
            return f"needs {ARCH}, {target.name} is {target.arch}"
        assert isinstance(workload, Gemm)
        if workload.dtype == "tf32" and not all(x.k_major for x in operands(workload)):
            return "multiplies tf32 in layout nt only"
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        return hopper_knobs(as_gemm(workload), target)

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_gemm(workload)
        return hopper_rules(w, target, once(lambda v: HopperPlan(w, target, v)))

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        w = as_gemm(workload)
        knobs = {knob.name: knob.choices for knob in self.knobs(w, target)}
        return default_values(w, target, knobs, self.rules(w, target))

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_gemm(workload)
        return hopper_features(w, target, values, HopperPlan(w, target, values))

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_gemm(workload)
        v = {name: value for _, name, value in theta.items()}
        p = HopperPlan(w, target, v)
        defines = {**problem_defines(w), **hopper_defines(w, v, p)}
        source = stub(defines) + expand(Path(__file__).with_name("wgmma.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source, launches=p.launches(),
            workspace_bytes=p.workspace_bytes, zeroed_bytes=p.split.zeroed,
            most_spill_bytes=_MOST_SPILL_BYTES,
        )  # fmt: skip
