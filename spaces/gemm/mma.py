"""`mma`: tensor-core matrix product for sm_80 and later (source: `mma.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kt.spaces.cuda import Floats
from kt.spaces.family import Columns, RankedFamily, Rule, once
from kt.spaces.kernel import Kernel, expand, stub
from kt.spaces.knob import Categorical, Knob
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Gemm, Workload

from .cuda import as_gemm, problem_defines, refuses_cuda_gemm
from .mma_default import ranked_values
from .mma_plan import Plan, operands
from .mma_tiles import (
    LAYOUTS,
    MOST_SPILL_BYTES,
    tile_defines,
    tile_features,
    tile_knobs,
    tile_rules,
)


class GemmMma(RankedFamily):
    """Tiles of C by mma.sync, operands through a ring of cp.async stages."""

    name = "mma"
    empty: Mapping[str, str] = {}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return refuses_cuda_gemm(
            workload, target, ("fp16", "bf16", "tf32", "int8"), "the tensor cores multiply"
        )

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_gemm(workload)
        a, b = operands(w)
        by_words_only = a.by_words and b.by_words
        copies = [
            Categorical("mem", "copy_a", a.copies),
            Categorical("mem", "copy_b", b.copies),
        ]
        return tile_knobs(w, target, copies, ("padded",) if by_words_only else LAYOUTS)

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_gemm(workload)
        return tile_rules(w, target, once(lambda v: Plan(w, v)))

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        w = as_gemm(workload)
        knobs = {knob.name: knob.choices for knob in self.knobs(w, target)}
        copies = {name: _default_copy(knobs[name], w) for name in ("copy_a", "copy_b")}
        rules = self.rules(w, target)
        return ranked_values(w, target, knobs, rules, copies, lambda v: Plan(w, v))

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_gemm(workload)
        return tile_features(w, target, values, Plan(w, values))

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_gemm(workload)
        v = {name: value for _, name, value in theta.items()}
        p = Plan(w, v)
        defines = {
            **problem_defines(w), **tile_defines(w, v, p),
            "KT_REPACK_A": int(v["copy_a"] == "repack"),
            "KT_REPACK_B": int(v["copy_b"] == "repack"),
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("mma.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source, launches=p.launches(),
            workspace_bytes=p.workspace_bytes, zeroed_bytes=p.split.zeroed,
            most_spill_bytes=MOST_SPILL_BYTES,
        )  # fmt: skip


def _default_copy(copies: Sequence[Value], w: Gemm) -> Value:
    """Unaligned operands are repacked when they are read often enough to pay for it."""
    worth = min(w.m, w.n) >= 512 or copies == ("repack",)
    return "repack" if worth and "repack" in copies else copies[0]
