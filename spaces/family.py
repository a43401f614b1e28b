"""Kernel families: one kernel of one idea, its knobs, its legality and its source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .kernel import Kernel
from .knob import Knob
from .target import Target
from .theta import Theta, Value
from .workload import Workload

T = TypeVar("T")

Columns = Mapping[str, NDArray[Any]]
"""Knob values of a batch of points by short knob name, one array element a point."""


def once(plan: Callable[[Any], T]) -> Callable[[Any], T]:
    """`plan`, asked again only for other columns: rules judge the same ones, one after another."""
    last: tuple[Any, T] | None = None

    def remembered(values: Any) -> T:
        nonlocal last
        held = last  # read once: another thread may judge other columns
        if held is None or held[0] is not values:
            held = last = values, plan(values)
        return held[1]

    return remembered


@dataclass(frozen=True)
class Rule:
    """A legality rule: `ok` judges a batch of points at once, `why` words the refusal of one.

    Which knobs `ok` looks at must not depend on their values, and it must work on every combination
    of them, also on what other rules refuse (`legality.py`).
    """

    name: str
    ok: Callable[[Columns], NDArray[np.bool_]]
    why: Callable[[Mapping[str, Any]], str]


class Family(ABC):
    """What a kernel family declares. Methods are pure functions of workload and target."""

    name: str
    empty: Mapping[str, str]
    """Why a component of θ has no knob in this family, by component."""

    @abstractmethod
    def refuses(self, workload: Workload, target: Target) -> str | None:
        """Why this family cannot serve the workload on the target, or None when it can."""

    @abstractmethod
    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        """The knobs and their choices; short names are unique within a family."""

    @abstractmethod
    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        """The legality rules beyond membership of each knob's choices."""

    @abstractmethod
    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        """A hand-written heuristic's values by short knob name; always legal."""

    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        """Legal values that the heuristic ranks high, best first; the first is the default."""
        return (self.default(workload, target),)

    @abstractmethod
    def derive(
        self, workload: Workload, target: Target, values: Columns
    ) -> dict[str, NDArray[np.float64]]:
        """Features that the knobs imply for this workload and target, by name."""

    @abstractmethod
    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        """The kernel of a legal θ."""


class RankedFamily(Family):
    """A family whose heuristic ranks several points; the first is the default."""

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return self.likely(workload, target)[0]

    @abstractmethod
    def likely(self, workload: Workload, target: Target) -> Sequence[Mapping[str, Value]]:
        """Legal values, best first."""
