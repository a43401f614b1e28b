"""The words before and after a run: what is tuned, what was found, what to type next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from kt.logs.record import StopRecord
from kt.spaces.target import Target

from . import text
from .noise import busy
from .progress import Lane, Progress
from .tune import Result

REASONS: Mapping[str, str] = {
    "trials": "all trials were used",
    "time": "the time budget ended",
    "patience": "no improvement for as many trials as --patience allows",
    "near_bound": "within --near-bound of the measured bound",
    "exhausted": "the whole space was measured",
    "failures": "nothing valid among the first trials",
    "interrupted": "interrupted",
}
REMARKS: Mapping[str, str] = {"prepare": " (before that)", "build": " (builders, overlapping)"}
"""What to add to a stage's seconds."""


def reason_text(reason: str) -> str:
    """A stop record's reason for people."""
    return REASONS.get(reason, text.one_line(reason))


def device_text(target: Target) -> str:
    """A device in a few words."""
    cores = "cores" if target.kind == "cpu" else "SMs"
    return text.one_line(f"{target.processor} ({target.arch}, {target.cores} {cores})")


def heading(progress: Progress) -> list[str]:
    """What is about to happen."""
    session, header = progress.session, progress.session.header
    lines = [
        f"run {header.run} on {header.target.name}: {device_text(header.target)}",
        f"log {session.journal.path}",
        f"strategy {header.settings.strategy}, {progress.total} trials, seed {header.seed}"
        + _budget(session.settings.seconds),
    ]
    for lane, space in zip(progress.lanes, session.spaces, strict=True):
        families = ", ".join(part.family.name for part in space.parts)
        lines.append(f"{lane.name}: {space.size:.3g} points in {families}; {_limits(lane)}")
    taught = {start.workload for starts in header.warm.values() for start in starts}
    if taught:
        count = text.number_of(len(taught), "workload")
        lines.append(f"begins with what earlier logs say of {count}")
    if session.known:
        lines.append(f"resumed: {len(session.known)} trials are in the log already")
    return lines


def _budget(seconds: float) -> str:
    return f", at most {text.duration(seconds)}" if seconds > 0 else ""


def _limits(lane: Lane) -> str:
    flops = lane.workload.flops
    bound = f"bound {text.time_of(lane.bound_us)} ({text.rate_of(flops, lane.bound_us)})"
    if lane.vendor_us is None:
        return bound
    return f"{bound}, vendor {text.time_of(lane.vendor_us)} ({text.rate_of(flops, lane.vendor_us)})"


def summary(progress: Progress, log: Path, stop: StopRecord) -> list[str]:
    """What was found, where it is logged and what to do with it."""
    lines = [line for i in range(len(progress.lanes)) for line in _found(progress, i)]
    seconds = ", ".join(
        f"{k} {text.duration(v)}{REMARKS.get(k, '')}" for k, v in stop.seconds.items()
    )
    lines += [
        "",
        f"{stop.trials} trials, failures: {text.counts(progress.failures)}; "
        f"stopped: {reason_text(stop.reason)}",
        f"time: {seconds}",
        f"log {log}  run {stop.run}",
    ]
    found = [lane for i, lane in enumerate(progress.lanes) if progress.winner(i)]
    lines += [f"next: {apply_command(log, lane.name)}" for lane in found]
    if stop.reason == "interrupted":
        lines.append("to go on: the same command with --resume")
    return lines


def _found(progress: Progress, which: int) -> list[str]:
    lane, winner = progress.lanes[which], progress.winner(which)
    if winner is None:
        return ["", lane.name, "  no valid result"]
    lines = ["", lane.name, f"  best   {'   '.join(lane.facts())}"]
    lines.append(f"  from   trial {winner.trial}, family {winner.family}")
    lines.append(f"  θ      {winner.theta}")
    if lane.final and busy(lane.final):
        lines.append("  final  verified again; the machine was busy, so no speed-up is claimed")
    elif lane.final:
        noise = f"±{100 * lane.final.noise:.1f} %"
        lines.append(f"  final  verified again, measured against the default; noise {noise}")
    return lines


def apply_command(log: Path, workload: str) -> str:
    """The command that emits a workload's best kernel."""
    name = re.sub(r"[^a-z0-9]+", "_", workload)[:60].strip("_")
    return f"kt apply {shlex.quote(str(log))} {workload} -o {name}.c --verify"


def _unstarted(result: Result) -> str:
    early = result.reason == "time" and not result.trials
    return " before the first trial: give more --time" if early else ""


def nothing_valid(result: Result) -> str:
    """Why a run has workloads without a result, with the first failure in full."""
    missing = [name for name, trial in result.best.items() if trial < 0]
    lines = [
        f"no valid result for {', '.join(repr(name) for name in missing)} "
        f"in {result.trials} trials ({reason_text(result.reason)}{_unstarted(result)})"
    ]
    if result.failures:
        lines.append(f"failures: {text.counts(result.failures)}")
        lines.append(f"the first one: {result.first_failure}")
    return "\n".join(lines)
