"""Export to T4 and Kernel Tuner: nothing lost, read back by our own reader."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_runs import CPU, GEMM, header, proposed, read_run, trial, tuned

from kt.logs.query import Run, runs
from kt.logs.record import Failure, RunRecord, Timing, TrialRecord
from kt.spaces.errors import LogError, SettingsError
from kt.spaces.theta import Theta
from kt.tuner.export import FORMATS, export_command, exported
from kt.tuner.foreign import ABSENT, read_recording
from kt.tuner.output import write_atomically


def some_run() -> list[Run]:
    """Times, every kind of failure, two families with other knobs, a point measured twice."""
    kinds = ("compile_error", "run_timeout", "wrong_result", "crash", "build_timeout")
    other = Theta(tile={"bm": 4}, map={"warps": 2})
    trials = [
        trial(0, Timing((1.0, 3.0, 2.0), 2.0), time="2026-01-01"),
        trial(1, 2.5),
        trial(2, 4.0, family="other", theta=other),
        *(
            trial(3 + i, Failure(kind, "run", f"{kind} é", "tail"), theta=Theta(tile={"bm": i}))  # type: ignore[arg-type]
            for i, kind in enumerate(kinds)
        ),
    ]
    return runs(proposed(header(), *trials))


def records(document: dict[str, Any], form: str) -> list[TrialRecord]:
    """The trial records that a document carries."""
    if form == "t4":
        found = [result["kt"] for result in document["results"]]
    else:
        found = [one for entry in document["cache"].values() for one in entry["kt"]]
    return sorted((msgspec.convert(r, TrialRecord) for r in found), key=lambda r: r.trial)


@pytest.mark.parametrize("form", FORMATS)
def test_every_record_comes_back_unchanged(form: str) -> None:
    known = some_run()
    document = json.loads(json.dumps(exported(known, GEMM, form)))
    assert records(document, form) == known[0].of(GEMM)
    kept = document["metadata"]["kt"] if form == "t4" else document["kt"]
    assert [msgspec.convert(one, RunRecord) for one in kept] == [known[0].header]


def test_t4_says_what_happened_in_its_own_words() -> None:
    results = exported(some_run(), GEMM, "t4")["results"]
    assert [r["invalidity"] for r in results] == [
        "correct", "correct", "correct", "compile", "timeout", "correctness", "runtime", "timeout",
    ]  # fmt: skip
    assert results[0]["measurements"] == [{"name": "time", "value": 0.002, "unit": "milliseconds"}]
    assert results[0]["times"]["runtimes"] == [0.001, 0.003, 0.002]
    assert results[2]["configuration"]["map.warps"] == 2
    assert results[2]["configuration"]["tile.bn"] is None


def test_the_cache_has_an_entry_a_configuration_with_its_first_time() -> None:
    cache = exported(some_run(), GEMM, "kernel-tuner")
    assert next(iter(cache["cache"])).startswith("fake,8,8,8,")
    assert all(
        key == ",".join(str(entry[name]) for name in cache["tune_params_keys"])
        and all(entry[name] in cache["tune_params"][name] for name in cache["tune_params_keys"])
        for key, entry in cache["cache"].items()
    )
    first = next(iter(cache["cache"].values()))
    assert first["time"] == 0.002 and len(first["kt"]) == 2  # trials 0 and 1 are one θ
    assert {e["time"] for e in cache["cache"].values() if "__error__" in e} == {
        "CompilationFailedConfig", "RuntimeFailedConfig", "InvalidConfig",
    }  # fmt: skip


@pytest.mark.usefixtures("fake_families")
@pytest.mark.parametrize("form", FORMATS)
def test_our_reader_reads_what_is_exported(tmp_path: Path, form: str) -> None:
    log = tmp_path / "log.jsonl"
    tuned(log, trials=48, strategy="random")
    output = tmp_path / "out.json"
    common = {"log": log, "words": (), "run": None}
    assert export_command(**common, form=form, output=output) == 0  # type: ignore[arg-type]
    recording = read_recording(output)
    assert recording is not None and len(recording.results) == 48
    known = read_run(log).of(GEMM)
    times = [t.outcome.median_us if isinstance(t.outcome, Timing) else None for t in known]
    assert [r.us for r in recording.results] == [us and pytest.approx(us) for us in times]
    assert recording.parameters["family"] == ("fake",)
    assert ABSENT not in recording.parameters["tile.bm"]


def test_other_devices_are_left_out_and_questions_are_refused(tmp_path: Path) -> None:
    elsewhere = msgspec.structs.replace(CPU, processor="another")
    both = runs(
        proposed(header("a", target=elsewhere), trial(0, 1.0, "a"), header("b"), trial(0, 2.0, "b"))
    )
    assert [r.run for r in records(exported(both, GEMM, "t4"), "t4")] == ["b"]
    with pytest.raises(LogError, match="no trial"):
        exported(both, "gemm 1x1x1 dtype=fp32", "t4")
    with pytest.raises(SettingsError, match="accepts t4, kernel-tuner"):
        export_command(log=tmp_path, words=(), form="csv", output=None, run=None)


@pytest.mark.usefixtures("fake_families")
@pytest.mark.parametrize("zipped", [False, True])
def test_a_log_is_never_replaced(tmp_path: Path, zipped: bool) -> None:
    log = tmp_path / "log.jsonl"
    tuned(log, trials=8, strategy="random")
    content = gzip.compress(log.read_bytes()) if zipped else log.read_bytes()
    log.write_bytes(content)
    with pytest.raises(SettingsError, match="is a log: its measurements would be lost"):
        export_command(log=log, words=(), form="t4", output=log, run=None)
    with pytest.raises(SettingsError, match="is a log"):
        write_atomically(log, b"anything")
    assert log.read_bytes() == content


@pytest.mark.usefixtures("fake_families")
def test_an_export_replaces_exports_only(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "a.json"
    tuned(log, trials=8, strategy="random")
    for form in FORMATS * 2:
        assert export_command(log=log, words=(), form=form, output=out, run=None) == 0
    out.write_text('{"schema_version": "1.0.0", "results": []}')  # a recording of another tool
    with pytest.raises(SettingsError, match="exists and is not a kt export: --force"):
        export_command(log=log, words=(), form="t4", output=out, run=None)
    export_command(log=log, words=(), form="t4", output=out, run=None, force=True)
    assert json.loads(out.read_text())["results"]
