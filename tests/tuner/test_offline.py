"""`kt replay`: what it prints, and its exit codes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_runs import GEMM, read_run, tuned

OTHER = "gemm 32x32x32 dtype=fp32"
ANNEAL: dict[str, Any] = {"strategy": "anneal", "trials": 32}


@pytest.fixture
def walk(fake_families: None, tmp_path: Path) -> Path:
    """A log of a run whose second batch depends on the first one's outcomes."""
    return tuned(tmp_path / "walk.jsonl", **ANNEAL).log


def edit(log: Path, kind: str, change: Callable[[dict[str, Any]], object], n: int = 0) -> None:
    """Changes the n-th record of a type."""
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    change([line for line in lines if line["type"] == kind][n])
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_point(batch: dict[str, Any]) -> None:
    batch["entries"][5]["knobs"]["fusion"]["fused"] ^= True


def other_version(header: dict[str, Any]) -> None:
    header["versions"]["numpy"] = "1.0.0"


def facts(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_an_identical_run(kt, walk: Path) -> None:
    ran = kt("replay", walk)
    run = read_run(walk)
    assert ran.code == 0 and ran.err == ""
    assert f"run {run.header.run}: strategy anneal, seed 0, 32 trials in 2 batches" in ran.out
    assert "ended: trials" in ran.out and "proposals identical in 2 batches" in ran.out
    assert "best during the search after trials 8: " in ran.out
    assert f"{GEMM}: final best " in ran.out


def test_another_point_is_a_difference(kt, walk: Path) -> None:
    edit(walk, "batch", other_point, 1)
    ran = kt("replay", walk)
    assert ran.code == 1 and "DIFFERENT under the same versions: batch 1 proposes other" in ran.out
    (found,) = facts(kt("replay", walk, "--json").out)
    assert (found["identical"], found["exit_code"], found["versions"]) == (False, 1, "")
    assert found["difference"] == "batch 1 proposes other points from trial 21 on"


def test_another_point_under_other_versions_is_not_comparable(kt, walk: Path) -> None:
    edit(walk, "run", other_version)
    assert kt("replay", walk).code == 0  # identical is identical
    edit(walk, "batch", other_point, 1)
    ran = kt("replay", walk)
    assert ran.code == 2 and "not comparable" in ran.out and "numpy 1.0.0 in the log" in ran.out
    assert facts(kt("replay", walk, "--json").out)[0]["exit_code"] == 2


def test_json_holds_the_curve(kt, walk: Path) -> None:
    ran = kt("replay", walk, "--json")
    (found,) = facts(ran.out)
    run = read_run(walk)
    assert ran.code == 0 and found["identical"] and found["run"] == run.header.run
    assert (found["trials"], found["batches"], found["reason"]) == (32, 2, "trials")
    curve = found["workloads"][GEMM]["curve"]
    times = [us for _, us in curve]
    assert times == sorted(times, reverse=True) and 1 <= curve[0][0] <= curve[-1][0] <= 32
    fastest = min(o.median_us for t in run.trials.values()
                  if not hasattr(o := t.outcome, "failure"))  # fmt: skip
    assert times[-1] == pytest.approx(fastest)


def test_several_runs_and_the_worst_exit_code(kt, walk: Path) -> None:
    tuned(walk, seed=1, **ANNEAL)
    tuned(walk, OTHER, seed=2, **ANNEAL)
    ran = kt("replay", walk, "--json")
    assert ran.code == 0 and [one["seed"] for one in facts(ran.out)] == [0, 1, 2]
    assert [one["seed"] for one in facts(kt("replay", walk, *OTHER.split(), "--json").out)] == [2]
    edit(walk, "batch", other_point, 3)
    ran = kt("replay", walk, "--json")
    assert ran.code == 1 and [one["exit_code"] for one in facts(ran.out)] == [0, 1, 0]
    edit(walk, "run", other_version, 2)
    edit(walk, "batch", other_point, 5)
    ran = kt("replay", walk, "--json")
    assert ran.code == 1 and [one["exit_code"] for one in facts(ran.out)] == [0, 1, 2]
    last = facts(ran.out)[2]["run"]
    assert kt("replay", walk, "--run", last).code == 2
    assert kt("replay", walk, "--run", "zz").refused("no run 'zz'")


def test_a_run_that_was_cut_off(kt, walk: Path) -> None:
    walk.write_bytes(b"".join(walk.read_bytes().splitlines(keepends=True)[:12]))
    ran = kt("replay", walk)
    assert ran.code == 0 and "10 trials in 1 batches, ended: cut off" in ran.out


@pytest.mark.parametrize("strategy", ["random", "anneal"])
def test_a_strategy_on_recorded_outcomes(kt, tmp_path: Path, strategy: str) -> None:
    log = tuned(tmp_path / "a.jsonl", strategy="random", trials=100).log
    words = ("replay", log, "--strategy", strategy, "--seeds", "2")
    (found,) = facts(kt(*words, "--budget", "20", "--json").out)
    run = read_run(log)
    times = [o.median_us for t in run.trials.values() if not hasattr(o := t.outcome, "failure")]
    assert (found["workload"], found["strategy"]) == (GEMM, strategy)
    assert (found["budget"], found["points"], len(found["best_us"])) == (20, 100, 2)
    assert found["optimum_us"] == min(times) and set(found["best_us"]) <= set(times)
    ran = kt(*words)
    assert ran.code == 0 and f"{strategy} on 100 recorded points, budget 50" in ran.out
    assert "% of the recorded best" in ran.out and "median of 2 seeds" in ran.out


def test_strategies_and_budgets_that_cannot_be(kt, walk: Path) -> None:
    assert kt("replay", walk, "--strategy", "genetic").refused("--strategy")
    assert kt("replay", walk, "--strategy", "random").refused("at least 64", "this log has 32")
    for budget in ("0", "-1", "many"):
        assert kt("replay", walk, "--strategy", "random", "--budget", budget).refused("--budget")


def test_unknown_workloads(kt, walk: Path) -> None:
    assert kt("replay", walk, "gemm", "1x1x1").refused("has no 'gemm 1x1x1'; it has", GEMM)
    assert kt("replay", walk, "gem", "1x1x1").refused("unknown operator 'gem'")
    assert kt("replay", walk, "gemm", "1x1").refused("accepts MxNxK")


def test_logs_that_cannot_be_read(kt, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "folder").mkdir()
    for name, says in (
        ("missing.jsonl", "no such log"), ("empty.jsonl", "the log is empty"),
        ("foreign.jsonl", "not a kt log"), ("folder", "no logs in this directory"),
    ):  # fmt: skip
        assert kt("replay", name).refused(says, name)


def test_bad_lines_are_reported_and_missing_batches_refused(kt, walk: Path) -> None:
    lines = walk.read_bytes().splitlines(keepends=True)
    walk.write_bytes(b"".join([*lines[:5], b"garbage\n", *lines[5:]]))
    ran = kt("replay", walk)
    assert ran.code == 0 and "walk.jsonl:6: " in ran.err and "identical in 2 batches" in ran.out
    walk.write_bytes(b"".join(line for line in lines if b'"batch":0,"workload"' not in line[:80]))
    assert kt("replay", walk).refused("batch 0 is missing from the log")


@pytest.mark.parametrize("seed", range(6))
def test_odd_values_anywhere_are_no_internal_error(kt, walk: Path, seed: int) -> None:
    rng = random.Random(seed)
    lines = [json.loads(line) for line in walk.read_bytes().splitlines()]
    for _ in range(8):
        changed = copy.deepcopy(lines)
        for record in (changed[0], rng.choice(changed)):
            places = [(record, key) for key in record]
            places += [(v, key) for v in record.values() if isinstance(v, dict) for key in v]
            owner, key = rng.choice(places)
            owner[key] = rng.choice((0, -5, 3, 10**30, 5e-324, 1e308, {}, [], "\x1b[2J\n"))
        walk.write_text("".join(json.dumps(line) + "\n" for line in changed))
        for words in (
            ["replay", walk],
            [
                "tune",
                *GEMM.split(),
                "--log",
                walk,
                "--resume",
                "--strategy",
                "anneal",
                "--trials",
                "34",
                "--plain",
            ],
        ):
            ran = kt(*words)
            assert "internal error" not in ran.err, ran
            assert "\x1b" not in ran.out + ran.err
