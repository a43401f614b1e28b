"""Knob kinds: sampling, neighbours, encoding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt.spaces.knob import Categorical, Knob, Ordinal

SIZES = st.integers(1, 9)


def ordinal(size: int) -> Knob:
    return Ordinal("tile", "x", tuple(3 * i + 1 for i in range(size)))


def categorical(size: int) -> Knob:
    return Categorical("mem", "y", tuple(f"c{i}" for i in range(size)))


def either(size: int) -> list[Knob]:
    return [ordinal(size), categorical(size)]


@given(SIZES, st.integers(0, 2**32))
def test_every_step_is_to_a_neighbour_and_every_neighbour_is_reached(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for knob in either(size):
        for index in range(size):
            reached = set(knob.step(np.full(200, index), rng).tolist())
            assert reached == (set(knob.neighbours(index)) or {index})


@given(SIZES)
def test_neighbours_are_mutual_and_never_the_choice_itself(size: int) -> None:
    for knob in either(size):
        near = {i: set(knob.neighbours(i)) for i in range(size)}
        assert all(i not in found and all(i in near[j] for j in found) for i, found in near.items())
    assert {i: set(ordinal(size).neighbours(i)) for i in range(size)} == {
        i: {i - 1, i + 1} & set(range(size)) for i in range(size)
    }
    assert all(len(categorical(size).neighbours(i)) == size - 1 for i in range(size))


@given(SIZES)
def test_encoding_tells_the_choices_apart_in_named_columns(size: int) -> None:
    for knob in either(size):
        encoded = knob.encode(np.arange(size))
        assert encoded.shape == (size, len(knob.columns))
        assert len(np.unique(encoded, axis=0)) == size
        assert len(set(knob.columns)) == len(knob.columns)
        assert all(name.startswith(knob.path) for name in knob.columns)


def test_ordinals_are_encoded_by_value_and_categories_one_hot() -> None:
    assert ordinal(3).encode(np.array([2, 0])).tolist() == [[7.0], [1.0]]
    assert ordinal(3).columns == ("tile.x",)
    flag = Categorical("fusion", "fused", (False, True))
    assert flag.columns == ("fusion.fused=false", "fusion.fused=true")
    assert flag.encode(np.array([1])).tolist() == [[0.0, 1.0]]


def test_an_index_needs_the_value_and_its_type() -> None:
    assert Ordinal("tile", "x", (0, 1, 2)).index(1) == 1
    assert Ordinal("tile", "x", (0, 1, 2)).index(True) is None
    assert Categorical("tile", "x", (False, True)).index(1) is None
    assert Categorical("tile", "x", ("1", "2")).index(2) is None


def test_samples_are_uniform_over_the_choices() -> None:
    counts = np.bincount(ordinal(5).sample(np.random.default_rng(0), 10_000))
    assert len(counts) == 5 and counts.min() > 1800


@pytest.mark.parametrize("choices", [(), (1, 1), (True, 1)])
def test_choices_must_be_distinct_and_not_empty(choices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tile\.x: choices must be distinct"):
        Ordinal("tile", "x", choices)


def test_a_knob_belongs_to_one_of_the_seven_components() -> None:
    with pytest.raises(ValueError, match="unknown component tiles"):
        Ordinal("tiles", "x", (1,))
