"""Sessions: freezing, resuming from any cut, machine crashes, budgets that end inside a batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fake_runs import GEMM, proposals, read_run, tuned
from fakes import AnalyticMeasurer

from kt.logs.journal import Journal, read_log
from kt.logs.query import Run, runs
from kt.logs.record import Failure, Settings, TrialRecord
from kt.spaces.errors import LogError
from kt.tuner import session as sessions
from kt.tuner.measure import FrozenBatch, Measured
from kt.tuner.replay import check_identity
from kt.tuner.session import Session

pytestmark = pytest.mark.usefixtures("fake_families")

WALK: dict[str, Any] = {"strategy": "anneal", "batch_size": 8, "trials": 40}
MODEL: dict[str, Any] = {"strategy": "kt", "batch_size": 8, "trials": 40}


class Watching(AnalyticMeasurer):
    """Remembers in which order candidates came, and which were to run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[int, bool]] = []

    def finish(self, batch: FrozenBatch, deadline: float | None = None) -> Iterator[Measured]:
        self.order += [(candidate.trial, candidate.alone) for candidate in batch.candidates]
        return super().finish(batch, deadline)


def outcomes(run: Run) -> dict[int, tuple[str, object]]:
    """Everything of the trials that does not depend on the clock."""
    return {n: (t.theta.key(), t.outcome) for n, t in sorted(run.trials.items())}


def cut(path: Path, text: bytes, size: int) -> Path:
    path.write_bytes(text[:size])
    return path


def after_trial(text: bytes, number: int) -> int:
    """Bytes up to and including the record of a trial."""
    mark = b'{"type":"trial","run":"' + json.loads(text.split(b"\n")[0])["run"].encode()
    start = text.index(mark + b'","trial":%d,' % number)
    return text.index(b"\n", start) + 1


# -- resuming a cut log ------------------------------------------------------------------------


def assert_resumes(path: Path, whole: Run, settings: dict[str, Any]) -> Run:
    """Resumes a cut log; everything is there once and as in the uninterrupted run."""
    kept = [r.trial for r in read_records(path) if isinstance(r, TrialRecord)]
    measurer = AnalyticMeasurer()
    result = tuned(path, resume=True, measurer=measurer, **settings)
    run = read_run(path)
    assert proposals(run) == proposals(whole)
    assert outcomes(run) == outcomes(whole)
    assert sorted(measurer.measured + kept) == sorted(whole.trials)  # nothing twice, nothing lost
    assert result.trials == len(whole.trials) and result.reason == "trials"
    assert check_identity(run).exit_code == 0
    return run


def read_records(path: Path) -> list[object]:
    try:
        return list(read_log(path).records)
    except LogError:
        return []  # cut inside the header: nothing was logged yet


@pytest.mark.parametrize("settings", [WALK, WALK | {"lag": 1}], ids=["lag0", "lag1"])
def test_a_log_cut_after_any_byte_resumes_to_the_same_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    tuned(tmp_path / "whole.jsonl", **settings)
    text, whole = (tmp_path / "whole.jsonl").read_bytes(), read_run(tmp_path / "whole.jsonl")
    sizes = [0, 1, 40, *range(997, len(text), len(text) // 30), len(text) - 1, len(text)]
    assert len(sizes) > 30
    for size in sizes:
        assert_resumes(cut(tmp_path / "cut.jsonl", text, size), whole, settings)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_log_of_the_model_cut_after_a_line_resumes_to_the_same_run(
    lag: int, tmp_path: Path
) -> None:
    settings = MODEL | {"lag": lag, "trials": 24}
    tuned(tmp_path / "whole.jsonl", **settings)
    text, whole = (tmp_path / "whole.jsonl").read_bytes(), read_run(tmp_path / "whole.jsonl")
    lines = text.splitlines(keepends=True)
    assert len(lines) == 30  # a header, three batches of eight trials, a final and a stop
    for count in (9, 10, 23):  # before a batch's last trial, after it, in the model's second batch
        size = len(b"".join(lines[:count]))
        run = assert_resumes(cut(tmp_path / "cut.jsonl", text, size), whole, settings)
        assert [b.model for b in run.batches] == [b.model for b in whole.batches]
        assert [b.predicted for b in run.batches] == [b.predicted for b in whole.batches]


def test_a_log_with_damaged_lines_resumes(tmp_path: Path) -> None:
    tuned(tmp_path / "whole.jsonl", **WALK)
    whole = read_run(tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    trials = [i for i, line in enumerate(lines) if b'"type":"trial"' in line]
    for i in (trials[3], trials[20]):
        lines[i] = b"\0" * 20 + lines[i][20:]
    (tmp_path / "damaged.jsonl").write_bytes(b"".join(lines[:-2]))
    assert_resumes(tmp_path / "damaged.jsonl", whole, WALK)


def test_a_finished_run_resumes_without_measuring_anything(tmp_path: Path) -> None:
    first = tuned(tmp_path / "a.jsonl", **WALK)
    measurer = AnalyticMeasurer()
    again = tuned(tmp_path / "a.jsonl", measurer=measurer, resume=True, **WALK)
    assert measurer.measured == [] and again.reason == "trials"
    assert (again.best, again.trials, again.failures) == (first.best, first.trials, first.failures)
    assert read_run(tmp_path / "a.jsonl").stop is not None


def test_binaries_of_the_first_session_are_known_to_the_second(tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", **WALK)
    text = (tmp_path / "a.jsonl").read_bytes()
    cut(tmp_path / "a.jsonl", text, after_trial(text, 12))
    measurer = AnalyticMeasurer()
    tuned(tmp_path / "a.jsonl", measurer=measurer, resume=True, **WALK)
    known = {
        (t.workload, t.build.binary): n
        for n, t in read_run(tmp_path / "a.jsonl").trials.items()
        if t.build
    }
    assert measurer.known == known


def test_a_tampered_batch_is_refused_with_the_versions(tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", **WALK)
    path = tmp_path / "a.jsonl"
    text = path.read_bytes()
    start = text.index(b'{"type":"batch"')
    end = text.index(b"\n", start)
    line = json.loads(text[start:end])
    line["entries"][3]["knobs"]["unroll"]["ku"] ^= 3
    path.write_bytes(text[:start] + json.dumps(line).encode() + text[end:])
    with pytest.raises(LogError) as caught:
        tuned(path, resume=True, **WALK)
    assert "batch 0 proposes other points from trial 3 on" in str(caught.value)
    assert "the versions are the same" in str(caught.value)


def test_a_missing_batch_is_refused(tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", **WALK)
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"type":"batch"' not in line or b'"batch":1,' not in line]
    assert len(kept) == len(lines) - 1
    (tmp_path / "a.jsonl").write_bytes(b"".join(kept))
    with pytest.raises(LogError, match="batch 1 is missing from the log"):
        tuned(tmp_path / "a.jsonl", resume=True, **WALK)


# -- a budget that ends inside a batch -----------------------------------------------------------


@pytest.mark.parametrize("strategy", ["kt", "anneal", "random", "grid"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_batch_that_the_budget_cut_is_completed_as_if_it_had_not_been(
    strategy: str, lag: int, tmp_path: Path
) -> None:
    settings = {"strategy": strategy, "lag": lag, "batch_size": 8}
    tuned(tmp_path / "whole.jsonl", trials=24, **settings)
    for trials in (13, 16, 24):  # inside batch 1, at its end, and all
        tuned(tmp_path / "cut.jsonl", trials=trials, resume=True, **settings)
        run = read_run(tmp_path / "cut.jsonl")
        assert sorted(run.trials) == list(range(trials))
        assert sum(len(b.entries) for b in run.batches) == trials
        assert check_identity(run).exit_code == 0
    whole = read_run(tmp_path / "whole.jsonl")
    assert proposals(run) == proposals(whole) and outcomes(run) == outcomes(whole)
    assert [b.predicted for b in run.batches] == [b.predicted for b in whole.batches]


def test_several_workloads_are_cut_each_on_its_own_and_go_on(tmp_path: Path) -> None:
    texts = (GEMM, "gemm 32x32x32 dtype=fp32")
    for trials in (3, 12, 21):
        tuned(tmp_path / "a.jsonl", *texts, trials=trials, resume=True, batch_size=8)
        run = read_run(tmp_path / "a.jsonl")
        assert [len(run.of(text)) for text in texts] == [trials, trials]
        assert check_identity(run).exit_code == 0
        for text in texts:
            assert len({t.theta.key() for t in run.of(text)}) == trials


def test_a_smaller_budget_still_finishes_what_was_frozen(tmp_path: Path) -> None:
    tuned(tmp_path / "a.jsonl", **WALK)
    text = (tmp_path / "a.jsonl").read_bytes()
    cut(tmp_path / "a.jsonl", text, after_trial(text, 10))
    tuned(tmp_path / "a.jsonl", resume=True, **WALK | {"trials": 4})
    assert sorted(read_run(tmp_path / "a.jsonl").trials) == list(range(16))


# -- the machine went down -----------------------------------------------------------------------


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The identity of the running system, to be changed by a test."""
    current = ["first"]
    for module in (sessions, import_module("kt.tuner.tune")):
        monkeypatch.setattr(module, "boot_id", lambda: current[0])
    yield current


def test_what_brought_the_machine_down_runs_last_and_alone_and_then_is_a_failure(
    tmp_path: Path, boot: list[str]
) -> None:
    path = tmp_path / "a.jsonl"
    tuned(path, **WALK)
    text = path.read_bytes()
    cut(path, text, after_trial(text, 9))  # trial 10 was running, 11 … 15 were not begun

    boot[0] = "second"
    measurer = Watching()
    tuned(path, measurer=measurer, resume=True, **WALK)
    assert measurer.order[:6] == [*((n, False) for n in range(11, 16)), (10, True)]
    assert not any(alone for _, alone in measurer.order[6:])
    assert read_run(path).resumes[-1].suspects == (10,)

    text = path.read_bytes()
    cut(path, text, after_trial(text, 15))  # and again, while 10 ran alone
    boot[0] = "third"
    measurer = Watching()
    tuned(path, measurer=measurer, resume=True, **WALK)
    run = read_run(path)
    assert run.trials[10].outcome == Failure(
        "interrupted", "run", "the machine went down twice while this ran"
    )
    assert measurer.order[0] == (16, False) and 10 not in measurer.measured
    assert sorted(run.trials) == list(range(40))
    assert run.resumes[-1].suspects == () and check_identity(run).exit_code == 0


def test_a_second_crash_at_another_trial_makes_two_suspects(
    tmp_path: Path, boot: list[str]
) -> None:
    path = tmp_path / "a.jsonl"
    tuned(path, **WALK)
    text = path.read_bytes()
    cut(path, text, after_trial(text, 9))
    boot[0] = "second"
    tuned(path, resume=True, **WALK)
    text = path.read_bytes()
    cut(path, text, after_trial(text, 12))  # 10 was put off; this time 13 was running
    boot[0] = "third"
    measurer = Watching()
    tuned(path, measurer=measurer, resume=True, **WALK)
    assert measurer.order[:4] == [(14, False), (15, False), (10, True), (13, True)]
    assert "interrupted" not in {t.outcome.failure for t in read_run(path).trials.values()
                                 if isinstance(t.outcome, Failure)}  # fmt: skip


def test_a_killed_process_on_the_same_system_makes_no_suspect_but_keeps_them(
    tmp_path: Path, boot: list[str]
) -> None:
    path = tmp_path / "a.jsonl"
    tuned(path, **WALK)
    text = path.read_bytes()
    cut(path, text, after_trial(text, 9))
    measurer = Watching()
    tuned(path, measurer=measurer, resume=True, **WALK)
    assert measurer.order[0] == (10, False) and read_run(path).resumes[-1].suspects == ()

    cut(path, text, after_trial(text, 9))
    boot[0] = "second"
    tuned(path, resume=True, **WALK)
    text = path.read_bytes()
    cut(path, text, after_trial(text, 12))  # killed, the machine stayed up
    measurer = Watching()
    tuned(path, measurer=measurer, resume=True, **WALK)
    assert measurer.order[:4] == [(13, False), (14, False), (15, False), (10, True)]


def test_a_crash_between_batches_suspects_nothing(tmp_path: Path, boot: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    tuned(path, **WALK)
    text = path.read_bytes()
    cut(path, text, after_trial(text, 15))
    boot[0] = "second"
    measurer = Watching()
    tuned(path, measurer=measurer, resume=True, **WALK)
    assert measurer.order[0] == (16, False) and not any(alone for _, alone in measurer.order)


def test_the_boot_id_is_the_systems_in_every_process(tmp_path: Path) -> None:
    code = "from kt.tuner.session import boot_id; print(boot_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == sessions.boot_id()
    system = Path("/proc/sys/kernel/random/boot_id")
    assert sessions.boot_id() == (system.read_text().strip() if system.exists() else "")
    tuned(tmp_path / "a.jsonl", strategy="random", trials=2)
    assert read_run(tmp_path / "a.jsonl").header.boot == sessions.boot_id()


# -- recording -----------------------------------------------------------------------------------


def test_a_duplicate_takes_over_the_outcome_of_its_original(tmp_path: Path) -> None:
    class Twins(Watching):
        """Every odd trial has the binary of the one before it."""

        def finish(self, batch: FrozenBatch, deadline: float | None = None) -> Iterator[Measured]:
            for measured in super().finish(batch, deadline):
                if measured.trial % 2:
                    yield Measured(measured.trial, None, measured.build, measured.seconds,
                                   duplicate_of=measured.trial - 1)  # fmt: skip
                else:
                    yield measured

    tuned(tmp_path / "a.jsonl", measurer=Twins(), trials=32, strategy="random", finalists=50)
    run = read_run(tmp_path / "a.jsonl")
    for number in range(1, 32, 2):
        twin, first = run.trials[number], run.trials[number - 1]
        assert twin.duplicate_of == first.trial
        if isinstance(first.outcome, Failure):
            assert isinstance(twin.outcome, Failure)
            assert twin.outcome.failure == first.outcome.failure
            assert f"trial {first.trial}" in twin.outcome.message
        else:
            assert not isinstance(twin.outcome, Failure)
            assert twin.outcome.median_us == first.outcome.median_us and not twin.outcome.us
    finalists = {entry.trial for entry in run.finals[GEMM].entries}
    assert len(finalists) > 10 and all(trial % 2 == 0 for trial in finalists)
    assert check_identity(run).exit_code == 0


def test_a_hostile_log_cannot_make_a_session_stumble(tmp_path: Path) -> None:
    """Trials outside the space, of other workloads or with absurd numbers are refused in a line."""
    tuned(tmp_path / "a.jsonl", **WALK)
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    line = json.loads(next(text for text in lines if b'"type":"trial"' in text))
    settings = Settings(**WALK)
    for change in ({"workload": "gemm 1x1x1"}, {"trial": -5}, {"trial": 10**30}):
        (tmp_path / "b.jsonl").write_bytes(
            b"".join(lines) + json.dumps(line | change).encode() + b"\n"
        )
        (run,) = runs(read_log(tmp_path / "b.jsonl").records)
        with Journal(tmp_path / "b.jsonl") as journal:
            session = Session(run.header, settings, journal)
            session.resume(run)
        assert len(session.known) >= 40
    (tmp_path / "b.jsonl").write_bytes(
        b"".join(lines) + json.dumps(line | {"trial": 99, "family": "evil"}).encode() + b"\n"
    )
    tuned(tmp_path / "b.jsonl", resume=True, **WALK)  # no batch proposed it: it is left out
    assert 99 not in read_run(tmp_path / "b.jsonl").trials
