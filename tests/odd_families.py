"""Odd families and spaces: one point, two, one knob, empty by rules, with holes, huge, unions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fakes import FakeFamily

from kt.spaces.family import Columns, Rule
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.space import Space
from kt.spaces.target import Target, detect_cpu
from kt.spaces.theta import Value
from kt.spaces.workload import Workload, parse

GEMM = parse("gemm 64x64x64")
CPU = detect_cpu()


class OddFamily(FakeFamily):
    """Given knobs and rules; the default is each knob's first choice."""

    def __init__(
        self, *knobs: Knob, rules: Sequence[Rule] = (), name: str = "odd", why: str | None = None
    ) -> None:
        self._knobs, self._rules, self.name, self._why = knobs, rules, name, why

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return self._why

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        return self._knobs

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        return self._rules

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return {knob.name: knob.choices[0] for knob in self._knobs}

    def derive(
        self, workload: Workload, target: Target, values: Columns
    ) -> dict[str, np.ndarray[Any, Any]]:
        first = next(iter(values.values()))
        return {"odd": np.arange(len(first)) * 0.0 + 0.3}


def rule(name: str, ok: Any) -> Rule:
    return Rule(name, ok, lambda v: f"{name} refuses {v}")


NEVER = rule("never", lambda v: np.zeros(len(v["a"]), dtype=bool))
ONE = OddFamily(Ordinal("tile", "a", (7,)))
TWO = OddFamily(Categorical("tile", "a", ("x", "y")), name="two")
ONE_KNOB = OddFamily(Ordinal("map", "a", (1, 2, 4, 8, 16)), name="one_knob")
EMPTY = OddFamily(Ordinal("tile", "a", (1, 2, 3)), rules=[NEVER], name="empty")
HOLES = OddFamily(
    Ordinal("tile", "a", tuple(range(12))), Ordinal("mem", "b", tuple(range(11))),
    Categorical("sync", "c", ("p", "q", "r")),
    rules=[rule("odd", lambda v: (v["a"] + v["b"]) % 2 == 0),
           rule("not_q", lambda v: v["c"] != "q")],
    name="holes",
)  # fmt: skip
HUGE = OddFamily(
    *(Ordinal("tile", f"k{i}", tuple(range(10))) for i in range(15)),
    rules=[rule("half", lambda v: v["k0"] >= 5)], name="huge",
)  # fmt: skip
HUGE_EMPTY = OddFamily(
    *(Ordinal("tile", n, tuple(range(100))) for n in "abcdefgh"), rules=[NEVER], name="void"
)
SPACES = {
    "fake": [FakeFamily()], "one": [ONE], "two": [TWO], "one_knob": [ONE_KNOB], "holes": [HOLES],
    "huge": [HUGE], "union": [FakeFamily(), HOLES, ONE], "huge_union": [HUGE, TWO],
}  # fmt: skip


def space(name: str) -> Space:
    return Space(GEMM, CPU, SPACES[name])
