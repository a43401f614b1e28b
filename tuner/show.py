"""`kt show`: bests, failures, time and model quality of a log, as text, JSON or a picture."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kt.logs.query import Run
from kt.logs.record import Failure, TrialRecord
from kt.spaces.errors import SettingsError

from . import text
from .explain import Explanation, explain, lines_of
from .lookup import one_trial, open_runs, report_bad, workloads_in
from .noise import unstable, unstable_text
from .output import refuse_overwriting, write_atomically
from .plot import is_plot, picture, refuse_format
from .report import Row, RunFacts, rows, run_facts
from .summary import REMARKS, device_text, reason_text

RUNS_SHOWN = 5
_SERIAL = ("search", "check", "run")  # builds overlap: they have no share of the wall time


def show_command(
    *,
    log: Path,
    words: tuple[str, ...],
    plot: Path | None,
    trial: int | None,
    run: str | None,
    as_json: bool,
    explained: bool = False,
    force: bool = False,
    **flags: str | None,
) -> int:
    """Prints what is asked for."""
    if plot:
        refuse_format(plot)
        if trial is not None:
            raise SettingsError("--plot draws a whole search: leave --trial out")
        refuse_overwriting(plot, force, is_plot, "kt plot")
    runs, bad = open_runs(log, run)
    report_bad(bad)
    texts = workloads_in(runs, words, flags)
    if trial is not None:
        owner, record = one_trial(runs, texts, trial)
        print("\n".join(trial_lines(log, owner, record, as_json)))
        return 0
    table = rows(runs, texts)
    wanted = frozenset(texts)
    facts = [run_facts(r, wanted) for r in runs if not wanted.isdisjoint(r.workloads)]
    found = _explained(runs, texts) if explained else []
    if as_json:
        more = {"explained": [one.facts() for one in found]} if explained else {}
        print(json.dumps(_json(log, table, facts, bad.total) | more))
    else:
        told = [line for one in found for line in lines_of(one)]
        print("\n".join([*table_lines(table), *_runs_lines(facts), *told]))
    if plot:
        write_atomically(plot, picture(runs, table, plot))
        print(f"kt: drew {plot}", file=sys.stderr)
    return 0


def _explained(runs: Sequence[Run], texts: Sequence[str]) -> list[Explanation]:
    """Of each workload, the newest run that measured it."""
    found = []
    for workload in texts:
        having = [run for run in runs if run.of(workload)]
        newest = max(having, key=lambda run: run.header.time, default=None)
        if newest and (one := explain(newest, workload)):
            found.append(one)
    return found


def _json(log: Path, table: Sequence[Row], facts: Sequence[RunFacts], bad: int) -> dict[str, Any]:
    return {
        "log": str(log), "bad_lines": bad, "workloads": [row.facts() for row in table],
        "runs": [fact.facts() for fact in facts],
    }  # fmt: skip


def table_lines(table: Sequence[Row]) -> list[str]:
    """One line a workload; a heading names the device where there is more than one."""
    head = ("workload", "best", "throughput", "of bound", "default", "speed-up", "vendor",
            "over vendor", "trials", "failed")  # fmt: skip
    lines: list[str] = []
    devices: dict[str, list[tuple[str, ...]]] = {}
    for row in table:
        devices.setdefault(device_text(row.target), []).append(_cells(row))
    for device, cells in devices.items():
        lines += [device, *text.columns([head, *cells], set(range(1, len(head)))), ""]
    for row in (r for r in table if r.best):
        assert row.best
        lines.append(f"{text.one_line(row.workload)}: trial {row.best.trial.trial} of run "
                     f"{text.one_line(row.run)}{_certainty(row)}")  # fmt: skip
        trial = row.best.trial
        lines.append(f"  {text.one_line(trial.family)}: {text.one_line(str(trial.theta))}")
    return lines


def _certainty(row: Row) -> str:
    final = row.best.final if row.best else None
    if final is None:
        return ", not verified by a final"
    if row.busy:
        return ", verified again; the machine was busy, so no speed-up is claimed"
    return f", verified again; noise ±{100 * final.noise:.1f} %"


def _cells(row: Row) -> tuple[str, ...]:
    vendor = row.vendor_samples
    vendor_text = unstable_text(vendor) if unstable(vendor) else text.time_of(row.vendor_us)
    return (
        text.one_line(row.workload, 120), text.time_of(row.us), text.rate_of(row.flops, row.us),
        text.of_bound(row.bound_us, row.us), text.time_of(row.default_us),
        text.times(row.over_default), vendor_text, text.times(row.over_vendor), str(row.trials),
        str(sum(row.failures.values())),
    )  # fmt: skip


def _runs_lines(facts: Sequence[RunFacts]) -> list[str]:
    lines = []
    if len(facts) > RUNS_SHOWN:
        lines += ["", f"{len(facts)} runs; the newest {RUNS_SHOWN} (--run ID shows another):"]
    for fact in sorted(facts, key=lambda f: f.run.header.time)[-RUNS_SHOWN:]:
        lines += ["", *run_lines(fact)]
    return lines


def run_lines(fact: RunFacts) -> list[str]:
    """How one run went."""
    header = fact.run.header
    when = text.one_line(header.time, 40)
    again, batches = len(fact.run.resumes), text.number_of(len(fact.run.batches), "batch")
    resumed = f", resumed {text.number_of(again, 'time')}" if again else ""
    since = " since it was resumed" if again and fact.seconds else ""
    strategy, version = (text.one_line(t, 40) for t in (header.settings.strategy, header.kt))
    lines = [
        f"run {text.one_line(header.run)} of {when}: strategy {strategy}, seed {header.seed}, "
        f"kt {version}{resumed}",
        f"  trials    {fact.trials} in {batches}; {reason_text(fact.reason)}",
        f"  time      {_split(fact.seconds)}{since}",
        f"  failures  {text.counts(fact.failures)}",
    ]
    lines += [f"            {count}x {message}" for count, message in fact.messages]
    if fact.run.left_out:
        lines.append(f"  left out  {fact.run.left_out} trial records that no batch proposed")
    if fact.model:
        ranks = [f"{rank:.2f}" for _, rank, _, _ in fact.model if rank is not None]
        recalls = [recall for _, _, recall, _ in fact.model if recall is not None]
        lines.append(f"  model     rank correlation by batch {' '.join(ranks)}")
        if recalls:
            lines.append(f"            found {100 * sum(recalls) / len(recalls):.0f} % of each "
                         "batch's best four among its four best guesses")  # fmt: skip
    return lines


def _split(seconds: dict[str, float]) -> str:
    wall = seconds.get("wall")
    return ", ".join(
        f"{text.one_line(name)} {text.duration(value)}{REMARKS.get(name, '')}"
        + (f" ({text.percent(value, wall)})" if wall and name in _SERIAL and value > 0 else "")
        for name, value in seconds.items()
    )


def trial_lines(log: Path, run: Run, record: TrialRecord, as_json: bool) -> list[str]:
    """One record in full, and how to make its kernel again."""
    found = msgspec.to_builtins(record)
    command = (
        f"kt apply {shlex.quote(str(log))} --run {shlex.quote(run.header.run)} "
        f"--trial {record.trial} -o kernel.c --verify"
    )
    if as_json:
        return [json.dumps(found | {"reproduce": command})]
    lines = [text.one_line(record.workload), f"  {text.one_line(str(record.theta))}", ""]
    lines += json.dumps(found, indent=2).splitlines()
    if isinstance(record.outcome, Failure) and record.outcome.detail:
        lines += ["", text.printable(record.outcome.detail)]
    return [*lines, "", f"to make it again: {text.one_line(command)}"]
