"""`kt apply`: the best kernels of a log in one file, proven before it is written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kt.logs.query import Run, best_of, timed
from kt.logs.record import Failure
from kt.spaces.errors import SettingsError
from kt.spaces.target import checked_target
from kt.spaces.workload import Workload

from .api import DTYPE
from .chosen import Chosen, choose, refuse_other_device
from .emit import is_ours
from .emit_shapes import shapes_text
from .forms import emitted, form_of, proven, refuse_suffix
from .lookup import failure_text, open_runs, report_bad
from .output import refuse_overwriting, write_atomically
from .proof import Say, prove
from .proof_shapes import prove_shapes
from .request import workloads_of
from .session import version_difference
from .shapes import Shapes, choose_shapes
from .text import time_of


def apply(
    log: str | Path,
    workload: str | Workload | None = None,
    *,
    form: str = "",
    any_device: bool = False,
    trial: int | None = None,
    run: str | None = None,
    dispatch: bool = False,
) -> str:
    """The text of a log's best kernel; raises KtError saying why there is none.

    `workload` may be left out when the log has one only. Records of another device are refused
    unless `any_device`. `form` is "c" (the default on the CPU), "cu" (on CUDA), "python" or "json".
    With `dispatch` the text has the best kernel of every shape, and one for any other.
    """
    found, _ = open_runs(Path(log), run)
    words = [] if workload is None else str(workload).split()
    if dispatch:
        shapes, _ = _shapes(found, words, {}, any_device, trial, form)
        return shapes_text(shapes, Path(log).name)
    chosen = choose(found, words, {}, any_device, trial)
    form = form_of(chosen, form)
    if form == "cubin":
        raise SettingsError("--format cubin: is no text; `kt apply -o FILE` writes it")
    return emitted(chosen, form, Path(log).name).decode()


@dataclass(frozen=True)
class Emission:
    """What is about to be written, the kernels in it, and how it is proven."""

    content: bytes
    form: str
    what: str
    chosen: Sequence[Chosen]
    prove: Callable[[bool, bool, Say], None]
    """Verifies, times, and says what was found."""


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
    predict: bool = False,
    dispatch: bool = False,
    **flags: str | None,
) -> int:
    """Checks what is asked for, then writes; the exit code is 1 when a check fails."""
    found, bad = open_runs(log, run)
    report_bad(bad)
    if dispatch:
        if predict:
            raise SettingsError("--dispatch holds tuned kernels: leave --predict out")
        shapes, without = _shapes(found, words, flags, any_device, trial, form)
        for why in without:
            print(f"kt: left out: {why}", file=sys.stderr)
        emission = _emission_of_shapes(shapes, log.name)
    else:
        if predict:
            chosen, why = _predicted(found, words, flags, any_device, trial)
            print(f"kt: {why}", file=sys.stderr)
        else:
            chosen = choose(found, words, flags, any_device, trial)
        emission = _emission_of_one(chosen, form, output is None, log.name)
    if output:
        refuse_suffix(output, emission.form)
        refuse_overwriting(output, force, is_ours, "kt kernel")
    for doubt in dict.fromkeys(doubt for one in emission.chosen for doubt in _doubts(one)):
        print(f"kt: {doubt}", file=sys.stderr)
    if verify or bench:
        to = sys.stdout if output else sys.stderr  # stdout is for the source then
        emission.prove(verify, bench, lambda line: print(line, file=to))
    if output is None:
        sys.stdout.write(emission.content.decode())
        return 0
    write_atomically(output, emission.content)
    print(f"wrote {output}: {emission.what}")
    return 0


def _emission_of_one(chosen: Chosen, form: str, to_stdout: bool, log: str) -> Emission:
    """One kernel in the format asked for."""
    form = form_of(chosen, form)
    if form == "cubin" and to_stdout:
        raise SettingsError("--format cubin: is no text; name a file with -o FILE")
    when = f", {time_of(chosen.best.us)} when it was measured" if chosen.best.us else ""
    return Emission(
        emitted(chosen, form, log), form, f"{chosen.workload}{when}", [chosen],
        lambda verify, bench, say: prove(proven(chosen, form, log), verify, bench, say),
    )  # fmt: skip


def _emission_of_shapes(shapes: Shapes, log: str) -> Emission:
    """The source with the kernels of many shapes."""
    source = shapes_text(shapes, log)
    return Emission(
        source.encode(), form_of(shapes.chosen[0], ""),
        f"gemm, {len(shapes.chosen)} tuned shapes and any other", shapes.chosen,
        lambda verify, bench, say: prove_shapes(shapes, source, verify, bench, say),
    )  # fmt: skip


def _shapes(
    found: Sequence[Run],
    words: Sequence[str],
    flags: Mapping[str, str | None],
    any_device: bool,
    trial: int | None,
    form: str,
) -> tuple[Shapes, list[str]]:
    """What one dispatched file holds, and why workloads are left out of it."""
    if trial is not None:
        raise SettingsError("--dispatch takes the best of every shape: leave --trial out")
    shapes, without = choose_shapes(found, words, flags, any_device)
    source = form_of(shapes.chosen[0], "")
    if form.lower() not in ("", source):
        raise SettingsError(f"--format {form}: --dispatch writes {source}")
    return shapes, without


def _predicted(
    found: Sequence[Run],
    words: Sequence[str],
    flags: Mapping[str, str | None],
    any_device: bool,
    trial: int | None,
) -> tuple[Chosen, str]:
    """The schedule that the logs promise most of for a shape that need not be in them."""
    from .predict import predicted_choice

    if trial is not None:
        raise SettingsError("--predict chooses a schedule by itself: leave --trial out")
    target = checked_target(max(found, key=lambda run: run.header.time).header.target)
    if not any_device:
        refuse_other_device(target)
    workloads = workloads_of(words, flags, DTYPE[target.kind])
    if len(workloads) > 1:
        raise SettingsError("--predict: name one workload")
    chosen, why = predicted_choice(found, workloads[0], target)
    bests = (best_of(run, str(workloads[0])) for run in found)
    if any(best and timed(best.trial) and best.target.same_device(target) for best in bests):
        why += "; the log has this shape: `kt apply` without --predict uses its measured schedule"
    return chosen, why


def _doubts(chosen: Chosen) -> Iterator[str]:
    """What makes the kernel less than sure."""
    if chosen.best.trial.source == "predicted":
        return  # the choice was explained, and no time is claimed
    outcome = chosen.best.trial.outcome
    if isinstance(outcome, Failure):
        yield f"this trial failed: {failure_text(outcome)}"
    elif chosen.best.final is None:
        yield "no finalists' comparison in this run: the time is a single trial's"
    changed = version_difference(chosen.run.header)
    if "search" in changed:
        yield f"made by other sources than measured, so it may differ ({changed})"
