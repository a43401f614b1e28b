"""Arithmetic on extents: how many parts cover one, and which choices of a part are worth having."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)


def round_up(a: Any, b: Any) -> Any:
    return ceil_div(a, b) * b


def until_covered(choices: tuple[int, ...], extent: int) -> tuple[int, ...]:
    """The choices up to the first that covers `extent`."""
    first = next((i for i, c in enumerate(choices) if c >= extent), len(choices) - 1)
    return choices[: first + 1]


def with_extent(choices: Sequence[int], extent: int) -> tuple[int, ...]:
    """The choices below `extent`, and `extent` itself (one part) where it is not too large."""
    below = tuple(c for c in choices if c < extent)
    return (*below, extent) if extent <= 2 * choices[-1] or not below else below
