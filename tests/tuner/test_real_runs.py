"""Real kernels, real builders, and the program itself killed at awkward moments."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runs import proposals, read_run
from quick import Quick, Steady
from served import alive, descendants, wait_gone

from kt.logs.journal import read_log
from kt.logs.query import Run
from kt.logs.record import BatchRecord, RunRecord, Settings, Timing, TrialRecord
from kt.spaces.target import detect_cpu
from kt.spaces.workload import parse
from kt.tuner import pool
from kt.tuner.replay import check_identity
from kt.tuner.tune import tune

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

TINY = "gemm 64x64x64 dtype=fp32"
LEAST: dict[str, Any] = {"sample_seconds": 0.002, "finalists": 1}


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for the module, and short finals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(pool._FINAL_SECONDS, "cpu", 0.2)
        yield


def tuned_for_real(kind: type[Quick], builders: int, settings: Settings, log: Path) -> Run:
    target = detect_cpu()
    with kind(target, settings, builders=builders) as measurer:
        tune([parse(TINY)], target, log, measurer, settings)
    run = read_run(log)
    assert sorted(run.trials) == list(range(settings.trials))
    found = check_identity(run)
    assert (found.exit_code, found.difference) == (0, "")
    return run


def test_proposals_do_not_depend_on_the_number_of_builders(tmp_path: Path) -> None:
    settings = Settings(trials=24, batch_size=6, lag=1, **LEAST)
    eight, one = (
        tuned_for_real(Steady, builders, settings, tmp_path / f"{builders}.jsonl")
        for builders in (8, 1)
    )
    assert proposals(eight) == proposals(one) and len(one.batches) == 4
    assert [(b.predicted, b.model) for b in eight.batches] == [
        (b.predicted, b.model) for b in one.batches
    ]
    assert {entry.source for entry in one.batches[-1].entries} & {"model"}


@pytest.mark.parametrize("builders", [1, 4])
def test_proposals_are_recomputed_from_real_outcomes(builders: int, tmp_path: Path) -> None:
    settings = Settings(trials=16, batch_size=4, **LEAST)
    run = tuned_for_real(Quick, builders, settings, tmp_path / "a.jsonl")
    assert len(run.batches) == 4
    assert sum(isinstance(t.outcome, Timing) for t in run.trials.values()) > 8


# -- the program, killed --------------------------------------------------------------------------

COUNT = 12
KT = (
    sys.executable, "-c", "from kt.tuner.cli import main; main()", "tune", *TINY.split()[:2],
    "--target", "cpu", "--trials", str(COUNT), "--batch-size", "6", "--strategy", "anneal",
    "--sample-time", "0.1", "--finalists", "1", "--log", "a.jsonl", "--resume", "--quiet",
)  # fmt: skip
SLOW_CC = """#!/bin/sh
case "$*" in *--version*|*-dumpversion*) exec cc "$@"; esac
if grep -q kt_describe *.c 2>/dev/null; then sleep 0.2; fi
exec cc "$@"
"""


def of(log: Path, kind: type) -> list[object]:
    """Records of a type in a log that may not exist yet."""
    if not log.exists() or b"\n" not in log.read_bytes():
        return []
    return [record for record in read_log(log).records if isinstance(record, kind)]


Moment = Callable[[Path, int], bool]


def in_builds(log: Path, before: int) -> bool:
    """A batch is frozen, and none of it has come back."""
    batches = of(log, BatchRecord)
    return bool(batches) and len(of(log, TrialRecord)) == before


def in_runs(log: Path, before: int) -> bool:
    """Some trials of a batch are there, and the next one runs."""
    return before + 2 <= len(of(log, TrialRecord)) < COUNT


MOMENTS: list[tuple[str, Moment]] = [
    ("builds", in_builds), ("runs", in_runs), ("later runs", in_runs),
]  # fmt: skip


def test_the_program_killed_at_any_moment_resumes_with_nothing_lost(tmp_path: Path) -> None:
    compiler = tmp_path / "slowcc"
    compiler.write_text(SLOW_CC)
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler)}
    log = tmp_path / "a.jsonl"
    kept: dict[int, TrialRecord] = {}
    for name, moment in MOMENTS:
        before, end = len(of(log, TrialRecord)), time.monotonic() + 90
        process = subprocess.Popen(KT, cwd=tmp_path, env=environment, start_new_session=True)
        children: set[int] = set()
        resumed = log.stat().st_size if log.exists() else 0
        while not (log.exists() and log.stat().st_size > resumed and moment(log, before)):
            assert process.poll() is None and time.monotonic() < end, name
            time.sleep(0.01)
        children |= descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        assert children and not wait_gone(children, 20), {p for p in children if alive(p)}
        run = read_run(log)
        assert kept.items() <= run.trials.items(), name  # nothing that was logged was lost
        kept = dict(run.trials)
    done = subprocess.run(KT, cwd=tmp_path, env=environment, timeout=120, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run, records = read_run(log), read_log(log)
    assert kept.items() <= run.trials.items() and len(kept) >= 4
    trials = [r.trial for r in records.records if isinstance(r, TrialRecord)]
    assert sorted(trials) == list(range(COUNT))  # no trial twice, none missing
    assert sum(isinstance(record, RunRecord) for record in records.records) == 1
    assert records.bad == [] and run.stop is not None and run.stop.reason == "trials"
    assert len(run.resumes) == 3 and check_identity(run).exit_code == 0
    assert not descendants(os.getpid()) & children
