"""Arithmetic on extents."""

from __future__ import annotations

import numpy as np
import pytest

from kt.spaces.extents import ceil_div, round_up, until_covered, with_extent


def test_division_and_rounding_go_up() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert round_up(np.array([1, 16, 17]), 16).tolist() == [16, 16, 32]


@pytest.mark.parametrize(
    ("extent", "kept"), [(1, (16,)), (16, (16,)), (17, (16, 32)), (1000, (16, 32, 64))]
)
def test_one_choice_at_most_covers_the_extent(extent: int, kept: tuple[int, ...]) -> None:
    assert until_covered((16, 32, 64), extent) == kept


@pytest.mark.parametrize(
    ("extent", "kept"),
    [(1, (1,)), (16, (16,)), (40, (16, 32, 40)), (128, (16, 32, 64, 128)), (129, (16, 32, 64))],
)
def test_the_extent_itself_is_a_choice_unless_it_is_large(
    extent: int, kept: tuple[int, ...]
) -> None:
    assert with_extent((16, 32, 64), extent) == kept
