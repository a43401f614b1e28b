"""`kt show`: numbers for people and machines, one record in full, a picture."""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kt.logs.record import Failure
from kt.tuner.plot import FORMATS, is_plot

TUNE = ("tune", "gemm", "64x64x64", "--strategy", "random", "--trials", "20")


def fail(log: Path, *trials: int) -> None:
    """Makes trials of a log fail, with messages that differ in a number."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["type"] == "trial" and line["trial"] in trials:
            message = f"relative error 0.{line['trial']} exceeds 0.1"
            failure = Failure("launch_error", "check", message, "stderr\x1b[31m of the child")
            line["outcome"] = msgspec.to_builtins(failure)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_table(kt, log: Path) -> None:
    fail(log, 5, 6)
    ran = kt("show", log)
    assert ran.code == 0 and ran.err == ""
    for text in ("gemm 64x64x64 dtype=fp32", "speed-up", "over vendor", "all trials were used",
                 "launch_error 2", "2x launch_error in check: relative error 0.5", "search",
                 "20 in 2 batches", "verified again"):  # fmt: skip
        assert text in ran.out, text


def test_json(kt, log: Path) -> None:
    fail(log, 5)
    facts = json.loads(kt("show", log, "--json").out)
    row, run = facts["workloads"][0], facts["runs"][0]
    assert row["trials"] == 20 and row["failures"]["launch_error"] == 1 and row["verified"]
    assert row["over_default"] == pytest.approx(row["default_us"] / row["best_us"])
    assert run["reason"] == "trials" and "launch_error in check" in str(run["messages"])
    assert set(run["seconds"]) >= {"search", "build", "check", "run"}


def test_the_model_is_judged(kt, tmp_path: Path) -> None:
    kt("tune", "gemm", "64x64x64", "--strategy", "forest", "--trials", "48", "--log", "f.jsonl")
    run = json.loads(kt("show", "f.jsonl", "--json").out)["runs"][0]
    assert [row["batch"] for row in run["model"]] == list(range(2, 9))  # batch 1 is judged first
    assert "rank correlation by batch" in kt("show", "f.jsonl").out


def test_one_trial(kt, log: Path) -> None:
    fail(log, 5)
    ran = kt("show", log, "--trial", "5")
    assert '"failure": "launch_error"' in ran.out and "\x1b" not in ran.out
    command = ran.out.strip().splitlines()[-1].removeprefix("to make it again: kt ").split()
    assert kt(*command[:-1]).code == 0  # without --verify: the fake has no kernel
    assert json.loads(kt("show", log, "--trial", "5", "--json").out)["trial"] == 5
    assert kt("show", log, "--trial", "20").refused("no trial 20 in this log: accepts 0 to 19")


def test_directories_and_compressed_logs(kt, log: Path, tmp_path: Path) -> None:
    database = tmp_path / "db"
    database.mkdir()
    (database / "a.jsonl.gz").write_bytes(gzip.compress(log.read_bytes()))
    kt("tune", "gemm", "8x8x8", *TUNE[3:], "--log", database)
    facts = json.loads(kt("show", database, "--json").out)
    assert len(facts["workloads"]) == len(facts["runs"]) == 2
    facts = json.loads(kt("show", database, "gemm", "8x8x8", "--json").out)
    assert [row["workload"] for row in facts["workloads"]] == ["gemm 8x8x8 dtype=fp32"]
    assert len(facts["runs"]) == 1


def test_many_runs(kt, log: Path) -> None:
    text = log.read_text()
    run = json.loads(text.splitlines()[0])["run"]
    log.write_text("".join(text.replace(run, f"{i:012x}") for i in range(9)))
    out = kt("show", log).out
    assert "9 runs; the newest 5" in out and out.count("\nrun ") == 5
    assert kt("show", log, "--run", "000000000003").out.count("\nrun ") == 1


def test_bad_lines_are_reported_and_skipped(kt, log: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    lines[3:3] = [b"\xff\xfe not json \x1b[31m\n"] * 12
    log.write_bytes(b"".join(lines) + b'{"type":"trial","ru')
    ran = kt("show", log)
    assert ran.code == 0 and f"{log}:4: skipped" in ran.err and "and 5 more bad lines" in ran.err
    assert "\x1b" not in ran.err
    assert json.loads(kt("show", log, "--json").out)["bad_lines"] == 13


def test_a_log_cut_anywhere(kt, log: Path) -> None:
    data = log.read_bytes()
    for share in (0.05, 0.3, 0.5, 0.7, 0.9, 0.99):
        log.write_bytes(data[: int(len(data) * share)])
        ran = kt("show", log)
        assert ran.code == 0 or ran.refused("log.jsonl"), ran


def test_workloads_that_make_no_sense(kt, log: Path) -> None:
    log.write_text(log.read_text().replace("gemm 64x64x64 dtype=fp32", "gem \\u001b[31m -1x"))
    ran = kt("show", log)
    assert ran.code == 0 and "gem \\x1b[31m -1x" in ran.out
    assert kt("apply", log).refused("unknown operator 'gem'")


def test_headers_that_make_no_sense(kt, log: Path) -> None:
    lines = log.read_text().splitlines()
    header = json.loads(lines[0])
    header["bounds"] = {"fp32": {"flops": 1e-5, "bandwidth": 1e23}}
    header["vendor_us"] = {"gemm 64x64x64 dtype=fp32": 1e14}
    stop = json.loads(lines[-1])
    stop["seconds"] = {"wall": 0, "search": -1e300, "x": 1e300}
    log.write_text("\n".join([json.dumps(header), *lines[1:-1], json.dumps(stop)]) + "\n")
    assert kt("show", log).code == 0
    assert kt("show", log, "--plot", "a.png").code == 0


ODD = (None, True, -1, 0, 2**63 - 1, 1e308, -1e-308, "", "\x1b[2J*/\n", "x" * 5000, [], {}, [[]])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path into decoded JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items if isinstance(value, dict | list) else ():
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


@pytest.mark.parametrize("seed", range(12))
def test_odd_values_anywhere(kt, log: Path, seed: int) -> None:
    rng = random.Random(seed)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for _ in range(12):
        changed = copy.deepcopy(lines)
        for _ in range(rng.randint(1, 3)):
            *path, last = rng.choice(list(places(changed)))
            owner = changed
            for key in path:
                owner = owner[key]
            owner[last] = rng.choice(ODD)
        text = "".join(json.dumps(line) + "\n" for line in changed)
        log.write_text(text)
        for words in (["show"], ["show", "--json"], ["apply"], ["apply", "--any-device"]):
            ran = kt(words[0], log, *words[1:])
            assert ran.code == 0 or ran.refused(), (ran, words)
            assert "\x1b" not in ran.out + ran.err and "internal error" not in ran.err


# -- the picture --------------------------------------------------------------------------------


def test_plot(kt, log: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fail(log, 5, 6)
    assert kt("show", log, "--plot", "a.png").code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert kt("show", log, "--plot", "a.svg").code == 0
    for name in ("a.png", "a.svg", "a.pdf", "a.pdf"):
        assert kt("show", log, "--plot", name).code == 0
    for text in ("best so far", "failed (", "bound", "vendor", "default"):
        assert text in (tmp_path / "a.svg").read_text()


def test_a_plot_replaces_plots_only(kt, log: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    photograph = tmp_path / "a.png"
    photograph.write_bytes(b"\x89PNG\r\n")
    assert kt("show", log, "--plot", "a.png").refused("exists and is not a kt plot: --force")
    assert photograph.read_bytes() == b"\x89PNG\r\n"
    assert kt("show", log, "--plot", "a.png", "--force").code == 0
    assert photograph.stat().st_size > 10_000
    named = log.rename(tmp_path / "log.png")
    assert kt("show", named, "--plot", named, "--force").refused("is a log")


def drawn(form: str, **metadata: str) -> bytes:
    """A plot that somebody else drew with matplotlib."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.subplots().plot([1, 2, 3], label="kt")
    image = io.BytesIO()
    figure.savefig(image, format=form, metadata=metadata)
    return image.getvalue()


@pytest.mark.parametrize("form", FORMATS)
def test_plots_of_others_are_kept(kt, log: Path, tmp_path: Path, form: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"a.{form}"
    assert kt("show", log, "--plot", path).code == 0
    ours = path.read_bytes()
    assert is_plot(ours) and kt("show", log, "--plot", path).code == 0
    paper = b"%PDF-1.5\n%\xd0\xd4\xc5\xd8\n(drawn with Matplotlib) /PTEX.InfoDict " + ours
    for content in (
        drawn(form),
        drawn(form, Title="kt"),
        b"import matplotlib\n",
        b" " + ours,
        paper,
    ):
        path.write_bytes(content)
        assert kt("show", log, "--plot", path).refused("exists and is not a kt plot: --force")
        assert path.read_bytes() == content
    assert kt("show", log, "--plot", path, "--force").code == 0 and is_plot(path.read_bytes())


def test_plots_that_cannot_be_are_refused_first(kt, log: Path, tmp_path: Path) -> None:
    for words in (
        ["a.exe"],
        ["a"],
        ["a.txt", "--json"],
        [log, "--force"],
        ["a.exe", "--trial", "3"],
    ):
        ran = kt("show", log, "--plot", *words)
        assert ran.refused(f"--plot {words[0]}: accepts names that end in .png") and not ran.out
    for more in ([], ["--json"]):
        ran = kt("show", log, "--trial", "3", "--plot", "a.png", *more)
        assert ran.refused("--plot draws a whole search: leave --trial out") and not ran.out
    (tmp_path / "loop.png").symlink_to("loop.png")
    ran = kt("show", log, "--plot", "loop.png")
    assert ran.refused("cannot write loop.png: Too many levels of symbolic links") and not ran.out
    assert not (tmp_path / "a.png").exists()


def test_plots_that_cannot_be(kt, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert kt("show", log, "--plot", "no/such/a.png").refused("cannot write", "no/such/a.png")
    fail(log, *range(20))
    log.write_text("".join(x for x in log.read_text().splitlines(True) if '"final"' not in x))
    assert kt("show", log, "--plot", "a.png").refused("no valid result to draw")


def test_without_matplotlib(kt, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert kt("show", log, "--plot", "a.png").refused("pip install matplotlib")


def test_a_resumed_runs_time_is_that_since_then(kt, log: Path) -> None:
    assert "since it was resumed" not in kt("show", log).out
    words = ("gemm", "64x64x64", "--strategy", "random", "--trials", "24")
    assert kt("tune", *words, "--log", log, "--resume").code == 0
    (line,) = [line for line in kt("show", log).out.splitlines() if line.startswith("  time ")]
    assert line.endswith(" since it was resumed")
