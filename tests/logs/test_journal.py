"""The journal under crashes, hostile content, concurrent writers and a full disk."""

from __future__ import annotations

import gzip
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from fake_runs import GEMM, THETA, header, one_of_each, trial
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kt.logs import journal
from kt.logs.journal import (
    MAX_LINE_BYTES,
    Journal,
    encode_records,
    holds_nothing,
    log_files,
    read_log,
)
from kt.logs.query import runs
from kt.logs.record import BatchRecord, Bound, Entry, ModelReport, Record
from kt.spaces.errors import LogError

RECORDS = [*one_of_each("a"), *one_of_each("b")]
LINES = [encode_records([record]) for record in RECORDS]
TEXT = b"".join(LINES)

FLIPS = st.tuples(st.integers(0, len(TEXT) - 1), st.integers(1, 255))
JUNK = st.binary(min_size=1, max_size=300).filter(lambda junk: b"\n" not in junk)
fuzz = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def is_subsequence(few: list[Record], many: list[Record]) -> bool:
    rest = iter(many)
    return all(any(record == other for other in rest) for record in few)


def written(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


# -- reading what was damaged ------------------------------------------------------------------


@fuzz
@given(st.integers(0, len(TEXT)))
def test_a_log_cut_anywhere_keeps_every_whole_record(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "a.jsonl", TEXT[:cut])
    ends = [len(b"".join(LINES[: i + 1])) - 1 for i in range(len(LINES))]
    whole = sum(end <= cut for end in ends)  # complete without its newline is complete
    if not whole:
        with pytest.raises(LogError, match=r"empty|not a kt log"):
            read_log(path)
        return
    log = read_log(path)
    assert log.records == RECORDS[:whole]
    torn = cut not in (*ends, *(end + 1 for end in ends))
    assert [bad.line for bad in log.bad] == ([whole + 1] if torn else [])
    assert all("torn line" in str(bad) and f"{path}:{whole + 1}: " in str(bad) for bad in log.bad)


@fuzz
@given(st.lists(FLIPS, min_size=1, max_size=6))
def test_flipped_bytes_cost_only_the_lines_they_hit(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    damaged = bytearray(TEXT)
    for position, bits in flips:
        damaged[position] ^= bits
    path = written(tmp_path / "a.jsonl", bytes(damaged))
    starts = [len(b"".join(LINES[:i])) for i in range(len(LINES))]
    spans = [slice(max(0, s - 1), s + len(line)) for s, line in zip(starts, LINES, strict=True)]
    untouched = [r for r, span in zip(RECORDS, spans, strict=True) if damaged[span] == TEXT[span]]
    try:
        log = read_log(path)
    except LogError as error:
        assert "newer kt" in str(error)  # a flip made the schema a higher digit
        return
    assert is_subsequence(untouched, log.records)
    count = damaged.count(b"\n") + 1
    assert all(1 <= bad.line <= count and str(bad).startswith(f"{path}:") for bad in log.bad)


@fuzz
@example(b"\x1f\x8b\x08", 0)
@given(JUNK, st.integers(0, len(LINES)))
def test_a_line_of_anything_is_reported_and_skipped(
    tmp_path: Path, junk: bytes, position: int
) -> None:
    lines = [*LINES[:position], junk + b"\n", *LINES[position:]]
    log = read_log(written(tmp_path / "a.jsonl", b"".join(lines)))
    assert log.records == RECORDS
    assert [bad.line for bad in log.bad] == ([position + 1] if junk.strip() else [])


HOSTILE = {
    "nul": b"\0" * 4096,
    "nested": b"[" * 200_000,
    "nested header": b'{"type":"run","target":' + b'{"a":' * 200_000,
    "huge integer": LINES[7].replace(b'"trials":3', b'"trials":' + b"9" * 10_000),
    "huge float": LINES[7].replace(b'"wall":1.0', b'"wall":1e999'),
    "not UTF-8": LINES[7].replace(b'"trials"', b'"\xff\xfe"', 1),
    "surrogate": LINES[7].replace(b'"reason":"trials"', b'"reason":"\\ud800"'),
    "another schema": b'{"type":"run","hello":"world"}',
    "no object": b"3",
    "another tool": b'{"device_name":"x","cache":{}}',
    "long": b'{"type":"trial","run":"' + b"x" * (20 * 2**20),
    "long and a record": b"x" * MAX_LINE_BYTES + LINES[2].rstrip(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_cost_nothing_but_themselves(name: str, tmp_path: Path) -> None:
    junk = HOSTILE[name].rstrip(b"\n")
    path = written(tmp_path / "a.jsonl", b"".join([*LINES[:3], junk + b"\n", *LINES[3:]]))
    log = read_log(path)
    assert log.records == RECORDS
    assert [bad.line for bad in log.bad] == [4]
    assert all(len(str(bad)) < 400 + len(str(path)) and "\n" not in str(bad) for bad in log.bad)
    with pytest.raises(LogError):
        read_log(written(tmp_path / "alone.jsonl", junk))


def test_control_characters_of_a_log_do_not_reach_a_report(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", TEXT + b'{"type":"\\u001b[31m\\nred"}\n')
    (bad,) = read_log(path).bad
    assert bad.line == len(LINES) + 1
    assert str(bad).isprintable()


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl", "blank.jsonl", "folder"])
def test_nothing_to_read_is_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder" / "notes.txt", b"hello")
    written(tmp_path / "empty.jsonl", b"")
    written(tmp_path / "blank.jsonl", b"\n \n")
    with pytest.raises(
        LogError, match=r"no such log|the log is empty|no logs in this directory"
    ) as e:
        read_log(tmp_path / name)
    assert str(tmp_path / name) in str(e.value) and "\n" not in str(e.value)


def test_a_device_or_a_name_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="not a regular file"):
        read_log(Path("/dev/zero"))
    with pytest.raises(LogError, match="too long"):
        log_files(tmp_path / ("x" * 300 + ".jsonl"))


@pytest.mark.parametrize("line", [
    b'{"type":"run","schema":2}', b'{"type":"run","run":[],"schema":99,"more":{}}',
    encode_records([header()]).replace(b'"schema":1', b'"schema":2').rstrip(),
])  # fmt: skip
def test_a_newer_schema_is_refused_with_a_sentence(line: bytes, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", TEXT + line + b"\n")
    with pytest.raises(LogError, match=rf":{len(LINES) + 1}: written by a newer kt .*upgrade kt"):
        read_log(path)


def test_a_directory_of_logs_is_read_in_order_of_names(tmp_path: Path) -> None:
    written(tmp_path / "b.jsonl", LINES[1])
    written(tmp_path / "a.jsonl.gz", gzip.compress(LINES[0]))
    written(tmp_path / "c.txt", b"not looked at")
    (tmp_path / "d.jsonl").mkdir()
    assert [path.name for path in log_files(tmp_path)] == ["a.jsonl.gz", "b.jsonl"]
    assert read_log(tmp_path).records == RECORDS[:2]


def test_a_compressed_log_is_read_and_a_damaged_one_as_far_as_it_goes(tmp_path: Path) -> None:
    packed = gzip.compress(TEXT * 50)
    assert read_log(written(tmp_path / "a.gz", packed)).records == RECORDS * 50
    for damaged in (packed[:-400], packed[: len(packed) // 2], packed[:200]):
        path = written(tmp_path / "b.jsonl.gz", damaged)
        try:
            log = read_log(path)
        except LogError as error:
            assert "compressed data ends or is damaged" in str(error)
        else:
            assert log.records == (RECORDS * 50)[: len(log.records)]
            assert "compressed data ends or is damaged" in str(log.bad[-1])
    for seed in range(40):
        damaged = bytearray(packed)
        damaged[random.Random(seed).randrange(2, len(packed))] ^= 0x55
        try:
            read_log(written(tmp_path / "c.jsonl.gz", bytes(damaged)))
        except LogError as error:
            assert "\n" not in str(error)


def test_100_000_trials_load_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = encode_records([trial(0, predicted=0.5, source="model", time="t")])
    text = b"".join(line.replace(b'"trial":0', b'"trial":%d' % i) for i in range(100_000))
    numbers = [range(first, first + 1000) for first in range(0, 100_000, 1000)]
    batches = [
        BatchRecord(
            run="r", batch=i, workload=GEMM, predicted=(0.5,) * 1000, time="t",
            entries=tuple(Entry(n, "fake", THETA, "model") for n in block), model=ModelReport(),
        )
        for i, block in enumerate(numbers)
    ]  # fmt: skip
    path = written(tmp_path / "a.jsonl", encode_records([header(), *batches]) + text)
    started = time.process_time()
    (run,) = runs(read_log(path).records)
    seconds = time.process_time() - started
    with capsys.disabled():
        print(f" [100 000 trials of {len(line)} bytes: {seconds:.2f} s]", end="")
    assert len(run.trials) == 100_000
    assert seconds < 8  # the goal is 2 on a quiet machine


# -- appending -----------------------------------------------------------------------------------


def test_appended_records_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.jsonl"
    with Journal(path) as log:
        log.append(RECORDS[0], durable=True)
        log.append(*RECORDS[1:])
        log.append()
    assert read_log(path) == journal.Log(RECORDS, [])
    assert path.read_bytes() == TEXT


@fuzz
@given(st.integers(1, len(TEXT)))
def test_a_torn_last_line_is_repaired_by_the_next_append(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "a.jsonl", TEXT[:cut])
    with Journal(path) as log:
        log.append(trial(99))
    ends = [len(b"".join(LINES[: i + 1])) - 1 for i in range(len(LINES))]
    whole = sum(end <= cut for end in ends)
    assert path.read_bytes() == b"".join(LINES[:whole]) + encode_records([trial(99)])


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"x" * (2 * MAX_LINE_BYTES + 5), b"\xff{", b" "])
def test_whatever_a_crash_left_at_the_end_is_removed(tail: bytes, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", TEXT + tail)
    with Journal(path) as log:
        log.append(trial(99))
    assert path.read_bytes() == TEXT + encode_records([trial(99)])


def test_a_record_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.jsonl") as log:
        log.append(RECORDS[0])
        for broken in (trial(1, float("nan")), header(bounds={"fp32": Bound(float("inf"), 1.0)})):
            with pytest.raises(msgspec.ValidationError):
                log.append(broken)
    assert (tmp_path / "a.jsonl").read_bytes() == LINES[0]


@pytest.mark.parametrize(
    "content", [b"hello\n", b"# notes\nof mine", b"\0", b'{"type":"run"}\n', b"{}", b'{"a":1}\n']
)
def test_a_foreign_file_is_not_appended_to(content: bytes, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", content)
    with pytest.raises(LogError, match="exists and is not a kt log; give another --log"):
        Journal(path)
    assert path.read_bytes() == content
    assert not holds_nothing(path)


def test_a_log_with_a_damaged_header_is_still_a_log(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b"damaged\n" + b"".join(LINES[1:]))
    with Journal(path) as log:
        log.append(trial(99))
    assert read_log(path).records == [*RECORDS[1:], trial(99)]


@pytest.mark.parametrize("cut", [0, 1, 5, 14, 200, len(LINES[0]) - 2])
def test_a_file_torn_in_its_first_line_holds_nothing_and_is_begun_anew(
    cut: int, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", LINES[0][:cut])
    assert holds_nothing(path)
    with Journal(path) as log:
        log.append(RECORDS[0])
    assert path.read_bytes() == LINES[0]
    assert not holds_nothing(path)


def test_what_cannot_be_appended_to_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = written(tmp_path / "file", TEXT)
    fifo = tmp_path / "fifo.jsonl"
    subprocess.run(["mkfifo", fifo], check=True)
    refused = [
        (tmp_path / "a.jsonl.gz", "read-only"), (tmp_path, "regular file"), (fifo, "regular file"),
        (Path("/dev/full"), "regular file"), (file / "a.jsonl", "cannot write"),
        (tmp_path / ("x" * 300), "too long"), (Path("/proc/nowhere/a.jsonl"), "cannot write"),
    ]  # fmt: skip
    for path, why in refused:
        with pytest.raises(LogError, match=why) as caught:
            Journal(path)
        assert "\n" not in str(caught.value)


# -- a full disk ---------------------------------------------------------------------------------


@contextmanager
def small_tmpfs(folder: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def small_files(folder: Path) -> Iterator[Path]:
    """No file grows beyond 64 KiB (Python ignores SIGXFSZ, so that writing fails with EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("disk", [small_tmpfs, small_files])
def test_a_full_disk_loses_nothing_that_was_logged(
    disk: Callable[[Path], AbstractContextManager[Path]], tmp_path: Path
) -> None:
    with disk(tmp_path) as folder:
        path, kept = folder / "a.jsonl", 0
        with Journal(path) as log:
            with pytest.raises(LogError, match="; what was logged before is intact"):
                for kept in range(10_000):
                    log.append(trial(kept, time="x" * 999))
            assert kept > 30
            text = path.read_bytes()
            assert text == encode_records(trial(i, time="x" * 999) for i in range(kept))
            with pytest.raises(LogError):  # a block is written whole or not at all
                log.append(*(trial(i, time="y" * 999) for i in range(99)))
            assert path.read_bytes() == text
            (folder / "a.jsonl").write_bytes(text[: len(text) // 2])  # someone makes room
        with Journal(path) as log:
            log.append(trial(kept))
        records = read_log(path).records
    assert len(records) > 10 and records[-1] == trial(kept)


# -- several writers -----------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from fake_runs import trial
from kt.logs.journal import Journal
with Journal(Path(sys.argv[1])) as log:
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(0, 3000, 3):
        log.append(*(trial(i + j, time="x" * (i % 700), run=sys.argv[2]) for j in range(3)))
"""


def test_two_processes_append_thousands_of_records_that_never_interleave(tmp_path: Path) -> None:
    path, tests = tmp_path / "a.jsonl", str(Path(__file__).parent.parent)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, name, tests], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        for name in "ab"
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()

    assert [writer.returncode for writer in writers] == [0, 0]
    log = read_log(path)
    assert log.bad == [] and len(log.records) == 6000
    for name in "ab":
        mine = [record for record in log.records if record.run == name]
        assert mine == [trial(i, time="x" * (i // 3 * 3 % 700), run=name) for i in range(3000)]
    blocks = [{r.run for r in log.records[i : i + 3]} for i in range(0, 6000, 3)]
    assert all(len(block) == 1 for block in blocks)  # a block of records stays together
    assert len({tuple(block) for block in blocks}) == 2
    switches = sum(a != b for a, b in pairwise(blocks))
    assert switches > 3  # they did write at the same time


def test_two_journals_of_one_process_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path) as a, Journal(path) as b:
        for i in range(4):
            (a, b)[i % 2].append(trial(i))
    assert read_log(path).records == [trial(i) for i in range(4)]
