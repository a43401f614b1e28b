"""The benchmark of search strategies on a small recorded space."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scored_space

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script, with its files in a temporary folder, and a folder of data."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("search")
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(module, "RESULT", tmp_path / "search.json")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "search.png")
    monkeypatch.setattr(module, "BUDGETS", (20, 60))
    data = tmp_path / "data"
    data.mkdir()
    (data / "made_up_T4.json").write_text(json.dumps(scored_space.t4()))
    (data / "made_up_T1.json").write_text("{}")  # no recording of results
    return module


def call(search: Any, monkeypatch: pytest.MonkeyPatch, data: Path, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["search.py", str(data), *words])
    search.main()


def test_one_command_scores_strategies_and_writes_results(
    search: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    words = ("--seeds", "3", "--strategies", "random", "kt")
    call(search, monkeypatch, tmp_path / "data", *words)
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "search.json").read_text())["rows"]
    by = {row["strategy"]: row for row in rows}
    assert by["kt"]["score"] > by["random"]["score"] + 0.2
    assert abs(by["random"]["score"]) < 0.4
    assert by["kt"]["class"] == "hub" and by["kt"]["seeds"] == 3
    assert 0.5 < by["kt"]["at_20"] <= by["kt"]["at_60"] <= 1.0
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines] == ["strategy", "kt", "random"]


def test_runs_are_kept_and_each_evaluates_a_configuration_once(
    search: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--strategies", "random", "--seeds")
    call(search, monkeypatch, tmp_path / "data", *words, "2")
    (file,) = (tmp_path / "runs").iterdir()
    before = file.read_text()
    for line in before.splitlines():
        order = json.loads(line)["order"]
        assert len(order) == len(set(order)) >= 60
    call(search, monkeypatch, tmp_path / "data", *words, "3")
    after = file.read_text()
    assert after.startswith(before) and len(after.splitlines()) == 3
    call(search, monkeypatch, tmp_path / "data", *words, "9", "--seconds", "0")
    assert file.read_text() == after  # the time was over: a later call goes on


def test_constants_are_chosen_on_the_other_spaces_with_common_seeds(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {"a": {"kt": 0.5, "x": 0.9}, "b": {"kt": 0.9, "x": 0.3}, "c": {"kt": 0.6, "x": 0.6}}
    ran = {"kt": 25, "x": 8, "y": 0}
    monkeypatch.setattr(search, "kept", lambda space, name: dict.fromkeys(range(ran[name])))
    monkeypatch.setattr(
        search, "row_of",
        lambda space, name, seeds: {
            "space": space.name, "score": scores[space.name][name], "seeds": seeds,
        },
    )  # fmt: skip
    spaces = [search.Recorded(name, None) for name in scores]
    rows = list(search.left_out(spaces, 25, ["kt", "x", "y"]))
    assert {r["space"]: (r["preset"], r["score"]) for r in rows} == {
        "a": ("kt", 0.5), "b": ("x", 0.3), "c": ("kt", 0.6),
    }  # fmt: skip
    assert {row["seeds"] for row in rows} == {8}
    assert not list(search.left_out(spaces[:1], 25, ["kt"]))


def test_peers_that_are_missing_are_named_with_their_command(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = importlib.import_module("search_peers")
    monkeypatch.setattr(peers, "_MODULES", {"kernel_tuner": "no_such_module", "optuna": "json"})
    assert peers.missing() == {"kernel_tuner": "pip install kernel_tuner"}
    assert set(peers.peers().values()) == {"kernel_tuner", "optuna"}


def test_a_cache_for_kernel_tuner_holds_every_configuration(search: Any, tmp_path: Path) -> None:
    peers = importlib.import_module("search_peers")
    (space,) = search.spaces_in(tmp_path / "data", [])
    cache = peers._cache(space.recording)
    assert len(cache["cache"]) == len(space.recording.results)
    failed = [e for e in cache["cache"].values() if "__error__" in e]
    assert len(failed) == int(np.isnan(space.baseline.us).sum())
