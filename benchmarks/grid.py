"""Class gemm-grid: 100 GEMM shapes, at most 64 trials each, every search taught by earlier ones.

    python benchmarks/grid.py [--shard 0/4] [options]

A shape begins with warm starts and a model from the nearest GEMMs of benchmarks/logs, those of the
grid measured so far included, whichever shard wrote them. Shapes go from small to large. One whose
row exists is skipped (with `--remeasure`: one without, or with a row of this commit; with
`--retune` only the latter) and none is begun that `--minutes` may not suffice for: the same
command, repeated, goes on. Shards of one machine share the result file; two on one GPU take turns
on it, and one searches while the other measures:

    for i in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$i python benchmarks/grid.py --shard $i/4 & done; wait
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from classes import CLASSES, GRID, GRID_TRIALS, chosen
from measure import Bench, Earlier, NoResult
from rows import Results, packed
from run import LIBRARIES, add_again, add_only, check_only, fingerprint, line, prepare, shard

from kt.spaces.errors import KtError
from kt.spaces.target import usable_cores
from kt.spaces.workload import Workload, parse
from kt.tuner.api import effective_settings
from kt.tuner.devices import tuning_target
from kt.tuner.pool import LocalMeasurer

TUNING_SECONDS, COMPARING_SECONDS = 16.0, 6.0
"""What a shape may take, the float64 references apart."""
REFERENCE_FLOPS = 4e12
"""Float64 references are computed at this speed at least, flop/s (on an H200)."""


def reference_seconds(workload: Workload) -> float:
    """How long one float64 reference takes; each change of the seed makes one."""
    return workload.flops / REFERENCE_FLOPS


def tuning_seconds(workload: Workload, seconds: float = TUNING_SECONDS) -> float:
    """A run's budget: it needs the reference of its trials and, in the final, two more."""
    return seconds + 3 * reference_seconds(workload)


def row_seconds(workload: Workload) -> float:
    """What a row takes at most: tuning, then checks on another seed and a comparison."""
    return tuning_seconds(workload) + COMPARING_SECONDS + 2 * reference_seconds(workload)


def shard_of(workloads: Sequence[Workload], index: int, count: int) -> list[Workload]:
    """The shapes of shard `index` of `count` that take about equally long, small ones first."""
    shards: list[list[Workload]] = [[] for _ in range(count)]
    spent = [0.0] * count
    for workload in sorted(workloads, key=lambda w: (-w.flops, str(w))):
        least = spent.index(min(spent))
        shards[least].append(workload)
        spent[least] += row_seconds(workload)
    return shards[index][::-1]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shard", type=shard, default=(0, 1), help="which of how many")
    parser.add_argument("--minutes", type=float, default=8.5, help="for the whole command")
    add_again(parser)
    add_only(parser)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="for archives")
    parser.add_argument("--commit", default="", help="of this tree, where git does not know")
    given = parser.parse_args()
    check_only(parser, given.only, CLASSES[GRID].workloads, GRID)
    return given


def measured(
    bench: Bench,
    results: Results,
    workloads: Sequence[Workload],
    end: float,
    out: Path | None,
    remeasure: bool = False,
    retune: bool = False,
) -> list[str]:
    """Adds the rows of these shapes that are missing; says what has none in the end.

    With `remeasure` the rows that exist, made by another commit, are made again from their logs,
    with `retune` all that this commit did not make, from new logs.
    """
    earlier, missing = Earlier("gemm"), []
    for workload in workloads:
        text = str(workload)
        exists = text in results.rows
        skipped = not exists if remeasure else exists and not retune
        if skipped or results.is_of_this_tree(text):
            continue
        if time.monotonic() + row_seconds(workload) > end:
            missing.append(f"{workload}: no time left")
            continue
        one = replace(bench, seconds=tuning_seconds(workload, bench.seconds))
        try:
            prepare(one.measurer, workload)
            results.add(one.tuned_row(workload, retune, earlier.of_others(workload)))
        except (NoResult, KtError) as why:
            missing.append(f"{workload}: {why}")
            print(missing[-1], flush=True)
        else:
            print(line(results.rows[str(workload)]), flush=True)
        if out:
            logs = map(bench.packed_log, map(parse, bench.one.workloads))
            packed(GRID, bench.one.device, out, filter(Path.exists, logs))
    return missing


def main() -> None:
    """Runs what is missing; exits 1 when a shape of the shard has no row in the end."""
    given = arguments()
    end, (index, count) = time.monotonic() + 60 * given.minutes, given.shard
    one = CLASSES[GRID]
    try:
        target = tuning_target("cuda")
    except KtError as error:
        sys.exit(str(error))
    wanted = map(parse, chosen(one.workloads, given.only))
    workloads = shard_of(list(wanted), index, count)
    settings = effective_settings(target, {"trials": GRID_TRIALS})
    builders = max(1, usable_cores() // count)
    with LocalMeasurer(target, settings, builders=builders) as measurer:
        bench = Bench(GRID, target, measurer, GRID_TRIALS, TUNING_SECONDS)
        results = Results(one.device, GRID, fingerprint(bench), LIBRARIES, given.commit)
        missing = measured(bench, results, workloads, end, given.out, given.remeasure, given.retune)
    print(*["", *missing], sep="\n")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
