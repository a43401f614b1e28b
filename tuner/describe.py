"""`kt space` and `kt target`: what can be tuned, and on what."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kt.logs.record import Failure
from kt.spaces.errors import KtError, SettingsError, SpaceError
from kt.spaces.families import space_of
from kt.spaces.space import Census, FamilySpace, Space
from kt.spaces.target import CUDA_TARGETS, Target, detect_cpu
from kt.spaces.theta import COMPONENTS, Theta, Value

from .api import DTYPE
from .devices import described_target
from .request import workloads_of
from .summary import device_text
from .text import columns, one_line

if TYPE_CHECKING:
    from .backend.cc import CCompiler

_SMALLEST = "#include <pthread.h>\nint kt_launch(void *const *args) { return args == 0; }\n"
_PREFLIGHT_SECONDS = 30.0
_LIMIT = "  (physical limit, not measured)"
"""No time below it is believed; `kt tune` measures what this machine reaches."""


def space_command(
    *, words: tuple[str, ...], target: str, theta: str | None, as_json: bool, **flags: str | None
) -> int:
    """Prints the space of one or several workloads, or judges one θ."""
    device = described_target(target)
    for workload in workloads_of(words, flags, DTYPE[device.kind]):
        space = space_of(workload, device)
        if theta is not None:
            family, checked = read_theta(space, theta)
            space.check(family, checked)
            print(f"legal in family {family}: {checked}")
        elif as_json:
            print(json.dumps(space_facts(space)))
        else:
            print("\n".join(space_lines(space)))
    return 0


def read_theta(space: Space, given: str) -> tuple[str, Theta]:
    """(family, θ) of JSON text: a θ, or an object with `family` and `theta` as in a log."""
    try:
        found = msgspec.json.decode(given)
        if isinstance(found, dict) and "theta" in found:
            family, found = found.get("family"), found["theta"]
        else:
            family = None
        theta = msgspec.convert(found, Theta)
        unknown = set(found) - set(COMPONENTS)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SettingsError(f"--check: not a θ as JSON ({error})") from None
    if unknown:
        raise SpaceError(
            f"--check: unknown component {', '.join(sorted(unknown))}: accepts "
            f"{', '.join(COMPONENTS)}"
        )
    names = [part.family.name for part in space.parts]
    if family is None and len(names) > 1:
        names = [name for name in names if _member(space, name, theta)] or names
    if family is None and len(names) > 1:
        raise SettingsError(f'--check: say which family with "family": {", ".join(names)}')
    return str(family or names[0]), theta


def _member(space: Space, family: str, theta: Theta) -> bool:
    try:
        space.point(family, theta)
    except SpaceError:
        return False
    return True


def space_lines(space: Space) -> list[str]:
    """The space for people."""
    lines = [f"{space.workload} on {space.target.name}: {device_text(space.target)}"]
    for part in space.parts:
        census = Space(space.workload, space.target, [part.family]).census()
        lines += ["", *_family_lines(part, census)]
    lines += [f"\nfamily {name} does not serve this: {why}" for name, why in space.refused.items()]
    return lines


def _family_lines(part: FamilySpace, census: Census) -> Iterator[str]:
    how = "counted" if census.exact else "estimated from a sample"
    share = 100 * census.legal / census.points
    yield f"family {part.family.name}: {_size(census.points)} points, {share:.3g} % legal ({how})"
    rows = []
    for component in COMPONENTS:
        knobs = [knob for knob in part.knobs if knob.component == component]
        if not knobs:
            rows.append(("", component, "–", part.family.empty.get(component, "unused")))
        for i, knob in enumerate(knobs):
            choices = " ".join(map(_text, knob.choices))
            rows.append(("", "" if i else component, knob.name, choices))
    yield from columns(rows)
    if census.rules:
        yield f"  rules, and the points that each one removes ({how})"
        removed = [
            ("   ", c.rule, _size(c.removed), _share(c.removed, census)) for c in census.rules
        ]
        yield from columns(removed, right={2, 3})
    yield f"  default {default_theta(part)}"


def default_theta(part: FamilySpace) -> Theta:
    """A family's default."""
    alone = Space(part.workload, part.target, [part.family])
    return alone.theta(int(alone.defaults()[0]))


def _share(count: int, census: Census) -> str:
    return f"{100 * count / census.points:.3g} %"


def _size(count: int) -> str:
    return f"{count:,}" if count < 10_000_000 else f"{count:.3g}"


def _text(value: Value) -> str:
    return str(value).lower()


def space_facts(space: Space) -> dict[str, Any]:
    """The space for machines."""
    families = []
    for part in space.parts:
        census = Space(space.workload, space.target, [part.family]).census()
        families.append(
            {
                "family": part.family.name,
                "points": census.points, "legal": census.legal, "exact": census.exact,
                "knobs": {k.path: list(k.choices) for k in part.knobs},
                "empty": {
                    c: part.family.empty.get(c, "unused")
                    for c in COMPONENTS
                    if not any(k.component == c for k in part.knobs)
                },
                "rules": {count.rule: count.removed for count in census.rules},
                "default": msgspec.to_builtins(default_theta(part)),
            }
        )  # fmt: skip
    return {
        "workload": str(space.workload), "target": space.target.name, "digest": space.digest,
        "families": families, "refused": space.refused,
    }  # fmt: skip


def target_command(name: str | None, as_json: bool) -> int:
    """Lists the targets, or prints one in full."""
    shown = [detect_cpu(), *CUDA_TARGETS.values()] if name is None else [described_target(name)]
    compiler = compiler_text() if name is None or shown[0].kind == "cpu" else ""
    if as_json:
        facts = [msgspec.to_builtins(target) for target in shown]
        print(json.dumps(facts if name is None else facts[0] | {"compiler": compiler}))
        return 0
    if name is None:
        rows = [(t.name, t.kind, t.arch, f"{t.cores}", one_line(t.processor)) for t in shown]
        print("\n".join(columns([("target", "kind", "arch", "cores", "device"), *rows], {3})))
        print(f"\nC compiler: {compiler}")
        return 0
    print("\n".join(_target_lines(shown[0])))
    if compiler:
        print(f"compiler         {compiler}")
    return 0


def _target_lines(target: Target) -> list[str]:
    facts = msgspec.to_builtins(target)
    peaks = facts.pop("peak")
    rows = [(name, _quantity(name, value)) for name, value in facts.items() if value]
    rows += [(f"peak {dtype}", f"{value / 1e9:,.0f} GFLOP/s") for dtype, value in peaks.items()]
    limits = {"clock_mhz", "bandwidth", *(f"peak {dtype}" for dtype in peaks)}
    label = _LIMIT if target.kind == "cpu" else ""
    return [f"{name:16} {value}{label if name in limits else ''}" for name, value in rows]


def _quantity(name: str, value: object) -> str:
    if isinstance(value, int) and "bytes" in name and value >= 1024:
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size:
                return f"{value / size:.4g} {unit}"
    if name == "bandwidth" and isinstance(value, float):
        return f"{value / 1e9:,.0f} GB/s"
    return one_line(str(value))


def compiler_text() -> str:
    """The C compiler that kernels are built with, or why there is none."""
    from .backend.cc import find_compiler

    try:
        found = find_compiler()
    except KtError as error:
        return str(error)
    return f"{' '.join(found.command)} ({found.version}); {preflight(found)}"


def preflight(compiler: CCompiler) -> str:
    """Whether a small library can really be built here."""
    with tempfile.TemporaryDirectory(prefix="kt-") as name:
        folder = Path(name)
        (folder / compiler.source_name).write_text(_SMALLEST)
        built = compiler.compile(folder, "", _PREFLIGHT_SECONDS)
    if isinstance(built, Failure):
        return f"it cannot build a kernel: {built.message}"
    return f"built a test kernel in {built.seconds:.2f} s"
