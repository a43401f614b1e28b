"""`kt tune`: from options to a run with its view, its signals and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kt.logs.record import Settings
from kt.spaces.errors import SettingsError
from kt.spaces.families import space_of
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .api import DTYPE, effective_settings, tune
from .bundle import build_bundle
from .console import view_of
from .devices import described_target, tuning_target
from .request import weighted_workloads
from .signals import Interrupts
from .summary import nothing_valid
from .text import number_of, printable

_SETTINGS = (
    "trials", "seconds", "strategy", "batch_size", "epsilon", "patience", "near_bound",
    "max_failures", "finalists", "build_timeout", "run_timeout", "sample_seconds", "family",
    "scheduler",
)  # fmt: skip
_IN_FULL = 100_000


def tune_command(
    *,
    words: tuple[str, ...],
    file: Path | None,
    target: str,
    log: Path,
    seed: int,
    resume: bool,
    builders: int | None,
    gpus: tuple[int, ...] | None,
    build_only: bool,
    output: Path | None,
    bundle: Path | None,
    as_json: bool,
    plain: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Tunes and returns the exit code: 0, 1 without a valid result, 130 or 143 interrupted."""
    settings = {name: value for name in _SETTINGS if (value := options.pop(name)) is not None}
    if build_only != (output is not None) or (build_only and (bundle or resume)):
        raise SettingsError("--build-only writes a new bundle: it needs -o DIR, and -o needs it")
    device = described_target(target) if build_only else tuning_target(target)
    effective = effective_settings(device, settings)
    weighted = weighted_workloads(words, options, file, DTYPE[device.kind])
    workloads = list(weighted)
    for workload in workloads:
        space_of(workload, device, effective.family)  # refused before a view says what is prepared
    if output is not None:
        return _build_only(workloads, device, output, effective, seed, builders)
    with Interrupts() as interrupts:
        try:
            with view_of(as_json, plain, quiet, interrupts.stdout_closed) as view:
                result = tune(
                    workloads, target=device, log=log, seed=seed, resume=resume,
                    builders=builders, gpus=gpus, bundle=bundle, view=view,
                    weights=list(weighted.values()), **settings,
                )  # fmt: skip
        except KeyboardInterrupt:
            if interrupts.caught in interrupts.SIGNALS:
                print("kt: interrupted", file=sys.stderr)
            return interrupts.code
    if result.reason == "interrupted":
        return interrupts.code
    if any(trial < 0 for trial in result.best.values()):
        print(f"kt: error: {printable(nothing_valid(result), _IN_FULL)}", file=sys.stderr)
        return 1
    return 0


def _build_only(
    workloads: Sequence[Workload],
    target: Target,
    output: Path,
    settings: Settings,
    seed: int,
    builders: int | None,
) -> int:
    """Writes a bundle; exit code 1 when nothing could be built."""
    made = build_bundle(workloads, target, output, settings, seed, builders)
    if made.failure:
        failed = f"{made.candidates - made.built} of {made.candidates} did not build"
        print(f"kt: {failed}, the first: {printable(made.failure)}", file=sys.stderr)
    print(
        f"wrote {output}: {number_of(made.built, 'kernel')} of {number_of(made.batches, 'batch')} "
        f"for {target.name} ({target.arch}); kt tune … --bundle {output} takes them"
    )
    return 0 if made.built else 1
