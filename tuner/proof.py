"""`kt apply --verify` and `--bench`: the emitted text itself, compiled, checked and timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from kt.logs.record import Failure, Settings
from kt.spaces.errors import KtError
from kt.spaces.kernel import Kernel
from kt.spaces.target import detect_cpu
from kt.spaces.workload import Workload

from . import text

if TYPE_CHECKING:
    from .backend.build import Binary
    from .pool import LocalMeasurer

SEEDS = (101, 102, 103)
"""Inputs that no tuning run with a small seed has seen."""
_BENCH_SECONDS = 2.0

Say = Callable[[str], None]


class ProofError(KtError):
    """An emitted kernel that does not compile, is wrong, or cannot be timed."""


def prove(
    source: str, workload: Workload, default: Kernel, verify: bool, bench: bool, say: Say
) -> None:
    """Compiles `source` and does what is asked; `say` gets the results as lines.

    Raises ProofError for the first thing that is wrong.
    """
    from .pool import LocalMeasurer

    with LocalMeasurer(detect_cpu(), Settings(), SEEDS[0]) as measurer:
        measurer.prepare([workload])
        binary = _built(measurer, source, "the emitted kernel")
        if verify:
            say(_verify(measurer, binary, workload))
        if bench:
            other = _built(measurer, default.source, "the default kernel")
            for line in _bench(measurer, binary, other, workload):
                say(line)


def _built(measurer: LocalMeasurer, source: str, what: str) -> Binary:
    built = measurer.build_source(source)
    if isinstance(built, Failure):
        detail = f"\n{built.detail}" if built.detail else ""
        raise ProofError(f"{what} does not compile: {built.message}{detail}")
    return built


def _verify(measurer: LocalMeasurer, binary: Binary, workload: Workload) -> str:
    found = measurer.verify_binary(binary, workload, SEEDS)
    if found.failure:
        raise ProofError(f"the emitted kernel is wrong: {found.failure}")
    return (
        f"verified: {found.launches} launches on {len(SEEDS)} sets of inputs agree with the "
        f"float64 reference, largest relative error {found.error:.2g}"
    )


def _bench(
    measurer: LocalMeasurer, binary: Binary, default: Binary, workload: Workload
) -> list[str]:
    names = ["emitted", "default", "vendor"]
    compared = measurer.compare_binaries(
        workload, [binary, default], seconds=_BENCH_SECONDS, vendor=True
    )
    if compared.failure:
        raise ProofError(f"the {names[compared.failed]} kernel failed: {compared.failure}")
    medians = [statistics.median(us) for us in compared.us]
    rows = [("", "median", "throughput", "ratio", "samples")]
    for name, us, samples in zip(names, medians, compared.us, strict=False):
        rate = text.rate_of(workload.flops, us)
        rows.append((name, text.time_of(us), rate, text.ratio(us, medians[0]), str(len(samples))))
    return ["bench, interleaved in one process:", *text.columns(rows, {1, 2, 3, 4})]
