"""Where a run is logged, what it learns from, what it resumes."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_runs import CPU, GEMM, header, one_of_each, proposed, trial, tuned

from kt.logs.journal import encode_records
from kt.logs.record import Record, Settings
from kt.spaces.errors import LogError, SettingsError
from kt.spaces.target import Target
from kt.spaces.workload import parse
from kt.tuner.store import Store, open_store

OTHER = "gemm 8x8x8 dtype=fp32"


def opened(
    log: Path,
    *texts: str,
    resume: bool = False,
    seed: int = 0,
    target: Target = CPU,
    **settings: Any,
) -> Store:
    workloads = [parse(text) for text in texts or (GEMM,)]
    return open_store(log, workloads, target, Settings(**settings), seed, resume)


def logged(path: Path, *records: Record) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_records(proposed(*records)))
    return path


def test_a_file_is_itself_and_a_directory_gets_a_new_file_named_for_the_workload(
    tmp_path: Path,
) -> None:
    assert opened(tmp_path / "a.jsonl") == Store(tmp_path / "a.jsonl")
    for folder in (tmp_path, tmp_path / "not" / "there"):
        place = opened(folder, "gemm 8x8x8 epilogue=bias+relu")
        assert place.path.parent == folder and not place.warm and place.run is None
        assert place.path.name.startswith("gemm-8x8x8-epilogue-bias-relu-dtype-fp32-2")
        assert place.path.suffix == ".jsonl" and not place.path.exists()


def warm_runs(place: Store, text: str = GEMM) -> list[str]:
    return [start.run for start in place.warm.get(text, ())]


def test_the_file_or_the_whole_directory_gives_warm_starts(tmp_path: Path) -> None:
    a = logged(tmp_path / "a.jsonl", header("a"), trial(0, run="a"))
    other = [header("b", workloads=(OTHER,)), trial(0, run="b", workload=OTHER)]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(encode_records(proposed(*other))))
    assert warm_runs(opened(a)) == ["a"]
    assert warm_runs(opened(tmp_path)) == ["a", "b"]
    assert warm_runs(opened(tmp_path, OTHER), OTHER) == ["b", "a"]


def test_foreign_and_newer_files_of_a_directory_do_not_hide_the_others(tmp_path: Path) -> None:
    logged(tmp_path / "b.jsonl", header("b"), trial(0, run="b"))
    (tmp_path / "a.jsonl").write_text("hello\n")
    (tmp_path / "c.jsonl").write_text('{"type":"run","schema":9}\n')
    (tmp_path / "d.jsonl").write_text("")
    assert warm_runs(opened(tmp_path)) == ["b"]
    assert opened(tmp_path, resume=True).run is not None


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("content", [b"hello\n", b'{"type":"run","schema":9}\n', b"\0\0"])
def test_a_file_that_is_no_log_of_ours_is_refused(
    content: bytes, resume: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(LogError) as caught:
        opened(tmp_path / "a.jsonl", resume=resume)
    assert "a.jsonl" in str(caught.value) and "\n" not in str(caught.value)
    assert (tmp_path / "a.jsonl").read_bytes() == content


@pytest.mark.parametrize("resume", [False, True])
def test_an_empty_or_barely_begun_file_is_a_new_one(resume: bool, tmp_path: Path) -> None:
    for content in (b"", b"{", encode_records([header()])[:200]):
        (tmp_path / "a.jsonl").write_bytes(content)
        assert opened(tmp_path / "a.jsonl", resume=resume) == Store(tmp_path / "a.jsonl")


def test_impossible_paths_are_one_sentence(tmp_path: Path) -> None:
    for log in (tmp_path / ("x" * 300), tmp_path / ("x" * 300 + ".jsonl")):
        with pytest.raises(LogError, match="too long"):
            opened(log)


def test_the_newest_run_of_exactly_these_workloads_is_resumed(tmp_path: Path) -> None:
    logged(tmp_path / "a.jsonl", header("a1", time="2026-01-01"), header("a2", time="2026-03-01"))
    logged(tmp_path / "b.jsonl", header("b1", time="2026-02-01"),
           header("b2", time="2026-09-01", workloads=(GEMM, OTHER)))  # fmt: skip
    place = opened(tmp_path, resume=True)
    assert place.run is not None
    assert (place.path.name, place.run.header.run) == ("a.jsonl", "a2")
    both = opened(tmp_path, GEMM, OTHER, resume=True)
    assert both.run is not None and both.run.header.run == "b2"
    assert opened(tmp_path / "b.jsonl", resume=True).run.header.run == "b1"  # type: ignore[union-attr]


def test_with_nothing_to_resume_a_new_run_begins_and_learns(tmp_path: Path) -> None:
    logged(tmp_path / "a.jsonl", *one_of_each())
    place = opened(tmp_path, OTHER, resume=True)
    assert place.run is None and warm_runs(place, OTHER) == ["r"]
    assert opened(tmp_path).run is None  # not asked to


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seed": 5}, "it has --seed 0, not 5"),
    ({"strategy": "random"}, "it has --strategy kt, not random"),
    ({"batch_size": 8}, "it has --batch-size 16, not 8"),
    ({"epsilon": 0.5}, "it has --epsilon 0.1, not 0.5"),
    ({"model_threads": 7}, "it has --model-threads 1, not 7"),
]


@pytest.mark.parametrize(("change", "why"), REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_a_run_with_other_deciding_settings_is_not_resumed(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    log = logged(tmp_path / "a.jsonl", header("abc"))
    with pytest.raises(SettingsError) as caught:
        opened(log, resume=True, **change)
    assert str(caught.value) == f"cannot resume run abc: {why}"


def test_settings_that_do_not_decide_what_is_proposed_may_change(tmp_path: Path) -> None:
    log = logged(tmp_path / "a.jsonl", header("abc"))
    place = opened(log, resume=True, trials=999, seconds=9.0, patience=3, finalists=9)
    assert place.run is not None


def test_a_run_of_another_device_is_not_resumed_and_both_are_named(tmp_path: Path) -> None:
    log = logged(tmp_path / "a.jsonl", header("abc"))
    here = msgspec.structs.replace(CPU, processor="Other CPU", cores=64)
    with pytest.raises(SettingsError) as caught:
        opened(log, resume=True, target=here)
    message = str(caught.value)
    assert f"measured on {CPU.processor} ({CPU.arch}, {CPU.cores} cores)" in message
    assert f"this is Other CPU ({CPU.arch}, 64 cores)" in message and "\n" not in message


@pytest.mark.usefixtures("fake_families")
def test_runs_of_a_directory_are_resumed_in_their_own_file(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "random", "batch_size": 4}
    first = tuned(tmp_path / "logs", trials=4, **settings)
    again = tuned(tmp_path / "logs", trials=8, resume=True, **settings)
    assert again.log == first.log and again.run == first.run and again.trials == 8
    new = tuned(tmp_path / "logs", trials=4, **settings)
    assert new.log != first.log and len(list((tmp_path / "logs").iterdir())) == 2


@pytest.mark.usefixtures("fake_families")
def test_a_compressed_log_is_not_resumed_in_place(tmp_path: Path) -> None:
    done = tuned(tmp_path / "a.jsonl", trials=4, strategy="random")
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(done.log.read_bytes()))
    with pytest.raises(LogError, match="compressed logs are read-only"):
        tuned(packed, trials=8, strategy="random", resume=True)
