"""Class cpu-gemm: tunes each workload, then times tuned, default and OpenBLAS interleaved.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python benchmarks/cpu_gemm.py [options]

A workload whose row exists is skipped, so that an interrupted benchmark goes on; `--remeasure`
times the logged winners again, `--retune` starts over.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from classes import CLASSES
from rows import HERE, Results, compressed, median, ratio_interval, slug

from kt.logs.journal import read_log
from kt.logs.query import best_of, runs
from kt.logs.record import Failure, Settings
from kt.spaces.families import space_of
from kt.spaces.target import Target, detect_cpu
from kt.spaces.workload import Workload, parse
from kt.tuner.pool import LocalMeasurer
from kt.tuner.stop import bound_us
from kt.tuner.tune import tune

NAME = "cpu-gemm"
COMPARE_SECONDS = 4.0


def tuned_log(workload: Workload, target: Target, settings: Settings, again: bool) -> Path:
    """The compressed log of a finished tuning run, made when it is missing."""
    log = HERE / "logs" / f"{NAME}-{slug(str(workload))}.jsonl"
    packed = log.with_suffix(".jsonl.gz")
    if packed.exists() and not again:
        return packed
    log.unlink(missing_ok=True)
    with LocalMeasurer(target, settings) as measurer:
        tune([workload], target, log, measurer, settings)
    return compressed(log)


def measure(workload: Workload, target: Target, settings: Settings, log: Path) -> dict[str, object]:
    """One row: tuned, default and OpenBLAS interleaved in one process."""
    run = runs(read_log(log).records)[-1]
    best = best_of(run, str(workload))
    if best is None:
        raise SystemExit(f"{log}: no result")
    space = space_of(workload, target)
    points = [space.check(best.trial.family, best.trial.theta), int(space.defaults()[0])]
    with LocalMeasurer(target, settings) as measurer:
        measurer.prepare([workload])
        built = [measurer.build_source(space.kernel(point).source) for point in points]
        for binary in built:
            if isinstance(binary, Failure):
                raise SystemExit(f"{workload}: {binary.message}")
        sound = [binary for binary in built if not isinstance(binary, Failure)]
        compared = measurer.compare_binaries(workload, sound, seconds=COMPARE_SECONDS, vendor=True)
        bound = bound_us(workload, measurer.bound(workload.dtype))
    ours, default, opponent = (list(samples) for samples in compared.us)
    spent = run.stop.seconds if run.stop else {"wall": 1.0, "search": 0.0}
    ratio, low, high = ratio_interval(opponent, ours)
    return {
        "workload": str(workload), "opponent": "openblas", "opponent_us": median(opponent),
        "kt_us": median(ours), "ratio": round(ratio, 4), "ratio_low": round(low, 4),
        "ratio_high": round(high, 4), "others": {}, "default_us": median(default),
        "bound_us": round(bound, 3), "trials": len(run.trials),
        "trials_per_second": round(len(run.trials) / spent["wall"], 2),
        "search_share": round(spent["search"] / spent["wall"], 4),
        "theta": best.trial.theta.flat(), "family": best.trial.family,
        "log": str(log.relative_to(HERE.parent)),
        "samples": {"kt_us": ours, "opponent_us": opponent, "default_us": default},
    }  # fmt: skip


def main() -> None:
    """Parses the command line and runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="workloads that contain this text")
    parser.add_argument("--trials", type=int, default=128)
    parser.add_argument("--remeasure", action="store_true")
    parser.add_argument("--retune", action="store_true")
    arguments = parser.parse_args()
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        if name in os.environ:
            raise SystemExit(f"unset {name}: it makes the opponent slower")
    target, settings = detect_cpu(), Settings(trials=arguments.trials)
    fingerprint = {"processor": target.processor, "arch": target.arch, "cores": target.cores}
    results = Results("cpu", NAME, fingerprint)
    for text in CLASSES[NAME].workloads:
        again = arguments.remeasure or arguments.retune
        if arguments.only not in text or (text in results.rows and not again):
            continue
        workload = parse(text)
        log = tuned_log(workload, target, settings, arguments.retune)
        row = measure(workload, target, settings, log)
        results.add(row)
        print(
            f"{text:40} kt {row['kt_us']:9} us  openblas {row['opponent_us']:9} us  "
            f"ratio {row['ratio']:.3f}  default/kt {row['default_us'] / row['kt_us']:.2f}",  # type: ignore[operator]
            flush=True,
        )


if __name__ == "__main__":
    main()
