"""`kt apply --verify` and `--bench`: the emitted text itself, compiled, checked and timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kt.logs.record import Failure, Settings
from kt.spaces.errors import KtError, TargetError
from kt.spaces.kernel import Kernel
from kt.spaces.target import Target, detect_cpu
from kt.spaces.workload import Workload

from . import text
from .devices import detect_gpu, has_nvidia_driver
from .noise import median_text, unstable

if TYPE_CHECKING:
    from .backend.build import Binary
    from .pool import LocalMeasurer

SEEDS = (101, 102, 103)
"""Inputs that no tuning run with a small seed has seen."""
_BENCH_SECONDS = 2.0
BUILD_SECONDS = 300.0

Say = Callable[[str], None]


class ProofError(KtError):
    """An emitted kernel that does not compile, is wrong, or cannot be timed."""


@dataclass(frozen=True)
class Proven:
    """The emitted source in its language, and the kernels that it is compared with."""

    source: str
    language: str
    kernel: Kernel
    default: Kernel
    kind: str = "cpu"

    def target(self) -> Target:
        """The device of this machine that it runs on; raises TargetError without one."""
        if self.kind == "cpu":
            return detect_cpu()
        if not has_nvidia_driver():
            raise TargetError("--verify and --bench run the kernel: this machine has no GPU")
        return detect_gpu("--verify and --bench")


def prove(proven: Proven, verified: bool, bench: bool, say: Say) -> None:
    """Compiles the source and does what is asked; `say` gets the results as lines.

    Raises ProofError for the first thing that is wrong.
    """
    from .pool import LocalMeasurer

    settings = Settings(build_timeout=BUILD_SECONDS)
    with LocalMeasurer(proven.target(), settings, SEEDS[0]) as measurer:
        binary = built(measurer, proven.source, proven.language, "the emitted kernel")
        if proven.language == "cuda":
            binary = binary.started_by(proven.kernel)
        measurer.prepare([proven.kernel.workload])
        if verified:
            say(verify(measurer, binary, proven.kernel.workload))
        if bench:
            for line in bench_lines(measurer, binary, proven):
                say(line)


def built(measurer: LocalMeasurer, source: str, language: str, what: str) -> Binary:
    """The binary of a source; raises ProofError when `what` does not compile."""
    made = measurer.build_source(source, language)
    if isinstance(made, Failure):
        detail = f"\n{made.detail}" if made.detail else ""
        raise ProofError(f"{what} does not compile: {made.message}{detail}")
    return made


def verify(
    measurer: LocalMeasurer, binary: Binary, workload: Workload, what: str = "the emitted kernel"
) -> str:
    """Checks a binary on several inputs; raises ProofError when `what` is wrong."""
    found = measurer.verify_binary(binary, workload, SEEDS)
    if found.failure:
        raise ProofError(f"{what} is wrong: {found.failure}")
    return (
        f"verified: {found.launches} launches on {len(SEEDS)} sets of inputs agree with the "
        f"float64 reference, largest relative error {found.error:.2g}"
    )


def bench_lines(measurer: LocalMeasurer, binary: Binary, proven: Proven) -> list[str]:
    """Emitted, default and vendor; where another compiler made the measured binary, that too."""
    rivals = {"default": proven.default}
    if proven.language == "nvcc":
        rivals = {"tuned": proven.kernel, **rivals}
    binaries = [binary] + [
        built(measurer, kernel.source, kernel.language, f"the {name} kernel").started_by(kernel)
        for name, kernel in rivals.items()
    ]
    names = ["emitted", *rivals, "vendor"]
    workload = proven.kernel.workload
    compared = measurer.compare_binaries(workload, binaries, seconds=_BENCH_SECONDS, vendor=True)
    if compared.failure:
        raise ProofError(f"the {names[compared.failed]} kernel failed: {compared.failure}")
    medians = [statistics.median(us) for us in compared.us]
    rows = [("", "median", "throughput", "ratio", "samples")]
    for name, us, samples in zip(names, medians, compared.us, strict=False):
        rate = text.rate_of(workload.flops, us)
        told = not unstable(samples) and not unstable(compared.us[0])
        ratio = text.ratio(us, medians[0]) if told else text.DASH
        rows.append((name, median_text(samples), rate, ratio, str(len(samples))))
    lines = ["bench, interleaved in one process:", *text.columns(rows, {1, 2, 3, 4})]
    if "tuned" in rivals:
        lines.append(f"emitted / tuned: {medians[0] / medians[1]:.3f}")
    return lines
