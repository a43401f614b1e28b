"""What a log says, as values: one `Row` a workload and device, one `RunFacts` a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from kt.logs.query import Best, Run, best_of, failures
from kt.logs.record import Failure, TrialRecord
from kt.spaces.errors import WorkloadError
from kt.spaces.target import Target
from kt.spaces.workload import Workload, parse

from .lookup import failure_text
from .noise import busy, noise_of, unstable
from .stop import bound_us
from .text import quotient

DISTINCT = 5
"""Distinct failure messages that are kept."""


@dataclass(frozen=True)
class Row:
    """One workload on one device, over all runs in the log. Times in microseconds."""

    workload: str
    target: Target
    trials: int
    failures: dict[str, int]
    flops: int = 0
    best: Best | None = None
    run: str = ""
    bound_us: float | None = None
    vendor_us: float | None = None

    @property
    def vendor_samples(self) -> tuple[float, ...]:
        """The vendor's times in the final, where there was one."""
        return self.best.final.vendor_us if self.best and self.best.final else ()

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for any ratio to be claimed."""
        return busy(self.best.final if self.best else None)

    @property
    def over_default(self) -> float | None:
        return None if self.busy else quotient(self.default_us, self.us)

    @property
    def over_vendor(self) -> float | None:
        noisy = self.busy or unstable(self.vendor_samples)
        return None if noisy else quotient(self.vendor_us, self.us)

    @property
    def us(self) -> float | None:
        return self.best.us if self.best else None

    @property
    def default_us(self) -> float | None:
        return self.best.default_us if self.best else None

    def facts(self) -> dict[str, Any]:
        """For machines."""
        best = self.best
        return {
            "workload": self.workload, "device": self.target.processor, "arch": self.target.arch,
            "best_us": self.us, "default_us": self.default_us, "vendor_us": self.vendor_us,
            "bound_us": self.bound_us, "over_default": self.over_default,
            "over_vendor": self.over_vendor, "vendor_noise": noise_of(self.vendor_samples),
            "gflops": quotient(self.flops / 1e3, self.us),
            "of_bound": quotient(self.bound_us, self.us),
            "trials": self.trials, "failures": self.failures, "run": self.run,
            "trial": best.trial.trial if best else None,
            "family": best.trial.family if best else None,
            "theta": msgspec.to_builtins(best.trial.theta) if best else None,
            "verified": bool(best and best.final),
            "noise": best.final.noise if best and best.final else None, "busy": self.busy,
        }  # fmt: skip


@dataclass(frozen=True)
class RunFacts:
    """One run: how it ended, where its time went, what failed, how well its model predicted."""

    run: Run
    trials: int
    failures: dict[str, int]
    messages: tuple[tuple[int, str], ...]
    seconds: dict[str, float]
    model: tuple[tuple[int, float | None, float | None, int], ...]
    """(batch, rank correlation, top recall, records fitted on)."""

    @property
    def reason(self) -> str:
        return self.run.stop.reason if self.run.stop else "no stop record: killed or still running"

    def facts(self) -> dict[str, Any]:
        """For machines."""
        header = self.run.header
        names = ("batch", "rank_correlation", "top_recall", "fitted_on")
        return {
            "run": header.run, "time": header.time, "kt": header.kt, "seed": header.seed,
            "strategy": header.settings.strategy, "workloads": header.workloads,
            "trials": self.trials, "reason": self.reason, "failures": self.failures,
            "messages": [{"count": n, "message": m} for n, m in self.messages],
            "seconds": self.seconds, "resumed": len(self.run.resumes),
            "left_out": self.run.left_out,
            "model": [dict(zip(names, row, strict=True)) for row in self.model],
        }  # fmt: skip


def rows(runs: Sequence[Run], texts: Iterable[str]) -> list[Row]:
    """A row for every workload of `texts` and device that measured it."""
    groups: dict[str, dict[object, list[Run]]] = {text: {} for text in texts}
    for run in runs:
        for text in run.workloads & groups.keys():
            if run.of(text):
                groups[text].setdefault(run.header.target.device, []).append(run)
    return [_row(group, text) for text, devices in groups.items() for group in devices.values()]


def _row(runs: Sequence[Run], text: str) -> Row:
    trials = [trial for run in runs for trial in run.of(text)]
    row = Row(text, runs[0].header.target, len(trials), failures(trials))
    bests = [(best.rank, i, best) for i, run in enumerate(runs) if (best := best_of(run, text))]
    try:
        workload = parse(text)
    except WorkloadError:
        return row  # a log may hold anything
    if not bests:
        return _replaced(row, workload, runs[-1], None)
    _, i, best = min(bests, key=lambda item: item[:2])
    return _replaced(row, workload, runs[i], best)


def _replaced(row: Row, workload: Workload, run: Run, best: Best | None) -> Row:
    return Row(
        row.workload, row.target, row.trials, row.failures, workload.flops, best, run.header.run,
        bound_of(run, workload),
        (best.vendor_us if best else None) or run.header.vendor_us.get(row.workload),
    )  # fmt: skip


def bound_of(run: Run, workload: Workload) -> float | None:
    """The measured bound of a workload in microseconds, where the header has one."""
    bound = run.header.bounds.get(workload.dtype)
    return bound_us(workload, bound) if bound else None


def run_facts(run: Run, texts: Set[str]) -> RunFacts:
    """The facts of one run, its trials restricted to the workloads of `texts`."""
    trials = [trial for _, trial in sorted(run.trials.items()) if trial.workload in texts]
    model = tuple(
        (b.batch, b.model.rank_correlation, b.model.top_recall, b.model.fitted_on)
        for b in run.batches
        if b.model.rank_correlation is not None and b.workload in texts
    )
    return RunFacts(
        run, len(trials), failures(trials), _messages(trials), _seconds(run, trials), model
    )


def _messages(trials: Sequence[TrialRecord]) -> tuple[tuple[int, str], ...]:
    """(count, first message) of the most frequent failures that differ in more than numbers."""
    counted: Counter[str] = Counter()
    first: dict[str, str] = {}
    for outcome in (t.outcome for t in trials if isinstance(t.outcome, Failure)):
        text = failure_text(outcome)
        key = re.sub(r"\d+(\.\d+)?", "0", text)
        counted[key] += 1
        first.setdefault(key, text)
    return tuple((count, first[key]) for key, count in counted.most_common(DISTINCT))


def _seconds(run: Run, trials: Sequence[TrialRecord]) -> dict[str, float]:
    """Where the time went: the stop record's word, else the sums over trials."""
    if run.stop and run.stop.seconds:
        return dict(run.stop.seconds)
    stages = ("build", "check", "run")
    return {name: round(sum(getattr(t.seconds, name) for t in trials), 3) for name in stages}
