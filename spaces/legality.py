"""Which points of a family are legal: its rules over arrays, tabulated where that pays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .family import Rule
from .knob import Knob

_LARGEST_TABLE = 2**18
"""Combinations of the knobs that one rule looks at: more are not tabulated."""
_LARGEST_JOINT = 2**16
"""Combinations of a table of several rules."""


class Columns(Mapping[str, NDArray[Any]]):
    """Knob values of points by short name, worked out when a rule asks for them."""

    def __init__(self, digits: Digits, points: NDArray[np.int64]) -> None:
        self.digits, self.points = digits, points
        self._indices: dict[int, NDArray[np.int64]] = {}
        self._values: dict[str, NDArray[Any]] = {}

    def index(self, knob: int) -> NDArray[np.int64]:
        """Choice index of knob number `knob`."""
        if knob not in self._indices:
            self._indices[knob] = self.digits.index(knob, self.points)
        return self._indices[knob]

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._values:
            knob = self.digits.position[name]
            self._values[name] = self.digits.values[knob][self.index(knob)]
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.digits.position)

    def __len__(self) -> int:
        return len(self.digits.position)

    def where(self, kept: NDArray[np.bool_]) -> Columns:
        """The columns of the kept points."""
        left = Columns(self.digits, self.points[kept])
        left._indices = {knob: index[kept] for knob, index in self._indices.items()}
        left._values = {name: column[kept] for name, column in self._values.items()}
        return left


class Digits:
    """How points, mixed-radix numbers over a family's knobs, spell choices."""

    def __init__(self, knobs: Sequence[Knob]) -> None:
        sizes = [len(knob.choices) for knob in knobs]
        self.position = {knob.name: i for i, knob in enumerate(knobs)}
        self.values = [knob.values for knob in knobs]
        self.sizes = np.array(sizes, dtype=np.int64)
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        self.strides = np.array(strides, dtype=np.int64)

    def index(self, knob: int, points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choice index of knob number `knob`."""
        above = points // self.strides[knob]
        # NumPy divides by a scalar several times faster than it takes the rest.
        index: NDArray[np.int64] = above - above // self.sizes[knob] * self.sizes[knob]
        return index


@dataclass(frozen=True)
class _Table:
    """What rules say of every combination of some knobs' choices; an axis a knob, in order."""

    knobs: tuple[int, ...]
    said: NDArray[np.bool_]

    def ok(self, values: Columns) -> NDArray[np.bool_]:
        at: Any = 0
        for size, knob in zip(self.said.shape, self.knobs, strict=True):
            at = at * size + values.index(knob)
        found: NDArray[np.bool_] = self.said.reshape(-1)[at]
        return found

    def joined(self, other: _Table, sizes: NDArray[np.int64]) -> _Table | None:
        """The table of both, unless it would be too large."""
        knobs = tuple(sorted({*self.knobs, *other.knobs}))
        if math.prod(sizes[list(knobs)].tolist()) > _LARGEST_JOINT:
            return None
        return _Table(knobs, self._along(knobs) & other._along(knobs))

    def _along(self, knobs: tuple[int, ...]) -> NDArray[np.bool_]:
        shape = iter(self.said.shape)
        return self.said.reshape([next(shape) if knob in self.knobs else 1 for knob in knobs])


@dataclass
class _Judge:
    """One rule, the points that it has judged, and whether a table may take its place."""

    rule: Rule
    judged: int = 0
    knobs: tuple[int, ...] | None = None

    def ok(self, values: Columns) -> NDArray[np.bool_]:
        self.judged += len(values.points)
        return self.rule.ok(values)

    def table(self, digits: Digits) -> _Table | None:
        """The rule over all choices of the knobs that it looks at, once that many were judged."""
        if self.knobs is None:
            self.knobs = _looked_at(self.rule, digits)
        shape = digits.sizes[list(self.knobs)].tolist()
        if not self.knobs or self.judged < (size := math.prod(shape)) or size > _LARGEST_TABLE:
            return None
        names, indices = list(digits.position), np.unravel_index(np.arange(size), shape)
        columns = {
            names[knob]: digits.values[knob][index]
            for knob, index in zip(self.knobs, indices, strict=True)
        }
        ok = np.broadcast_to(self.rule.ok(columns), size)
        return _Table(self.knobs, ok.reshape(shape))


def _looked_at(rule: Rule, digits: Digits) -> tuple[int, ...]:
    """The knobs that a rule looks at; what it looks at does not depend on their values."""
    fresh = Columns(digits, np.zeros(2, dtype=np.int64))
    rule.ok(fresh)
    return tuple(sorted(digits.position[name] for name in fresh._values))


class Legality:
    """Judges points by all rules. A rule that judged more points than it can tell apart becomes
    a table, and small tables become one."""

    def __init__(self, digits: Digits, rules: Sequence[Rule]) -> None:
        self._digits = digits
        # One attribute, so that threads never see a rule that is in neither or in both.
        self._state: tuple[tuple[_Table, ...], tuple[_Judge, ...]] = ((), tuple(map(_Judge, rules)))

    def legal(self, points: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each point breaks no rule."""
        ok = np.zeros(len(points), dtype=bool)
        rows, values = np.arange(len(points)), Columns(self._digits, points)
        kept = np.ones(len(points), dtype=bool)
        tables, judges = self._state
        judging: tuple[_Table | _Judge, ...] = (*tables, *judges)
        for judge in judging:
            kept &= judge.ok(values)
            # In a sparse space little is soon left to look at. What rules work out of columns they
            # share, so that these are thinned out only when that pays.
            if 2 * np.count_nonzero(kept) < len(kept):
                rows, values = rows[kept], values.where(kept)
                kept = np.ones(len(rows), dtype=bool)
                if not len(rows):
                    break
        ok[rows[kept]] = True
        self._tabulate(tables, judges)
        return ok

    def _tabulate(self, tables: tuple[_Table, ...], judges: tuple[_Judge, ...]) -> None:
        """Replaces rules by tables where that has come to pay."""
        left = []
        for judge in judges:
            table = judge.table(self._digits)
            if table is None:
                left.append(judge)
            else:
                tables = self._with(tables, table)
        if len(left) < len(judges):
            self._state = tables, tuple(left)

    def _with(self, tables: tuple[_Table, ...], table: _Table) -> tuple[_Table, ...]:
        """The tables and one more, joined where that stays small; the most selective first."""
        for i, other in enumerate(tables):
            joint = other.joined(table, self._digits.sizes)
            if joint is not None:
                found = (*tables[:i], joint, *tables[i + 1 :])
                break
        else:
            found = (*tables, table)
        return tuple(sorted(found, key=lambda each: float(each.said.mean())))
