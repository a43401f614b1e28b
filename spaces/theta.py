"""θ = (tile, mem, perm, fusion, unroll, map, sync): one point of a schedule space.

`Theta` always has the seven components in this order; each maps the sub-knobs that the kernel
family declares under it to their values. The log stores it as a nested object with these keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

Value = bool | int | str

COMPONENTS = ("tile", "mem", "perm", "fusion", "unroll", "map", "sync")

_encoder = msgspec.json.Encoder(order="sorted")


class Theta(msgspec.Struct, frozen=True):
    """One schedule. Equal thetas have equal `key()`."""

    tile: dict[str, Value] = {}
    mem: dict[str, Value] = {}
    perm: dict[str, Value] = {}
    fusion: dict[str, Value] = {}
    unroll: dict[str, Value] = {}
    map: dict[str, Value] = {}
    sync: dict[str, Value] = {}

    def items(self) -> Iterator[tuple[str, str, Value]]:
        """(component, knob, value) in component order."""
        for component in COMPONENTS:
            for name, value in getattr(self, component).items():
                yield component, name, value

    def flat(self) -> dict[str, Value]:
        """Values by `component.knob`."""
        return {f"{component}.{name}": value for component, name, value in self.items()}

    def key(self) -> str:
        """Canonical text, for identity and hashing."""
        return _encoder.encode({c: getattr(self, c) for c in COMPONENTS}).decode()

    def __hash__(self) -> int:
        return hash(self.key())

    def __str__(self) -> str:
        parts = []
        for component in COMPONENTS:
            knobs = getattr(self, component)
            if knobs:
                inside = ", ".join(f"{name}={_text(value)}" for name, value in knobs.items())
                parts.append(f"{component}({inside})")
        return " ".join(parts)


def theta_from_flat(values: dict[str, Value]) -> Theta:
    """The Theta of values keyed `component.knob`."""
    nested: dict[str, dict[str, Value]] = {component: {} for component in COMPONENTS}
    for path, value in values.items():
        component, _, name = path.partition(".")
        nested[component][name] = value
    return Theta(**nested)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
