"""How fast tuning is on a GPU: one workload from cold, nothing built or measured before.

    python benchmarks/tuning_rate.py [--trials 256] [--lag 1 2] [options]

Trials a second of the loop, the share of it in which the device had nothing to run, and the best
TFLOP/s over time; a run for each lag, of which the first one's log is kept. With `--out` (default:
the folder that $OUT names) also as tuning-rate.tar.gz, which `tar -xzf ARCHIVE -C benchmarks`
unpacks. Exits 1 when the first run misses a goal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from measure import gpu_state, pace
from rows import HERE, Results, compressed, packed, slug

from kt.logs.journal import read_log
from kt.logs.query import Run, best_of, runs, timed
from kt.spaces.errors import KtError
from kt.spaces.target import Target
from kt.spaces.workload import parse
from kt.tuner.api import effective_settings
from kt.tuner.devices import tuning_target
from kt.tuner.pool import LocalMeasurer
from kt.tuner.tune import tune

DEVICE, NAME = "nvidia-h200", "tuning-rate"
LEAST_RATE, MOST_IDLE = 15.0, 0.3
LIBRARIES = ("numpy", "xgboost", "xgboost-cpu", "nvidia-cuda-nvrtc", "cuda-bindings")


def curve(run: Run, flops: float) -> list[tuple[float, int, float]]:
    """(seconds since the first batch, trial, TFLOP/s) at each new best."""
    begin = datetime.fromisoformat(run.batches[0].time)
    points, best = [], float("inf")
    for trial in sorted(run.trials.values(), key=lambda t: t.time):
        us = timed(trial)
        if us is not None and us < best:
            best = us
            seconds = (datetime.fromisoformat(trial.time) - begin).total_seconds()
            points.append((round(seconds, 3), trial.trial, round(flops / us * 1e-6, 2)))
    return points


def summary(run: Run, text: str, cores: int) -> dict[str, Any]:
    """What the results keep of one run."""
    best, flops = best_of(run, text), parse(text).flops
    assert best is not None and run.stop is not None
    built = [t.build.seconds for t in run.trials.values() if t.build and not t.build.cached]
    cached = sum(bool(t.build and t.build.cached) for t in run.trials.values())
    kinds: dict[str, int] = {}
    for trial in run.trials.values():
        kind = getattr(trial.outcome, "failure", "timing")
        kinds[kind] = kinds.get(kind, 0) + 1
    return {
        **pace(run), "trials": len(run.trials), "seconds": run.stop.seconds, "cores": cores,
        "build_seconds_mean": round(sum(built) / max(len(built), 1), 4), "cached": cached,
        "outcomes": kinds, "best_us": round(best.us, 3),
        "best_tflops": round(flops / best.us * 1e-6, 2), "default_us": best.default_us,
        "curve": curve(run, flops),
    }  # fmt: skip


def tuned(given: argparse.Namespace, target: Target, lag: int, folder: Path) -> tuple[Path, Any]:
    """The log of one run with an empty cache, and what describes the device."""
    os.environ["KT_CACHE_DIR"] = str(folder / f"cache{lag}")
    log = folder / f"{NAME}-{slug(given.workload)}.jsonl"
    log.unlink(missing_ok=True)
    settings = effective_settings(target, {"trials": given.trials, "lag": lag})
    with LocalMeasurer(target, settings, given.seed, builders=given.builders) as measurer:
        tune([parse(given.workload)], target, log, measurer, settings, given.seed)
        facts = measurer.environment() | gpu_state()
    return log, {"processor": target.processor, "arch": target.arch, **facts}


def line(lag: int, one: dict[str, Any]) -> str:
    """One run for the terminal."""
    return (
        f"lag {lag}: {one['trials']} trials, {one['trials_per_second']:.1f}/s, idle "
        f"{100 * one['idle_share']:.0f} %, search {100 * one['search_share']:.0f} %, builds of "
        f"{one['build_seconds_mean']:.2f} s ({one['cached']} cached), check "
        f"{1e3 * one['seconds']['check'] / one['trials']:.1f} + run "
        f"{1e3 * one['seconds']['run'] / one['trials']:.1f} ms a trial, before the loop "
        f"{one['seconds']['prepare']:.1f} s, best {one['best_tflops']:.1f} TFLOP/s, "
        f"outcomes {one['outcomes']}"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="gemm 4096x4096x4096 dtype=bf16")
    parser.add_argument("--trials", type=int, default=256)
    parser.add_argument("--lag", type=int, nargs="+", help="default: the setting of CUDA targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--builders", type=int, help="default: the usable cores")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="for the archive")
    parser.add_argument("--commit", default="", help="of this tree, where git does not know")
    return parser.parse_args()


def main() -> None:
    """Tunes once a lag and writes the results."""
    given = arguments()
    try:
        given.workload = str(parse(given.workload))
        target = tuning_target("cuda")
        lags = given.lag or [effective_settings(target, {}).lag]
    except KtError as error:
        sys.exit(str(error))
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for lag in lags:
            log, device = tuned(given, target, lag, Path(name))
            run = runs(read_log(log).records)[-1]
            found[f"lag {lag}"] = summary(run, given.workload, len(os.sched_getaffinity(0)))
            print(line(lag, found[f"lag {lag}"]), flush=True)
            kept = HERE / "logs" / log.with_suffix(".jsonl.gz").name
            if lag == lags[0]:
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(compressed(log), kept)
    results = Results(DEVICE, NAME, device, LIBRARIES, given.commit)
    results.add({
        "workload": given.workload, "log": str(kept.relative_to(HERE.parent)), "seed": given.seed,
        "runs": found,
    })  # fmt: skip
    if given.out:
        packed(NAME, DEVICE, given.out)
    first = found[f"lag {lags[0]}"]
    missed = []
    if first["trials_per_second"] < LEAST_RATE:
        missed.append(f"{first['trials_per_second']} trials/s, not {LEAST_RATE}")
    if first["idle_share"] > MOST_IDLE:
        missed.append(f"the device was idle {100 * first['idle_share']:.0f} % of the loop")
    sys.exit("; ".join(missed) or 0)


if __name__ == "__main__":
    main()
