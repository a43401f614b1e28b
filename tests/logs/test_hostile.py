"""Logs of somebody else: what they claim is believed only where a batch proposed it."""

from __future__ import annotations

import copy
import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_runs import GEMM, THETA, header, one_of_each, proposed, read_run, trial, tuned

from kt.logs import journal
from kt.logs.journal import BAD_KEPT, BAD_REFUSED, Journal, encode_records, read_log
from kt.logs.query import best_trials, runs
from kt.logs.record import BatchRecord, Entry, ModelReport, Record
from kt.spaces.errors import KtError, LogError
from kt.tuner.replay import check_identity, simulate
from kt.tuner.report import rows, run_facts
from kt.tuner.show import table_lines

OTHER = msgspec.structs.replace(THETA, fusion={"fused": True})
WALK: dict[str, Any] = {"strategy": "anneal", "trials": 32}


def batch(number: int, *entries: Entry, workload: str = GEMM) -> BatchRecord:
    return BatchRecord(
        run="r", batch=number, workload=workload, entries=entries, model=ModelReport(), time="t",
        predicted=(None,) * len(entries),
    )  # fmt: skip


def entry(number: int, theta: Any = THETA) -> Entry:
    return Entry(number, "fake", theta, "model")


# -- trials and batches --------------------------------------------------------------------------


def test_a_trial_counts_only_where_a_batch_of_its_run_proposed_it() -> None:
    strangers = [
        trial(2), trial(1, theta=OTHER), trial(1, family="evil"), trial(1, workload="gemm 1x1x1"),
    ]  # fmt: skip
    (run,) = runs([header(), trial(0), batch(0, entry(0), entry(1)), *strangers, trial(0)])
    assert list(run.trials) == [0] and run.left_out == 5
    assert run.of(GEMM) == [trial(0)] and run.of("gemm 1x1x1") == []


def test_of_two_resumes_at_once_the_first_batch_decides_what_its_trials_are() -> None:
    mine, theirs = batch(0, entry(0), entry(1)), batch(0, entry(0, OTHER), entry(1, OTHER))
    (run,) = runs([header(), mine, theirs, trial(0, theta=OTHER), trial(1), trial(0)])
    assert run.batches == [mine] and run.left_out == 1
    assert {t.theta.key() for t in run.trials.values()} == {THETA.key()}


@pytest.mark.parametrize(
    "second",
    [
        batch(1, entry(5)), batch(1, entry(0)), batch(1, entry(2), entry(2)),
        batch(1, entry(2), workload="gemm 1x1x1"), batch(0, entry(3)),
        msgspec.structs.replace(batch(1, entry(2)), predicted=()),
        batch(1, *map(entry, range(2, 5000))),
    ],
)  # fmt: skip
def test_batches_whose_trials_do_not_follow_are_left_out(second: BatchRecord) -> None:
    (run,) = runs([header(), batch(0, entry(0), entry(1)), second, batch(1, entry(2)), trial(2)])
    assert [[e.trial for e in b.entries] for b in run.batches] == [[0, 1], [2]]
    assert list(run.trials) == [2]


@pytest.mark.parametrize("number", [-1, 2**31, 10**30])
def test_numbers_are_numbers_of_trials(number: int, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in encode_records(one_of_each()).splitlines()]
    lines[1]["entries"][0]["trial"] = lines[2]["trial"] = number
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [bad.line for bad in read_log(tmp_path / "a.jsonl").bad] == [2, 3]


def test_extra_trials_change_neither_replay_nor_resume(fake_families: None, tmp_path: Path) -> None:
    log = tuned(tmp_path / "a.jsonl", **WALK).log
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    made = copy.deepcopy(next(line for line in lines if line["type"] == "trial"))
    made["theta"]["tile"]["bm"] = 10**9
    evil = [made | {"trial": n} for n in range(64)]
    lines[1:1] = evil
    log.write_text("".join(json.dumps(line) + "\n" for line in lines + evil))
    run = read_run(log)
    assert run.left_out == 128 and check_identity(run).exit_code == 0
    tuned(log, resume=True, **WALK | {"trials": 48})
    resumed = read_run(log)
    assert len(resumed.trials) == 48 and check_identity(resumed).exit_code == 0


# -- size ----------------------------------------------------------------------------------------


def test_bad_lines_are_counted_and_a_foreign_file_is_given_up(tmp_path: Path) -> None:
    path, good = tmp_path / "a.jsonl", encode_records(one_of_each())
    path.write_bytes(good + b"x\n" * (BAD_REFUSED - 1))
    log = read_log(path)
    assert log.bad.total == BAD_REFUSED - 1 and len(log.bad) == BAD_KEPT
    for line in (b"x\n", b"\n"):
        path.write_bytes(good + line * BAD_REFUSED * 2)
        with pytest.raises(LogError, match=r"a\.jsonl: not a kt log"):
            read_log(path)


def test_more_good_lines_than_bad_are_a_log(tmp_path: Path) -> None:
    line = encode_records([trial(0)])
    (tmp_path / "a.jsonl").write_bytes((line + line + b"x\n") * BAD_REFUSED)
    log = read_log(tmp_path / "a.jsonl")
    assert log.bad.total == BAD_REFUSED and len(log.records) == 2 * BAD_REFUSED


def test_what_decompresses_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_FILE_BYTES", 2**20)
    for name, data in (("a.jsonl.gz", encode_records([trial(0)]) * 9999), ("b.gz", b"x" * 2**22)):
        (tmp_path / name).write_bytes(gzip.compress(data))
        with pytest.raises(LogError, match=r"holds more than .* too much for a log"):
            read_log(tmp_path / name)


@pytest.mark.parametrize(("count", "each"), [(16_000, 1), (1, 8_000)])
def test_many_runs_and_many_workloads_take_seconds(count: int, each: int) -> None:
    records: list[Record] = []
    for n in range(count):
        texts = tuple(f"gemm {n + 1}x{k + 1}x8 dtype=fp32" for k in range(each))
        made = [trial(k, run=f"r{n}", workload=text) for k, text in enumerate(texts)]
        records += proposed(header(f"r{n}", workloads=texts), *made)
    started = time.process_time()
    found = runs(records)
    texts = dict.fromkeys(text for run in found for text in run.workloads)
    table = rows(found, texts)
    facts = [run_facts(run, texts.keys()) for run in found]
    assert len(table) == len(best_trials(records)) == count * each and len(facts) == count
    assert len(table_lines(table)) > 2 * len(table)
    assert time.process_time() - started < 20


# -- the file under a running tuner --------------------------------------------------------------


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    (path.parent / "b").write_bytes(path.read_bytes())
    os.replace(path.parent / "b", path)


def truncate(path: Path) -> None:
    os.truncate(path, 10)


@pytest.mark.parametrize(
    ("change", "says"), [(remove, "removed"), (replace, "replaced"), (truncate, "truncated")]
)
def test_a_log_that_is_lost_while_tuning_ends_the_run(
    change: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path) as log:
        log.append(header())
        change(path)
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(LogError, match=f"a.jsonl was {says} while tuning"):
            log.append(trial(0))
        assert (path.read_bytes() if path.exists() else None) == before


def test_a_file_that_took_the_place_of_an_empty_log_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path):
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine"


# -- headers -------------------------------------------------------------------------------------

ODD_HEADERS = [
    {"target": {"simd_bytes": 0}}, {"target": {"simd_bytes": -5}},
    {"target": {"simd_bytes": 10**30}}, {"target": {"cores": 0}},
    {"target": {"vector_registers": 3}}, {"target": {"l1_bytes": 0}}, {"target": {"kind": "tpu"}},
    {"bounds": {"fp32": {"flops": 0, "bandwidth": 1}}}, {"bounds": {"fp32": None}},
    {"vendor_us": {GEMM: 5e-324}},
]  # fmt: skip


@pytest.mark.parametrize("change", ODD_HEADERS, ids=str)
def test_impossible_headers_are_refused_in_a_sentence(
    change: dict[str, dict[str, Any]], fake_families: None, tmp_path: Path
) -> None:
    path = tuned(tmp_path / "a.jsonl", **WALK).log
    first, *rest = path.read_bytes().splitlines(keepends=True)
    head = json.loads(first)
    for key, value in change.items():
        head[key].update(value)
    path.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(rest))
    uses: list[Callable[[], object]] = [
        lambda: check_identity(read_run(path)),
        lambda: simulate([read_run(path)], GEMM, "random", 4),
    ]
    if "target" in change:  # else the run is not found any more, and a new one begins
        uses.append(lambda: tuned(path, resume=True, **WALK))
    if not runs(read_log(path).records):
        return
    for use in uses:
        with pytest.raises(KtError):
            use()


def test_a_header_without_bounds_is_not_resumed(fake_families: None, tmp_path: Path) -> None:
    path = tuned(tmp_path / "a.jsonl", **WALK).log
    first, *rest = path.read_bytes().splitlines(keepends=True)
    head = json.loads(first) | {"bounds": {}}
    path.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(rest))
    with pytest.raises(LogError, match="no measured bound for fp32"):
        tuned(path, resume=True, **WALK)


@pytest.mark.parametrize("us", [0, 5e-324, 1e16, 1e308])
def test_times_that_no_kernel_takes_are_bad_lines(us: float, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in encode_records(one_of_each()).splitlines()]
    lines[2]["outcome"]["median_us"] = us
    lines[3]["seconds"] = {"run": 1e308}
    lines[7]["seconds"] = {"wall": 1e308}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = read_log(tmp_path / "a.jsonl")
    assert [bad.line for bad in log.bad] == [3, 4, 8]
