"""A log of one CUDA trial, made without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from kt.logs.journal import Journal
from kt.logs.record import (
    BatchRecord,
    Bound,
    Entry,
    ModelReport,
    RunRecord,
    Seconds,
    Settings,
    Timing,
    TrialRecord,
)
from kt.spaces.families import space_of
from kt.spaces.kernel import Kernel
from kt.spaces.target import CUDA_TARGETS, Target
from kt.spaces.workload import parse

H200 = CUDA_TARGETS["h200"]


def write_log(
    path: Path,
    text: str,
    wanted: Callable[[Kernel], bool] | None = None,
    target: Target = H200,
    run: str = "abc",
) -> Path:
    """One timed trial of a workload: its default θ, or the first sampled that is `wanted`."""
    workload = parse(text)
    space = space_of(workload, target)
    points = space.defaults().tolist() + space.sample(np.random.default_rng(0), 512).tolist()
    point = next(p for p in points if wanted is None or wanted(space.kernel(p)))
    header = RunRecord(
        run=run, kt="0", seed=0, settings=Settings(), target=target, workloads=(text,),
        spaces=(space.digest,), bounds={workload.dtype: Bound(1e12, 1e12)}, versions={},
        environment={}, time="2026-01-01",
    )  # fmt: skip
    entry = Entry(0, space.family_of(point), space.theta(point), "default")
    batch = BatchRecord(
        run=run, batch=0, workload=text, entries=(entry,), predicted=(None,),
        model=ModelReport(), time="now",
    )  # fmt: skip
    trial = TrialRecord(
        run=run, trial=0, batch=0, workload=text, family=entry.family, theta=entry.knobs,
        outcome=Timing((5.0,), 5.0), seconds=Seconds(), time="now",
    )  # fmt: skip
    with Journal(path) as journal:
        journal.append(header, batch, trial)
    return path


def zeroes_its_workspace(kernel: Kernel) -> bool:
    """Needs leading bytes that are zero before the first launch."""
    return bool(kernel.zeroed_bytes)
