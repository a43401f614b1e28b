"""θ: seven components in a fixed order, a canonical key, a readable text."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kt.spaces.theta import COMPONENTS, Theta, theta_from_flat

NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
VALUES = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=8))
FLAT = st.dictionaries(
    st.tuples(st.sampled_from(COMPONENTS), NAMES).map(".".join), VALUES, max_size=12
)


def test_theta_has_exactly_the_seven_components_in_order() -> None:
    assert COMPONENTS == ("tile", "mem", "perm", "fusion", "unroll", "map", "sync")
    assert Theta.__struct_fields__ == COMPONENTS
    assert list(json.loads(msgspec.json.encode(Theta()))) == list(COMPONENTS)


@given(FLAT)
def test_flat_and_json_read_back_as_the_same_theta(values: dict[str, bool | int | str]) -> None:
    theta = theta_from_flat(values)
    assert theta.flat() == values
    assert theta_from_flat(theta.flat()) == theta
    again = msgspec.json.decode(msgspec.json.encode(theta), type=Theta)
    assert again == theta and again.key() == theta.key()


@given(FLAT, st.randoms(use_true_random=False))
def test_the_key_does_not_depend_on_the_order_of_knobs(
    values: dict[str, bool | int | str], random: object
) -> None:
    items = list(values.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    a, b = theta_from_flat(values), theta_from_flat(dict(items))
    assert a == b and a.key() == b.key() and hash(a) == hash(b)


def test_the_key_tells_values_and_types_apart() -> None:
    keys = {Theta(tile={"x": value}).key() for value in (1, True, "1", 2, "true")}
    assert len(keys) == 5
    assert Theta(tile={"x": 1}).key() != Theta(mem={"x": 1}).key()


def test_the_text_lists_what_is_set() -> None:
    theta = Theta(tile={"bm": 64, "bn": 8}, fusion={"fused": True}, sync={"wait": "none"})
    assert str(theta) == "tile(bm=64, bn=8) fusion(fused=true) sync(wait=none)"
    assert str(Theta()) == ""
    assert [item[0] for item in theta.items()] == ["tile", "tile", "fusion", "sync"]
