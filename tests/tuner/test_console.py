"""How numbers read, and how the views look after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt.logs.journal import Journal
from kt.logs.record import Bound, RunRecord, Settings
from kt.spaces.target import detect_cpu
from kt.spaces.workload import parse
from kt.tuner import console, text
from kt.tuner.progress import Progress
from kt.tuner.session import Session


@pytest.mark.parametrize(
    ("us", "says"),
    [
        (None, "–"), (0.5, "0.5 µs"), (187.06, "187.1 µs"), (9999, "9999 µs"),
        (12_345, "12.35 ms"), (9_999_999, "10000 ms"), (12_000_000, "12 s"), (4e9, "66 min 40 s"),
    ],
)  # fmt: skip
def test_times(us: float | None, says: str) -> None:
    assert text.time_of(us) == says


def test_rates_and_ratios() -> None:
    assert text.rate_of(2 * 512**3, 1180.2) == "227.4 GFLOP/s"
    assert text.rate_of(2 * 4096**3, 187.1) == "735 TFLOP/s"
    assert text.rate_of(10, None) == text.rate_of(10, 0) == text.rate_of(10, -1) == "–"
    assert text.ratio(3, 2) == "1.50x" and text.ratio(None, 2) == text.ratio(1, 0) == "–"
    assert text.percent(1, 4) == "25 %" and text.percent(-1, 4) == "–"
    assert text.ratio(1e308, 1e-308) == "–"


def test_durations() -> None:
    spans = [text.duration(s) for s in (0.04, 9.4, 99.2, 100, 3600, 7 * 3600 + 61)]
    assert spans == ["0.0 s", "9.4 s", "99 s", "1 min 40 s", "60 min 0 s", "7 h 1 min"]


def test_sparklines() -> None:
    assert text.sparkline([]) == "" and text.sparkline([3, 3]) == "▁▁"
    assert text.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(text.sparkline(list(range(1000)))) == 32 and text.sparkline(range(99))[-1] == "█"


def test_foreign_text() -> None:
    assert text.printable("a\x1b[1m\u202eb\nc") == "a\\x1b[1m\\u202eb\nc"
    assert text.one_line("a\nb\r") == "a\\nb\\r"
    assert text.printable("x" * 10_000).endswith("… (10000 characters)")


def test_columns() -> None:
    assert text.columns([("a", "b"), ("ccc", "dd")], {0}) == ["  a  b", "ccc  dd"]
    assert text.columns([]) == []


def test_a_run_that_measured_nothing_yet(fake_families: None, tmp_path: Path) -> None:
    workload = parse("gemm 64x64x64")
    header = RunRecord(
        run="r", kt="0", seed=0, settings=Settings(), target=detect_cpu(), time="",
        workloads=(str(workload),), spaces=("",), bounds={"fp32": Bound(1e12, 1e11)},
        versions={}, environment={},
    )  # fmt: skip
    with Journal(tmp_path / "a.jsonl") as journal:
        progress = Progress(Session(header, header.settings, journal))
    assert progress.winner(0) is None and progress.eta is None
    assert progress.status() == "0/128 trials · 0.0 trials/s · failures: none"
    assert progress.lanes[0].facts() == ["–", "–", "– of bound", "– default"]


def test_which_view(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(as_json: bool, plain: bool, quiet: bool) -> str:
        return type(console.view_of(as_json, plain, quiet, lambda: None)).__name__

    assert kind(True, True, True) == "JsonView" and kind(False, True, True) == "QuietView"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert kind(False, False, False) == "LiveView" and kind(False, True, False) == "PlainView"
    monkeypatch.setenv("TERM", "dumb")
    assert kind(False, False, False) == "PlainView"
