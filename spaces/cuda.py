"""What the CUDA families share whatever the operator: limits, rules, residency on an SM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .extents import round_up
from .family import Columns, Rule
from .knob import Categorical, Knob
from .target import Target
from .workload import DTYPE_BYTES, EPILOGUE_OPERANDS, Workload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

OLDEST = 80
"""cp.async and the matrix instructions used here begin with sm_80."""
MAX_REGISTERS = 255
MAX_BLOCKS = 2**31 - 1
CTA_SHARED_BYTES = 1024
"""Shared memory that the system takes of every CTA."""
VECTOR = 16
"""Bytes of the widest memory access."""

HINTS = ("none", "first", "last")
"""What a load tells L2 to do with a line."""


def alignment(size: int, most: int = VECTOR) -> int:
    """The largest power of two, at most `most`, that divides `size`."""
    return min(size & -size, most)


def sm_version(target: Target) -> int:
    """80 for sm_80, 90 for sm_90a."""
    return int("".join(c for c in target.arch if c.isdigit()))


def early_launch(target: Target) -> bool:
    """Whether the target has programmatic dependent launch."""
    return sm_version(target) >= 90


def early_knob(target: Target) -> Knob:
    """Whether the kernel may start while the one before it ends; it waits before it reads."""
    return Categorical("sync", "early", (False, True) if early_launch(target) else (False,))


def refuses_cuda(
    workload: Workload, target: Target, dtypes: Sequence[str], reach: str
) -> str | None:
    """Why a CUDA family for `dtypes` cannot serve the workload, or None."""
    if target.kind != "cuda":
        return f"serves {workload.OPERATOR} on CUDA"
    if sm_version(target) < OLDEST:
        return f"needs sm_{OLDEST} or later, {target.name} is {target.arch}"
    if workload.dtype not in dtypes:
        return f"{reach} {', '.join(dtypes)}, not {workload.dtype}"
    return None


def element_bytes(w: Workload) -> int:
    return DTYPE_BYTES[w.dtype]


def acc_bytes(w: Workload) -> int:
    return 8 if w.dtype == "fp64" else 4


def output_bytes(w: Workload) -> int:
    return DTYPE_BYTES[w.out_dtype]


def epilogue_defines(w: Workload) -> dict[str, int | str]:
    """The stub's lines for the epilogue chain."""
    ops = w.epilogue
    return {
        "KT_HAS_EPILOGUE": int(bool(ops)),
        "KT_EPILOGUE": " ".join(f"KT_OP_{op.upper()}" for op in ops),
        **{f"KT_HAS_{op.upper()}": int(op in ops) for op in EPILOGUE_OPERANDS},
    }


# -- rules ----------------------------------------------------------------------------------


def rule(name: str, ok: Callable[[Columns], Any], why: str | Callable[[Any], str]) -> Rule:
    """A rule whose reason is a text, or a function of the point's values."""
    text = why if callable(why) else lambda _: why
    return Rule(name, lambda v: np.asarray(ok(v), dtype=bool), text)


def is_legal(rules: Sequence[Rule], values: Mapping[str, Any]) -> bool:
    """Whether the values of one θ break no rule."""
    columns = {name: np.array([value]) for name, value in values.items()}
    return all(bool(r.ok(columns)[0]) for r in rules)


def legal(rules: Sequence[Rule], columns: Mapping[str, Any], count: int) -> NDArray[np.bool_]:
    """Which of `count` θ break no rule; a column may be one value of all."""
    ok = np.ones(count, dtype=bool)
    for r in rules:
        ok &= r.ok(columns)
    return ok


# -- residency ------------------------------------------------------------------------------


def register_limit(target: Target, threads: Any, blocks: Any) -> Any:
    """Registers that the compiler may give a thread when `blocks` CTAs must fit one SM."""
    limit = target.registers_sm // (threads * blocks) // 8 * 8
    return np.minimum(limit, MAX_REGISTERS)


def grid_rule(ctas: Callable[[Columns], Any]) -> Rule:
    """A launch has so many CTAs at most."""
    return rule(
        "grid",
        lambda v: ctas(v) <= MAX_BLOCKS,
        lambda v: f"{ctas(v)} CTAs exceed {MAX_BLOCKS}",
    )


def residency_rules(target: Target, plan: Callable[[Any], Any]) -> list[Rule]:
    """CTAs must fit the SM as often as knob `blocks` promises, without spilling.

    `plan` says what knob values imply: its `threads`, `shared_bytes` and `registers` are read.
    """

    def limit(v: Any) -> Any:
        return register_limit(target, plan(v).threads, v["blocks"])

    def shared_limit(v: Any) -> Any:
        each = target.shared_bytes_sm // v["blocks"] - CTA_SHARED_BYTES
        return np.minimum(each, target.shared_bytes)

    return [
        rule(
            "shared",
            lambda v: plan(v).shared_bytes <= shared_limit(v),
            lambda v: (
                f"shared memory {int(plan(v).shared_bytes)} B exceeds {int(shared_limit(v))} B of "
                f"{target.arch} with {v['blocks']} CTAs an SM"
            ),
        ),
        rule(
            "threads",
            lambda v: plan(v).threads * v["blocks"] <= target.threads_sm,
            lambda v: (
                f"{int(plan(v).threads * v['blocks'])} threads exceed {target.threads_sm} an SM"
            ),
        ),
        rule(
            "registers",
            lambda v: plan(v).registers <= limit(v),
            lambda v: f"about {int(plan(v).registers)} registers a thread exceed {int(limit(v))}",
        ),
    ]


def occupancy(target: Target, threads: Any, shared: Any, registers: Any) -> Ints:
    """CTAs that one SM holds."""
    by_shared = target.shared_bytes_sm // (shared + CTA_SHARED_BYTES)
    by_registers = target.registers_sm // (
        round_up(np.minimum(registers, MAX_REGISTERS), 8) * threads
    )
    found: Ints = np.clip(
        np.minimum(np.minimum(by_shared, by_registers), target.threads_sm // threads), 1, 32
    )
    return found
