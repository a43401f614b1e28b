"""Option types and option groups of the command line. Imports nothing heavy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kt.spaces.workload import OPERATORS, Option

from .text import one_line

F = TypeVar("F", bound=Callable[..., Any])

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
LONGEST_SECONDS = 30 * 86400.0


def duration(text: str) -> float:
    """Option type: seconds from texts like 90, 90s, 5m, 1h30m."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not text.strip():
        raise click.BadParameter(f"'{one_line(text, 80)}' is no duration: accepts 90, 5m, 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = 3600 * hours + 60 * minutes + seconds
    if not 0 < total <= LONGEST_SECONDS:
        raise click.BadParameter(f"'{one_line(text, 80)}': accepts more than 0, up to 30 days")
    return total


def indices(text: str) -> tuple[int, ...]:
    """Option type: distinct device numbers from texts like 0,1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,3}", part) for part in parts):
        raise click.BadParameter(f"'{one_line(text, 80)}': accepts GPU numbers like 0,1")
    numbers = tuple(map(int, parts))
    if len(set(numbers)) < len(numbers):
        raise click.BadParameter(f"'{one_line(text, 80)}' names a GPU twice")
    return numbers


def share(low: float = 0.0, high: float = 1.0) -> Callable[[str], float]:
    """Option type: a share within `low` and `high`, from texts like 5% or 0.05."""

    def convert(text: str) -> float:
        try:
            number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            accepts = f"{low:g} to {high:g}, or {100 * low:g}% to {100 * high:g}%"
            raise click.BadParameter(f"'{one_line(text, 80)}': accepts {accepts}")
        return number

    return convert


def _merged() -> dict[str, list[tuple[str, Option]]]:
    """Every workload option by key, with the operators that have it."""
    found: dict[str, list[tuple[str, Option]]] = {}
    for operator, kind in OPERATORS.items():
        for option in kind.OPTIONS:
            found.setdefault(option.key, []).append((operator, option))
    return found


def _help(uses: list[tuple[str, Option]]) -> str:
    """One line: what the option means, for which operators, and what it accepts."""
    texts = dict.fromkeys(
        o.help if o.kind == "flag" else f"{o.help} ({o.accepts})" for _, o in uses
    )
    if len(texts) == 1:
        text = next(iter(texts))
        return text if len(uses) == len(OPERATORS) else f"{'/'.join(u[0] for u in uses)}: {text}"
    return "; ".join(f"{operator}: {o.help} ({', '.join(o.choices)})" for operator, o in uses)


def workload_options(hidden: bool = False) -> Callable[[F], F]:
    """Adds every workload option of every operator, as texts (None when not given)."""

    def decorate(command: F) -> F:
        for key, uses in reversed(_merged().items()):
            flag = uses[0][1].kind == "flag"
            switch: dict[str, Any] = {"is_flag": True, "flag_value": "true"} if flag else {}
            command = click.option(
                f"--{key}", uses[0][1].field, default=None, hidden=hidden, help=_help(uses),
                metavar=None if flag else uses[0][1].kind.upper(), type=str, **switch,
            )(command)  # fmt: skip
        return command

    return decorate


def workload_argument(command: F) -> F:
    """The words of a workload's text, joined by `kt.tuner.request`."""
    return click.argument("words", metavar="[WORKLOAD]...", nargs=-1)(command)
