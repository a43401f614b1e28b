"""Offline replay: identity of proposals, and strategies on recorded outcomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_runs import CPU, GEMM, read_run, tuned
from fakes import AnalyticMeasurer, FakeFamily

from kt.logs.journal import read_log
from kt.logs.query import Run, runs
from kt.logs.record import Failure, Timing
from kt.spaces.errors import LogError, SettingsError
from kt.spaces.families import space_of
from kt.spaces.workload import parse
from kt.tuner import replay
from kt.tuner.replay import LEAST_POINTS, check_identity, simulate
from kt.tuner.strategy import STRATEGIES

pytestmark = pytest.mark.usefixtures("fake_families")
OTHER = "gemm 32x32x32 dtype=fp32"


def edited(path: Path, change: Callable[[dict[str, Any]], None], which: str, n: int = 0) -> Run:
    """The run after `change` was made to the n-th record of type `which`."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    change([line for line in lines if line["type"] == which][n])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_proposals_are_recomputed_from_the_log_alone(strategy: str, tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", strategy=strategy, trials=30, batch_size=8, lag=1)
    found = check_identity(read_run(tmp_path / "a.jsonl"))
    assert (found.exit_code, found.batches, found.difference, found.versions) == (0, 4, "", "")


def test_a_model_log_of_several_workloads_is_identical(tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", GEMM, OTHER, trials=20, batch_size=8)
    assert check_identity(read_run(tmp_path / "a.jsonl")).exit_code == 0


def log(tmp_path: Path) -> Path:
    return tuned(tmp_path / "a.jsonl", strategy="anneal", trials=48).log


def swap_knob(batch: dict[str, Any]) -> None:
    batch["entries"][5]["knobs"]["fusion"]["fused"] ^= True


def test_a_changed_entry_differs_under_the_same_versions(tmp_path: Path) -> None:
    found = check_identity(edited(log(tmp_path), swap_knob, "batch", 1))
    assert found.exit_code == 1
    assert found.difference == "batch 1 proposes other points from trial 21 on"


def test_a_changed_entry_under_other_versions_is_not_comparable(tmp_path: Path) -> None:
    path = log(tmp_path)
    edited(path, swap_knob, "batch", 1)
    run = edited(path, lambda header: header["versions"].update(numpy="1.0.0", zlib="9"), "run")
    found = check_identity(run)
    assert found.exit_code == 2 and "numpy 1.0.0 in the log, " in found.versions
    assert "zlib 9 in the log, absent here" in found.versions


def test_identical_is_identical_whatever_the_versions(tmp_path: Path) -> None:
    run = edited(log(tmp_path), lambda header: header["versions"].update(numpy="1.0"), "run")
    found = check_identity(run)
    assert found.exit_code == 0 and found.versions


def test_a_changed_seed_or_outcome_shows(tmp_path: Path) -> None:
    path = log(tmp_path)
    text = path.read_bytes()
    assert check_identity(edited(path, lambda r: r.update(seed=1), "run")).exit_code == 1
    path.write_bytes(text)

    def fail(trial: dict[str, Any]) -> None:
        trial["outcome"] = {"kind": "failure", "failure": "crash", "stage": "run", "message": ""}

    for n in range(16):
        run = edited(path, fail, "trial", n)
    assert "batch 1" in check_identity(run).difference  # the first that knew of them


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b["entries"][0].update(family="evil"), "batch 0 proposes other points"),
        (lambda b: b["entries"][0]["knobs"]["tile"].update(bm=10**9), "batch 0 proposes other"),
        (lambda b: b.update(entries=[], predicted=[]), "batch 0 proposes nothing"),
    ],
)
def test_hostile_batches_are_differences(
    change: Callable[[dict[str, Any]], None], says: str, tmp_path: Path
) -> None:
    found = check_identity(edited(log(tmp_path), change, "batch"))
    assert found.exit_code == 1 and says in found.difference


def test_a_missing_batch_and_an_impossible_header_are_one_sentence(tmp_path: Path) -> None:
    path = log(tmp_path)
    text = path.read_bytes()
    changes: tuple[Callable[[dict[str, Any]], object], ...] = (
        lambda b: b.update(batch=7),
        lambda b: b.update(workload=OTHER),
        lambda b: b["entries"].extend(b["entries"]),
        lambda b: b["entries"][3].update(trial=0),
    )
    for change in changes:
        with pytest.raises(LogError, match="batch 0 is missing from the log"):
            check_identity(edited(path, change, "batch", 0))
        path.write_bytes(text)
    with pytest.raises(SettingsError, match="unknown strategy 'x'"):
        check_identity(edited(path, lambda r: r["settings"].update(strategy="x"), "run"))


def test_a_space_that_is_no_more_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(log(tmp_path))
    monkeypatch.setattr("kt.spaces.families.FAMILIES", {})
    found = check_identity(run)
    assert found.exit_code == 1 and "no kernel family serves" in found.difference


def test_a_run_that_was_only_begun_is_identical(tmp_path: Path) -> None:
    path = log(tmp_path)
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    assert check_identity(read_run(path)) == replay.Identity(read_run(path).header.run, 0)


# -- simulation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_runs_on_recorded_outcomes(strategy: str, tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", strategy="random", trials=120)
    run = read_run(tmp_path / "a.jsonl")
    found = simulate([run], GEMM, strategy, 24, seeds=2)
    outcomes = [t.outcome for t in run.trials.values()]
    times = sorted(o.median_us for o in outcomes if isinstance(o, Timing))
    assert found.points == 120 and found.budget == 24
    assert found.optimum_us == times[0] and len(found.best_us) == 2
    assert set(found.best_us) <= set(times) and 0 < found.reached <= 1
    assert found == simulate([run], GEMM, strategy, 24, seeds=2)


def test_the_guided_strategy_finds_more_of_a_recorded_space(tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", strategy="random", trials=400, batch_size=64)
    run = read_run(tmp_path / "a.jsonl")
    kt, random = (simulate([run], GEMM, name, 80, seeds=3) for name in ("kt", "random"))
    assert kt.reached >= random.reached and kt.reached > 0.9


def test_several_runs_add_up_and_half_of_the_points_is_the_budget(tmp_path: Path) -> None:
    for seed in (0, 1):
        tuned(tmp_path / "a.jsonl", strategy="random", trials=40, seed=seed)
    both = runs(read_log(tmp_path / "a.jsonl").records)
    found = simulate(both, GEMM, "random", None, seeds=1)
    distinct = {t.theta.key() for run in both for t in run.trials.values()}
    assert found.points == len(distinct) and found.budget == len(distinct) // 2


@pytest.mark.parametrize(
    ("trials", "budget", "says"),
    [(40, None, "at least 64"), (63, 10, "at least 64"), (100, 80, "so it accepts 1 to 50")],
)
def test_too_few_recorded_points_are_refused_with_the_number(
    trials: int, budget: int | None, says: str, tmp_path: Path
) -> None:
    tuned(tmp_path / "a.jsonl", strategy="random", trials=trials)
    with pytest.raises(SettingsError) as caught:
        simulate([read_run(tmp_path / "a.jsonl")], GEMM, "random", budget)
    message = str(caught.value)
    assert f"this log has {trials}" in message and says in message
    assert LEAST_POINTS == 64 and "\n" not in message


def test_recorded_failures_alone_are_refused(tmp_path: Path) -> None:
    failing = AnalyticMeasurer(lambda theta: Failure("crash", "run", ""))
    tuned(tmp_path / "a.jsonl", measurer=failing, strategy="random", trials=70, max_failures=999)
    with pytest.raises(SettingsError, match="no recorded result to search for"):
        simulate([read_run(tmp_path / "a.jsonl")], GEMM, "random", 20)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("revision", [2, 5])
def test_a_log_outlives_the_heuristics_that_it_began_with(
    named: bool, revision: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers name what heuristics ranked high; older logs have their defaults' trials."""
    tuned(tmp_path / "a.jsonl", trials=24, revision=revision, lag=1)
    run = edited(tmp_path / "a.jsonl", lambda h: None if named else h.pop("heuristics"), "run")
    kept = run.header.heuristics
    assert bool(kept) == named and all(one[0].default for one in kept.values())
    before = run.batches[0].entries[0].knobs

    def other(family: Any, workload: Any, target: Any) -> Any:
        return {"bm": 16, "bn": 8, "bk": 8, "pack": "none", "fused": False, "ku": 1}

    monkeypatch.setattr(FakeFamily, "default", other)
    assert space_of(parse(GEMM), CPU).theta(int(space_of(parse(GEMM), CPU).defaults()[0])) != before
    assert check_identity(run).exit_code == 0
    assert tuned(tmp_path / "b.jsonl", trials=24, revision=revision, lag=1).trials == 24
    assert read_run(tmp_path / "b.jsonl").batches[0].entries[0].knobs != before


def test_a_resumed_run_keeps_the_default_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(tmp_path / "a.jsonl", trials=12, revision=5)
    changed = {"bm": 16, "bn": 8, "bk": 8, "pack": "none", "fused": False, "ku": 1}
    monkeypatch.setattr(FakeFamily, "default", lambda *_: changed)
    assert tuned(tmp_path / "a.jsonl", trials=24, revision=5, resume=True).trials == 24
    assert check_identity(read_run(tmp_path / "a.jsonl")).exit_code == 0


def test_a_resumed_run_keeps_the_lag_of_its_header(tmp_path: Path) -> None:
    """No option chooses the lag, and its default may change."""
    tuned(tmp_path / "a.jsonl", trials=12, revision=5, lag=1)
    assert tuned(tmp_path / "a.jsonl", trials=24, revision=5, lag=2, resume=True).trials == 24
    run = read_run(tmp_path / "a.jsonl")
    assert run.header.settings.lag == 1 and check_identity(run).exit_code == 0
