"""Constraints and defaults of a T1 problem description, over a recorded space's parameters.

An expression is parsed and evaluated node by node over arrays; nothing of the file is executed.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt.spaces.errors import LogError

Columns = Mapping[str, NDArray[Any]]

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: np.true_divide, ast.FloorDiv: np.floor_divide, ast.Mod: np.mod, ast.Pow: np.power,
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_CALLS: Mapping[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum, "abs": np.abs}
_LONGEST = 4096


@dataclass(frozen=True)
class Description:
    """What a T1 file adds to a recording: conditions by text, and each parameter's default."""

    conditions: Mapping[str, Callable[[Columns], NDArray[np.bool_]]]
    defaults: Mapping[str, bool | int | float | str]


def read_description(path: Path) -> Description:
    """The T1 file in `path`; raises LogError naming what is not understood."""
    try:
        space = json.loads(path.read_text())["ConfigurationSpace"]
        expressions = [one["Expression"] for one in space.get("Conditions", ())]
        defaults = {
            one["Name"]: one["Default"] for one in space["TuningParameters"] if "Default" in one
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LogError(f"{path}: not a T1 problem description ({error})") from None
    return Description({text: condition(path, text) for text in expressions}, defaults)


def condition(path: Path, text: str) -> Callable[[Columns], NDArray[np.bool_]]:
    """A condition over parameter columns from a Python boolean expression."""
    try:
        tree = ast.parse(text[:_LONGEST].strip(), mode="eval").body
        evaluator = _evaluator(tree)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise LogError(f"{path}: condition '{text[:80]}': {error}") from None

    def ok(values: Columns) -> NDArray[np.bool_]:
        with np.errstate(all="ignore"):
            found = np.asarray(evaluator(values), dtype=bool)
        size = len(next(iter(values.values())))
        return np.broadcast_to(found, (size,)).copy()

    return ok


def _evaluator(node: ast.expr) -> Callable[[Columns], Any]:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return lambda values: value
        case ast.Name(id=name):
            return lambda values: values[name]
        case ast.BoolOp(op=op, values=parts):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            terms = [_evaluator(part) for part in parts]
            return lambda values: join.reduce(_aligned([term(values) for term in terms]))
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            negated = _evaluator(inner)
            return lambda values: np.logical_not(negated(values))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            positive = _evaluator(inner)
            return lambda values: -positive(values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            apply, a, b = _BINARY[type(op)], _evaluator(left), _evaluator(right)
            return lambda values: apply(a(values), b(values))
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _comparison([left, *others], ops)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _CALLS:
            call, inputs = _CALLS[name], [_evaluator(one) for one in arguments]
            return lambda values: call(*(one(values) for one in inputs))
    raise ValueError(f"'{ast.unparse(node)}' is not accepted in a condition")


def _comparison(nodes: list[ast.expr], ops: list[ast.cmpop]) -> Callable[[Columns], Any]:
    sides = [_evaluator(node) for node in nodes]
    if not all(type(op) in _COMPARE for op in ops):
        raise ValueError("only == != < <= > >= are accepted")

    def compare(values: Columns) -> Any:
        given = [side(values) for side in sides]
        held = [_COMPARE[type(op)](given[i], given[i + 1]) for i, op in enumerate(ops)]
        return np.logical_and.reduce(_aligned(held))

    return compare


def _aligned(terms: list[Any]) -> list[NDArray[np.bool_]]:
    return list(np.broadcast_arrays(*(np.asarray(term, dtype=bool) for term in terms)))
