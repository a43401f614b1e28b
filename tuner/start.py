"""`kt tune`: from options to a run with its view, its signals and its exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .api import DTYPE, tune
from .console import view_of
from .devices import tuning_target
from .request import workloads_of
from .signals import Interrupts
from .summary import nothing_valid
from .text import printable

_SETTINGS = (
    "trials", "seconds", "strategy", "batch_size", "epsilon", "patience", "near_bound",
    "max_failures", "finalists", "build_timeout", "run_timeout", "sample_seconds",
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
    as_json: bool,
    plain: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Tunes and returns the exit code: 0, 1 without a valid result, 130 or 143 interrupted."""
    settings = {name: value for name in _SETTINGS if (value := options.pop(name)) is not None}
    device = tuning_target(target)
    workloads = workloads_of(words, options, file, DTYPE[device.kind])
    with Interrupts() as interrupts:
        try:
            with view_of(as_json, plain, quiet, interrupts.stdout_closed) as view:
                result = tune(
                    workloads, target=device, log=log, seed=seed, resume=resume,
                    builders=builders, view=view, **settings,
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
