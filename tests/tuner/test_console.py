"""How numbers read, and how the views look after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kt.logs.journal import Journal
from kt.logs.record import Bound, FinalEntry, FinalRecord, RunRecord, Settings
from kt.spaces.target import detect_cpu
from kt.spaces.workload import parse
from kt.tuner import console, text
from kt.tuner.noise import busy
from kt.tuner.progress import Lane, Progress
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


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (200, 36_000, "0.2–36 ms"), (0.5, 12.25, "0.5–12 µs"), (187.2, 512.7, "187–513 µs"),
        (1300.4, 2845, "1300–2845 µs"), (2_000_000, 12_000_000, "2000 ms–12 s"),
    ],
)  # fmt: skip
def test_spans_of_times(low: float, high: float, says: str) -> None:
    assert text.span_of(low, high) == says


def test_rates_and_ratios() -> None:
    assert text.rate_of(2 * 512**3, 1180.2) == "227.4 GFLOP/s"
    assert text.rate_of(2 * 4096**3, 187.1) == "735 TFLOP/s"
    assert text.rate_of(2 * 8192**3, 873.3) == "1259 TFLOP/s"
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


def lane(
    name: str = "gemm 4096x4096x4096 dtype=bf16 epilogue=bias+gelu layout=nt", **f: Any
) -> Lane:
    known: dict[str, Any] = {
        "bound_us": 140.0, "vendor_us": 180.5, "done": 117, "best_us": 187.1, "default_us": 930.0,
        "curve": [0.1, 0.2, 0.5, 0.7],
    }  # fmt: skip
    return Lane(parse("gemm 4096x4096x4096 dtype=bf16"), name, **known | f)


def final(us: tuple[float, ...], vendor: tuple[float, ...], noise: float = 0.01) -> FinalRecord:
    return FinalRecord(
        run="r", workload="w", entries=(FinalEntry(1, us, us[0]), FinalEntry(0, (930.0,), 930.0)),
        best=1, default=0, noise=noise, vendor_us=vendor, time="t",
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_live_numbers_are_never_cut(width: int) -> None:
    lanes = [lane(), lane("b", vendor_us=None), lane(done=3, best_us=12_345.6, default_us=None)]
    lines = console.lane_lines(lanes, 128, width)
    assert all(len(numbers) + len(curve) <= width for numbers, curve in lines)
    for one, (numbers, curve) in zip(lanes, lines, strict=True):
        cells = one.facts()
        shown = [cell for cell in cells if "FLOP" not in cell] if width < 100 else cells
        assert all(cell in numbers for cell in shown) and curve
    assert len({len(numbers) for numbers, _ in lines}) == 1


def test_workloads_that_share_a_budget_have_no_limit_of_their_own() -> None:
    ((alone, _),), ((shared, _),) = (console.lane_lines([lane()], n, 160) for n in (128, 0))
    assert alone.split()[0] == "117/128" and shared.split()[0] == "117"


def test_a_vendor_whose_times_spread_is_not_compared_with() -> None:
    shown = lane()
    shown.finish(final((187.1,), (180.0, 181.0, 182.0)))
    assert shown.facts()[-1] == "0.97x vendor"
    shown.finish(final((187.1,), (200.0, 900.0, 36_000.0)))
    assert shown.facts()[-1] == "vendor unstable (0.2–36 ms)"
    assert shown.facts()[-2] == "4.97x default"


@pytest.mark.parametrize(
    "record", [final((187.1,), (), 0.3), final((187.1, 90.0, 400.0), ())], ids=["noise", "samples"]
)
def test_a_busy_machine_makes_no_claim(record: FinalRecord) -> None:
    shown = lane()
    shown.finish(record)
    assert busy(record) and shown.facts()[3:] == ["– default", "– vendor"]


def test_a_bound_that_is_beaten() -> None:
    assert text.of_bound(10.2, 10.0) == "≥ 100 %" and text.of_bound(10.0, 10.0) == "100 %"
    assert text.of_bound(None, 1.0) == "–"


def test_numbers_that_are_none() -> None:
    assert text.duration(float("inf")) == text.duration(float("nan")) == "–"
    assert text.time_of(float("inf")) == text.sparkline([1.0, float("inf")]) == "–"


def test_lines_are_written_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console.QuietView(lambda: None).write("run \x1b[2J\nstrategy")
    assert capsys.readouterr().out == "run \\x1b[2J\\nstrategy\n"
