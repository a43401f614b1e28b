"""A benchmark row: a workload tuned, then timed interleaved with its default and its opponents."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from classes import CLASSES, BenchmarkClass
from rows import HERE, compressed, slug, versus

from kt.logs.journal import read_log
from kt.logs.query import Best, Run, best_of, runs
from kt.logs.record import Failure, Record, RunRecord
from kt.spaces.families import space_of
from kt.spaces.target import Target
from kt.spaces.workload import Workload
from kt.tuner.api import effective_settings
from kt.tuner.backend.build import Binary
from kt.tuner.chosen import default_point
from kt.tuner.pool import LocalMeasurer
from kt.tuner.stop import bound_us
from kt.tuner.tune import tune

COMPARE_SECONDS: Mapping[str, float] = {"cpu": 4.0, "cuda": 1.5}
VERIFIED_SEED = 101
_STATE = ("driver_version", "clocks.max.sm", "clocks.max.mem", "clocks.sm", "power.limit",
          "temperature.gpu", "clocks_event_reasons.active")  # fmt: skip


class NoResult(Exception):
    """A workload without a row, and why."""


def gpu_state() -> dict[str, str]:
    """Driver, clocks, power limit and throttle reasons, as nvidia-smi shows them."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_STATE)}",
        "--format=csv,noheader",
        "-i",
        index,
    ]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in shown.stdout.split(",")]
    return dict(zip(_STATE, values, strict=True)) if len(values) == len(_STATE) else {}


def pace(run: Run) -> dict[str, float]:
    """Trials a second of the loop, and the shares of it that search took and the device idled."""
    last = max((trial.time for trial in run.trials.values()), default=run.header.time)
    begin, end = datetime.fromisoformat(run.header.time), datetime.fromisoformat(last)
    spent = run.stop.seconds if run.stop else {}
    loop = max(spent.get("loop", (end - begin).total_seconds()), 1e-3)
    busy = spent.get("check", 0.0) + spent.get("run", 0.0)
    return {
        "trials_per_second": round(len(run.trials) / loop, 2),
        "search_share": round(spent.get("search", 0.0) / loop, 4),
        "idle_share": round(max(spent.get("idle", loop - busy) / loop, 0.0), 4),
    }


class Earlier:
    """Records of an operator's logs in benchmarks/logs; new ones are read when asked for.

    So are those that took the place of others since, whichever process wrote them.
    """

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._read: dict[Path, tuple[int, list[Record]]] = {}

    def of_others(self, workload: Workload) -> list[Record]:
        """Those of every workload but this one: its own log would add to its trials."""
        for path in sorted((HERE / "logs").glob("*.jsonl.gz")):
            written = path.stat().st_mtime_ns
            if self._read.get(path, (0,))[0] != written:
                self._read[path] = written, self._of_operator(path)
        return [
            record
            for _, records in self._read.values()
            if str(workload) not in _workloads(records)
            for record in records
        ]

    def _of_operator(self, path: Path) -> list[Record]:
        records = read_log(path).records
        operators = {text.split()[0] for text in _workloads(records)}
        return records if self._operator in operators else []


def _workloads(records: Sequence[Record]) -> set[str]:
    """Of all runs of a log."""
    headers = (record for record in records if isinstance(record, RunRecord))
    return {text for header in headers for text in header.workloads}


def _winner(log: Path, workload: Workload) -> tuple[Run, Best]:
    """The last run of a log and its best trial; raises NoResult when there is none."""
    run = runs(read_log(log).records)[-1]
    best = best_of(run, str(workload))
    if best is None:
        count = len(run.trials)
        raise NoResult(
            f"all {count} trials failed" if count else "no trial ended in the time for tuning"
        )
    return run, best


@dataclass(frozen=True)
class Bench:
    """One class on one device."""

    name: str
    target: Target
    measurer: LocalMeasurer
    trials: int
    seconds: float
    """For tuning a workload; 0: no limit."""

    @property
    def one(self) -> BenchmarkClass:
        return CLASSES[self.name]

    def packed_log(self, workload: Workload) -> Path:
        """Where the workload's compressed log is, or will be."""
        return HERE / "logs" / f"{self.name}-{slug(str(workload))}.jsonl.gz"

    def tuned_row(
        self,
        workload: Workload,
        again: bool = False,
        earlier: Sequence[Record] = (),
        rested: bool = False,
    ) -> dict[str, Any]:
        """A row from the workload's log, made when it is missing or `again`.

        A new log takes the place of an older one only with its row. The run learns from `earlier`
        records of other logs.
        """
        log = self.tuned_log(workload, again, earlier)
        row = self.row(workload, log, rested)
        if log != self.packed_log(workload):
            compressed(log)
        return row

    def tuned_log(
        self, workload: Workload, again: bool = False, earlier: Sequence[Record] = ()
    ) -> Path:
        """The log of a finished tuning run: compressed, unless it would replace one that exists."""
        packed = self.packed_log(workload)
        log = packed.with_suffix("")
        if packed.exists() and not again:
            return packed
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        limits = {"trials": self.trials, "seconds": self.seconds, "family": self.one.family}
        settings = effective_settings(self.target, limits)
        tune([workload], self.target, log, self.measurer, settings, earlier=earlier)
        _winner(log, workload)
        return log if packed.exists() else compressed(log)

    def row(self, workload: Workload, log: Path, rested: bool = False) -> dict[str, Any]:
        """Tuned, default and every opponent interleaved in one process, on verified kernels."""
        run, best = _winner(log, workload)
        self.measurer.prepare([workload])
        built = self._binaries(workload, run, best)
        times, facts = self._compared(workload, built, False)
        samples = times.pop("samples")
        limits = self.measurer.bound(workload.dtype)
        return {
            "workload": str(workload), **times, "regime": "sustained",
            "bound_us": round(bound_us(workload, limits), 3), "trials": len(run.trials),
            "copy_share": round(1e6 * workload.bytes / times["kt_us"] / limits.bandwidth, 4),
            **pace(run), "family": best.trial.family, "theta": best.trial.theta.flat(),
            "log": str(self.packed_log(workload).relative_to(HERE.parent)), "opponents": facts,
            **({"rested": self._compared(workload, built, True)[0]} if rested else {}),
            "samples": samples,
        }  # fmt: skip

    def _binaries(self, workload: Workload, run: Run, best: Best) -> list[Binary]:
        """The tuned kernel and the default one, each checked on inputs that tuning never saw."""
        space = space_of(workload, self.target, self.one.family)
        tuned = space.check(best.trial.family, best.trial.theta)
        built = []
        for point in (tuned, default_point(space, run, best)):
            kernel = space.kernel(point)
            binary = self.measurer.build_source(kernel.source, kernel.language)
            if isinstance(binary, Failure):
                raise NoResult(binary.message)
            built.append(binary.started_by(kernel))
            checked = self.measurer.verify_binary(built[-1], workload, (VERIFIED_SEED,))
            if checked.failure:
                raise NoResult(f"family {kernel.family}: {checked.failure}")
        return built

    def _compared(
        self, workload: Workload, built: Sequence[Binary], rested: bool
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Times of the two and of the class's opponents, and what the opponents say."""
        seconds, names = COMPARE_SECONDS[self.target.kind], self.one.opponents
        if self.target.kind == "cpu":  # one opponent, which NumPy calls
            found = self.measurer.compare_binaries(workload, built, seconds=seconds, vendor=True)
            opponents = dict(zip(names, found.us[2:], strict=False))
        else:
            found = self.measurer.compare_binaries(
                workload, built, seconds=seconds, opponents=names, rested=rested
            )
            opponents = dict(found.opponents)
        facts = dict(found.facts)
        if found.failure:
            raise NoResult(f"in the comparison, number {found.failed}: {found.failure}")
        if not opponents:
            why = "; ".join(f"{name}: {fact}" for name, fact in facts.items())
            raise NoResult(f"no opponent runs here ({why})")
        return versus(found.us[0], found.us[1], opponents), facts
