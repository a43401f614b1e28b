"""The tuned kernels of one dispatched file: the same operator and options, other extents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kt.logs.query import Run
from kt.spaces.errors import KtError, LogError, SettingsError, TargetError
from kt.spaces.gemm import many
from kt.spaces.target import Target
from kt.spaces.workload import Gemm

from .chosen import Chosen, choose
from .lookup import workloads_in
from .summary import device_text

_EDGES = ((1, 1, 1, 1), (1, 67, 3, 1), (65, 63, 127, 3), (63, 65, 17, 2), (131, 1, 257, 1))
"""M, N, K and batch beside the tiles of the kernel for any extents: one, primes, a tile ± 1."""


@dataclass(frozen=True)
class Shapes:
    """Kernels that differ in extents alone, smallest product first."""

    chosen: tuple[Chosen, ...]

    @property
    def workloads(self) -> list[Gemm]:
        """The tuned products."""
        return [_gemm(chosen) for chosen in self.chosen]

    @property
    def workload(self) -> Gemm:
        """The first product, which stands for the options of all."""
        return self.workloads[0]

    @property
    def target(self) -> Target:
        return self.chosen[0].best.target

    def edges(self) -> list[Gemm]:
        """Products that only the kernel for any extents serves."""
        tuned = set(self.workloads)
        edges = (replace(self.workload, m=m, n=n, k=k, batch=batch) for m, n, k, batch in _EDGES)
        return [edge for edge in edges if edge not in tuned]


def choose_shapes(
    found: Sequence[Run],
    words: Sequence[str],
    flags: Mapping[str, str | None],
    any_device: bool,
) -> tuple[Shapes, list[str]]:
    """The best kernel of every workload asked for, and why some have none.

    `words` and `flags` choose as for `choose_logged`; without words every gemm is meant. Raises
    LogError when they are not of one kind.
    """
    chosen, without = list[Chosen](), dict[str, KtError]()
    for text in workloads_in(found, words or [Gemm.OPERATOR], flags):
        try:
            chosen.append(choose(found, [text], {}, any_device, None))
        except (LogError, TargetError) as error:  # nothing valid, or of another device
            without[text] = error
    if not chosen:
        raise next(iter(without.values()))
    _refuse_mixed(chosen)
    workloads = sorted(chosen, key=lambda c: (c.workload.flops, str(c.workload)))
    return Shapes(tuple(workloads)), [f"'{text}': {error}" for text, error in without.items()]


def _refuse_mixed(chosen: Sequence[Chosen]) -> None:
    """Raises when one file cannot serve them, naming the first two that differ."""
    first = chosen[0]
    target = first.best.target
    for other in chosen:
        if not isinstance(other.workload, Gemm):
            raise SettingsError(f"--dispatch: serves gemm alone, not '{other.workload}'")
        _refuse_other_options(_gemm(first), other.workload)
        if not target.same_device(other.best.target):
            raise LogError(
                f"--dispatch: one file is for one device: '{first.workload}' was measured on "
                f"{device_text(target)}, '{other.workload}' on {device_text(other.best.target)}"
            )
    if first.workload.dtype not in many.DTYPES[target.kind]:
        served = ", ".join(many.DTYPES[target.kind])
        raise SettingsError(f"--dispatch: serves {served}, not {first.workload.dtype}")


def _refuse_other_options(first: Gemm, other: Gemm) -> None:
    """Raises LogError when two products differ in more than their extents."""
    for option in Gemm.OPTIONS:
        mine, its = (option.show(getattr(w, option.field)) or "none" for w in (first, other))
        if option.field != "batch" and mine != its:
            raise LogError(
                f"--dispatch: one file has one {option.key}: {mine} of '{first}' or {its} of "
                f"'{other}'; restrict it with --{option.key}, or name the workloads"
            )


def _gemm(chosen: Chosen) -> Gemm:
    assert isinstance(chosen.workload, Gemm)
    return chosen.workload
