"""`kt apply`: the best kernel of a log as one self-contained file, checked before it is written."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kt.logs.query import Best, Run, best_of, timed
from kt.logs.record import Failure
from kt.spaces.errors import LogError, SettingsError, TargetError
from kt.spaces.families import space_of
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import SIMD, Target, detect_cpu
from kt.spaces.workload import Workload, parse

from .emit import c_text, is_ours, json_text
from .lookup import failure_text, one_trial, open_runs, report_bad, workloads_in
from .proof import prove
from .request import listed
from .session import version_difference
from .summary import device_text
from .text import time_of

FORMATS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("c", "json"), "cuda": ("cu", "cubin", "python", "json"),
}  # fmt: skip
"""What a record of each kind of target can be emitted as, the default first."""


@dataclass(frozen=True)
class Chosen:
    """A logged kernel made again from its θ, which was checked against its space."""

    best: Best
    run: Run
    workload: Workload
    space: Space
    kernel: Kernel

    @property
    def default(self) -> Kernel:
        """The kernel of the first family's default θ."""
        return self.space.kernel(int(self.space.defaults()[0]))


def apply(
    log: str | Path,
    workload: str | Workload | None = None,
    *,
    form: str = "",
    any_device: bool = False,
    trial: int | None = None,
    run: str | None = None,
) -> str:
    """The source text of a log's best kernel; raises KtError saying why there is none.

    `workload` may be left out when the log has one only. Records of another device are refused
    unless `any_device`. `form` is "c" (the default on the CPU) or "json".
    """
    found, _ = open_runs(Path(log), run)
    words = [] if workload is None else str(workload).split()
    return text_of(choose(found, words, {}, any_device, trial), form, Path(log).name)


def choose(
    found: Sequence[Run],
    words: Sequence[str],
    flags: Mapping[str, str | None],
    any_device: bool,
    trial: int | None,
) -> Chosen:
    """The best trial (or trial number `trial`) of the one workload that is asked for."""
    texts = workloads_in(found, words, flags)
    if trial is not None:
        run, best = _of_trial(found, texts, trial)
    elif len(texts) > 1:
        raise LogError(f"the log has several workloads, name one: {listed(texts)}")
    else:
        run, best = _fastest(found, texts[0])
    if not any_device:
        _refuse_other_device(best.target)
    workload = parse(best.workload)
    space = space_of(workload, _sane(best.target))
    kernel = space.kernel(space.check(best.trial.family, best.trial.theta))
    return Chosen(best, run, workload, space, kernel)


def _fastest(found: Sequence[Run], text: str) -> tuple[Run, Best]:
    """The fastest best of all runs, those of this device first."""
    here = detect_cpu()
    bests = [(r, best) for r in found if (best := best_of(r, text)) and timed(best.trial)]
    if not bests:
        failed = [
            t.outcome for run in found for t in run.of(text) if isinstance(t.outcome, Failure)
        ]
        why = f"; the first failure: {failure_text(failed[0])}" if failed else ""
        raise LogError(f"the log has no valid result for '{text}'{why}")
    return min(bests, key=lambda pair: (not pair[1].target.same_device(here), pair[1].us))


def _of_trial(found: Sequence[Run], texts: Sequence[str], number: int) -> tuple[Run, Best]:
    """One trial, failed or not: so that a failure can be looked into."""
    run, trial = one_trial(found, texts, number)
    best = best_of(run, trial.workload)
    default = best.default_us if best else None
    us = timed(trial) or 0.0
    return run, Best(trial.workload, run.header.target, trial, us, default, None)


def _refuse_other_device(target: Target) -> None:
    here = detect_cpu()
    if not target.same_device(here):
        raise TargetError(
            f"measured on {device_text(target)}, this is {device_text(here)}: "
            "its speed says nothing here (--any-device emits it all the same)"
        )


def _sane(target: Target) -> Target:
    """The logged device, which source is made from, when such a device can exist."""
    sane = (
        1 <= target.cores <= 4096
        and all(1024 <= size <= 2**36 for size in (target.l1_bytes, target.l2_bytes))
        and 0 <= target.l3_bytes <= 2**36
    )
    if target.kind == "cpu":
        sane &= SIMD.get(target.arch) == (target.simd_bytes, target.vector_registers)
    if not sane:
        raise LogError(f"there is no such device as the log describes: {device_text(target)}")
    return target


def text_of(chosen: Chosen, form: str, log: str) -> str:
    """The emitted text; raises SettingsError for a format that the record cannot have."""
    accepted = FORMATS.get(chosen.best.target.kind, ())
    form = (form or accepted[0]).lower()
    if form == "json":
        return json_text(chosen.best)
    if form not in accepted:
        raise SettingsError(
            f"--format {form}: a {chosen.best.target.kind} kernel can be emitted as "
            f"{', '.join(accepted)}"
        )
    if form != "c":
        raise SettingsError(f"--format {form}: this version emits {', '.join(FORMATS['cpu'])} only")
    return c_text(chosen.best, chosen.kernel, chosen.workload, log)


def apply_command(
    *,
    log: Path,
    words: tuple[str, ...],
    output: Path | None,
    form: str,
    verify: bool,
    bench: bool,
    any_device: bool,
    trial: int | None,
    run: str | None,
    force: bool,
    **flags: str | None,
) -> int:
    """Checks what is asked for, then writes; the exit code is 1 when a check fails."""
    found, bad = open_runs(log, run)
    report_bad(bad)
    chosen = choose(found, words, flags, any_device, trial)
    text = text_of(chosen, form, log.name)
    if output:
        refuse_overwriting(output, force)
    _warn(chosen)
    if verify or bench:
        to = sys.stdout if output else sys.stderr  # stdout is for the source then

        def say(line: str) -> None:
            print(line, file=to)

        prove(text_of(chosen, "c", log.name), chosen.workload, chosen.default, verify, bench, say)
    if output is None:
        sys.stdout.write(text)
        return 0
    write_atomically(output, text)
    when = f", {time_of(chosen.best.us)} when it was measured" if chosen.best.us else ""
    print(f"wrote {output}: {chosen.workload}{when}")
    return 0


def _warn(chosen: Chosen) -> None:
    """Says on stderr what makes the kernel less than sure."""
    outcome = chosen.best.trial.outcome
    if isinstance(outcome, Failure):
        print(f"kt: this trial failed: {failure_text(outcome)}", file=sys.stderr)
    elif chosen.best.final is None:
        print("kt: no finalists' comparison in this run: the time is a single trial's",
              file=sys.stderr)  # fmt: skip
    changed = version_difference(chosen.run.header)
    if "search" in changed:
        print(f"kt: made by other sources than measured, so it may differ ({changed})",
              file=sys.stderr)  # fmt: skip


def refuse_overwriting(path: Path, force: bool) -> None:
    """Raises SettingsError for an existing file that kt did not write."""
    if force or not path.is_file():
        return
    with open(path, "rb") as file:
        head = file.read(64)
    if not is_ours(head):
        raise SettingsError(f"{path} exists and is not a kt kernel: --force overwrites it")


def write_atomically(path: Path, text: str) -> None:
    """Writes a whole file or nothing; what is no regular file (a pipe, a device) gets the text."""
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            path.write_text(text)
        else:
            _replace(path, text)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from None


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    try:
        with open(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, path.stat().st_mode if path.exists() else 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
