"""What `kt show --explain` says: effects, one-knob variations, misses, regret."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_runs import GEMM, THETA, header, proposed, read_run, trial, tuned
from odd_families import space

from kt.logs.query import runs
from kt.logs.record import Failure, FinalEntry, FinalRecord, ModelReport
from kt.spaces.theta import theta_from_flat
from kt.tuner.explain import Variation, explain, lines_of

WHERE = space("fake")


@pytest.mark.usefixtures("fake_families")
def test_effects_follow_the_knobs_that_decide(tmp_path: Path) -> None:
    tuned(tmp_path / "log.jsonl", trials=160, strategy="random")
    found = explain(read_run(tmp_path / "log.jsonl"), GEMM)
    assert found is not None
    assert set(found.knobs) <= {
        "tile.bm", "tile.bn", "tile.bk", "mem.pack", "fusion.fused", "unroll.ku", "family",
    }  # fmt: skip
    assert sum(found.knobs.values()) == pytest.approx(1.0, abs=0.01)
    assert found.components["tile"] > 0.5 and found.components["perm"] == 0
    assert found.knobs["tile.bm"] > found.knobs["unroll.ku"]


def test_variations_differ_from_the_winner_in_one_knob() -> None:
    flat = THETA.flat()
    others = [
        theta_from_flat(flat | {"tile.bm": 16}), theta_from_flat(flat | {"mem.pack": "a"}),
        theta_from_flat(flat | {"tile.bm": 16, "mem.pack": "a"}),
    ]  # fmt: skip
    failure = Failure("crash", "run", "signal 11")
    (run,) = runs(
        proposed(
            header(), trial(0, 50.0), trial(1, 75.0, theta=others[0]),
            trial(2, failure, theta=others[1]), trial(3, 60.0, theta=others[2]),
        )
    )  # fmt: skip
    found = explain(run, GEMM)
    assert found is not None
    assert found.variations == (
        Variation("mem.pack", "none", "a", None, 2), Variation("tile.bm", 8, 16, 1.5, 1),
    )  # fmt: skip
    text = "\n".join(lines_of(found))
    assert "tile.bm 8 -> 16: 1.500x the time (trial 1)" in text and "a: failed (trial 2)" in text


def test_misses_and_regret_are_those_of_the_search() -> None:
    times = [100.0, 80.0, 200.0, 50.0, *[60.0] * 6]
    guesses = [None, 0.6, 0.9, 0.9, *[0.8] * 6]
    trials = [
        trial(i, us, predicted=guess, theta=WHERE.theta(p))
        for i, (us, guess, p) in enumerate(
            zip(times, guesses, WHERE.sample(np.random.default_rng(0), 10).tolist(), strict=True)
        )
    ]
    (run,) = runs(proposed(header(), *trials))
    found = explain(run, GEMM)
    assert found is not None
    assert [(m.trial, m.measured) for m in found.misses[:2]] == [(2, 0.25), (3, 1.0)]
    assert found.regret == {8: 0.0, 10: 0.0}
    assert explain(run, "gemm 1x1x1 dtype=fp32") is None


def test_the_round_under_load_shows_why_the_fastest_alone_lost() -> None:
    alone = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5]
    points = WHERE.sample(np.random.default_rng(0), 6).tolist()
    trials = [trial(i, us, theta=WHERE.theta(points[i])) for i, us in enumerate(alone)]
    entries = tuple(FinalEntry(i, (us,), us) for i, us in enumerate([14.0, 11.0, 12.5, 12, 12, 13]))
    wrong = (FinalEntry(1, (), 0.0, "crash"), entries[3])  # a failure, and an entry once more
    final = FinalRecord(
        run=trials[0].run, workload=GEMM, entries=entries[1:2], qualifying=entries + wrong, best=1,
        default=-1, noise=0.005, time=""
    )  # fmt: skip
    (run,) = runs(proposed(header(), *trials, final))
    found = explain(run, GEMM)
    assert found is not None and [one.trial for one in found.loaded] == [1, 3, 4, 2, 5, 0]
    assert (
        "under load  6 trials in turn; 1: 11 µs (alone 10.1 µs), 3: 12 µs (alone 10.3 µs), "
        "4: 12 µs (alone 10.4 µs), 2: 12.5 µs (alone 10.2 µs), 0: 14 µs (alone 10 µs)"
    ) in "\n".join(lines_of(found))
    assert found.facts()["loaded"][0] == {"trial": 1, "us": 11.0, "alone_us": 10.1}


def test_the_use_of_earlier_logs_is_told() -> None:
    records = proposed(header(), trial(0, 50.0))
    report = ModelReport(transfer_rows=96, transfer_weight=0.5)
    records[1] = type(records[1])(
        **{n: getattr(records[1], n) for n in records[1].__struct_fields__} | {"model": report}
    )
    (run,) = runs(records)
    found = explain(run, GEMM)
    assert found is not None and found.transfer == (0.5,)
    assert "96 rows of earlier logs, weight by batch 0.50" in "\n".join(lines_of(found))


def test_the_command_shows_it_as_text_and_as_json(kt: Callable[..., object], log: Path) -> None:
    shown = kt("show", log, "--explain")
    assert shown.code == 0 and "what mattered" in shown.out and "regret" in shown.out  # type: ignore[attr-defined]
    plain = kt("show", log)
    assert "what mattered" not in plain.out  # type: ignore[attr-defined]
    facts = json.loads(kt("show", log, "--explain", "--json").out)  # type: ignore[attr-defined]
    (one,) = facts["explained"]
    assert one["workload"] == GEMM and set(one["components"]) >= {"tile", "sync"}
