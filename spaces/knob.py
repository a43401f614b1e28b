"""Knobs: one tunable decision each. A knob kind owns its sampling, neighbours and encoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .theta import COMPONENTS, Value

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Knob(ABC):
    """A decision of `component` with a finite list of choices; points hold indices into it."""

    component: str
    name: str
    choices: tuple[Value, ...]

    def __post_init__(self) -> None:
        if self.component not in COMPONENTS:
            raise ValueError(f"unknown component {self.component}")
        if not self.choices or len(set(self.choices)) != len(self.choices):
            raise ValueError(f"{self.path}: choices must be distinct and not empty")

    @property
    def path(self) -> str:
        return f"{self.component}.{self.name}"

    @property
    def integers(self) -> list[int]:
        """The choices of a knob that counts something."""
        return [c for c in self.choices if isinstance(c, int)]

    @property
    def values(self) -> NDArray[np.generic]:
        """The choices as an array, for vectorised look-up."""
        return np.array(self.choices)

    def index(self, value: Value) -> int | None:
        """Position of `value`, or None; a bool never equals a number here."""
        for i, choice in enumerate(self.choices):
            if type(choice) is type(value) and choice == value:
                return i
        return None

    def sample(self, rng: np.random.Generator, n: int) -> Indices:
        """`n` uniform choices."""
        return rng.integers(len(self.choices), size=n)

    @abstractmethod
    def step(self, indices: Indices, rng: np.random.Generator) -> Indices:
        """A neighbouring choice of each index (the same one when there is no other)."""

    @abstractmethod
    def neighbours(self, index: int) -> list[int]:
        """Every neighbouring choice of one index."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Names of the feature columns."""

    @abstractmethod
    def encode(self, indices: Indices) -> NDArray[np.float64]:
        """Features, shape [len(indices), len(columns)]."""


class Ordinal(Knob):
    """Ordered choices (numbers): neighbours are one step away, encoded by value."""

    def step(self, indices: Indices, rng: np.random.Generator) -> Indices:
        last = len(self.choices) - 1
        up = rng.random(len(indices)) < 0.5
        up = np.where(indices == 0, True, np.where(indices == last, False, up))
        return np.clip(indices + np.where(up, 1, -1), 0, last)

    def neighbours(self, index: int) -> list[int]:
        return [i for i in (index - 1, index + 1) if 0 <= i < len(self.choices)]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.path,)

    def encode(self, indices: Indices) -> NDArray[np.float64]:
        return self.values.astype(np.float64)[indices][:, None]


class Categorical(Knob):
    """Unordered choices: every other one is a neighbour, encoded one-hot."""

    def step(self, indices: Indices, rng: np.random.Generator) -> Indices:
        n = len(self.choices)
        if n == 1:
            return indices
        return (indices + rng.integers(1, n, size=len(indices))) % n

    def neighbours(self, index: int) -> list[int]:
        return [i for i in range(len(self.choices)) if i != index]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"{self.path}={str(choice).lower()}" for choice in self.choices)

    def encode(self, indices: Indices) -> NDArray[np.float64]:
        return np.eye(len(self.choices))[indices]
