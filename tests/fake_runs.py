"""Records and whole runs made with the fakes, for the tests of logs and of the tuner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes import AnalyticMeasurer

from kt.logs.journal import read_log
from kt.logs.query import Run, runs
from kt.logs.record import (
    BatchRecord,
    BuildFacts,
    Entry,
    Failure,
    FinalEntry,
    FinalRecord,
    ModelReport,
    Outcome,
    Record,
    ResumeRecord,
    RunRecord,
    Seconds,
    Settings,
    StopRecord,
    Timing,
    TrialRecord,
)
from kt.spaces.target import Target, detect_cpu
from kt.spaces.theta import Theta
from kt.spaces.workload import parse
from kt.tuner.tune import Result, tune

GEMM = "gemm 64x64x64 dtype=fp32"
CPU = detect_cpu()
THETA = Theta(tile={"bm": 8, "bn": 8, "bk": 8}, mem={"pack": "none"}, fusion={"fused": False},
              unroll={"ku": 1})  # fmt: skip


def header(run: str = "r", **fields: Any) -> RunRecord:
    known: dict[str, Any] = {
        "kt": "0", "seed": 0, "settings": Settings(), "target": CPU, "workloads": (GEMM,),
        "spaces": ("",), "bounds": {}, "versions": {}, "environment": {}, "time": "t",
    }  # fmt: skip
    return RunRecord(run=run, **known | fields)


def trial(number: int, outcome: Outcome | float = 100.0, run: str = "r", **f: Any) -> TrialRecord:
    """A trial with a time in microseconds, or with any outcome."""
    known: dict[str, Any] = {
        "batch": 0, "workload": GEMM, "family": "fake", "theta": THETA, "seconds": Seconds()
    }  # fmt: skip
    if not isinstance(outcome, Timing | Failure):
        outcome = Timing((outcome,), outcome)
    return TrialRecord(run=run, trial=number, outcome=outcome, **known | f)


def proposed(*records: Record) -> list[Record]:
    """`records` with a batch for each trial that no batch of them proposes before it."""
    planned: dict[str, int] = {}
    batches: dict[str, int] = {}
    found: list[Record] = []
    for record in records:
        if isinstance(record, TrialRecord) and record.trial >= planned.get(record.run, 0):
            first, number = planned.get(record.run, 0), batches.get(record.run, 0)
            numbers = range(first, record.trial + 1)
            found.append(
                BatchRecord(
                    run=record.run, batch=number, workload=record.workload, time="t",
                    entries=tuple(
                        Entry(n, record.family, record.theta, record.source) for n in numbers
                    ),
                    predicted=(None,) * len(numbers), model=ModelReport(),
                )
            )  # fmt: skip
            planned[record.run], batches[record.run] = record.trial + 1, number + 1
        found.append(record)
    return found


def one_of_each(run: str = "r") -> list[Record]:
    """A record of every type, with every optional field set somewhere."""
    facts = BuildFacts(0.5, "ab", True, 8, 16, 24, 32, ("warning: café",))
    return [
        header(run, boot="b", vendor_us={GEMM: 2.0}, environment={"a": 1, "b": "x", "c": True}),
        BatchRecord(
            run=run, batch=0, workload=GEMM, predicted=(None, 0.5, 0.5), time="t",
            entries=(
                Entry(0, "fake", THETA, "default"), Entry(1, "fake", THETA, "model"),
                Entry(2, "fake", THETA, "model"),
            ),
            model=ModelReport(8, 0.5, 0.25, 0.1),
        ),
        trial(0, run=run, build=facts, predicted=0.25, clock_mhz=1.5, source="default"),
        trial(1, Failure("crash", "run", "signal 11", "tail\nof stderr"), run, duplicate_of=0),
        trial(2, Timing((1.0, 2.0), 1.5, True, 1.0, True, 1e-9), run),
        FinalRecord(
            run=run, workload=GEMM, best=0, default=0, noise=0.01, time="t",
            entries=(FinalEntry(0, (1.0,), 1.0), FinalEntry(2, (), 0.0, "wrong")),
        ),
        ResumeRecord(run=run, boot="b", settings=Settings(trials=9), time="t", suspects=(1,)),
        StopRecord(run=run, reason="trials", trials=3, best={GEMM: 0}, seconds={"wall": 1.0},
                   time="t"),
    ]  # fmt: skip


def tuned(
    log: Path,
    *workloads: str,
    measurer: AnalyticMeasurer | None = None,
    seed: int = 0,
    resume: bool = False,
    target: Target = CPU,
    **settings: Any,
) -> Result:
    """A run of `tune` on the analytic fake."""
    return tune(
        [parse(text) for text in workloads or (GEMM,)], target, log,
        measurer or AnalyticMeasurer(), Settings(**settings), seed, resume,
    )  # fmt: skip


def read_run(log: Path) -> Run:
    """The only run of a log."""
    (run,) = runs(read_log(log).records)
    return run


def proposals(run: Run) -> list[tuple[str, list[tuple[int, str, str]]]]:
    """What was proposed: workload and (trial, θ, source) of every batch."""
    return [
        (batch.workload, [(e.trial, e.knobs.key(), e.source) for e in batch.entries])
        for batch in run.batches
    ]
