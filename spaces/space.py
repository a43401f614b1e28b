"""The space of a workload on a target: the union of the families that can serve it.

A point is one int64: a mixed-radix number over a family's knobs plus the family's offset. Points
are therefore cheap to store, compare and sort (their order is the canonical order of θ), and
every operation here works on arrays of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import SpaceError
from .family import Columns, Family
from .kernel import Kernel
from .legality import Digits, Legality
from .target import Target
from .theta import Theta, Value, theta_from_flat
from .workload import Workload

Points = NDArray[np.int64]
Features = NDArray[np.float32]

ENUMERABLE = 2**18
"""Spaces up to this many points are listed in full; larger ones are sampled."""
_ROUNDS, _MOST_DRAWN = 64, 2**14
"""Bounds of rejection sampling: rounds, and points drawn of each family in one."""
_SIGNIFICANT_BITS = 12


@dataclass(frozen=True)
class RuleCount:
    """Points that one rule removes (each rule counted on its own)."""

    family: str
    rule: str
    removed: int


@dataclass(frozen=True)
class Census:
    """Size of a space. Counts are estimates from a seeded sample when `exact` is false."""

    points: int
    legal: int
    exact: bool
    rules: tuple[RuleCount, ...]


class FamilySpace:
    """One family's points, numbered from 0: knobs, rules and the arithmetic between them."""

    def __init__(self, family: Family, workload: Workload, target: Target) -> None:
        self.family, self.workload, self.target = family, workload, target
        self.knobs = tuple(family.knobs(workload, target))
        self.rules = tuple(family.rules(workload, target))
        self.size = math.prod(len(knob.choices) for knob in self.knobs)
        if self.size >= 2**62:
            raise ValueError(f"{family.name}: {self.size} points do not fit an int64")
        digits = Digits(self.knobs)
        if len(digits.position) != len(self.knobs):
            raise ValueError(f"{family.name}: short knob names repeat")
        self._sizes, self._strides, self._values = digits.sizes, digits.strides, digits.values
        self._legality = Legality(digits, self.rules)
        self._movable = np.flatnonzero(self._sizes > 1)

    @cached_property
    def default(self) -> int:
        """The point of the family's default."""
        return self._named(self.family.default(self.workload, self.target))

    @cached_property
    def likely(self) -> Points:
        """The points that the family's heuristic ranks high, distinct, the default first."""
        ranked = self.family.likely(self.workload, self.target)
        return np.array(list(dict.fromkeys(map(self._named, ranked))), dtype=np.int64)

    def _named(self, values: Mapping[str, Value]) -> int:
        """The point of values by short name."""
        paths = {knob.name: knob.path for knob in self.knobs}
        return self.point({paths[name]: value for name, value in values.items()})

    def indices(self, points: Points) -> NDArray[np.int64]:
        """Choice index of each knob, shape [len(points), knobs]."""
        return points[:, None] // self._strides % self._sizes

    def points(self, indices: NDArray[np.int64]) -> Points:
        """Inverse of `indices`."""
        return indices @ self._strides

    def columns(self, indices: NDArray[np.int64]) -> Columns:
        """Knob values by short name."""
        return {
            knob.name: values[indices[:, i]]
            for i, (knob, values) in enumerate(zip(self.knobs, self._values, strict=True))
        }

    def legal(self, points: Points) -> NDArray[np.bool_]:
        return self._legality.legal(points)

    def move(self, points: Points, rng: np.random.Generator) -> Points:
        """One knob of each point moved one step (legality not looked at)."""
        if not len(self._movable):
            return points
        indices = self.indices(points)
        which = rng.choice(self._movable, size=len(points))
        for i in self._movable:
            rows = np.flatnonzero(which == i)
            if len(rows):
                indices[rows, i] = self.knobs[i].step(indices[rows, i], rng)
        return self.points(indices)

    def around(self, point: int) -> Points:
        """Every legal point one step of one knob away."""
        base = self.indices(np.array([point]))[0]
        found = [
            point + (j - int(base[i])) * int(self._strides[i])
            for i, knob in enumerate(self.knobs)
            for j in knob.neighbours(int(base[i]))
        ]
        points = np.array(found, dtype=np.int64)
        return points[self.legal(points)] if len(points) else points

    def one_step(self, points: Points) -> Iterator[Points]:
        """For each possible step of one knob: where it leads from every point, -1 for nowhere."""
        indices = self.indices(points)
        for i, knob in enumerate(self.knobs):
            steps = [knob.neighbours(j) for j in range(len(knob.choices))]
            for k in range(max(map(len, steps))):
                targets = np.array([step[k] if k < len(step) else -1 for step in steps])
                to = targets[indices[:, i]]
                moved = points + (to - indices[:, i]) * self._strides[i]
                yield np.where(to >= 0, moved, -1)

    def draw(self, rng: np.random.Generator, n: int) -> Points:
        """`n` uniform points, legal or not."""
        return rng.integers(self.size, size=n)

    def theta(self, point: int) -> Theta:
        index = self.indices(np.array([point]))[0]
        return theta_from_flat(
            {k.path: k.choices[i] for k, i in zip(self.knobs, index.tolist(), strict=True)}
        )

    def point(self, values: Mapping[str, Value]) -> int:
        """The point of values by path; raises SpaceError naming what does not fit."""
        name = self.family.name
        extra = set(values) - {knob.path for knob in self.knobs}
        if extra:
            raise SpaceError(f"family {name} has no knob {', '.join(sorted(extra))}")
        total = 0
        for knob, stride in zip(self.knobs, self._strides.tolist(), strict=True):
            if knob.path not in values:
                raise SpaceError(f"family {name} needs a value for knob {knob.path}")
            index = knob.index(values[knob.path])
            if index is None:
                accepted = ", ".join(str(choice).lower() for choice in knob.choices)
                raise SpaceError(f"{knob.path}={values[knob.path]}: accepts {accepted}")
            total += index * stride
        return int(total)

    def why_illegal(self, point: int) -> str | None:
        """The first broken rule's reason, or None for a legal point."""
        values = self.columns(self.indices(np.array([point])))
        scalars: dict[str, Any] = {name: array[0].item() for name, array in values.items()}
        for rule in self.rules:
            if not bool(rule.ok(values)[0]):
                return rule.why(scalars)
        return None


class Space:
    """All legal schedules of one workload on one target."""

    def __init__(self, workload: Workload, target: Target, families: Sequence[Family]) -> None:
        self.workload, self.target = workload, target
        self.refused = {f.name: why for f in families if (why := f.refuses(workload, target))}
        self.parts = [
            FamilySpace(f, workload, target) for f in families if f.name not in self.refused
        ]
        if not self.parts:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise SpaceError(
                f"no kernel family serves '{workload}' on {target.name}"
                + (f" ({reasons})" if reasons else "")
            )
        self._offsets = np.cumsum([0, *(part.size for part in self.parts)])
        self.size = int(self._offsets[-1])

    # -- identity ---------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Changes when a knob, a choice or a rule's name does."""
        text = msgspec.json.encode(
            [
                [p.family.name, [[k.path, k.choices] for k in p.knobs], [r.name for r in p.rules]]
                for p in self.parts
            ]
        )
        return hashlib.sha256(text).hexdigest()[:16]

    def family_of(self, point: int) -> str:
        return self._part(point)[0].family.name

    def theta(self, point: int) -> Theta:
        part, local = self._part(point)
        return part.theta(local)

    def point(self, family: str, theta: Theta) -> int:
        """The point of a θ, which need not be legal; raises SpaceError when it is not a member."""
        for part, offset in zip(self.parts, self._offsets.tolist(), strict=False):
            if part.family.name == family:
                return int(offset + part.point(theta.flat()))
        names = ", ".join(part.family.name for part in self.parts)
        raise SpaceError(f"no family '{family}' for '{self.workload}': accepts {names}")

    def check(self, family: str, theta: Theta) -> int:
        """The point of a θ that must be legal; raises SpaceError with the broken rule's reason."""
        point = self.point(family, theta)
        why = self.why_illegal(point)
        if why:
            raise SpaceError(f"illegal θ for '{self.workload}': {why}")
        return point

    def kernel(self, point: int) -> Kernel:
        part, local = self._part(point)
        return part.family.kernel(self.workload, self.target, part.theta(local))

    def defaults(self) -> Points:
        """Each family's default, the first family's first."""
        parts = zip(self.parts, self._offsets.tolist(), strict=False)
        return np.array([offset + part.default for part, offset in parts], dtype=np.int64)

    def likely(self, count: int) -> Points:
        """Points that the families' heuristics rank high besides the defaults, best first.

        The families take turns; at most `count` of each.
        """
        parts = zip(self.parts, self._offsets.tolist(), strict=False) if count else ()
        ranked = [offset + part.likely[1 : 1 + count] for part, offset in parts]
        turns = [(turn, which, p) for which, r in enumerate(ranked) for turn, p in enumerate(r)]
        return np.array([int(point) for _, _, point in sorted(turns)], dtype=np.int64)

    def _part(self, point: int) -> tuple[FamilySpace, int]:
        i = int(np.searchsorted(self._offsets, point, side="right")) - 1
        return self.parts[i], int(point - self._offsets[i])

    def _split(self, points: Points) -> list[tuple[FamilySpace, int, NDArray[np.int64]]]:
        """(part, offset, rows of `points` in it) for the parts that occur."""
        which = np.searchsorted(self._offsets, points, side="right") - 1
        rows = ((i, np.flatnonzero(which == i)) for i in range(len(self.parts)))
        return [(self.parts[i], int(self._offsets[i]), r) for i, r in rows if len(r)]

    # -- legality and sampling --------------------------------------------------------------

    def legal(self, points: Points) -> NDArray[np.bool_]:
        ok = np.zeros(len(points), dtype=bool)
        for part, offset, rows in self._split(points):
            ok[rows] = part.legal(points[rows] - offset)
        return ok

    def why_illegal(self, point: int) -> str | None:
        part, local = self._part(point)
        return part.why_illegal(local)

    @cached_property
    def listed(self) -> Points | None:
        """All legal points in canonical order, or None when the space is too large to list."""
        if self.size > ENUMERABLE:
            return None
        points = np.arange(self.size, dtype=np.int64)
        return points[self.legal(points)]

    def sample(self, rng: np.random.Generator, n: int, exclude: Points | None = None) -> Points:
        """Up to `n` distinct legal points outside `exclude`.

        Uniform in a listed space; families in equal shares in a larger one. Fewer come back when
        the space (nearly) ends. Raises SpaceError, with the counts by rule, when no legal point
        was found and none is excluded.
        """
        exclude = np.empty(0, dtype=np.int64) if exclude is None else exclude
        if self.listed is not None:
            left = np.setdiff1d(self.listed, exclude)
            found = rng.permutation(left)[:n]
        else:
            found = self._rejection(rng, n, exclude)
        if n > 0 and not len(found) and not len(exclude):
            raise SpaceError(self._empty_message())
        return found

    def _rejection(self, rng: np.random.Generator, n: int, exclude: Points) -> Points:
        found = np.empty(0, dtype=np.int64)
        chunk = max(256, 4 * -(-n // len(self.parts)))
        for _ in range(_ROUNDS):
            drawn = [
                offset + part.draw(rng, chunk)
                for part, offset in zip(self.parts, self._offsets.tolist(), strict=False)
            ]
            points = np.stack(drawn, axis=1).ravel()  # interleaved: equal shares of the families
            points = points[self.legal(points)]
            found = _distinct(np.concatenate([found, points[~np.isin(points, exclude)]]))
            if len(found) >= n:
                break
            chunk = max(chunk, min(2 * chunk, _MOST_DRAWN))
        return found[:n]

    def neighbours(self, points: Points, rng: np.random.Generator, tries: int = 4) -> Points:
        """A legal point one knob step from each; the point itself where none was found."""
        result = points.copy()
        todo = np.arange(len(points))
        for _ in range(tries):
            moved = points[todo].copy()
            for part, offset, rows in self._split(moved):
                moved[rows] = offset + part.move(moved[rows] - offset, rng)
            ok = self.legal(moved)
            result[todo[ok]] = moved[ok]
            todo = todo[~ok]
            if not len(todo):
                break
        return result

    def moves(self, points: Points, rng: np.random.Generator, tries: int = 3) -> Points:
        """As `neighbours`, with all tries judged at once: few points cost little more than one."""
        moved = np.tile(points, tries)
        for part, offset, rows in self._split(moved):
            moved[rows] = offset + part.move(moved[rows] - offset, rng)
        ok = self.legal(moved).reshape(tries, -1)
        first = moved.reshape(tries, -1)[ok.argmax(axis=0), np.arange(len(points))]
        return np.where(ok.any(axis=0), first, points)

    def around(self, point: int) -> Points:
        """Every legal point one knob step away from `point`."""
        part, local = self._part(point)
        return part.around(local) + (point - local)

    def census(self, seed: int = 0) -> Census:
        """Legal points and what each rule removes, counted or estimated."""
        legal, exact, counts = 0.0, True, []
        for part in self.parts:
            full = part.size <= ENUMERABLE
            exact &= full
            points = (
                np.arange(part.size, dtype=np.int64)
                if full
                else part.draw(np.random.default_rng(seed), ENUMERABLE)
            )
            values = part.columns(part.indices(points))
            weight = part.size / len(points)
            legal += float(part.legal(points).sum()) * weight
            for rule in part.rules:
                removed = round(float((~rule.ok(values)).sum()) * weight)
                counts.append(RuleCount(part.family.name, rule.name, removed))
        return Census(self.size, round(legal), exact, tuple(counts))

    def _empty_message(self) -> str:
        rules = ", ".join(f"{c.family}/{c.rule} {c.removed}" for c in self.census().rules)
        return f"the space of '{self.workload}' has no legal point among {self.size}: {rules}"

    # -- numbers for models and distances ---------------------------------------------------

    def coordinates(self, points: Points) -> NDArray[np.float64]:
        """Choice indices scaled to [0, 1], family first; knobs of other families are -1."""
        width = max(len(part.knobs) for part in self.parts)
        out = np.full((len(points), 1 + width), -1.0)
        for part, offset, rows in self._split(points):
            out[rows, 0] = self.parts.index(part)
            spans = np.maximum(part._sizes - 1, 1)
            out[rows, 1 : 1 + len(part.knobs)] = part.indices(points[rows] - offset) / spans
        return out

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Column names of `encode`: workload.*, target.*, family=*, knobs by path, derived.*."""
        names: dict[str, None] = dict.fromkeys(self._constants)
        names |= dict.fromkeys(f"family={part.family.name}" for part in self.parts)
        for part in self.parts:
            names |= dict.fromkeys(self._part_features(part, np.array([part.default])))
        return tuple(names)

    @cached_property
    def _constants(self) -> dict[str, float]:
        described = self.workload.descriptors()
        constants = {f"workload.{name}": float(v) for name, v in described.items()}
        constants |= {"workload.flops": self.workload.flops, "workload.bytes": self.workload.bytes}
        return constants | {f"target.{n}": float(v) for n, v in self.target.descriptors().items()}

    def _part_features(self, part: FamilySpace, local: Points) -> dict[str, NDArray[np.float64]]:
        indices = part.indices(local)
        features: dict[str, NDArray[np.float64]] = {}
        for i, knob in enumerate(part.knobs):
            features |= zip(knob.columns, knob.encode(indices[:, i]).T, strict=True)
        derived = part.family.derive(self.workload, self.target, part.columns(indices))
        return features | {f"derived.{name}": column for name, column in derived.items()}

    def encode(self, points: Points) -> Features:
        """Model features, shape [len(points), len(feature_names)]; absent knobs are NaN.

        Rounded to few significant bits, so that the last bit of a quotient, which differs between
        instruction sets, never reaches a model.
        """
        column = {name: i for i, name in enumerate(self.feature_names)}
        out = np.full((len(points), len(column)), np.nan, dtype=np.float32)
        for name, value in self._constants.items():
            out[:, column[name]] = value
        for part in self.parts:
            out[:, column[f"family={part.family.name}"]] = 0.0
        for part, offset, rows in self._split(points):
            where = slice(None) if len(rows) == len(points) else rows
            out[where, column[f"family={part.family.name}"]] = 1.0
            for name, values in self._part_features(part, points[where] - offset).items():
                out[where, column[name]] = values
        return round_significant(out)


def round_significant(values: NDArray[np.floating]) -> Features:
    """float32 with the mantissa rounded to `_SIGNIFICANT_BITS` bits; NaN and infinities kept."""
    single = values.astype(np.float32, copy=False)
    bits = single.view(np.uint32)
    drop = 23 - _SIGNIFICANT_BITS
    rounded = (bits + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    return np.where(np.isfinite(single), rounded.view(np.float32), single)


def _distinct(points: Points) -> Points:
    """Distinct points in order of first appearance."""
    _, first = np.unique(points, return_index=True)
    return points[np.sort(first)]
