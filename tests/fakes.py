"""Fakes for the one seam: a kernel family of made-up knobs, and a Measurer that computes times."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kt.logs.record import Bound, BuildFacts, Failure, FinalEntry, Outcome, Seconds, Timing
from kt.spaces.family import Columns, Family, Rule
from kt.spaces.kernel import Kernel
from kt.spaces.knob import Categorical, Knob, Ordinal
from kt.spaces.target import Target
from kt.spaces.theta import Theta, Value
from kt.spaces.workload import Workload
from kt.tuner.measure import VENDOR, Candidate, FrozenBatch, Measured


class FakeFamily(Family):
    """Six knobs with a product rule; times follow `analytic_us`."""

    name = "fake"
    empty: Mapping[str, str] = {"perm": "the fake has no loops"}

    def refuses(self, workload: Workload, target: Target) -> str | None:
        return None

    def knobs(self, workload: Workload, target: Target) -> Sequence[Knob]:
        powers = tuple(2**i for i in range(9))
        return (
            Ordinal("tile", "bm", powers),
            Ordinal("tile", "bn", powers),
            Ordinal("tile", "bk", powers),
            Categorical("mem", "pack", ("none", "a", "b", "both")),
            Categorical("fusion", "fused", (False, True)),
            Ordinal("unroll", "ku", (1, 2, 4, 8)),
        )

    def rules(self, workload: Workload, target: Target) -> Sequence[Rule]:
        return (
            Rule(
                "cache",
                lambda v: v["bm"] * v["bn"] <= 4096,
                lambda v: f"tile {v['bm']}x{v['bn']} exceeds 4096 elements",
            ),
        )

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return {"bm": 8, "bn": 8, "bk": 8, "pack": "none", "fused": False, "ku": 1}

    def derive(
        self, workload: Workload, target: Target, values: Columns
    ) -> dict[str, np.ndarray[Any, Any]]:
        return {"tile": (values["bm"] * values["bn"]).astype(np.float64)}

    def kernel(self, workload: Workload, target: Target, theta: Theta) -> Kernel:
        return Kernel(workload, self.name, theta, "c", f"// {theta.key()}\n")


def analytic_us(theta: Theta) -> float:
    """A smooth bowl with interactions; the optimum is 100 µs."""
    bm, bn = (np.log2(float(theta.tile[name])) for name in ("bm", "bn"))
    bk = np.log2(float(theta.tile["bk"]))
    cost = 0.04 * (bm - 5) ** 2 + 0.04 * (bn - 6) ** 2 + 0.03 * (bk - 4) ** 2
    cost += 0.05 * abs(bm - bn + 1)
    cost += {"none": 0.5, "a": 0.3, "b": 0.1, "both": 0.0}[str(theta.mem["pack"])]
    cost += 0.0 if theta.fusion["fused"] else 0.2
    cost += 0.06 * abs(np.log2(float(theta.unroll["ku"])) - 2)
    return float(100.0 * (1 + cost))


def analytic_outcome(theta: Theta) -> Outcome:
    """Time, or a failure in one corner of the space."""
    if theta.tile["bm"] == 256 and theta.mem["pack"] == "none":
        return Failure("wrong_result", "check", "relative error 0.3 exceeds 0.004")
    us = analytic_us(theta)
    return Timing((us, us * 1.01, us * 0.99), us)


class AnalyticMeasurer:
    """Outcomes from a formula; `shuffle` yields them out of order, as several runners would."""

    def __init__(
        self,
        outcome: Callable[[Theta], Outcome] = analytic_outcome,
        shuffle: int = 0,
        seconds: float = 0.0,
        die_after: int | None = None,
    ) -> None:
        self.outcome, self.seconds, self.die_after = outcome, seconds, die_after
        self._rng = np.random.default_rng(shuffle) if shuffle else None
        self.measured: list[int] = []
        self.known: dict[tuple[str, str], int] = {}

    def prepare(self, workloads: Sequence[Workload]) -> None:
        self.workloads = tuple(workloads)
        self.known.clear()

    def bound(self, dtype: str) -> Bound:
        return Bound(1e12, 1e11)

    def vendor_us(self, workload: Workload) -> float | None:
        return 150.0

    def environment(self) -> dict[str, str | int | float | bool]:
        return {"device": "fake"}

    def know(self, workload: str, binary: str, trial: int) -> None:
        self.known[workload, binary] = trial

    def start(self, batch: FrozenBatch, deadline: float | None = None) -> None:
        pass

    def finish(self, batch: FrozenBatch, deadline: float | None = None) -> Iterator[Measured]:
        duplicates = {c.trial: self._first(c) for c in batch.candidates}
        order = list(batch.candidates)
        if self._rng is not None:
            order = [order[i] for i in self._rng.permutation(len(order))]
            order.sort(key=lambda c: duplicates[c.trial] != c.trial)  # after their originals
        for candidate in order:
            if self.die_after is not None and len(self.measured) >= self.die_after:
                raise KeyboardInterrupt
            if deadline is not None and time.monotonic() >= deadline:
                return
            if self.seconds:
                time.sleep(self.seconds)
            yield self._measured(candidate, duplicates[candidate.trial])

    def busy_seconds(self) -> float:
        return self.seconds * len(self.measured)

    def _first(self, candidate: Candidate) -> int:
        binary = hashlib.sha256(candidate.kernel.source.encode()).hexdigest()
        return self.known.setdefault((str(candidate.kernel.workload), binary), candidate.trial)

    def _measured(self, candidate: Candidate, first: int) -> Measured:
        self.measured.append(candidate.trial)
        facts = BuildFacts(0.01, hashlib.sha256(candidate.kernel.source.encode()).hexdigest())
        if first != candidate.trial:
            return Measured(candidate.trial, None, facts, Seconds(0.01), duplicate_of=first)
        outcome = self.outcome(candidate.kernel.theta)
        return Measured(candidate.trial, outcome, facts, Seconds(0.01, 0.01, 0.02))

    def qualify(self, *_: object) -> list[FinalEntry]:
        return []

    def finals(
        self, workload: Workload, candidates: Sequence[Candidate], deadline: float | None = None
    ) -> list[FinalEntry]:
        entries = []
        for candidate in candidates:
            outcome = self.outcome(candidate.kernel.theta)
            if isinstance(outcome, Timing):
                entries.append(FinalEntry(candidate.trial, outcome.us, outcome.median_us))
            else:
                entries.append(FinalEntry(candidate.trial, (), 0.0, outcome.message))
        return [*entries, FinalEntry(VENDOR, (148.0, 152.0, 150.0), 150.0)]

    def close(self) -> None:
        pass
