"""`wgmma`: matrix product by TMA and the warpgroup instructions of sm_90a (source: `wgmma.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kt.spaces.cuda import Floats
from kt.spaces.family import Columns, Family, Rule, once
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Knob
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Gemm, Workload

from .cuda import as_gemm, problem_defines, refuses_cuda_gemm
from .hopper import PlanOf, hopper_defines, hopper_knobs, hopper_rules, hopper_stores
from .hopper_default import SHAPES, Shape, ranked_values
from .hopper_likely import likely_values
from .hopper_model import hopper_features
from .hopper_plan import HopperPlan
from .mma_plan import operands

_MOST_SPILL_BYTES = 64
"""A few words at the end of a tile, which the compiler may put aside though registers are free."""
DTYPES = ("fp16", "bf16", "tf32", "fp8_e4m3", "fp8_e5m2")
ARCH = "sm_90a"
"""The instructions are of this architecture alone, not of later ones."""


class GemmWgmma(Family):
    """Tiles of C by wgmma; a producer warp keeps a ring of stages full by TMA."""

    name = "wgmma"
    empty: Mapping[str, str] = {}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        why = refuses_cuda_gemm(workload, target, DTYPES, "the warpgroup instructions multiply")
        if why:
            return why
        if target.arch != ARCH:
            return f"needs {ARCH}, {target.name} is {target.arch}"
        assert isinstance(workload, Gemm)
        if workload.dtype == "tf32" and not all(x.k_major for x in operands(workload)):
            return "multiplies tf32 in layout nt only"
        return None

    def product(self, w: Gemm) -> Gemm:
        """What the kernel computes."""
        return w

    def plan(self, w: Gemm, target: Target, values: Mapping[str, Any]) -> HopperPlan:
        return HopperPlan(w, target, values)

    def shapes(self, knobs: Mapping[str, Sequence[Any]]) -> Sequence[Shape]:
        """Tiles that may be the default; `knobs` holds the choices by short name."""
        return SHAPES

    def stores(self, w: Gemm) -> Sequence[str]:
        """Ways from the accumulators to C."""
        return hopper_stores(w)

    def own_defines(self, values: Mapping[str, Any]) -> dict[str, int | str]:
        """The stub's lines beyond those of every product on wgmma."""
        return {}

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_gemm(workload)
        return hopper_knobs(self.product(w), target, self.stores(w))

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_gemm(workload)
        return hopper_rules(self.product(w), target, once(lambda v: self.plan(w, target, v)))

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return self.ranked(as_gemm(workload), target)[0]

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        w = as_gemm(workload)
        return (self.default(w, target), *likely_values(*self._described(w, target)))

    def ranked(self, w: Gemm, target: Target) -> Sequence[Mapping[str, Value]]:
        """Common tiles by estimated cycles."""
        plan, knobs, rules = self._described(w, target)
        return ranked_values(plan, knobs, rules, self.shapes(knobs))

    def _described(
        self, w: Gemm, target: Target
    ) -> tuple[PlanOf, Mapping[str, Sequence[Any]], Sequence[Rule]]:
        """What heuristics look at: what values imply, choices by short name, and legality."""
        knobs = {knob.name: knob.choices for knob in self.knobs(w, target)}
        return lambda v: self.plan(w, target, v), knobs, self.rules(w, target)

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_gemm(workload)
        return hopper_features(self.product(w), target, values, self.plan(w, target, values))

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_gemm(workload)
        v = {name: value for _, name, value in theta.items()}
        p = self.plan(w, target, v)
        product = self.product(w)
        defines = {
            **problem_defines(product), **hopper_defines(product, v, p), **self.own_defines(v)
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("wgmma.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source, launches=p.launches(),
            workspace_bytes=p.workspace_bytes, zeroed_bytes=p.split.zeroed,
            most_spill_bytes=_MOST_SPILL_BYTES,
        )  # fmt: skip
