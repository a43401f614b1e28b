"""A recording of another tool as a space with outcomes, for searching without a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kt.spaces.errors import LogError
from kt.spaces.family import Columns, Family, Rule
from kt.spaces.kernel import Kernel
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.space import Points, Space
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Operand, Option, Workload

from .constraints import Description
from .foreign import Level, Recording
from .recorded import RecordedSpace
from .state import Observation

COMPONENT = "tile"
"""Another tool's parameters belong to no component of θ; all are kept under this one."""


class Levels(Ordinal):
    """Numbers of any kind, fractions included: choices hold their text, values the numbers."""

    @property
    def values(self) -> NDArray[np.generic]:
        return np.array([float(choice) for choice in self.choices])


@dataclass(frozen=True)
class Foreign(Workload):
    """The workload of a recording: nothing is known of it but its name."""

    OPERATOR: ClassVar[str] = "recorded"
    OPTIONS: ClassVar[tuple[Option, ...]] = ()

    title: str = ""

    def _extents(self) -> dict[str, int]:
        return {}

    @property
    def shape_text(self) -> str:
        return self.title

    def inputs(self) -> tuple[Operand, ...]:
        return ()

    def outputs(self) -> tuple[Operand, ...]:
        return ()

    @property
    def flops(self) -> int:
        return 0

    def descriptors(self) -> dict[str, float]:
        return {}


_NOWHERE = Target(
    name="recorded", kind="recorded", arch="", processor="", cores=0, clock_mhz=0, memory_bytes=0,
    bandwidth=0.0, peak={}, l1_bytes=0, l2_bytes=0,
)  # fmt: skip


class ForeignFamily(Family):
    """The parameters of a recording as knobs, and a T1 file's conditions as rules."""

    name = "recorded"
    empty: Mapping[str, str] = {}

    def __init__(self, recording: Recording, description: Description | None) -> None:
        self._recording, self._description = recording, description

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        return [_knob(name, levels) for name, levels in self._recording.parameters.items()]

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        conditions = self._description.conditions if self._description else {}
        return [
            Rule(text, ok, lambda values, text=text: f"breaks '{text}'")  # type: ignore[misc]
            for text, ok in conditions.items()
        ]

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        """A T1 file's defaults as far as they were recorded, else the first values."""
        given = self._description.defaults if self._description else {}
        return {
            knob.name: knob.choices[_position(knob, given.get(knob.name))]
            for knob in self.knobs(workload, target)
        }

    def derive(
        self, workload: Workload, target: Target, values: Columns
    ) -> dict[str, NDArray[np.float64]]:
        """Products of two numbers (areas, threads) and the powers of two that divide them."""
        numbers = {
            knob.name: values[knob.name].astype(np.float64)
            for knob in self.knobs(workload, target)
            if isinstance(knob, Ordinal) and len(knob.choices) > 1
        }
        sized = {name: column for name, column in numbers.items() if self._most(name) > 1}
        found = {f"{a}*{b}": sized[a] * sized[b] for a, b in combinations(sized, 2)}
        for name in sized:
            if all(type(level) is int for level in self._recording.parameters[name]):
                whole = sized[name].astype(np.int64)
                found[f"power({name})"] = (whole & -whole).astype(np.float64)
        return found

    def _most(self, name: str) -> float:
        """The largest value of a numeric parameter."""
        return max(float(level) for level in self._recording.parameters[name])

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        raise LogError("a recorded space of another tool has no kernel")


def _knob(name: str, levels: Sequence[Level]) -> Knob:
    if all(type(level) is int for level in levels):
        return Ordinal(COMPONENT, name, tuple(levels))  # type: ignore[arg-type]
    if any(isinstance(level, str | bool) for level in levels):
        return Categorical(COMPONENT, name, tuple(map(_value, levels)))
    return Levels(COMPONENT, name, tuple(str(float(level)) for level in levels))


def _value(level: Level) -> Value:
    return str(level) if isinstance(level, float) else level


def _position(knob: Knob, level: Level | None) -> int:
    """Index of `level` among the knob's choices; 0 when it is not one."""
    if level is None:
        return 0
    text = str(float(level)) if isinstance(knob, Levels) else level
    index = knob.index(text) if isinstance(text, bool | int | str) else None
    return index or 0


class ForeignSpace(RecordedSpace):
    """The recorded points of another tool. Without a T1 file there is no default to begin with."""

    def __init__(self, recording: Recording, description: Description | None = None) -> None:
        family = ForeignFamily(recording, description)
        base = Space(Foreign(title=recording.title), _NOWHERE, [family])
        self._described = description is not None
        self.order = self._points_of(base, recording)
        """The point of each result, in the recording's order."""
        super().__init__(base, np.sort(self.order))

    @staticmethod
    def _points_of(base: Space, recording: Recording) -> Points:
        part = base.parts[0]
        columns = []
        for i, (knob, levels) in enumerate(
            zip(part.knobs, recording.parameters.values(), strict=True)
        ):
            position = {_kind(level): j for j, level in enumerate(levels)}
            assert len(knob.choices) == len(levels)
            columns.append([position[_kind(result.values[i])] for result in recording.results])
        return part.points(np.array(columns, dtype=np.int64).T.reshape(-1, len(columns)))

    def defaults(self) -> Points:
        return super().defaults() if self._described else np.empty(0, dtype=np.int64)

    def likely(self, count: int) -> Points:
        """Nothing: nobody wrote a heuristic for it."""
        return np.empty(0, dtype=np.int64)

    @cached_property
    def disagreements(self) -> int:
        """Recorded points that a condition of the T1 file forbids."""
        return int((~Space.legal(self, self.order)).sum())


def _kind(level: Level) -> tuple[bool, Level]:
    return isinstance(level, bool), level  # True and 1 are two values


def outcomes(space: ForeignSpace, recording: Recording) -> dict[int, Observation]:
    """What the recording says of each of its points."""
    points = space.order.tolist()
    return {
        point: Observation(point, result.us)
        for point, result in zip(points, recording.results, strict=True)
    }
