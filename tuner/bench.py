"""`kt bench`: tuned kernels, their defaults and the vendor's libraries, interleaved."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt.logs.record import Failure, Settings
from kt.spaces.errors import KtError, SettingsError, TargetError
from kt.spaces.families import space_of
from kt.spaces.kernel import Kernel
from kt.spaces.target import Target
from kt.spaces.workload import OPERATORS, Workload

from . import text
from .api import DTYPE
from .chosen import choose
from .devices import devices_like, tuning_target
from .lookup import open_runs, report_bad, workloads_in
from .noise import median_text, unstable
from .request import workloads_of
from .summary import device_text

if TYPE_CHECKING:
    from .backend.build import Binary
    from .pool import LocalMeasurer

TUNED, DEFAULT, NUMPY = "tuned", "default", "numpy"
_SEED = 101
_BUILD_SECONDS = 120.0


@dataclass(frozen=True)
class Subject:
    """A workload and kt's kernels for it by name, the tuned one first where there is one."""

    workload: Workload
    target: Target
    kernels: Mapping[str, Kernel]


@dataclass(frozen=True)
class Row:
    """Samples (µs) of one workload by name; `failure` says why there are none."""

    workload: Workload
    target: Target
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""

    @property
    def us(self) -> dict[str, float]:
        return {name: statistics.median(us) for name, us in self.samples.items() if us}

    @property
    def ours(self) -> str:
        """The kernel that the others are compared with."""
        return TUNED if TUNED in self.samples else DEFAULT

    @property
    def opponent(self) -> str:
        """The fastest library; empty without any."""
        us = {name: us for name, us in self.us.items() if name not in (TUNED, DEFAULT)}
        return min(us, key=lambda name: us[name]) if us else ""

    @property
    def ratio(self) -> float | None:
        """The fastest library's time over ours: above 1 we are faster."""
        return text.quotient(self.us.get(self.opponent), self.us.get(self.ours))


def bench_command(
    *,
    words: tuple[str, ...],
    target: str,
    any_device: bool,
    run: str | None,
    seconds: float,
    rested: bool,
    opponents: str | None,
    as_json: bool,
    **flags: str | None,
) -> int:
    """Measures and prints; the exit code is 1 when a workload has no times."""
    if words and words[0].partition(" ")[0].lower() not in OPERATORS:
        if not Path(words[0]).exists():
            name = text.one_line(words[0])
            raise KtError(f"{name}: neither a log nor an operator: accepts {', '.join(OPERATORS)}")
        subjects = _of_log(Path(words[0]), words[1:], flags, any_device, run)
    else:
        subjects = _of_words(words, flags, target)
    rivals = [_opponents(subject, opponents) for subject in subjects]
    rows = []
    for row in measured(subjects, rivals, seconds, rested):
        rows.append(row)
        if row.failure:
            print(f"kt: {row.workload}: {text.printable(row.failure)}", file=sys.stderr)
    print(json.dumps(_json(rows, rested)) if as_json else "\n".join(_table(rows, rested)))
    return int(any(row.failure for row in rows))


def _of_words(words: Sequence[str], flags: Mapping[str, str | None], target: str) -> list[Subject]:
    """Workloads that nobody tuned: their defaults."""
    device = tuning_target(target)
    spaces = [space_of(w, device) for w in workloads_of(words, flags, DTYPE[device.kind])]
    return [
        Subject(space.workload, device, {DEFAULT: space.kernel(int(space.defaults()[0]))})
        for space in spaces
    ]


def _of_log(
    log: Path,
    words: Sequence[str],
    flags: Mapping[str, str | None],
    any_device: bool,
    run: str | None,
) -> list[Subject]:
    """The log's workloads that have a result; raises KtError when none has."""
    found, bad = open_runs(log, run)
    report_bad(bad)
    subjects, refused = [], []
    for logged in workloads_in(found, words, flags):
        try:
            chosen = choose(found, [logged], {}, any_device, None)
            here = devices_like(chosen.best.target)
            if not here:
                raise TargetError(f"this machine has no {chosen.best.target.processor} to time on")
        except KtError as error:
            refused.append(error)
            continue
        kernels = {TUNED: chosen.kernel, DEFAULT: chosen.default}
        subjects.append(Subject(chosen.workload, here[0], kernels))
    if not subjects:
        raise refused[0] if refused else SettingsError(f"{log}: no workload in this log")
    for why in refused:
        print(f"kt: left out: {text.one_line(str(why))}", file=sys.stderr)
    return subjects


# -- measuring ------------------------------------------------------------------------------------


def measured(
    subjects: Sequence[Subject], rivals: Sequence[tuple[str, ...]], seconds: float, rested: bool
) -> Iterator[Row]:
    """A row for each subject with its named opponents; one runner serves all of a device."""
    from .pool import LocalMeasurer

    measurers: dict[str, LocalMeasurer] = {}
    with ExitStack() as stack:
        for subject, names in zip(subjects, rivals, strict=True):
            kind = subject.target.kind
            if kind not in measurers:
                settings = Settings(build_timeout=_BUILD_SECONDS)
                made = LocalMeasurer(subject.target, settings, _SEED)
                measurers[kind] = stack.enter_context(made)
            yield _row(measurers[kind], subject, names, seconds, rested)


def _row(
    measurer: LocalMeasurer, subject: Subject, rivals: tuple[str, ...], seconds: float, rested: bool
) -> Row:
    """Builds, checks and times one subject."""
    workload, target = subject.workload, subject.target
    measurer.prepare([workload])
    binaries: list[Binary] = []
    for name, kernel in subject.kernels.items():
        built = measurer.build_source(kernel.source, kernel.language)
        if isinstance(built, Failure):
            return Row(workload, target, failure=f"the {name} kernel: {built.message}")
        binaries.append(built.started_by(kernel))
        checked = measurer.verify_binary(binaries[-1], workload, (_SEED,))
        if checked.failure:
            return Row(workload, target, failure=f"the {name} kernel: {checked.failure}")
    cuda = target.kind == "cuda"
    compared = measurer.compare_binaries(
        workload, binaries, seconds=seconds, vendor=not cuda, rested=rested, opponents=rivals
    )
    if compared.failure:
        return Row(workload, target, failure=compared.failure)
    names = [*subject.kernels, NUMPY]
    samples = dict(zip(names, compared.us, strict=False)) | dict(compared.opponents)
    return Row(workload, target, samples, dict(compared.facts))


def _opponents(subject: Subject, asked: str | None) -> tuple[str, ...]:
    """The libraries that a kernel is compared with on CUDA: those asked for, or the quick ones."""
    if subject.target.kind == "cpu":
        if asked:
            raise SettingsError("--opponents: for CUDA; on the CPU it is NumPy")
        return ()
    from .backend.cuda_vendor import COMPILED, opponents_of

    known = opponents_of(subject.workload)
    if asked is None:
        return tuple(name for name in known if name not in COMPILED)
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",")))
    if unknown := [name for name in names if name not in known]:
        operator = subject.workload.OPERATOR
        raise SettingsError(
            f"--opponents {text.one_line(unknown[0], 80)}: {operator} has {', '.join(known)}"
        )
    return names


# -- showing --------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], rested: bool) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.samples))
    cells = [("workload", *names, "throughput", "fastest library / ours")]
    for row in rows:
        if row.failure:
            continue
        us = row.us
        compared = (row.samples.get(name, ()) for name in (row.opponent, row.ours))
        ratio = text.DASH if any(map(unstable, compared)) else text.times(row.ratio)
        cells.append(
            (str(row.workload), *(median_text(row.samples.get(name, ())) for name in names),
             text.rate_of(row.workload.flops, us[row.ours]), ratio)
        )  # fmt: skip
    devices = dict.fromkeys(device_text(row.target) for row in rows)
    regime = "rested" if rested else "sustained"
    head = f"{', '.join(devices)}; medians, interleaved in one process, {regime}"
    facts = dict.fromkeys(f"{n}: {fact}" for row in rows for n, fact in row.facts.items())
    return [head, *text.columns(cells, set(range(1, len(cells[0])))), *map(text.one_line, facts)]


def _json(rows: Sequence[Row], rested: bool) -> dict[str, Any]:
    return {
        "regime": "rested" if rested else "sustained",
        "rows": [
            {
                "workload": str(row.workload), "device": device_text(row.target), "us": row.us,
                "opponent": row.opponent, "ratio": row.ratio, "samples": dict(row.samples),
                "facts": dict(row.facts), "failure": row.failure,
            }
            for row in rows
        ],
    }  # fmt: skip
