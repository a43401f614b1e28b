"""The loop as a whole: determinism, several workloads, and real processes that are killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_runs import GEMM, proposals, read_run, tuned
from fakes import AnalyticMeasurer, analytic_outcome
from odd_families import HUGE_EMPTY

from kt.logs.journal import read_log
from kt.logs.record import Failure, RunRecord, StopRecord, Timing, TrialRecord
from kt.spaces import families
from kt.spaces.errors import LogError, SettingsError, SpaceError
from kt.spaces.workload import parse
from kt.tuner.replay import check_identity
from kt.tuner.session import Planned, Session
from kt.tuner.tune import Quiet, Settings, tune

pytestmark = pytest.mark.usefixtures("fake_families")
OTHER = "gemm 32x32x32 dtype=fp32"


def test_a_run_is_logged_as_header_batches_trials_final_and_stop(tmp_path: Path) -> None:
    result = tuned(tmp_path / "a.jsonl", trials=32, strategy="random")
    records = read_log(result.log).records
    kinds = [type(record).__name__.removesuffix("Record").lower() for record in records]
    assert kinds == ["run", "batch", *["trial"] * 16, "batch", *["trial"] * 16, "final", "stop"]
    run = read_run(result.log)
    assert run.trials[0].source == "default"
    for batch in run.batches:
        for entry in batch.entries:
            trial = run.trials[entry.trial]
            assert (trial.theta, trial.source) == (entry.knobs, entry.source)
            assert trial.batch == batch.batch
            assert trial.outcome == analytic_outcome(trial.theta)
    assert result == type(result)(
        tmp_path / "a.jsonl", run.header.run, "trials", 32, run.stop.best, result.failures,  # type: ignore[union-attr]
        result.first_failure,
    )  # fmt: skip
    assert sum(result.failures.values()) == sum(
        isinstance(t.outcome, Failure) for t in run.trials.values()
    )


def test_the_header_holds_what_a_replay_needs(tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", GEMM, OTHER, trials=2, seed=7, strategy="random", finalists=3)
    header = read_run(tmp_path / "a.jsonl").header
    assert (header.seed, header.settings.strategy, header.settings.finalists) == (7, "random", 3)
    assert header.workloads == (GEMM, OTHER) and len(header.spaces) == 2
    assert header.vendor_us == {GEMM: 150.0, OTHER: 150.0} and header.bounds["fp32"].flops == 1e12
    assert {"numpy", "xgboost", "scikit-learn", "python", "search", "kt"} <= set(header.versions)
    assert header.environment == {"device": "fake"} and header.time.endswith("+00:00")


@pytest.mark.parametrize(
    ("strategy", "lag"), [("kt", 0), ("kt", 1), ("kt", 2), ("anneal", 2), ("random", 0)]
)
def test_the_order_of_completion_changes_nothing(strategy: str, lag: int, tmp_path: Path) -> None:
    found = []
    for shuffle in (0, 1):
        log = tmp_path / f"{shuffle}.jsonl"
        measurer = AnalyticMeasurer(shuffle=shuffle)
        tuned(log, measurer=measurer, trials=32, batch_size=8, strategy=strategy, lag=lag)
        run = read_run(log)
        assert check_identity(run).exit_code == 0
        if shuffle:
            assert measurer.measured != sorted(measurer.measured)
        found.append((proposals(run), [(b.predicted, b.model) for b in run.batches]))
    assert found[0] == found[1]


def test_several_workloads_share_a_run_and_a_model(tmp_path: Path) -> None:
    result = tuned(tmp_path / "a.jsonl", GEMM, OTHER, trials=24, batch_size=8)
    run = read_run(tmp_path / "a.jsonl")
    assert [batch.workload for batch in run.batches] == [GEMM, OTHER] * 3
    assert {text: len(run.of(text)) for text in (GEMM, OTHER)} == {GEMM: 24, OTHER: 24}
    assert set(run.finals) == set(result.best) == {GEMM, OTHER}
    assert all(run.trials[number].workload == text for text, number in result.best.items())
    assert [entry.trial for b in run.batches for entry in b.entries] == list(range(48))
    # Each workload's second batch is predicted with the rows of both.
    assert run.batches[3].model.fitted_on > run.batches[2].model.fitted_on


class Counting(Quiet):
    """A view that counts what it is shown."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def started(self, session: Session) -> None:
        self.seen.append("started")

    def planned(self, session: Session, planned: Planned) -> None:
        self.seen.append("planned")

    def trial(self, session: Session, record: TrialRecord) -> None:
        assert session.known[record.trial] is not None
        self.seen.append("trial")

    def stopped(self, session: Session, record: StopRecord) -> None:
        self.seen.append(record.reason)


def test_a_view_sees_every_step(tmp_path: Path) -> None:
    view = Counting()
    settings = Settings(trials=8, batch_size=4, lag=1, strategy="random")
    measurer = AnalyticMeasurer()
    header = read_run(tuned(tmp_path / "x.jsonl", trials=1, strategy="random").log).header
    tune([parse(GEMM)], header.target, tmp_path / "a.jsonl", measurer, settings, view=view)
    assert view.seen == ["started", "planned", "planned", *["trial"] * 8, "trials"]


def test_best_failures_and_improvements_agree_with_the_log(tmp_path: Path) -> None:
    result = tuned(tmp_path / "a.jsonl", trials=64, strategy="anneal", max_failures=999)
    run = read_run(tmp_path / "a.jsonl")
    best = min(t.outcome.median_us for t in run.trials.values() if isinstance(t.outcome, Timing))
    winner = run.trials[result.best[GEMM]].outcome
    assert isinstance(winner, Timing) and winner.median_us <= best * 1.005
    assert run.stop is not None and run.stop.trials == 64
    stages = {"wall", "loop", "idle", "prepare", "search", "build", "check", "run"}
    assert stages == set(run.stop.seconds)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_an_impossible_seed_is_refused(seed: int, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--seed .*: accepts 0 to 9223372036854775807"):
        tuned(tmp_path / "a.jsonl", seed=seed)
    assert not (tmp_path / "a.jsonl").exists()
    tuned(tmp_path / "b.jsonl", seed=2**63 - 1, trials=2, strategy="kt")
    assert read_run(tmp_path / "b.jsonl").header.seed == 2**63 - 1


def test_an_empty_space_and_a_full_disk_end_a_run_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LogError, match="not a regular file"):
        tuned(Path("/dev/full"), trials=4, strategy="random")
    monkeypatch.setattr(families, "FAMILIES", {("gemm", "cpu"): (HUGE_EMPTY,)})
    with pytest.raises(SpaceError, match=r"no legal point among 10000000000000000: void/never"):
        tuned(tmp_path / "a.jsonl", trials=4)
    monkeypatch.setattr(families, "FAMILIES", {})
    with pytest.raises(SpaceError, match="no kernel family serves"):
        tuned(tmp_path / "b.jsonl", trials=4)


# -- real processes, really killed -----------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from fakes import AnalyticMeasurer, FakeFamily
from fake_runs import tuned
from kt.spaces import families
families.FAMILIES = {("gemm", "cpu"): (FakeFamily(),)}
tuned(Path(sys.argv[1]), trials=int(sys.argv[4]), batch_size=8, lag=1, resume=True,
      strategy=sys.argv[3], measurer=AnalyticMeasurer(seconds=0.01))
"""


@pytest.mark.parametrize(("strategy", "kills", "count"), [("anneal", 3, 64), ("kt", 2, 24)])
def test_a_killed_run_resumes_with_nothing_lost(
    strategy: str, kills: int, count: int, tmp_path: Path
) -> None:
    log, chance = tmp_path / "a.jsonl", random.Random(strategy)
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", KILLED, str(log), tests, strategy, str(count)]
    kept: dict[int, TrialRecord] = {}
    for _ in range(kills):
        grown = log.stat().st_size if log.exists() else 0
        process = subprocess.Popen(command)
        end = time.monotonic() + 60
        while process.poll() is None and (not log.exists() or log.stat().st_size <= grown):
            assert time.monotonic() < end
            time.sleep(0.005)  # until it has begun to work
        time.sleep(chance.random() * 0.25)
        process.kill()
        process.wait()
        if log.read_bytes().count(b"\n"):
            run = read_run(log)
            assert kept.items() <= run.trials.items()  # nothing that was logged was lost
            kept = dict(run.trials)
    subprocess.run(command, check=True, timeout=60)
    run, records = read_run(log), read_log(log)
    assert len(run.resumes) >= (kills + 1) // 2 and kept.items() <= run.trials.items()
    trials = [r.trial for r in records.records if isinstance(r, TrialRecord)]
    assert sorted(trials) == list(range(count))  # no trial twice, none missing
    assert records.bad == [] and run.stop is not None and run.stop.reason == "trials"
    assert sum(isinstance(record, RunRecord) for record in records.records) == 1
    assert check_identity(run).exit_code == 0
    settings: dict[str, Any] = {"trials": count, "batch_size": 8, "lag": 1, "strategy": strategy}
    tuned(tmp_path / "whole.jsonl", **settings)
    assert proposals(run) == proposals(read_run(tmp_path / "whole.jsonl"))
