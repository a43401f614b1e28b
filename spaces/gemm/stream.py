"""`stream`: products with M or N up to 16, which read one operand once (source: `stream.cuh`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kt.spaces.cuda import (
    HINTS,
    VECTOR,
    Floats,
    early_knob,
    early_launch,
    element_bytes,
    is_legal,
    occupancy,
    register_limit,
    residency_rules,
    rule,
)
from kt.spaces.extents import ceil_div, round_up
from kt.spaces.family import Columns, Family, Rule, once
from kt.spaces.kernel import Kernel, Launch, expand, stub
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Gemm, Workload

from .cuda import (
    SPLIT_K,
    SplitWorkspace,
    as_gemm,
    problem_defines,
    reduce_launch,
    refuses_cuda_gemm,
    split_defines,
    split_knobs,
    split_rules,
    split_traffic,
    split_workspace,
)

_TINY = 16
_WARPS = (1, 2, 4, 8, 16)
_MOST_WARPS = 16
_MOST_LOADS = 32
_WARM = (0, 8, 16, 32, 64, 128)
"""KiB a CTA that L2 is asked for while the kernel before still runs."""
_BLOCKS = (1, 2, 3, 4, 6, 8)
_ADDRESS_REGISTERS = 52


class _Shape:
    """The product seen as a long stream and a few tokens."""

    def __init__(self, w: Gemm) -> None:
        self.w, self.size = w, element_bytes(w)
        self.stream_is_a = w.n < w.m
        self.long, self.tiny = max(w.m, w.n), min(w.m, w.n)
        self.k_major = w.layout[0] == "n" if self.stream_is_a else w.layout[1] == "t"
        pitch = w.k if self.k_major else self.long
        self.aligned = pitch * self.size % VECTOR == 0
        self.half = self.size == 2

    @property
    def step(self) -> int:
        """Values of k in one step of a warp."""
        if self.half:
            return 32
        return 128 if self.k_major else 4

    @property
    def unit_rows(self) -> int:
        """Rows of the stream that a warp takes for each `rows`."""
        if self.half:
            return 16 if self.k_major else 64
        return 1 if self.k_major else 128

    @property
    def unit_loads(self) -> int:
        """16-byte loads of a lane in one step for each `rows`."""
        if self.half:
            return 2 if self.k_major else 8
        return 1 if self.k_major else 4

    @property
    def rows(self) -> tuple[int, ...]:
        """Choices of `rows`."""
        if not self.k_major:
            return (1, 2)
        return (1, 2, 4) if self.half else (1, 2, 4, 8)

    @property
    def steps(self) -> int:
        return int(ceil_div(self.w.k, self.step))

    def token_bytes(self, steps: Any) -> Any:
        """Shared memory of the tokens' values for `steps` steps."""
        return self.tiny * (round_up(steps * self.step * self.size, 128) + 64)


class _Plan:
    """What knob values imply; arrays in, arrays out, and numbers for the values of one θ."""

    def __init__(self, w: Gemm, values: Mapping[str, Any]) -> None:
        self.w, self.v, self.s = w, values, _Shape(w)

    @cached_property
    def warp_rows(self) -> Any:
        return self.s.unit_rows * self.v["rows"]

    @cached_property
    def block(self) -> Any:
        return self.v["warps_n"] * self.warp_rows

    @cached_property
    def threads(self) -> Any:
        return 32 * self.v["warps_n"] * self.v["warps_k"]

    @cached_property
    def blocks(self) -> Any:
        """Blocks of the stream over all batches."""
        return ceil_div(self.s.long, self.block) * self.w.batch

    @cached_property
    def split_steps(self) -> Any:
        """The most steps along k of one CTA."""
        return ceil_div(self.s.steps, self.v["split_k"])

    @cached_property
    def loads(self) -> Any:
        """16-byte loads of a lane that start together."""
        return self.s.unit_loads * self.v["rows"] * self.v["k"]

    @cached_property
    def shared_bytes(self) -> Any:
        sums = self.v["warps_k"] * self.s.tiny * self.block * 4
        return np.maximum(self.s.token_bytes(self.split_steps), sums)

    @cached_property
    def registers(self) -> Any:
        """Estimate from above of what the compiler needs to keep everything in registers."""
        each = 4 if self.s.aligned else 14
        if self.s.half:
            sums = self.warp_rows // 16 * ceil_div(self.s.tiny, 8) * 4
            sums = sums + (0 if self.s.k_major else 12 * self.v["rows"])
        else:
            sums = self.v["rows"] * (1 if self.s.k_major else 4) * self.s.tiny
        return each * self.loads * self.v["batches"] + sums + _ADDRESS_REGISTERS

    @cached_property
    def split(self) -> SplitWorkspace:
        """Of one θ only."""
        v, count = self.v, self.s.tiny * self.block
        each = round_up(ceil_div(count, self.threads), 4)
        sums = each * ceil_div(count, each)
        return split_workspace(self.w, self.blocks, sums, v["split_k"], v["split_mode"])

    def launches(self) -> tuple[Launch, ...]:
        """Of one θ only."""
        grid, block = (self.blocks * self.v["split_k"], 1, 1), (self.threads, 1, 1)
        early = bool(self.v["early"])
        main = Launch("kt_kernel", grid, block, shared_bytes=int(self.shared_bytes), early=early)
        by_kernel = self.v["split_k"] > 1 and self.v["split_mode"] == "kernel"
        return (main, reduce_launch(self.w, early)) if by_kernel else (main,)


class GemmStream(Family):
    """The large operand straight into registers, many loads in flight; k shared out to warps."""

    name = "stream"
    empty: Mapping[str, str] = {
        "perm": "the large operand is read once, in the order of memory",
    }

    def refuses(self, workload: Workload, target: Target) -> str | None:
        why = refuses_cuda_gemm(workload, target, ("fp16", "bf16", "fp32"), "streams")
        if why is not None:
            return why
        s = _Shape(as_gemm(workload))
        if s.tiny > _TINY:
            return f"serves M or N up to {_TINY}"
        fewest = ceil_div(s.steps, min(SPLIT_K[-1], s.steps))
        if s.token_bytes(fewest) > target.shared_bytes:
            return f"{s.tiny} x {s.w.k} values do not fit {target.arch}'s shared memory"
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        w = as_gemm(workload)
        s = _Shape(w)
        return [
            Ordinal("tile", "rows", s.rows),
            Categorical("mem", "hint", HINTS[:2]),
            Ordinal("mem", "warm", _WARM if early_launch(target) else (0,)),
            *split_knobs(s.steps),
            Ordinal("unroll", "k", (1, 2, 4, 8, 16)),
            Ordinal("unroll", "batches", (1, 2)),
            Ordinal("map", "warps_n", _WARPS),
            Ordinal("map", "warps_k", _WARPS),
            Ordinal("map", "blocks", _BLOCKS),
            early_knob(target),
        ]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        w = as_gemm(workload)
        s = _Shape(w)

        @once
        def plan(v: Any) -> _Plan:
            return _Plan(w, v)

        return [
            rule(
                "warps",
                lambda v: plan(v).threads <= 32 * _MOST_WARPS,
                lambda v: f"{plan(v).threads // 32} warps exceed {_MOST_WARPS}",
            ),
            rule(
                "block",
                lambda v: (v["warps_n"] - 1) * plan(v).warp_rows < s.long,
                lambda v: (
                    f"{v['warps_n']} warps of {plan(v).warp_rows} rows where there are {s.long}"
                ),
            ),
            rule(
                "loads",
                lambda v: plan(v).loads <= _MOST_LOADS,
                lambda v: f"{plan(v).loads} loads at once exceed {_MOST_LOADS}",
            ),
            rule(
                "idle-warps",
                lambda v: (v["warps_k"] == 1) | ((v["warps_k"] - 1) * v["k"] < plan(v).split_steps),
                lambda v: (
                    f"{v['warps_k']} warps of {v['k']} steps where there are {plan(v).split_steps}"
                ),
            ),
            rule(
                "unroll",
                lambda v: (v["k"] == 1) | (v["k"] < 2 * plan(v).split_steps),
                lambda v: f"{v['k']} steps at once where there are {plan(v).split_steps}",
            ),
            rule(
                "warm",
                lambda v: (v["warm"] == 0) | np.asarray(v["early"]),
                "only a kernel that starts early has time to warm L2",
            ),
            *split_rules(lambda v: plan(v).blocks, lambda v: s.steps),
            *residency_rules(target, plan),
        ]

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return _default(as_gemm(workload), target, self)

    def derive(self, workload: Workload, target: Target, values: Columns) -> dict[str, Floats]:
        w = as_gemm(workload)
        p = _Plan(w, values)
        resident = occupancy(target, p.threads, p.shared_bytes, p.registers)
        ctas = p.blocks * values["split_k"]
        waves = ctas / (resident * target.cores)
        at_once = np.minimum(resident, ceil_div(ctas, target.cores))
        in_flight = at_once * p.threads * p.loads * values["batches"] * VECTOR
        found = {
            "block": p.block,
            "threads": p.threads,
            "loads": p.loads,
            "shared_bytes": p.shared_bytes,
            "registers": p.registers,
            "register_share": p.registers / register_limit(target, p.threads, values["blocks"]),
            "resident_ctas": resident,
            "resident_warps": resident * p.threads // 32,
            "waves": waves,
            "wave_efficiency": waves / np.ceil(waves),
            "bytes_in_flight": in_flight,
            "rounds": p.split_steps / (values["warps_k"] * values["k"]),
            "token_bytes": ctas * p.split_steps * p.s.step * p.s.tiny * p.s.size,
            "split_bytes": split_traffic(w, values),
        }
        return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        w = as_gemm(workload)
        v: dict[str, Any] = {name: value for _, name, value in theta.items()}
        p = _Plan(w, v)
        defines = {
            **problem_defines(w),
            "KT_ROWS": v["rows"], "KT_HINT": HINTS.index(v["hint"]), **split_defines(v),
            "KT_UNROLL": v["k"], "KT_BATCHES": v["batches"],
            "KT_WARPS_N": v["warps_n"], "KT_WARPS_K": v["warps_k"], "KT_BLOCKS": v["blocks"],
            "KT_WARM": v["warm"], "KT_EARLY": int(v["early"]),
            "KT_EXPECT_SHARED_BYTES": int(p.shared_bytes),
            "KT_EXPECT_WORKSPACE_BYTES": p.split.bytes,
            "KT_EXPECT_ZEROED_BYTES": p.split.zeroed,
        }  # fmt: skip
        source = stub(defines) + expand(Path(__file__).with_name("stream.cuh"))
        return Kernel(
            w, self.name, theta, "cuda", source,
            launches=p.launches(), workspace_bytes=p.split.bytes, zeroed_bytes=p.split.zeroed,
        )  # fmt: skip


def _default(w: Gemm, target: Target, family: GemmStream) -> Mapping[str, Value]:
    """Two CTAs of eight warps for each SM where k allows it; eight loads in flight a lane."""
    s = _Shape(w)
    knobs: dict[str, Sequence[Any]] = {k.name: k.choices for k in family.knobs(w, target)}
    rules = family.rules(w, target)
    blocks = ceil_div(s.long, s.unit_rows) * w.batch
    wanted = max(1, 2 * target.cores // blocks)
    splits = sorted(knobs["split_k"], key=lambda x: (x > wanted, abs(x - wanted)))
    for split, warps_k, batches in itertools.product(splits, (8, 4, 2, 1), (1, 2)):
        for k in sorted(knobs["k"], key=lambda x: abs(x * s.unit_loads - 8)):
            values: dict[str, Any] = {
                "rows": 1, "hint": "first", "warm": 0, "early": False, "split_k": split,
                "split_mode": "last", "k": k, "batches": batches, "warps_n": 1, "warps_k": warps_k,
                "blocks": 1,
            }  # fmt: skip
            if is_legal(rules, values):
                return values
    raise AssertionError(f"no default for '{w}' on {target.name}")
