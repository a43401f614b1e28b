"""Tables of rules say what the rules say."""

from __future__ import annotations

import numpy as np
import pytest

from kt.spaces import legality
from kt.spaces.families import space_of
from kt.spaces.family import Rule
from kt.spaces.knob import Ordinal
from kt.spaces.legality import Columns, Digits, Legality
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import parse

KNOBS = (Ordinal("tile", "a", (1, 2, 4)), Ordinal("tile", "b", (1, 3)), Ordinal("mem", "c", (5, 7)))
TEXTS = (
    "gemm 300x5000x700 dtype=bf16", "gemm 512x512x512 batch=3 dtype=fp32",
    "gemm 16x2048x2048 layout=nt dtype=fp16", "conv2d 2x14x14x64,64x3x3 pad=1 groups=4 dtype=bf16",
    "attention 1x4x1x64 kv-len=300 dtype=bf16", "attention 1x4x256x64 causal=true dtype=bf16",
)  # fmt: skip


def rule(name: str, ok: object) -> Rule:
    return Rule(name, ok, lambda _: name)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS)
def test_a_space_judges_as_its_rules_do_before_and_after_tables(text: str) -> None:
    space, rng = space_of(parse(text), CUDA_TARGETS["h200"]), np.random.default_rng(0)
    for part in space.parts:
        legal = 0
        for _ in range(12):
            points = np.concatenate([part.draw(rng, 6000), [part.default]])
            values = part.columns(part.indices(points))
            expected = np.all([r.ok(values) for r in part.rules], axis=0)
            np.testing.assert_array_equal(part.legal(points), expected)
            legal += int(expected.sum())
        assert legal >= 12 and part._legality._state[0], part.family.name


def test_a_rule_becomes_a_table_once_it_judged_all_that_it_can_tell_apart() -> None:
    asked = []

    def ok(v: Columns) -> object:
        asked.append(len(v["a"]))
        return v["a"] * v["c"] < 20

    judged = Legality(Digits(KNOBS), [rule("product", ok)])
    points = np.arange(12)
    first = judged.legal(points)
    assert first.tolist() == [True] * 4 + [True] * 4 + [False] * 4
    assert asked == [12, 2, 6]  # the points, which knobs it looks at, their combinations
    assert judged.legal(points).tolist() == first.tolist() and len(asked) == 3


def test_small_tables_become_one_and_large_rules_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = Digits(KNOBS)
    rules = [rule("a", lambda v: v["a"] > 1), rule("b", lambda v: v["b"] * v["a"] != 6)]
    joined = Legality(digits, rules)
    points = np.arange(12)
    expected = joined.legal(points).tolist()
    tables, judges = joined._state
    assert len(tables) == 1 and tables[0].said.shape == (3, 2) and not judges
    assert (
        joined.legal(points).tolist()
        == expected
        == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 4
    )
    monkeypatch.setattr(legality, "_LARGEST_JOINT", 5)
    apart = Legality(digits, rules)
    assert apart.legal(points).tolist() == expected and len(apart._state[0]) == 2
    monkeypatch.setattr(legality, "_LARGEST_TABLE", 5)
    large = Legality(digits, rules)
    assert large.legal(points).tolist() == expected
    assert len(large._state[0]) == 1 and len(large._state[1]) == 1


def test_nothing_and_one_point_are_judged() -> None:
    judged = Legality(Digits(KNOBS), [rule("a", lambda v: v["a"] > 1)])
    assert judged.legal(np.empty(0, dtype=np.int64)).tolist() == []
    assert judged.legal(np.array([0])).tolist() == [False]
    assert judged.legal(np.array([11])).tolist() == [True]
