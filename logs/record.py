"""The record schema: what one line of a log holds.

A run is `run`, then for each batch a `batch` (frozen before anything of it is built) and one
`trial` an entry, then `final` for each workload and `stop`; `resume` marks a continuation. Only
trial records have a `theta` key. The union is tagged on `type`; outcomes are tagged on `kind`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kt.spaces.target import Target
from kt.spaces.theta import Theta

Number = Annotated[int, Meta(ge=0, lt=2**31)]
"""Of a trial or a batch."""
Time = Annotated[float, Meta(gt=1e-6, lt=1e15)]
"""Of a launch, microseconds: no kernel takes a picosecond or thirty years."""
Span = Annotated[float, Meta(ge=0, lt=1e12)]
"""Seconds."""
Limit = Annotated[float, Meta(gt=1e-6, lt=1e24)]
"""Of a device, a second."""

LEAST_WEIGHT, MOST_WEIGHT = 1e-9, 1e9
Weight = Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
"""Of a workload's time beside the others', for the scheduler by gain."""

SCHEMA = 1
"""Version of this schema; a reader refuses a newer one."""

FailureKind = Literal[
    "compile_error", "resource", "build_timeout", "launch_error", "run_timeout", "crash",
    "wrong_result", "implausible", "out_of_memory", "device_lost", "interrupted",
]  # fmt: skip
Stage = Literal["build", "load", "check", "run"]


class BuildFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the compiler said of a kernel. `binary` is the content hash of the binary."""

    seconds: Span
    binary: str = ""
    cached: bool = False
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    warnings: tuple[str, ...] = ()


class Timing(msgspec.Struct, frozen=True, tag_field="kind", tag="timing", omit_defaults=True):
    """A correct candidate's time. `us` are the raw samples, microseconds a launch.

    `censored` means that it was cut early because it exceeded `bound_us`: `median_us` is then only
    a lower bound of evidence, never a result. `error` is the relative error of the check.
    """

    us: tuple[Time, ...]
    median_us: Time
    censored: bool = False
    bound_us: Annotated[float, Meta(ge=0, lt=1e15)] = 0.0
    confirmed: bool = False
    error: float = 0.0


class Failure(msgspec.Struct, frozen=True, tag_field="kind", tag="failure", omit_defaults=True):
    """Why a candidate has no time."""

    failure: FailureKind
    stage: Stage
    message: str
    detail: str = ""
    """The child's stderr tail, exit code or signal, where there is one."""


Outcome = Timing | Failure


class Seconds(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a trial's time went; queue wait is not in any of them."""

    build: Span = 0.0
    check: Span = 0.0
    run: Span = 0.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every effective setting of a run. Those above the line decide what is proposed."""

    strategy: str = "kt"
    batch_size: Annotated[int, Meta(ge=1, le=4096)] = 16
    lag: Annotated[int, Meta(ge=0, le=64)] = 0
    model_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    epsilon: Annotated[float, Meta(ge=0, le=1)] = 0.1
    revision: Annotated[int, Meta(ge=1, lt=2**15)] = 1
    """Of the search's constants (`kt.tuner.preset`); a log without it was made with the first."""
    family: str = "all"
    """Names of the kernel families that are searched, joined by commas."""
    scheduler: str = "even"
    """Whose turn it is: "even" turns, or the workload with most to "gain"."""
    # -- below: when to stop and how to measure; proposals do not depend on them ---------------
    trials: int = 128
    seconds: float = 0.0
    patience: int = 0
    near_bound: float = 0.0
    max_failures: int = 64
    finalists: int = 4
    build_timeout: float = 30.0
    run_timeout: float = 10.0
    sample_seconds: float = 0.1


class WarmStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A point transferred from an earlier record; `digest` identifies that record's content.

    One with a `score` (of its run's best throughput; 0 = it failed) teaches the model; one without
    is proposed.
    """

    run: str
    trial: int
    workload: str
    family: str
    knobs: Theta
    digest: str
    score: Annotated[float, Meta(ge=0, le=1)] | None = None


class Heuristic(msgspec.Struct, frozen=True, omit_defaults=True):
    """A point that a family's heuristic ranks high: its default, or one of those after it."""

    family: str
    knobs: Theta
    default: bool = False


class Bound(msgspec.Struct, frozen=True):
    """Measured limits of the device, for display and for stopping: flop/s and B/s."""

    flops: Limit
    bandwidth: Limit


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="run"):
    """The header: everything that a replay needs besides the outcomes."""

    run: str
    kt: str
    seed: Annotated[int, Meta(ge=0)]
    settings: Settings
    target: Target
    workloads: tuple[str, ...]
    spaces: tuple[str, ...]  # digest of each workload's space
    bounds: dict[str, Bound]  # by dtype
    vendor_us: dict[str, Time] = {}  # by workload: the vendor library's time, where measured
    warm: dict[str, tuple[WarmStart, ...]] = {}  # by workload
    heuristics: dict[str, tuple[Heuristic, ...]] = {}  # by workload, best first
    weights: dict[str, Weight] = {}  # by workload: what its time counts, 1 where absent
    versions: dict[str, str]
    environment: dict[str, str | int | float | bool]
    boot: str = ""
    time: str
    schema: int = SCHEMA


class Entry(msgspec.Struct, frozen=True):
    """One proposal of a batch. `source` says who proposed it (default, warm, model, random …)."""

    trial: Number
    family: str
    knobs: Theta
    source: str


class ModelReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """How well the model predicted the last finished batch before learning from it."""

    fitted_on: int = 0
    rank_correlation: float | None = None
    top_recall: float | None = None
    random_share: float = 0.0
    transfer_rows: int = 0
    """Rows of earlier logs in the model."""
    transfer_weight: float = 0.0
    """What each of them counted, where a row of this run counts 1."""


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="batch"):
    """A frozen batch, written and fsynced before its first launch.

    A batch that the budget cut short and a resumed run completes has a second record.
    """

    run: str
    batch: Number
    workload: str
    entries: tuple[Entry, ...]
    predicted: tuple[float | None, ...]
    model: ModelReport
    time: str


class TrialRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="trial", omit_defaults=True
):
    """One candidate's final outcome. `duplicate_of` names the trial with the same binary."""

    run: str
    trial: Number
    batch: Number
    workload: str
    family: str
    theta: Theta
    outcome: Outcome
    seconds: Seconds
    source: str = ""
    predicted: float | None = None
    build: BuildFacts | None = None
    duplicate_of: int | None = None
    clock_mhz: float = 0.0
    time: str = ""


class FinalEntry(msgspec.Struct, frozen=True):
    """A trial re-measured interleaved with others; a `failure` disqualifies it."""

    trial: int
    us: tuple[Time, ...]
    median_us: Annotated[float, Meta(ge=0, lt=1e15)]  # 0 when it failed
    failure: str = ""

    @property
    def sound(self) -> bool:
        """Whether it was timed and did not fail."""
        return not self.failure and self.median_us > 0 and bool(self.us)


class FinalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="final"):
    """The verified, interleaved comparison that decides a workload's best."""

    run: str
    workload: str
    entries: tuple[FinalEntry, ...]
    qualifying: tuple[FinalEntry, ...] = ()  # the round that chose among more, where there was one
    best: int
    default: int
    noise: Annotated[float, Meta(ge=0)]  # relative half-width inside which times are ties
    vendor_us: tuple[Time, ...] = ()  # samples of the vendor library in the same rounds
    time: str


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="resume"):
    """A run continued after a stop or a crash.

    `suspects` are trials that were running when the machine went down: they run last, alone.
    """

    run: str
    boot: str
    settings: Settings
    time: str
    suspects: tuple[int, ...] = ()


class StopRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stop"):
    """Why and when the run ended. `best` maps each workload to its best trial, -1 without one."""

    run: str
    reason: str
    trials: int
    best: dict[str, int]
    seconds: dict[str, Span]
    time: str


Record = RunRecord | BatchRecord | TrialRecord | FinalRecord | ResumeRecord | StopRecord
