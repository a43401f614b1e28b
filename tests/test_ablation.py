"""Ablations without a device: what is changed, what is kept, what the table says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import trial

from kt.logs.record import BuildFacts, Failure
from kt.spaces.families import space_of
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import parse
from kt.tuner.backend.build import Binary
from kt.tuner.backend.check import Verified
from kt.tuner.backend.cpu import Compared

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
H200 = CUDA_TARGETS["h200"]
TEXT = "gemm 300x5000x700 dtype=bf16"


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script, with its results in a folder of the test's."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("ablation")
    for name in ("ablation", "rows"):
        monkeypatch.setattr(importlib.import_module(name), "HERE", tmp_path / "benchmarks")
    return module


class Stopwatch:
    """Kernels with two stages are slow; those with three are wrong, with four do not build."""

    def prepare(self, workloads: Any) -> None:
        pass

    def build_source(self, source: str, language: str) -> Binary | Failure:
        stages = source.split("#define KT_STAGES ")[1].split("\n")[0]
        if stages == "4":
            return Failure("resource", "build", "does not fit")
        return Binary(Path(stages), BuildFacts(0.1, source), 0.1)

    def verify_binary(self, binary: Binary, workload: Any, seeds: Any) -> Verified:
        return Verified(4, 0.0, "race: 1 of 4" if str(binary.path) == "3" else "")

    def compare_binaries(self, workload: Any, binaries: Any, seconds: float) -> Compared:
        us = {"2": 20.0, "5": 10.0, "8": 12.0}
        if dying := [i for i, b in enumerate(binaries) if str(b.path) == "6"]:
            return Compared((), dying[0], "crash: SIGSEGV")
        rows = [us.get(str(b.path), 11.0) for b in binaries]
        return Compared(tuple((one, one * 1.001, one * 0.999) for one in rows))


def subject(ablation: Any, **changes: Any) -> Any:
    """The default θ of family `mma`, with five stages."""
    space = space_of(parse(TEXT), H200, "mma")
    flat = space.theta(int(space.defaults()[0])).flat() | {"mem.stages": 5, **changes}
    theta = space.theta(space.parts[0].point(flat))
    log = ablation.HERE / "logs" / "x.jsonl.gz"
    return ablation.Subject(parse(TEXT), log, trial(3, 10.0, family="mma", theta=theta))


def test_one_knob_changes_to_every_other_legal_value(ablation: Any) -> None:
    one = subject(ablation)
    space = space_of(parse(TEXT), H200, "mma")
    points, refused = ablation.variants(space.parts[0], one.trial.theta.flat(), "mem.stages")
    values = [space.theta(point).flat() for point in points]
    assert values[0] == one.trial.theta.flat() and len(values) > 3
    stages = [v.pop("mem.stages") for v in values]
    assert stages[0] == 5 and len(set(stages)) == len(stages)
    assert all(v == values[0] for v in values)
    assert all("shared memory" in why or "stages" in why for why in refused)
    whole = next(k for k in space.parts[0].knobs if k.name == "stages").choices
    assert len(points) + len(refused) == len(whole)


def test_a_knob_s_values_are_timed_against_the_tuned_one(ablation: Any) -> None:
    results = ablation.Results("nvidia-h200", "ablation", {}, (), "abc")
    made = ablation.Ablation(H200, Stopwatch(), results)
    one = subject(ablation)
    before = made.missing(one)
    assert "mem.stages" in before and "mem.swizzle_b" not in before
    knob = made.measure(one, "mem.stages")
    by_value = {v["value"]: v for v in knob["values"]}
    assert knob["tuned"] == 5 and knob["us"] == 10.0
    assert by_value[2]["ratio"] == 2.0 and by_value[2]["ratio_low"] > 1.9
    assert by_value[3]["failure"].startswith("race") and "fit" in by_value[4]["failure"]
    assert by_value[6]["failure"] == "crash: SIGSEGV"
    assert "mem.stages" in ablation.line(one, "mem.stages", knob)
    assert made.missing(one) == [path for path in before if path != "mem.stages"]
    again = ablation.Ablation(
        H200, Stopwatch(), ablation.Results("nvidia-h200", "ablation", {}, (), "abc")
    )
    assert again.missing(one) == made.missing(one)  # another process goes on
    assert "mem.stages" in again.missing(subject(ablation, **{"perm.group": 2}))  # another θ


def test_the_table_shows_wins_beyond_the_noise_and_their_absence(ablation: Any) -> None:
    results = ablation.Results("nvidia-h200", "ablation", {}, (), "abc")
    made = ablation.Ablation(H200, Stopwatch(), results)
    one = subject(ablation)
    for path in ("mem.stages", "perm.group"):
        made.measure(one, path)
    knobs = importlib.import_module("knobs")
    shown = knobs.table(results.path)
    assert f"| `mem.stages` | 1 of 1 | `{TEXT}`: 5 over 2, 2.00" in shown
    assert "`perm.group` | 0 of 1 | none beyond the noise" in shown
    tuned = {"tuned": 2, "us": 10.0, "samples": [10.0] * 9}  # plain, and not the best
    other = {"value": 5, "us": 8.0, "samples": [8.0] * 9}
    won = knobs.win("mem.stages", {**tuned, "values": [other]})
    assert (won.value, won.plain, won.ratio) == (5, 2, 1.25)
    assert knobs.win("mem.stages", {**tuned, "values": []}) is None
    assert knobs.table(results.path.with_name("none.json")) == "_Not measured yet._"
    assert json.loads(results.path.read_text())["rows"][0]["class"] == "ablation"
