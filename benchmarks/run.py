"""Benchmark classes: tunes each workload, then times it interleaved with default and opponents.

    python benchmarks/run.py --class gemm-tiny conv2d-resnet [options]

The device is the classes' own: this machine's CPU, or its GPU. A workload whose row exists is
skipped and no row is begun that `--minutes` may not suffice for, so that the same command,
repeated, goes on. So does one with `--remeasure`, which times the logged winners of rows that
another commit made again, or with `--retune`, which makes those rows from new logs. In an empty
folder of results all rows come from the committed logs. Shards of one machine share the files:

    for i in 0 1 2 3; do
        CUDA_VISIBLE_DEVICES=$i python benchmarks/run.py --shard $i/4 … &
    done; wait

Rows are written one by one; with `--out` (default: the folder that $OUT names) also as
CLASS.tar.gz, which `tar -xzf CLASS.tar.gz -C benchmarks` unpacks.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from classes import CLASSES, GRID, MOST_TRIALS, chosen
from measure import Bench, Earlier, NoResult, gpu_state
from rows import Results, packed

from kt.spaces.errors import KtError
from kt.spaces.target import usable_cores
from kt.spaces.workload import Workload, parse
from kt.tuner.api import effective_settings
from kt.tuner.backend.cuda_vendor import COMPILED
from kt.tuner.devices import tuning_target
from kt.tuner.pool import LocalMeasurer

LIBRARIES = ("numpy", "xgboost", "xgboost-cpu", "scikit-learn", "scipy", "torch", "triton",
             "fa3-fwd", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc",
             "cuda-bindings")  # fmt: skip
TUNING_SECONDS = {"cpu": 120.0, "cuda": 40.0}
SPARE_SECONDS, COMPILING_SECONDS = 12.0, 45.0
"""What a row may take besides tuning: comparison, and an opponent that tunes itself."""


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    return (
        f"{row['workload']:42} kt {row['kt_us']:9.2f} us  {row['opponent']} "
        f"{row['opponent_us']:9.2f} us  ratio {row['ratio']:.3f} "
        f"({row['ratio_low']:.3f}-{row['ratio_high']:.3f})  "
        f"default/kt {row['default_us'] / row['kt_us']:.2f}  "
        f"bound {100 * row['bound_us'] / row['kt_us']:.0f} %  {row['family']}, "
        f"{row['trials']} trials at {row['trials_per_second']:.1f}/s, "
        f"idle {100 * row['idle_share']:.0f} %"
    )


def shard(text: str) -> tuple[int, int]:
    """Option type: (index, count) from texts like 0/4."""
    found = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not index < count:
        raise argparse.ArgumentTypeError(f"'{text}': accepts 0/4 to 3/4, for example")
    return index, count


def add_only(parser: argparse.ArgumentParser) -> None:
    """The option `--only`, for `chosen`."""
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="workloads that contain such a text"
    )


def check_only(
    parser: argparse.ArgumentParser, only: Sequence[str], workloads: Iterable[str], of: str
) -> None:
    """Ends the command when `--only` leaves none of the workloads `of` a class."""
    if not chosen(workloads, only):
        parser.error(f"--only: no workload of {of} contains such a text")


def add_again(parser: argparse.ArgumentParser) -> None:
    """The options `--remeasure` and `--retune`, one of which may be given."""
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--remeasure", action="store_true", help="time the winners of another commit's rows again"
    )
    again.add_argument(
        "--retune", action="store_true", help="make another commit's rows from new logs"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in CLASSES if name != GRID]  # that one has its own command, grid.py
    parser.add_argument(
        "--class", nargs="+", dest="classes", required=True, choices=names, metavar="CLASS",
        help=", ".join(names),
    )  # fmt: skip
    add_only(parser)
    parser.add_argument(
        "--shard",
        type=shard,
        default=(0, 1),
        help="which of how many parts of each class: 0/4 to 3/4 on four GPUs",
    )
    parser.add_argument("--trials", type=int, help="at most 128 on the CPU, 256 on a GPU")
    parser.add_argument("--seconds-per-shape", type=float, help="for tuning")
    parser.add_argument("--minutes", type=float, default=8.5, help="for the whole command")
    parser.add_argument("--taught", action="store_true", help="learn from logs of other shapes")
    parser.add_argument("--rested", action="store_true", help="also with pauses before samples")
    add_again(parser)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="for archives")
    parser.add_argument("--commit", default="", help="of this tree, where git does not know")
    given = parser.parse_args()
    devices = {CLASSES[name].device for name in given.classes}
    if len(devices) > 1:
        parser.error(f"--class: accepts classes of one device, not of {' and '.join(devices)}")
    (given.device,) = devices
    texts = [text for name in given.classes for text in CLASSES[name].workloads]
    check_only(parser, given.only, texts, ", ".join(given.classes))
    most = MOST_TRIALS[given.device]
    given.trials = most if given.trials is None else given.trials
    if not 1 <= given.trials <= most:
        parser.error(f"--trials {given.trials}: accepts 1 to {most}")
    if given.device == "cpu" and (given.rested or given.shard[1] > 1):
        parser.error("--rested and --shard: for GPUs")
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        if given.device == "cpu" and name in os.environ:
            parser.error(f"unset {name}: it makes the opponent slower")
    return given


def fingerprint(bench: Bench) -> dict[str, Any]:
    """What the results were measured on."""
    target = bench.target
    found = {"processor": target.processor, "arch": target.arch, "cores": target.cores}
    return found | bench.measurer.environment() | (gpu_state() if target.kind == "cuda" else {})


def prepare(measurer: LocalMeasurer, workload: Workload) -> None:
    """Makes processes, inputs and the vendor's library ready: a run's budget is for tuning."""
    measurer.prepare([workload])
    measurer.vendor_us(workload)


def measured(bench: Bench, results: Results, given: argparse.Namespace, end: float) -> list[str]:
    """Adds the rows of one class that are missing; says what has none in the end."""
    slow = COMPILED.intersection(bench.one.opponents)
    spare = SPARE_SECONDS + COMPILING_SECONDS * len(slow)
    taught = Earlier(bench.one.workloads[0].split()[0])
    missing = []
    index, count = given.shard
    again = given.remeasure or given.retune
    for text in chosen(bench.one.workloads, given.only)[index::count]:
        if results.is_of_this_tree(text) if again else text in results.rows:
            continue
        if time.monotonic() + bench.seconds + spare > end:
            missing.append(f"{text}: no time left")
            continue
        workload = parse(text)
        try:
            prepare(bench.measurer, workload)
            earlier = taught.of_others(workload) if given.taught else ()
            row = bench.tuned_row(workload, given.retune, earlier, given.rested)
        except (NoResult, KtError) as why:
            missing.append(f"{text}: {why}")
            print(missing[-1], flush=True)
        else:
            results.add(row)
            print(line(results.rows[text]), flush=True)
        if given.out:
            logs = map(bench.packed_log, map(parse, bench.one.workloads))
            packed(bench.name, given.device, given.out, filter(Path.exists, logs))
    return missing


def main() -> None:
    """Runs what is missing; exits 1 when a workload has no row in the end."""
    given = arguments()
    end, missing = time.monotonic() + 60 * given.minutes, []
    try:
        target = tuning_target("cpu" if given.device == "cpu" else "cuda")
    except KtError as error:
        sys.exit(str(error))
    seconds = given.seconds_per_shape or TUNING_SECONDS[target.kind]
    settings = effective_settings(target, {"trials": given.trials, "seconds": seconds})
    builders = max(1, usable_cores() // given.shard[1])
    with LocalMeasurer(target, settings, builders=builders) as measurer:
        for name in given.classes:
            bench = Bench(name, target, measurer, given.trials, seconds)
            results = Results(given.device, name, fingerprint(bench), LIBRARIES, given.commit)
            missing += measured(bench, results, given, end)
    print(*["", *missing], sep="\n")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
