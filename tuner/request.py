"""Which workloads a command line asks for: words, flags and a file become `Workload`s."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kt.logs.record import LEAST_WEIGHT, MOST_WEIGHT
from kt.spaces.errors import LogError, SettingsError, WorkloadError
from kt.spaces.workload import OPERATORS, Option, Workload, parse

from .warm import distance

LARGEST_FILE = 4 * 2**20
_ACCEPTED = ", ".join(f"{name} {kind.SHAPE}" for name, kind in OPERATORS.items())


def workloads_of(
    words: Sequence[str], flags: Mapping[str, str | None], default_dtype: str
) -> list[Workload]:
    """Every workload asked for, in order. `flags` are option texts by field, and hold for all."""
    if not words:
        raise WorkloadError(f"no workload: accepts {_ACCEPTED}")
    return list(weighted_workloads(words, flags, None, default_dtype))


def weighted_workloads(
    words: Sequence[str], flags: Mapping[str, str | None], file: Path | None, default_dtype: str
) -> dict[Workload, float]:
    """Those of the words and of a file with the weight of each: 1 where a line has no `weight=`."""
    if file is None and not words:
        raise WorkloadError(f"no workload: accepts {_ACCEPTED}, or --workloads FILE")
    found: dict[Workload, float] = {}
    given = [("", group) for group in groups_of(words)]
    for place, group in [*given, *(_lines(file) if file else ())]:
        try:
            weight = _weight(group) if place else 1.0
            workload = parse(with_flags(group, flags), default_dtype)
            if workload in found:
                raise WorkloadError(f"'{workload}' is given twice")
        except WorkloadError as error:
            raise WorkloadError(f"{place}{error}") from None
        found[workload] = weight
    return found


def _weight(words: list[str]) -> float:
    """Takes `weight=NUMBER` out of a line's words."""
    given = [word for word in words if word.lower().startswith("weight=")]
    if not given:
        return 1.0
    words[:] = [word for word in words if word not in given]
    text = given[-1].partition("=")[2]
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if len(given) > 1 or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        accepts = f"one number of {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        raise WorkloadError(f"{' '.join(given)}: accepts {accepts}")
    return weight


def with_flags(words: Sequence[str], flags: Mapping[str, str | None]) -> list[str]:
    """`words` with the given flags as `key=value`; one that is there already must agree."""
    given = _given(flags)
    kind = OPERATORS.get(words[0].lower()) if words else None
    if kind is None or not given:
        return list(words)
    options = {option.field: option for option in kind.OPTIONS}
    texts = _written(words[2:], options)
    added = []
    for field, text in given.items():
        if field not in options:
            accepts = ", ".join(f"--{option.key}" for option in kind.OPTIONS)
            raise WorkloadError(f"{kind.OPERATOR} has no option {_flag(field)}: accepts {accepts}")
        option = options[field]
        value = option.read(text)
        if field not in texts:
            added.append(f"{option.key}={option.show(value)}")
        elif option.read(texts[field]) != value:
            raise WorkloadError(f"--{option.key} {text} contradicts '{option.key}={texts[field]}'")
    return [*words, *added]


def _given(flags: Mapping[str, str | None]) -> dict[str, str]:
    return {field: text for field, text in flags.items() if text is not None}


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _written(words: Iterable[str], options: Mapping[str, Option]) -> dict[str, str]:
    """Values of the `key=value` words that name an option, by field."""
    pairs = (word.partition("=") for word in words)
    found = ((key.lower().replace("-", "_"), value) for key, _, value in pairs)
    return {field: value for field, value in found if field in options}


def groups_of(words: Sequence[str]) -> list[list[str]]:
    """Words split where an operator's name begins another workload."""
    groups: list[list[str]] = [[]] if words else []
    for word in (w for text in words for w in text.split()):
        if word.lower() in OPERATORS and groups[-1]:
            groups.append([])
        groups[-1].append(word)
    return groups


def _lines(file: Path) -> list[tuple[str, list[str]]]:
    """(place, words) of each line of a workloads file; `#` begins a comment."""
    try:
        with open(file, "rb") as source:
            data = source.read(LARGEST_FILE + 1)
    except OSError as error:
        raise SettingsError(f"cannot read --workloads {file}: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise SettingsError(f"--workloads {file}: larger than {LARGEST_FILE} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SettingsError(f"--workloads {file}: not UTF-8 text") from None
    numbered = enumerate((line.partition("#")[0].split() for line in text.split("\n")), 1)
    found = [(f"{file}:{number}: ", words) for number, words in numbered if words]
    if not found:
        raise SettingsError(f"--workloads {file}: no workload in this file (one a line)")
    return found


def choose_logged(
    logged: Sequence[str], words: Sequence[str], flags: Mapping[str, str | None]
) -> list[str]:
    """The logged workloads that the words name, or all of operators that stand alone.

    Without words all are meant. Flags are options of the workloads named and restrict the others;
    an element type may be left out. Raises LogError listing the choices when none fits.
    """
    groups = groups_of(words) or [[]]
    return list(dict.fromkeys(text for group in groups for text in _chosen(logged, group, flags)))


def _chosen(
    logged: Sequence[str], group: Sequence[str], flags: Mapping[str, str | None]
) -> list[str]:
    """The logged workloads of one group of words: all of an operator, or one by its text."""
    if not group:
        return _having(logged, "workload", _given(flags))
    operator = group[0].lower()
    if len(group) == 1 and operator in OPERATORS:
        alike = [text for text in logged if text.split()[:1] == [operator]]
        if not alike:
            raise LogError(f"the log has no {operator}; it has {listed(logged)}")
        return _having(alike, operator, _given(flags))
    given = with_flags(group, flags)
    found = [text for text in logged if _names(given, text)]
    if not found:
        asked = parse(given)  # a malformed text is refused as such
        near = listed(nearest_first(logged, asked))
        raise LogError(f"the log has no '{shlex.join(given)}'; it has {near}")
    return found


def _having(texts: Sequence[str], what: str, options: Mapping[str, str]) -> list[str]:
    """Those of `texts` that have these option values; LogError when there are none of `what`."""
    if not options:
        return list(texts)
    found = [text for text in texts if _fits(text, options)]
    if not found:
        asked = " ".join(f"{_flag(field)} {value}" for field, value in options.items())
        raise LogError(f"the log has no {what} with {asked}; it has {listed(texts)}")
    return found


def _fits(text: str, flags: Mapping[str, str]) -> bool:
    """Whether a logged workload has these option values; raises WorkloadError for no value."""
    try:
        workload = parse(text)
    except WorkloadError:
        return False  # a log may hold anything
    options = {option.field: option for option in workload.OPTIONS}
    return all(
        field in options and getattr(workload, field) == options[field].read(value)
        for field, value in flags.items()
    )


def _names(given: Sequence[str], text: str) -> bool:
    try:
        candidate = parse(text)
        return parse(given, candidate.dtype) == candidate
    except WorkloadError:
        return False  # a log may hold anything


def nearest_first(logged: Sequence[str], asked: Workload) -> list[str]:
    """Logged workloads in the order of their likeness to one; those of its operator first."""

    def key(text: str) -> float:
        try:
            other = parse(text)
        except WorkloadError:
            return math.inf  # a log may hold anything
        return distance(asked, other) if type(other) is type(asked) else math.inf

    return sorted(logged, key=key)


def listed(texts: Sequence[str], most: int = 5) -> str:
    """`'a', 'b' … and 3 more`, for messages."""
    shown = ", ".join(f"'{text}'" for text in texts[:most])
    return shown + (f" … and {len(texts) - most} more" if len(texts) > most else "")
