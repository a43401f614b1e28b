"""What each knob is worth: the tuned θ with one knob changed to each other legal value.

    python benchmarks/ablation.py [--only TEXT …] [--minutes 8.5]

For each workload with a committed log: the best θ (and the best of family `mma`, whose knobs other
families lack), each knob of `knobs.PATHS` changed alone, nothing tuned again. All values of a knob
are built, verified and timed interleaved with the tuned one. A knob that is in the results is
skipped, so that the same command, repeated, goes on. With `--out` (default: the folder that $OUT
names) also as ablation.tar.gz, which `tar -xzf ablation.tar.gz -C benchmarks` unpacks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from classes import chosen
from knobs import PATHS, table, win
from measure import gpu_state
from rows import HERE, Results, median, packed, ratio_interval, slug, thinned
from run import add_only, check_only

from kt.logs.journal import read_log
from kt.logs.query import Run, best_of, runs, timed
from kt.logs.record import TrialRecord
from kt.spaces.errors import KtError, SpaceError
from kt.spaces.families import space_of
from kt.spaces.space import FamilySpace
from kt.spaces.target import Target
from kt.spaces.theta import Value
from kt.spaces.workload import Workload, parse
from kt.tuner.api import effective_settings
from kt.tuner.backend.build import Binary
from kt.tuner.devices import tuning_target
from kt.tuner.pool import LocalMeasurer

DEVICE, NAME = "nvidia-h200", "ablation"
WORKLOADS = (
    "gemm 9477x1152x588 dtype=bf16", "gemm 300x5000x700 dtype=bf16",
    "gemm 1000x1000x1000 dtype=bf16", "gemm 64x64x16384 dtype=bf16",
    "gemm 4096x4096x4096 dtype=bf16", "gemm 8191x8191x8191 dtype=bf16",
    "gemm 8192x8192x8192 dtype=bf16", "gemm 2048x2048x2048 dtype=bf16",
    "gemm 4095x4096x4097 dtype=bf16", "gemm 1024x1024x1024 dtype=bf16",
    "gemm 256x1024x1024 dtype=bf16", "gemm 512x512x512 batch=32 dtype=bf16",
    "gemm 128x2048x1024 dtype=bf16", "gemm 4x2048x2048 dtype=bf16",
    "conv2d 8x112x112x12,40x3x3 pad=1 dtype=bf16",
    "conv2d 32x14x14x1024,256x1x1 epilogue=bias+relu dtype=bf16",
)  # fmt: skip
ALWAYS = "mma"
SECONDS, SECONDS_EACH, SPARE_SECONDS = 0.5, 0.08, 25.0
LIBRARIES = ("numpy", "nvidia-cuda-nvrtc", "cuda-bindings")


@dataclass(frozen=True)
class Subject:
    """A tuned θ: the workload, its log and the trial."""

    workload: Workload
    log: Path
    trial: TrialRecord

    @property
    def family(self) -> str:
        return self.trial.family


def logged(text: str) -> Path | None:
    """The newest committed log of a workload."""
    logs = (HERE / "logs").glob(f"*-{slug(text)}.jsonl.gz")
    named = [log for log in logs if runs(read_log(log).records)[-1].header.workloads == (text,)]
    return max(named, key=lambda log: runs(read_log(log).records)[-1].header.time, default=None)


def subjects(text: str) -> Iterator[Subject]:
    """The best trial of a workload's log, and the best of family `mma`."""
    if (log := logged(text)) is None:
        return
    run = runs(read_log(log).records)[-1]
    best = best_of(run, text)
    if best is None:
        return
    yield Subject(parse(text), log, best.trial)
    if best.trial.family != ALWAYS and (other := _best_in(run, text, ALWAYS)):
        yield Subject(parse(text), log, other)


def _best_in(run: Run, text: str, family: str) -> TrialRecord | None:
    trials = [t for t in run.of(text) if t.family == family and timed(t) is not None]
    return min(trials, key=lambda t: (timed(t), t.trial), default=None)


def variants(part: FamilySpace, flat: dict[str, Value], path: str) -> tuple[list[int], list[str]]:
    """(the points with each value of one knob, the tuned one first; why others are not legal)."""
    knob = next(k for k in part.knobs if f"{k.component}.{k.name}" == path)
    values = [flat[path], *(v for v in knob.choices if v != flat[path])]
    points = [part.point({**flat, path: value}) for value in values]
    legal = part.legal(np.array(points, dtype=np.int64)).tolist()
    if not legal[0]:
        raise SpaceError(f"the tuned θ is no longer legal: {part.why_illegal(points[0])}")
    refused = [
        f"{value}: {part.why_illegal(point)}"
        for value, point, fine in zip(values, points, legal, strict=True)
        if not fine
    ]
    return [point for point, fine in zip(points, legal, strict=True) if fine], refused


class Ablation:
    """Changes knobs of tuned θ, one at a time, and adds what that costs to the results."""

    def __init__(self, target: Target, measurer: LocalMeasurer, results: Results) -> None:
        self._target, self._measurer, self._results = target, measurer, results

    def missing(self, subject: Subject) -> list[str]:
        """Paths of this θ's knobs that have no result yet."""
        known = self._row(subject)["knobs"]
        mine = subject.trial.theta.flat()
        return [path for path in PATHS if path in mine and f"{subject.family} {path}" not in known]

    def _row(self, subject: Subject) -> dict[str, Any]:
        """The workload's row; what another θ of a family said is dropped."""
        text, flat = str(subject.workload), subject.trial.theta.flat()
        found = self._results.rows.get(text, {})
        thetas, knobs = dict(found.get("theta", {})), dict(found.get("knobs", {}))
        if thetas.get(subject.family) != flat:
            knobs = {n: k for n, k in knobs.items() if n.split(" ")[0] != subject.family}
        thetas[subject.family] = flat
        return {
            "workload": text, "log": str(subject.log.relative_to(HERE.parent)), "theta": thetas,
            "knobs": knobs,
        }  # fmt: skip

    def measure(self, subject: Subject, path: str) -> dict[str, Any]:
        """Adds one knob; raises KtError where the θ is not legal any more."""
        space = space_of(subject.workload, self._target, subject.family)
        flat = subject.trial.theta.flat()
        points, refused = variants(space.parts[0], flat, path)
        self._measurer.prepare([subject.workload])
        kernels = [space.kernel(point) for point in points]
        values = [space.theta(point).flat()[path] for point in points]
        with ThreadPoolExecutor(len(kernels)) as threads:
            built = list(
                threads.map(lambda k: self._measurer.build_source(k.source, k.language), kernels)
            )
        sound, failures = dict[int, Binary](), dict[int, str]()
        for i, (kernel, one) in enumerate(zip(kernels, built, strict=True)):
            if not isinstance(one, Binary):
                failures[i] = f"{one.failure}: {one.message}"
                continue
            binary = one.started_by(kernel)
            failure = self._measurer.verify_binary(binary, subject.workload, (0,)).failure
            failures |= {i: failure} if failure else {}
            sound |= {} if failure else {i: binary}
        times = self._compared(subject.workload, sound, failures)
        knob = {"tuned": flat[path], "not_legal": refused, **_knob(values, times, failures)}
        row = self._row(subject)
        row["knobs"] |= {f"{subject.family} {path}": knob}
        self._results.add(row)
        return knob

    def _compared(
        self, workload: Workload, sound: dict[int, Binary], failures: dict[int, str]
    ) -> dict[int, Sequence[float]]:
        """Samples by index; one that fails meanwhile moves to `failures`."""
        while 0 in sound and len(sound) > 1:
            order = list(sound)
            seconds = SECONDS + SECONDS_EACH * len(order)
            found = self._measurer.compare_binaries(
                workload, [sound[i] for i in order], seconds=seconds
            )
            if not found.failure:
                return dict(zip(order, map(thinned, found.us), strict=True))
            failures[order[found.failed]] = found.failure
            del sound[order[found.failed]]
        return {}


def _knob(
    values: Sequence[Value], times: dict[int, Sequence[float]], failures: dict[int, str]
) -> dict[str, Any]:
    """What the results keep of one knob: each value's time over the tuned one's, and samples."""
    rows: list[dict[str, Any]] = []
    for i, value in enumerate(values):
        if i in failures:
            rows.append({"value": value, "failure": failures[i]})
        elif i and i in times:
            ratio, low, high = ratio_interval(times[i], times[0])
            rows.append({
                "value": value, "us": median(times[i]), "ratio": round(ratio, 4),
                "ratio_low": round(low, 4), "ratio_high": round(high, 4),
                "samples": list(times[i]),
            })  # fmt: skip
    tuned = {"us": median(times[0]), "samples": list(times[0])} if 0 in times else {}
    return {**tuned, "values": rows}


def line(subject: Subject, path: str, knob: dict[str, Any]) -> str:
    """One knob for the terminal."""
    timed_ones = [v for v in knob["values"] if "ratio" in v]
    shown = "  ".join(
        f"{v['value']} {v['ratio']:.3f}" for v in sorted(timed_ones, key=lambda v: v["ratio"])[:6]
    )
    one = win(path, knob)
    against = f"  {one.value} over plain {one.plain} {one.ratio:.3f}" if one else ""
    return (
        f"{subject.workload!s:38} {subject.family:8} {path:18} tuned {knob['tuned']!s:9} "
        f"others: {shown or 'none'}{against}"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_only(parser)
    parser.add_argument("--minutes", type=float, default=8.5, help="for the whole command")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="for the archive")
    parser.add_argument("--commit", default="", help="of this tree, where git does not know")
    given = parser.parse_args()
    check_only(parser, given.only, WORKLOADS, NAME)
    return given


def main() -> None:
    """Measures what is missing; exits 1 when something has no result in the end."""
    given = arguments()
    end, missing = time.monotonic() + 60 * given.minutes, []
    try:
        target = tuning_target("cuda")
    except KtError as error:
        sys.exit(str(error))
    with LocalMeasurer(target, effective_settings(target, {})) as measurer:
        device = {"processor": target.processor, "arch": target.arch, "cores": target.cores}
        device |= measurer.environment() | gpu_state()
        results = Results(DEVICE, NAME, device, LIBRARIES, given.commit)
        ablation = Ablation(target, measurer, results)
        for text in chosen(WORKLOADS, given.only):
            found = list(subjects(text))
            missing += [] if found else [f"{text}: no committed log with a result"]
            for subject in found:
                for path in ablation.missing(subject):
                    if time.monotonic() + SPARE_SECONDS > end:
                        missing.append(f"{text} {subject.family} {path}: no time left")
                        continue
                    try:
                        print(line(subject, path, ablation.measure(subject, path)), flush=True)
                    except KtError as why:
                        missing.append(f"{text} {subject.family} {path}: {why}")
            if given.out and results.rows:
                packed(NAME, DEVICE, given.out)
    print("", table(results.path), "", *missing, sep="\n")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
