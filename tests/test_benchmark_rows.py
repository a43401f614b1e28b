"""Benchmark rows with a fake device: what is tuned, compared and written, and what has no row."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import AnalyticMeasurer, FakeFamily

from kt.logs.journal import read_log
from kt.logs.query import runs
from kt.logs.record import BuildFacts
from kt.spaces import families
from kt.spaces.target import CUDA_TARGETS, Target, detect_cpu
from kt.spaces.workload import parse
from kt.tuner.backend.build import Binary
from kt.tuner.backend.check import Verified
from kt.tuner.backend.cpu import Compared

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TEXT = "attention 1x8x128x64 dtype=fp32"


class OtherFamily(FakeFamily):
    """A second one."""

    name = "mma"


class Device(AnalyticMeasurer):
    """Answers comparisons with given samples, and notes what is asked of it."""

    def __init__(self, compared: Callable[..., Compared], wrong: str = "") -> None:
        super().__init__()
        self._compared, self._wrong = compared, wrong
        self.asked: list[dict[str, Any]] = []
        self.built: list[str] = []

    def build_source(self, source: str, language: str) -> Binary:
        self.built.append(source)
        return Binary(Path("k"), BuildFacts(0.1), 0.1)

    def verify_binary(self, binary: Binary, workload: Any, seeds: Sequence[int]) -> Verified:
        return Verified(4, 0.0, self._wrong)

    def compare_binaries(self, workload: Any, binaries: Sequence[Binary], **asked: Any) -> Compared:
        self.asked.append(asked)
        return self._compared(**asked)


OURS = ((2.0, 2.1, 1.9), (4.0, 4.0, 4.1))


def on_gpu(**asked: Any) -> Compared:
    return Compared(
        OURS, opponents={"fa3": (3.0, 3.1, 2.9), "cudnn": (5.0,) * 3},
        facts={"fa3": "FlashAttention 3", "cudnn": "cuDNN 9", "fa2": "left out: no kernel"},
    )  # fmt: skip


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module, on fake families and writing to a folder of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    both = (FakeFamily(), OtherFamily())
    every = {(op, kind): both for op in ("gemm", "attention") for kind in ("cpu", "cuda")}
    monkeypatch.setattr(families, "FAMILIES", every)
    importlib.import_module("tables")  # what it reads is where it is imported
    found = importlib.import_module("measure")
    for module in (found, importlib.import_module("rows")):
        monkeypatch.setattr(module, "HERE", tmp_path / "benchmarks")
    yield found
    found.CLASSES.pop("fake", None)


def bench(measure: Any, measurer: Device, target: Target, **fields: Any) -> Any:
    one = measure.BenchmarkClass("nvidia-h200", ("fa3", "cudnn", "fa2"), 1.0, 1.1, (TEXT,))
    measure.CLASSES["fake"] = replace(one, **fields)
    return measure.Bench("fake", target, measurer, 8, 0.0)


def test_a_row_on_a_gpu(measure: Any) -> None:
    device = Device(on_gpu)
    one = bench(measure, device, CUDA_TARGETS["h200"])
    log = one.tuned_log(parse(TEXT))
    row = one.row(parse(TEXT), log, rested=True)
    assert (row["opponent"], row["ratio"], row["default_us"]) == ("fa3", 1.5, 4.0)
    assert row["others"] == {"cudnn": 5.0} and row["opponents"]["fa2"] == "left out: no kernel"
    assert row["rested"]["opponent"] == "fa3" and row["trials"] == 8
    assert row["log"] == "benchmarks/logs/fake-attention-1x8x128x64-dtype-fp32.jsonl.gz"
    assert [asked["rested"] for asked in device.asked] == [False, True]
    assert device.asked[0]["opponents"] == ("fa3", "cudnn", "fa2")
    (run,) = runs(read_log(log).records)
    default = run.trials[run.finals[TEXT].default]
    assert device.built[1] == FakeFamily().kernel(parse(TEXT), one.target, default.theta).source
    assert one.tuned_log(parse(TEXT)) == log and len(device.measured) == 8  # not tuned again


def test_a_new_log_takes_the_place_of_the_one_before_with_its_row(measure: Any) -> None:
    one = bench(measure, Device(on_gpu), CUDA_TARGETS["h200"])
    log = one.tuned_log(parse(TEXT))
    before = log.read_bytes()
    with pytest.raises(measure.NoResult, match="no trial ended in the time for tuning"):
        replace(one, seconds=1e-9).tuned_row(parse(TEXT), again=True)
    assert log.read_bytes() == before
    with pytest.raises(measure.NoResult, match="wrong_result: moved"):
        replace(one, measurer=Device(on_gpu, "wrong_result: moved")).tuned_row(parse(TEXT), True)
    assert log.read_bytes() == before
    assert replace(one, trials=9).tuned_row(parse(TEXT), again=True)["trials"] == 9
    assert log.read_bytes() != before and not log.with_suffix("").exists()


def test_a_class_of_one_family(measure: Any) -> None:
    one = bench(measure, Device(on_gpu), CUDA_TARGETS["h200"], family="mma")
    (run,) = runs(read_log(one.tuned_log(parse(TEXT))).records)
    assert {trial.family for trial in run.trials.values()} == {"mma"}


def test_a_row_on_the_cpu(measure: Any) -> None:
    device = Device(lambda **asked: Compared((*OURS, (6.0, 6.0, 6.0))))
    one = bench(measure, device, detect_cpu(), device="cpu", opponents=("numpy",))
    row = one.row(parse(TEXT), one.tuned_log(parse(TEXT)))
    assert (row["opponent"], row["ratio"], row["others"]) == ("numpy", 3.0, {})
    assert device.asked[0]["vendor"] and "opponents" not in device.asked[0]


@pytest.mark.parametrize(
    ("compared", "wrong", "says"),
    [
        (Compared(OURS, facts={"fa3": "left out: no fp32"}), "", r"no opponent runs here \(fa3: "),
        (Compared((), 1, "crash: SIGSEGV"), "", "number 1: crash"),
        (Compared(OURS), "wrong_result: moved", r"family (fake|mma): wrong_result"),
    ],
)
def test_what_has_no_row(measure: Any, compared: Compared, wrong: str, says: str) -> None:
    one = bench(measure, Device(lambda **asked: compared, wrong), CUDA_TARGETS["h200"])
    log = one.tuned_log(parse(TEXT))
    with pytest.raises(measure.NoResult, match=says):
        one.row(parse(TEXT), log)


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--class cpu-gemm gemm-tiny", "accepts classes of one device"),
        ("--class cpu-gemm --trials 200", "--trials 200: accepts 1 to 128"),
        ("--class gemm-tiny --trials 0", "--trials 0: accepts 1 to 256"),
        ("--class cpu-gemm --rested", "--rested and --shard: for GPUs"),
        ("--class nothing", "invalid choice: 'nothing'"),
        ("--class gemm-tiny --retune --remeasure", "not allowed with argument"),
        ("--class gemm-tiny --only 7x7x7", "--only: no workload of gemm-tiny contains such a text"),
    ],
)
def test_arguments(
    measure: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str, says: str
) -> None:
    run = importlib.import_module("run")
    monkeypatch.setattr(sys, "argv", ["run.py", *words.split()])
    with pytest.raises(SystemExit):
        run.arguments()
    assert says in capsys.readouterr().err


def test_rows_are_written_one_by_one_and_not_measured_twice(
    measure: Any, tmp_path: Path, capsys: Any
) -> None:
    run, rows = (importlib.import_module(name) for name in ("run", "rows"))
    device = Device(on_gpu)
    texts = (TEXT, "attention 1x8x64x64 dtype=fp32")
    one = bench(measure, device, CUDA_TARGETS["h200"], workloads=texts)
    results = rows.Results("nvidia-h200", "fake", {}, (), "abc")
    given = SimpleNamespace(
        remeasure=False,
        retune=False,
        only=[""],
        taught=False,
        rested=False,
        out=tmp_path,
        device="nvidia-h200",
        shard=(0, 1),
    )
    assert run.measured(one, results, given, float("inf")) == []
    assert len(device.asked) == 2 and "ratio 1.500" in capsys.readouterr().out
    written = tmp_path / "benchmarks" / "results" / "nvidia-h200" / "fake.json"
    assert [row["workload"] for row in json.loads(written.read_text())["rows"]] == list(texts)
    assert (tmp_path / "fake.tar.gz").exists()
    assert run.measured(one, results, given, float("inf")) == [] and len(device.asked) == 2
    given.remeasure = True
    assert run.measured(one, results, given, float("inf")) == [] and len(device.asked) == 2
    later = rows.Results("nvidia-h200", "fake", {}, (), "def")
    given.shard = (1, 2)
    assert run.measured(one, later, given, float("inf")) == [] and len(device.asked) == 3
    assert [row["kt"] for row in later.rows.values()] == ["abc", "def"]
    given.shard, given.remeasure, given.retune, given.only = (0, 1), False, True, ["128x64"]
    old = one.packed_log(parse(TEXT)).read_bytes()
    assert run.measured(one, later, given, float("inf")) == [] and len(device.asked) == 4
    assert run.measured(one, later, given, float("inf")) == [] and len(device.asked) == 4  # done
    assert [row["kt"] for row in later.rows.values()] == ["def", "def"]
    assert one.packed_log(parse(TEXT)).read_bytes() != old
    given.retune, given.only = False, [""]
    given.shard, given.remeasure = (0, 1), False
    results.rows.clear()
    assert run.measured(one, results, given, 0.0) == [f"{text}: no time left" for text in texts]


def test_a_taught_run_learns_from_every_log_but_those_of_its_own_shape(measure: Any) -> None:
    one = bench(measure, Device(on_gpu), CUDA_TARGETS["h200"])
    other = "attention 1x8x64x64 dtype=fp32"
    first = measure.Earlier("attention")
    assert first.of_others(parse(TEXT)) == []
    one.tuned_log(parse(TEXT))
    known = first.of_others(parse(other))  # a log that came since
    assert first.of_others(parse(TEXT)) == [] and len(known) > 8
    assert measure.Earlier("conv2d").of_others(parse(other)) == []
    replace(one, trials=9).tuned_row(parse(TEXT), again=True)
    again = first.of_others(parse(other))  # the new log, not the one before
    assert not {record.run for record in again} & {record.run for record in known}
    assert len(again) > len(known)
    taught = one.tuned_log(parse(other), earlier=known)
    header = runs(read_log(taught).records)[-1].header
    assert {start.workload for start in header.warm[other]} == {TEXT}


# -- the grid -------------------------------------------------------------------------------------


@pytest.fixture
def grid(measure: Any) -> Any:
    """The module of the grid, writing beside `measure`."""
    return importlib.import_module("grid")


def test_shards_are_all_shapes_and_take_equally_long(grid: Any) -> None:
    shapes = list(map(parse, grid.CLASSES[grid.GRID].workloads))
    shards = [grid.shard_of(shapes, i, 4) for i in range(4)]
    assert sorted(str(w) for shard in shards for w in shard) == sorted(map(str, shapes))
    spent = [sum(map(grid.row_seconds, shard)) for shard in shards]
    assert max(spent) - min(spent) < 30
    assert all(shard == sorted(shard, key=lambda w: w.flops) for shard in shards)
    assert grid.shard_of(shapes, 0, 1)[-1].flops == max(w.flops for w in shapes)


@pytest.mark.parametrize("text", ["4/4", "0", "1/0", "-1/2", "a/b"])
def test_a_shard_that_does_not_exist(grid: Any, text: str) -> None:
    with pytest.raises(grid.argparse.ArgumentTypeError, match="accepts 0/4 to 3/4"):
        grid.shard(text)
    assert grid.shard("3/4") == (3, 4)


def test_the_grid_learns_from_its_own_logs_and_goes_on(
    measure: Any, grid: Any, tmp_path: Path, capsys: Any
) -> None:
    rows = importlib.import_module("rows")
    texts = [f"gemm {n}x256x256 dtype=fp16" for n in (64, 128, 256)]
    bench = measure.Bench(grid.GRID, CUDA_TARGETS["h200"], Device(on_gpu), 24, 60.0)
    results = rows.Results("nvidia-h200", grid.GRID, {}, (), "abc")
    shapes = list(map(parse, texts))
    end = float("inf")
    assert grid.measured(bench, results, shapes[:2], end, tmp_path) == []
    assert len(capsys.readouterr().out.splitlines()) == 2
    again = rows.Results("nvidia-h200", grid.GRID, {}, (), "abc")
    assert grid.measured(bench, again, shapes, end, None) == []
    assert len(capsys.readouterr().out.splitlines()) == 1  # the others have rows
    headers = [runs(read_log(bench.packed_log(shape)).records)[0].header for shape in shapes]
    assert not headers[0].warm
    assert {start.workload for start in headers[1].warm[texts[1]]} == {texts[0]}
    assert {start.workload for start in headers[2].warm[texts[2]]} == set(texts[:2])
    assert grid.measured(bench, again, shapes, end, None, remeasure=True) == []
    later = rows.Results("nvidia-h200", grid.GRID, {}, (), "def")
    more = [*shapes, parse("gemm 512x256x256 dtype=fp16")]  # the last has no row
    for asked in (3, 0):
        assert grid.measured(bench, later, more, end, None, remeasure=True) == []
        assert len(capsys.readouterr().out.splitlines()) == asked
    newest = rows.Results("nvidia-h200", grid.GRID, {}, (), "ghi")
    first = read_log(bench.packed_log(shapes[0])).records[0].run
    for asked in (2, 0):  # one with a row and one without
        assert grid.measured(bench, newest, [shapes[0], more[-1]], end, None, retune=True) == []
        assert len(capsys.readouterr().out.splitlines()) == asked
    assert read_log(bench.packed_log(shapes[0])).records[0].run != first  # from a new log
    again.rows.clear()
    assert grid.measured(bench, again, shapes, 0.0, None) == [f"{t}: no time left" for t in texts]


def test_shards_keep_each_others_rows(measure: Any) -> None:
    rows = importlib.import_module("rows")
    one, other = (rows.Results("nvidia-h200", "fake", {}, (), "abc") for _ in range(2))
    one.add({"workload": "a", "ratio": 1.0})
    other.add({"workload": "b", "ratio": 2.0})
    one.add({"workload": "c", "ratio": 3.0})
    assert list(rows.Results("nvidia-h200", "fake", {}, (), "abc").rows) == ["a", "b", "c"]


def test_the_grid_is_shown_by_roofline(measure: Any) -> None:
    tables = importlib.import_module("tables")
    rows = [
        {"bound_us": us, "ratio": ratio, "default_us": 3.0, "kt_us": 2.0}
        for us, ratio in ((1.0, 4.0), (4.9, 1.0), (5.0, 0.5), (3000.0, 2.0))
    ]
    shown = tables.by_roofline(rows).splitlines()[2:]
    assert shown == [
        "| below 5 µs | 2 | **2.00** | 1.00 | 1.75–3.25 | 4.00 | 0 | 1.50 |",
        "| 5–20 µs | 1 | **0.50** | 0.50 | 0.50–0.50 | 0.50 | 1 | 1.50 |",
        "| from 100 µs | 1 | **2.00** | 2.00 | 2.00–2.00 | 2.00 | 0 | 1.50 |",
    ]
