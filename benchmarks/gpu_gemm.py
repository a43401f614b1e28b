"""GEMM classes on a GPU: tunes each workload, then times tuned, default and opponents interleaved.

    python benchmarks/gpu_gemm.py --class gemm-tiny gemm-fp32 [options]

A workload whose row exists is skipped and no row is begun that `--minutes` may not suffice for, so
that the same command, repeated, goes on. Rows are written one by one; with `--out` (default: the
folder that $OUT names) also as CLASS.tar.gz, which `tar -xzf CLASS.tar.gz -C benchmarks` unpacks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from classes import CLASSES
from rows import HERE, Results, compressed, packed, slug, versus

from kt.logs.journal import read_log
from kt.logs.query import Best, Run, best_of, runs
from kt.logs.record import Failure, Settings
from kt.spaces.errors import KtError
from kt.spaces.families import space_of
from kt.spaces.target import Target
from kt.spaces.workload import Workload, parse
from kt.tuner.api import effective_settings
from kt.tuner.backend.build import Binary
from kt.tuner.devices import tuning_target
from kt.tuner.pool import LocalMeasurer
from kt.tuner.stop import bound_us
from kt.tuner.tune import tune

DEVICE = "nvidia-h200"
MOST_TRIALS = 256
COMPARE_SECONDS = 1.5
SPARE_SECONDS = 12.0
"""What a row may take besides tuning: opponents and comparison."""
LIBRARIES = ("numpy", "xgboost", "xgboost-cpu", "scikit-learn", "torch", "nvidia-cublas",
             "nvidia-cuda-nvrtc", "cuda-bindings")  # fmt: skip


STATE = ("driver_version", "clocks.max.sm", "clocks.max.mem", "clocks.sm", "power.limit",
         "temperature.gpu", "clocks_event_reasons.active")  # fmt: skip


class NoResult(Exception):
    """A workload without a row, and why."""


def gpu_state() -> dict[str, str]:
    """Driver, clocks, power limit and throttle reasons, as nvidia-smi shows them."""
    command = ["nvidia-smi", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader", "-i", "0"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in shown.stdout.split(",")]
    return dict(zip(STATE, values, strict=True)) if len(values) == len(STATE) else {}


def tuned_log(
    name: str, workload: Workload, target: Target, measurer: LocalMeasurer, settings: Settings
) -> Path:
    """The compressed log of a finished tuning run, made when it is missing."""
    log = HERE / "logs" / f"{name}-{slug(str(workload))}.jsonl"
    gzipped = log.with_suffix(".jsonl.gz")
    if gzipped.exists():
        return gzipped
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    tune([workload], target, log, measurer, settings)
    return compressed(log)


def pace(run: Run) -> dict[str, float]:
    """Trials a second of the loop, and the shares of it that search took and the GPU idled."""
    last = max((trial.time for trial in run.trials.values()), default=run.header.time)
    begin, end = datetime.fromisoformat(run.header.time), datetime.fromisoformat(last)
    wall = max((end - begin).total_seconds(), 1e-3)
    spent = run.stop.seconds if run.stop else {}
    busy = spent.get("check", 0.0) + spent.get("run", 0.0)
    return {
        "trials_per_second": round(len(run.trials) / wall, 2),
        "search_share": round(spent.get("search", 0.0) / wall, 4),
        "idle_share": round(max(1 - busy / wall, 0.0), 4),
    }


def binaries(
    workload: Workload, target: Target, best: Best, measurer: LocalMeasurer
) -> list[Binary]:
    """The tuned kernel and the default one."""
    space = space_of(workload, target)
    built = []
    for point in (space.check(best.trial.family, best.trial.theta), int(space.defaults()[0])):
        kernel = space.kernel(point)
        binary = measurer.build_source(kernel.source, kernel.language)
        if isinstance(binary, Failure):
            raise NoResult(binary.message)
        built.append(binary.started_by(kernel))
    return built


def measure(
    name: str, workload: Workload, target: Target, measurer: LocalMeasurer, log: Path, rested: bool
) -> dict[str, Any]:
    """One row: tuned, default and every opponent interleaved in one process."""
    run = runs(read_log(log).records)[-1]
    best = best_of(run, str(workload))
    if best is None:
        raise NoResult("every trial failed")
    built = binaries(workload, target, best, measurer)

    def compared(rest: bool) -> tuple[dict[str, Any], dict[str, str]]:
        found = measurer.compare_binaries(
            workload, built, seconds=COMPARE_SECONDS, opponents=CLASSES[name].opponents, rested=rest
        )
        if found.failure:
            raise NoResult(f"in the comparison, number {found.failed}: {found.failure}")
        if not found.opponents:
            raise NoResult("no opponent runs here")
        return versus(found.us[0], found.us[1], found.opponents), dict(found.facts)

    times, facts = compared(rest=False)
    samples = times.pop("samples")
    limits = measurer.bound(workload.dtype)
    return {
        "workload": str(workload), **times, "regime": "sustained",
        "bound_us": round(bound_us(workload, limits), 3), "trials": len(run.trials),
        "copy_share": round(1e6 * workload.bytes / times["kt_us"] / limits.bandwidth, 4),
        **pace(run), "family": best.trial.family, "theta": best.trial.theta.flat(),
        "log": str(log.relative_to(HERE.parent)), "opponents": facts,
        **({"rested": compared(rest=True)[0]} if rested else {}), "samples": samples,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    return (
        f"{row['workload']:42} kt {row['kt_us']:9.2f} us  {row['opponent']} "
        f"{row['opponent_us']:9.2f} us  ratio {row['ratio']:.3f} "
        f"({row['ratio_low']:.3f}-{row['ratio_high']:.3f})  "
        f"default/kt {row['default_us'] / row['kt_us']:.2f}  "
        f"bound {100 * row['bound_us'] / row['kt_us']:.0f} %  "
        f"{row['trials']} trials at {row['trials_per_second']:.1f}/s, "
        f"idle {100 * row['idle_share']:.0f} %"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    known = [name for name, one in CLASSES.items() if one.device == DEVICE]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--class", nargs="+", dest="classes", required=True, choices=known)
    parser.add_argument("--only", default="", help="workloads that contain this text")
    parser.add_argument("--trials", type=int, default=MOST_TRIALS, help=f"at most {MOST_TRIALS}")
    parser.add_argument("--seconds-per-shape", type=float, default=40.0, help="for tuning")
    parser.add_argument("--minutes", type=float, default=8.5, help="for the whole command")
    parser.add_argument("--rested", action="store_true", help="also with pauses before samples")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="for archives")
    parser.add_argument("--commit", default="", help="of this tree, where git does not know")
    given = parser.parse_args()
    if not 1 <= given.trials <= MOST_TRIALS:
        parser.error(f"--trials {given.trials}: accepts 1 to {MOST_TRIALS}")
    return given


def main() -> None:
    """Runs what is missing; exits 1 when a workload has no row in the end."""
    given = arguments()
    end = time.monotonic() + 60 * given.minutes
    try:
        target = tuning_target("cuda")
    except KtError as error:
        sys.exit(str(error))
    settings = effective_settings(
        target, {"trials": given.trials, "seconds": given.seconds_per_shape}
    )
    missing, done = [], []
    with LocalMeasurer(target, settings) as measurer:
        fingerprint: dict[str, Any] = {"processor": target.processor, "arch": target.arch}
        fingerprint |= {"cores": target.cores, **measurer.environment(), **gpu_state()}
        for name in given.classes:
            results = Results(DEVICE, name, fingerprint, LIBRARIES, given.commit)
            for text in CLASSES[name].workloads:
                if given.only not in text or text in results.rows:
                    continue
                if time.monotonic() + given.seconds_per_shape + SPARE_SECONDS > end:
                    missing.append(f"{text}: no time left")
                    continue
                workload = parse(text)
                try:
                    log = tuned_log(name, workload, target, measurer, settings)
                    row = measure(name, workload, target, measurer, log, given.rested)
                except (NoResult, KtError) as why:
                    missing.append(f"{text}: {why}")
                    continue
                results.add(row)
                done.append(line(row))
                print(done[-1], flush=True)
                if given.out:
                    packed(name, DEVICE, given.out)
    print(*["", *done, *missing], sep="\n")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
