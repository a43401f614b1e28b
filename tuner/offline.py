"""`kt replay`: a log read without a device: its runs, their curves, their identity, what-ifs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from kt.logs.query import Best, Run, best_of, curve, failures
from kt.spaces.errors import SettingsError

from . import text
from .foreign import read_recording
from .foreign_replay import replay_recording
from .lookup import open_runs, report_bad, workloads_in
from .noise import busy
from .replay import Identity, Simulation, check_identity, simulate
from .strategy import STRATEGIES

_FIRST_BUDGET = 8


def replay_command(
    *,
    log: Path,
    words: tuple[str, ...],
    strategy: str | None,
    budget: int | None,
    seeds: int,
    run: str | None,
    as_json: bool,
    constraints: Path | None = None,
    **flags: str | None,
) -> int:
    """Prints what is asked for; 0 identical, 1 different, 2 other versions."""
    if recording := read_recording(log):
        facts, lines = replay_recording(
            recording, constraints=constraints, strategy=strategy, budget=budget, seeds=seeds
        )
        _print(as_json, [facts], lines)
        return 0
    if constraints is not None:
        raise SettingsError("--constraints is for recordings of other tools; this is a log of kt")
    found, bad = open_runs(log, run)
    report_bad(bad)
    texts = workloads_in(found, words, flags)
    if strategy is not None:
        if strategy not in STRATEGIES:
            raise SettingsError(f"--strategy {strategy}: accepts {', '.join(STRATEGIES)}")
        results = {w: _simulated(found, w, strategy, budget, seeds) for w in texts}
        _print(
            as_json,
            [_simulation_facts(workload, result) for workload, result in results.items()],
            [
                line
                for workload, result in results.items()
                for line in _simulation(workload, result)
            ],
        )
        return 0
    wanted = frozenset(texts)
    shown = [one for one in found if not wanted.isdisjoint(one.workloads)]
    identities = [check_identity(one) for one in shown]
    pairs = list(zip(shown, identities, strict=True))
    _print(
        as_json,
        [_facts(one, identity, wanted) for one, identity in pairs],
        [line for one, identity in pairs for line in _lines(one, identity, wanted)],
    )
    codes = {identity.exit_code for identity in identities}
    return 1 if 1 in codes else max(codes, default=0)


def _print(as_json: bool, facts: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> None:
    print("\n".join(map(json.dumps, facts) if as_json else map(text.one_line, lines)))


def _lines(run: Run, identity: Identity, texts: Set[str]) -> list[str]:
    """A run: its head, a curve a workload, and whether its proposals are reproduced."""
    header = run.header
    ended = run.stop.reason if run.stop else "cut off"
    lines = [
        f"run {header.run}: strategy {header.settings.strategy}, seed {header.seed}, "
        f"{len(run.trials)} trials in {len(run.batches)} batches, ended: {ended}"
    ]
    if run.left_out:
        lines.append(f"  {run.left_out} trial records left out: no batch proposed them")
    for workload in run.workloads:
        if workload in texts:
            lines += [f"  {line}" for line in _curve(run, workload)]
    return [*lines, f"  proposals {_verdict(identity)}"]


def _curve(run: Run, workload: str) -> list[str]:
    trials = run.of(workload)
    points = list(curve(trials))
    failed = text.counts(failures(trials))
    if not points:
        return [f"{workload}: no result; failures: {failed}"]
    best = best_of(run, workload)
    by_budget = [
        f"{budget}: {text.time_of(min(us for n, us in points if n <= budget))}"
        for budget in _budgets(len(trials))
        if points[0][0] <= budget
    ]
    curve_text = text.sparkline([1 / us for _, us in points])
    return [
        f"{workload}: {_decided(best)}failures: {failed}",
        f"  best during the search after trials {', '.join(by_budget)}  {curve_text}",
    ]


def _decided(best: Best | None) -> str:
    """The final's result, whose times differ from those of the search."""
    if best is None or best.final is None:
        return "no final; "
    over = None if busy(best.final) else text.quotient(best.default_us, best.us)
    return f"final best {text.time_of(best.us)}, {text.times(over)} the default; "


def _budgets(trials: int) -> list[int]:
    """8, 16, 32 … and the number of trials."""
    budgets, budget = [], _FIRST_BUDGET
    while budget < trials:
        budgets.append(budget)
        budget *= 2
    return [*budgets, trials]


def _verdict(identity: Identity) -> str:
    if not identity.difference:
        return f"identical in {identity.batches} batches"
    why = f": {text.one_line(identity.difference)}"
    if identity.versions:
        return f"not comparable{why} ({text.one_line(identity.versions)})"
    return f"DIFFERENT under the same versions{why}"


def _facts(run: Run, identity: Identity, texts: Set[str]) -> dict[str, Any]:
    return {
        "run": run.header.run, "seed": run.header.seed, "strategy": run.header.settings.strategy,
        "trials": len(run.trials), "batches": len(run.batches),
        "reason": run.stop.reason if run.stop else None,
        "identical": not identity.difference, "difference": identity.difference,
        "versions": identity.versions, "exit_code": identity.exit_code,
        "workloads": {
            workload: {
                "curve": list(curve(run.of(workload))), "failures": failures(run.of(workload)),
            }
            for workload in run.workloads if workload in texts
        },
    }  # fmt: skip


def _simulated(
    found: Sequence[Run], workload: str, strategy: str, budget: int | None, seeds: int
) -> Simulation:
    having = [run for run in found if workload in run.workloads]
    return simulate(having, workload, strategy, budget, seeds)


def _simulation(workload: str, result: Simulation) -> list[str]:
    times = ", ".join(text.time_of(us) for us in result.best_us)
    return [
        f"{workload}: {result.strategy} on {result.points} recorded points, budget {result.budget}",
        f"  found {100 * result.reached:.1f} % of the recorded best "
        f"{text.time_of(result.optimum_us)} (median of {len(result.best_us)} seeds: {times})",
    ]


def _simulation_facts(workload: str, result: Simulation) -> dict[str, Any]:
    return {
        "workload": workload, "strategy": result.strategy, "budget": result.budget,
        "points": result.points, "optimum_us": result.optimum_us, "best_us": result.best_us,
        "reached": result.reached,
    }  # fmt: skip
