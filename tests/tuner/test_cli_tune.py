"""`kt tune`: its views, its signals, its logs, and what it refuses to write to."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_kt
import pytest

from kt.logs.journal import read_log
from kt.logs.query import runs

TUNE = ("tune", "gemm", "64x64x64", "--strategy", "random")


def start(*words: str, cwd: Path, stdout: object = subprocess.PIPE, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(fake_kt.PROGRAM), *words], cwd=cwd, text=True,
        stdout=stdout, stderr=subprocess.PIPE, env={**os.environ, **env},
    )  # fmt: skip


def ended(log: Path) -> str | None:
    """The stop reason of a log's only run."""
    (run,) = runs(read_log(log).records)
    return run.stop.reason if run.stop else None


# -- output -------------------------------------------------------------------------------------


def test_plain_lines_and_summary(kt, tmp_path: Path) -> None:
    ran = kt(*TUNE, "--trials", "40")
    assert ran.code == 0 and ran.err == ""
    (log,) = (tmp_path / "kt-logs").iterdir()
    (run,) = runs(read_log(log).records)
    lines = ran.out.splitlines()
    assert sum(line.startswith("batch ") for line in lines) == 3
    assert any("trial 0:" in line and "1.00x default" in line for line in lines)
    tail = "\n".join(lines[lines.index("") :])
    best = run.trials[run.finals["gemm 64x64x64 dtype=fp32"].best]
    for text in (str(log.relative_to(tmp_path)), run.header.run, str(best.theta), "kt apply",
                 "% of bound", "x vendor", "all trials were used"):  # fmt: skip
        assert text in tail
    following = next(line for line in lines if line.startswith("next: kt ")).split()[2:]
    assert kt(*following[:-1]).code == 0  # without --verify: the fake has no kernel
    assert (tmp_path / "gemm_64x64x64_dtype_fp32.c").read_text().startswith("/* kt kernel")


def test_quiet_prints_the_summary_only(kt) -> None:
    ran = kt(*TUNE, "--trials", "5", "--quiet")
    assert ran.out.splitlines()[1] == "gemm 64x64x64 dtype=fp32" and "batch" not in ran.out


def test_json_is_one_object_a_line(kt) -> None:
    ran = kt(*TUNE, "--trials", "20", "--json")
    events = [json.loads(line) for line in ran.out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == ["start", "batch", *["trial"] * 16, "batch", *["trial"] * 4, "final", "stop"]
    assert len({event["run"] for event in events}) == 1
    trials = [event for event in events if event["event"] == "trial"]
    assert [t["trial"] for t in trials] == list(range(20)) and trials[-1]["done"] == 20
    assert events[-1]["best"]["gemm 64x64x64 dtype=fp32"] == events[-2]["best"]


def test_nothing_valid(kt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_FAKE_FAIL", "1")
    ran = kt(*TUNE, "--trials", "20", "--max-failures", "10")
    assert ran.refused("no valid result for 'gemm 64x64x64 dtype=fp32' in 16 trials")
    assert "failures: compile_error 16" in ran.err and "error: no 8\nkernel.c:1: detail" in ran.err
    assert "no valid result" in ran.out and "kt apply" not in ran.out


def test_live_view_on_a_terminal(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    env = {"TERM": "xterm", "COLUMNS": "120", "KT_FAKE_SECONDS": "0.03"}
    with start(*TUNE, "--trials", "40", cwd=tmp_path, stdout=child, **env) as process:
        os.close(child)
        shown = read_all(parent)
        assert process.wait(20) == 0
    for text in ("\x1b[?25l", "\x1b[?25h", "/40 trials", "trials/s", "ETA", "█", "% of bound",
                 "batch 1: 16 trials", "next: kt apply"):  # fmt: skip
        assert text in shown, text


def read_all(descriptor: int) -> str:
    data = b""
    while select.select([descriptor], [], [], 20)[0]:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # the other side is closed
            break
        data += chunk
    os.close(descriptor)
    return data.decode()


# -- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_shows_its_best_and_resumes(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    words = (*TUNE, "--trials", "24", "--log", "a.jsonl")
    process = start(*words, cwd=tmp_path, KT_FAKE_SECONDS="0.1")
    assert process.stdout
    first = ""
    while "trial 0:" not in first:
        first = process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code and "Traceback" not in err
    assert "stopped: interrupted" in out and "kt apply a.jsonl" in out and "--resume" in out
    assert ended(tmp_path / "a.jsonl") == "interrupted"
    again = start(*words, "--resume", cwd=tmp_path)
    out, _ = again.communicate(timeout=20)
    assert again.returncode == 0 and "trials are in the log already" in out
    assert ended(tmp_path / "a.jsonl") == "trials"


def test_what_earlier_logs_teach_is_said(kt, tmp_path: Path) -> None:
    first = kt(*TUNE, "--trials", "12", "--log", "logs/")
    assert first.code == 0 and "earlier logs" not in first.out
    again = kt("tune", "gemm", "96x64x64", "--dtype", "fp32", "--trials", "2", "--log", "logs/")
    assert again.code == 0 and "begins with what earlier logs say of 1 workload\n" in again.out


def test_nothing_to_resume_is_said(kt, tmp_path: Path) -> None:
    words = ("--strategy", "random", "--trials", "8", "--log", "a.jsonl")
    says = "kt: nothing to resume in a.jsonl: a new run begins\n"
    assert kt("tune", "gemm", "64x64x64", *words, "--resume").err == says
    other = kt("tune", "gemm", "8x8x8", *words, "--resume", "--json")  # the log has another's run
    assert other.err == says and other.code == 0
    assert kt("tune", "gemm", "8x8x8", *words, "--resume").err == ""
    assert len(runs(read_log(tmp_path / "a.jsonl").records)) == 2


def test_a_second_interrupt_ends_at_once() -> None:
    code = (
        "import os, signal, time\n"
        "from kt.tuner.signals import Interrupts\n"
        "with Interrupts():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(60)\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGINT and time.monotonic() - begin < 30


def test_a_reader_that_leaves_ends_the_run(tmp_path: Path) -> None:
    words = (*TUNE, "--trials", "24", "--log", "a.jsonl", "--json")
    process = start(*words, cwd=tmp_path, KT_FAKE_SECONDS="0.02")
    assert process.stdout and process.stderr
    assert json.loads(process.stdout.readline())["event"] == "start"
    process.stdout.close()
    assert process.wait(20) == 141
    assert "Traceback" not in process.stderr.read()
    assert ended(tmp_path / "a.jsonl") == "interrupted"
    process.stderr.close()


# -- places -------------------------------------------------------------------------------------


def test_full_standard_output(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start("space", "gemm", "8x8x8", cwd=tmp_path, stdout=full)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err == "kt: error: standard output: No space left on device\n"


def test_a_full_disk_keeps_what_was_logged(
    kt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    write, room = os.write, [30_000]

    def limited(descriptor: int, data: bytes) -> int:
        if descriptor > 2 and len(data) > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(data) if descriptor > 2 else 0
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", limited)
    ran = kt(*TUNE, "--trials", "200", "--log", "a.jsonl")
    assert ran.refused("cannot write log a.jsonl: No space left on device", "intact")
    assert not read_log(tmp_path / "a.jsonl").bad


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("/dev/full", "not a regular file"),
        ("/proc/kt-logs", "cannot write log"),
        ("file.txt/x.jsonl", "cannot write log"),
        ("file.txt", "not a kt log"),
        ("foreign.jsonl", "not a kt log"),
        ("a.jsonl.gz", "compressed"),
    ],
)
def test_logs_that_cannot_be_written(kt, tmp_path: Path, place: str, says: str) -> None:
    (tmp_path / "file.txt").write_text("mine\n")
    (tmp_path / "foreign.jsonl").write_text('{"type":"other"}\n')
    for more in ((), ("--resume",)):
        ran = kt(*TUNE, "--trials", "3", "--log", place, *more)
        assert ran.refused(says) and "nothing to resume" not in ran.err
    assert (tmp_path / "file.txt").read_text() == "mine\n"
    assert (tmp_path / "foreign.jsonl").read_text() == '{"type":"other"}\n'


def test_a_directory_with_foreign_files_is_used(kt, tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "notes.txt").write_text("mine")
    (tmp_path / "db" / "other.jsonl").write_text("not json\n")
    assert kt(*TUNE, "--trials", "3", "--log", "db").code == 0
    assert len(list((tmp_path / "db").glob("gemm-*.jsonl"))) == 1


def test_resuming_with_other_settings(kt) -> None:
    words = (*TUNE, "--trials", "3", "--log", "a.jsonl")
    assert kt(*words).code == 0
    assert kt(*words, "--resume", "--seed", "9").refused("cannot resume run", "seed")
    assert kt(*words, "--resume", "--batch-size", "2").refused("--batch-size")
