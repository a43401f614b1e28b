"""The committed tuning logs: what they propose is recomputed from header and outcomes alone.

Here the first batches of one log a class; with KT_ALL_LOGS set (`make replay-logs`) all of all.
Those made with another build of xgboost (xgboost-cpu) may say that they are not comparable; runs
taught by other logs nearly always do, so that one that was not is preferred.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
from pathlib import Path

import pytest

from kt.logs.journal import read_log
from kt.logs.query import Run, runs
from kt.spaces.workload import OPERATORS
from kt.tuner.replay import check_identity

LOGS = Path(__file__).parent.parent / "benchmarks" / "logs"
ALL = bool(os.environ.get("KT_ALL_LOGS"))
FEW = 4
"""Batches: without a model, with the first one, and refitted."""


def class_of(log: Path) -> str:
    """The part of a log's name before its workload's."""
    starts = [at for operator in OPERATORS if (at := log.name.find(f"-{operator}-")) > 0]
    return log.name[: max(starts)]  # the class may begin with the operator's name


def taught(log: Path) -> bool:
    """Whether the header has scored rows of other logs."""
    with gzip.open(log) as file:
        return b'"score":' in file.readline()


def chosen() -> list[Path]:
    logs = sorted(LOGS.glob("*.jsonl.gz"), key=lambda log: (taught(log), log.stat().st_size))
    if ALL:
        return logs
    return list({class_of(log): log for log in reversed(logs)}.values())


def beginning(run: Run) -> Run:
    return dataclasses.replace(run, batches=run.batches[:FEW])


def test_there_are_logs_to_replay() -> None:
    assert len({class_of(log) for log in LOGS.glob("*.jsonl.gz")}) >= 7


@pytest.mark.parametrize("log", chosen(), ids=lambda log: log.name.removesuffix(".jsonl.gz"))
def test_a_committed_log_replays_identically(log: Path) -> None:
    content = read_log(log)
    assert not content.bad
    (run,) = runs(content.records)
    assert run.stop is not None and len(run.batches) > 1
    identity = check_identity(run if ALL else beginning(run))
    if identity.difference and "(xgboost-cpu) in the log" in identity.versions:
        assert ALL or taught(log)
        pytest.skip(f"not comparable: {identity.difference} ({identity.versions})")
    assert not identity.difference, f"{identity.difference} ({identity.versions or 'as logged'})"
