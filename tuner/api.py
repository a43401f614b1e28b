"""The Python interface to tuning: texts and keyword arguments in, a `Result` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from kt.logs.record import LEAST_WEIGHT, MOST_WEIGHT, Settings
from kt.spaces.errors import SettingsError
from kt.spaces.families import space_of
from kt.spaces.target import Target
from kt.spaces.workload import Workload, parse

from .backend.cache import BinaryCache
from .bundle import open_bundle
from .devices import chosen_gpus, tuning_target
from .measure import Measurer
from .preset import CUDA_REVISION, EPSILON, REVISION
from .schedule import checked_scheduler
from .strategy import STRATEGIES
from .tune import Result, View
from .tune import tune as run

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"trials": 128, "revision": REVISION, "epsilon": EPSILON},
    "cuda": {"trials": 256, "revision": CUDA_REVISION, "epsilon": EPSILON, "lag": 2,
             "sample_seconds": 0.02},
}  # fmt: skip
"""Settings by kind of target. On CUDA two batches are built while one runs: lag 2."""
DTYPE: Mapping[str, str] = {"cpu": "fp32", "cuda": "bf16"}
"""Default element type, by kind of target."""

# Option and accepted range of every numeric setting, by field.
_RANGES: Mapping[str, tuple[str, float, float]] = {
    "trials": ("--trials", 1, 1_000_000),
    "seconds": ("--time", 0, 30 * 86400),
    "batch_size": ("--batch-size", 1, 4096),
    "epsilon": ("--epsilon", 0, 1),
    "patience": ("--patience", 0, 1_000_000),
    "near_bound": ("--near-bound", 0, 10),
    "max_failures": ("--max-failures", 1, 1_000_000),
    "finalists": ("--finalists", 1, 64),
    "build_timeout": ("--build-timeout", 0.1, 86400),
    "run_timeout": ("--run-timeout", 0.1, 86400),
    "sample_seconds": ("--sample-time", 0.001, 60),
    "model_threads": ("model_threads", 1, 256),
}


def tune(
    workloads: str | Workload | Sequence[str | Workload],
    *,
    target: str | Target = "auto",
    log: str | Path = "kt-logs",
    seed: int = 0,
    resume: bool = False,
    builders: int | None = None,
    gpus: Sequence[int] | None = None,
    bundle: str | Path | None = None,
    view: View | None = None,
    measurer: Measurer | None = None,
    weights: Sequence[float] | None = None,
    **settings: Any,
) -> Result:
    """Tunes one or several workloads, for example `tune("gemm 512x512x512 dtype=fp32")`.

    Everything is appended to `log`, a file or a directory; `settings` are fields of
    `kt.logs.record.Settings`, such as `trials=64` or `seconds=30.0`. `gpus` are the indices of
    those to measure on (default: all that are alike); binaries in `bundle` are not built again.
    `weights` say what a microsecond of each workload counts for `scheduler="gain"`. A
    `measurer` of the caller's replaces the local one and is left open. Raises KtError for what the
    caller must change.
    """
    device = tuning_target(target) if isinstance(target, str) else target
    given = [workloads] if isinstance(workloads, str | Workload) else list(workloads)
    parsed = [w if isinstance(w, Workload) else parse(w, DTYPE[device.kind]) for w in given]
    _check("--seed", seed, 0, 2**63 - 1)
    if builders is not None:
        _check("--builders", builders, 1, 256)
    effective = effective_settings(device, settings)
    counted = _weighted(parsed, list(weights)) if weights is not None else None
    for workload in parsed:
        space_of(workload, device, effective.family)  # refused before any process is started
    with ExitStack() as stack:
        if measurer is None:
            bundles = [open_bundle(Path(bundle), parsed, device, effective, seed)] if bundle else []
            chosen = chosen_gpus(device, gpus)
            local = local_measurer(device, effective, seed, builders, chosen, bundles)
            measurer = stack.enter_context(closing(local))
        return run(
            parsed, device, Path(log), measurer, effective, seed, resume, view, weights=counted
        )


def _weighted(workloads: Sequence[Workload], weights: Sequence[float]) -> dict[Workload, float]:
    if len(weights) != len(workloads):
        raise SettingsError(f"weights: {len(weights)} for {len(workloads)} workloads")
    for weight in weights:
        _check("weight", weight, LEAST_WEIGHT, MOST_WEIGHT)
    return dict(zip(workloads, weights, strict=True))


def effective_settings(target: Target, given: Mapping[str, Any]) -> Settings:
    """`given` over the defaults of the target; raises SettingsError naming option and range."""
    unknown = set(given) - set(Settings.__struct_fields__)
    if unknown:
        raise SettingsError(
            f"unknown setting {', '.join(sorted(unknown))}: accepts "
            f"{', '.join(Settings.__struct_fields__)}"
        )
    for field, (option, low, high) in _RANGES.items():
        if isinstance(value := given.get(field), int | float):
            _check(option, value, low, high)
    try:
        settings = msgspec.convert({**DEFAULTS[target.kind], **given}, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"settings: {error}") from None
    checked_scheduler(settings.scheduler)
    if settings.strategy not in STRATEGIES:
        raise SettingsError(f"--strategy {settings.strategy}: accepts {', '.join(STRATEGIES)}")
    return settings


def _check(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN included
        limits = (f"{x:g}" if isinstance(x, float) else str(x) for x in (low, high))
        raise SettingsError(f"{option} {value}: accepts {' to '.join(limits)}")


def local_measurer(
    target: Target,
    settings: Settings,
    seed: int,
    builders: int | None,
    gpus: Sequence[int],
    bundles: Sequence[BinaryCache],
) -> Measurer:
    """Pools of builders and runners on this machine; the caller closes it."""
    from .pool import LocalMeasurer

    return LocalMeasurer(target, settings, seed, builders=builders, gpus=gpus, bundles=bundles)
