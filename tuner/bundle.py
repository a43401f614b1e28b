"""`kt tune --build-only`: the first batches built on a machine without the device.

A bundle is a directory:

    proposals.jsonl   header and frozen batches, as in a log
    binaries/         a binary cache (kt.tuner.backend.cache): sources, binaries, build facts

It holds what needs no outcome: batches 0 to the lag, the first batch of every workload, and every
batch of a strategy that does not learn. A run that is given the bundle proposes anew, and by the
determinism contract the same from the same seed and settings; it looks up each kernel by content.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kt.logs.journal import Journal, read_log
from kt.logs.query import runs
from kt.logs.record import Bound, Failure, RunRecord, Settings
from kt.spaces.errors import SettingsError
from kt.spaces.families import space_of
from kt.spaces.target import Target
from kt.spaces.workload import Workload

from .backend.build import Binary
from .backend.builders import BuilderPool
from .backend.cache import BinaryCache
from .backend.cc import find_compiler
from .backend.cuda_data import SOURCE as ORACLE
from .backend.nvrtc import find_nvrtc
from .session import Session, heuristics_of, now
from .store import DECIDING
from .versions import kt_version, versions

PROPOSALS, BINARIES = "proposals.jsonl", "binaries"
_UNLEARNING = ("random", "grid")
_BUILD_SECONDS = 60.0


@dataclass(frozen=True)
class Bundled:
    """What was written: batches, candidates, how many of them built, and a failure if any."""

    batches: int
    candidates: int
    built: int
    failure: str


def build_bundle(
    workloads: Sequence[Workload],
    target: Target,
    output: Path,
    settings: Settings,
    seed: int,
    builders: int | None = None,
) -> Bundled:
    """Writes the bundle `output`, whole or not at all; raises SettingsError when it exists."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SettingsError(f"{output} exists: name a new directory for the bundle")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name[:64]}."))
    except OSError as error:
        raise SettingsError(f"cannot write {output}: {error.strerror}") from None
    try:
        bundled = _fill(staged, workloads, target, settings, seed, builders)
        shutil.rmtree(staged / BINARIES / "staging", ignore_errors=True)
        mask = os.umask(0)
        os.umask(mask)
        staged.chmod(0o777 & ~mask)
        os.replace(staged, output)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return bundled


def _fill(
    directory: Path,
    workloads: Sequence[Workload],
    target: Target,
    settings: Settings,
    seed: int,
    builders: int | None,
) -> Bundled:
    header = _header(workloads, target, settings, seed)
    with tempfile.TemporaryDirectory() as spare, Journal(directory / PROPOSALS) as journal:
        journal.append(header, durable=True)
        session = Session(header, settings, journal)
        pool = BuilderPool(Path(spare), builders, cache=BinaryCache(directory / BINARIES))
        try:
            builds = list(_builds(session, pool, target, settings.build_timeout))
            if target.kind == "cuda":  # the runner's own kernels
                pool.submit(ORACLE.read_text(), "cuda", target.arch, _BUILD_SECONDS).result()
            made = [build.result() for build in builds]
        finally:
            pool.close()
    failures = [found for found in made if isinstance(found, Failure)]
    first = f"{failures[0].failure}: {failures[0].message}" if failures else ""
    batches = len(runs(read_log(directory / PROPOSALS).records)[0].batches)
    return Bundled(batches, len(made), len(made) - len(failures), first)


def _builds(
    session: Session, pool: BuilderPool, target: Target, timeout: float
) -> Iterator[Future[Binary | Failure]]:
    """Plans the batches that depend on no outcome and begins to build them."""
    settings = session.settings
    most = max(settings.lag + 1, len(session.workloads))
    number = 0
    while settings.strategy in _UNLEARNING or number < most:
        planned = session.plan()
        if planned is None:
            return
        number += 1
        for candidate in planned.frozen.candidates:
            kernel = candidate.kernel
            yield pool.submit(kernel.source, kernel.language, target.arch, timeout)


def _header(
    workloads: Sequence[Workload], target: Target, settings: Settings, seed: int
) -> RunRecord:
    spaces = [space_of(workload, target, settings.family) for workload in workloads]
    return RunRecord(
        run=uuid.uuid4().hex[:12], kt=kt_version(), seed=seed, settings=settings, target=target,
        workloads=tuple(map(str, workloads)), spaces=tuple(space.digest for space in spaces),
        bounds={w.dtype: Bound(target.peak[w.dtype], target.bandwidth) for w in workloads},
        heuristics=heuristics_of(spaces, settings), versions=versions(),
        environment={"compiler": _compiler(target)}, time=now(),
    )  # fmt: skip


def _compiler(target: Target) -> str:
    """The identity of the compiler that this machine builds with."""
    toolchain = find_nvrtc() if target.kind == "cuda" else find_compiler()
    return toolchain.identity(target.arch).replace("\n", " ")


def open_bundle(
    path: Path, workloads: Sequence[Workload], target: Target, settings: Settings, seed: int
) -> BinaryCache:
    """The bundle's binaries; raises SettingsError when a run like this could not use them."""
    header = _logged_header(path)
    mine = _header(workloads, target, settings, seed)
    for what, theirs, ours in _compared(header, mine):
        if theirs != ours:
            raise SettingsError(f"--bundle {path}: it was made with {what} {theirs}, not {ours}")
    return BinaryCache(path / BINARIES)


def _logged_header(path: Path) -> RunRecord:
    if not (path / PROPOSALS).is_file():
        raise SettingsError(f"--bundle {path}: no bundle, which has {PROPOSALS}")
    found = runs(read_log(path / PROPOSALS).records)
    if len(found) != 1:
        raise SettingsError(f"--bundle {path}: {PROPOSALS} has {len(found)} runs, not one")
    return found[0].header


def _compared(theirs: RunRecord, mine: RunRecord) -> Iterator[tuple[str, str, str]]:
    """What must be equal for the run's first kernels to be the bundle's."""
    yield "the workloads", ", ".join(theirs.workloads), ", ".join(mine.workloads)
    yield "--target", theirs.target.arch, mine.target.arch
    yield "--seed", str(theirs.seed), str(mine.seed)
    given, own = (msgspec.to_builtins(header.settings) for header in (theirs, mine))
    for name in DECIDING:
        yield "--" + name.replace("_", "-"), str(given[name]), str(own[name])
    yield "the search space", ", ".join(theirs.spaces), ", ".join(mine.spaces)
    compilers = (str(header.environment.get("compiler")) for header in (theirs, mine))
    yield "the compiler", next(compilers), next(compilers)
