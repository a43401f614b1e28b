"""Batches on devices: what runs when, whose result it is, and what the deadline leaves out."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from c_kernels import gemm
from fake_gpus import SleepyGpu, SleepyMeasurer
from fake_runs import read_run
from fakes import FakeFamily

from kt.logs.record import Failure, Settings
from kt.spaces import families
from kt.spaces.errors import TargetError
from kt.spaces.kernel import Kernel, Launch
from kt.spaces.theta import Theta
from kt.tuner import pool
from kt.tuner.backend.build import Binary
from kt.tuner.backend.cpu import Compared
from kt.tuner.measure import Candidate, FrozenBatch
from kt.tuner.replay import check_identity
from kt.tuner.tune import tune

WORKLOAD = gemm("gemm 48x40x64 dtype=fp32")
TWIN = "// twin"


def batch(
    *sources: str,
    first: int = 0,
    alone: Sequence[int] = (),
    launches: Sequence[tuple[Launch, ...]] = (),
) -> FrozenBatch:
    """Kernels whose builds take as many hundredths of a second as the text's last digit says."""
    candidates = []
    for i, source in enumerate(sources):
        launch = launches[i] if launches else ()
        kernel = Kernel(WORKLOAD, "test", Theta(), "c", source, launch)
        candidates.append(Candidate(first + i, kernel, alone=first + i in alone))
    return FrozenBatch(first, WORKLOAD, tuple(candidates), None)


def by_digit(source: str) -> float:
    return 0.05 * int(source[-1])


def order(gpu: SleepyGpu) -> list[str]:
    return [str(binary.path).split("/")[0].strip() for _, _, binary in gpu.ran]


def test_what_is_built_first_runs_first_and_later_batches_fill_the_gaps() -> None:
    gpu = SleepyGpu()
    with SleepyMeasurer([gpu], builders=8, build_seconds=by_digit) as measurer:
        one, two = batch("a9", "b1", "c5"), batch("d3", "e7", first=3)
        measurer.start(one)
        measurer.start(two)
        assert set(measurer.all_of(one)) == {0, 1, 2}
        assert set(measurer.all_of(two)) == {3, 4}
    assert order(gpu) == ["b1", "d3", "c5", "e7", "a9"]


def test_of_binaries_that_are_ready_the_earlier_batch_goes_first() -> None:
    gpu = SleepyGpu(0.02)
    with SleepyMeasurer([gpu], builders=8) as measurer:
        gpu.before = lambda binary: time.sleep(0.2) if not gpu.ran else None
        batches = [batch("a", "b"), batch("c", "d", first=2), batch("e", "f", first=4)]
        for one in batches:
            measurer.start(one)
        for one in batches:
            assert len(measurer.all_of(one)) == 2
    assert "".join(sorted(order(gpu)[:2]) + sorted(order(gpu)[2:4])) == "abcd"


def test_the_lowest_trial_is_the_original_whichever_is_built_first() -> None:
    gpu = SleepyGpu()
    with SleepyMeasurer([gpu], builders=8, build_seconds=by_digit) as measurer:
        found = measurer.all_of(batch(f"a {TWIN} 5", f"a {TWIN} 1", "b0", f"a {TWIN} 9"))
    assert {t: m.duplicate_of for t, m in found.items()} == {0: None, 1: 0, 2: None, 3: 0}
    assert found[0].outcome and found[0].seconds.build == 0.25  # its own build, the other's run
    assert len(gpu.ran) == 2


def test_a_twin_of_an_earlier_batch_that_is_built_late_is_the_original() -> None:
    gpu = SleepyGpu()
    with SleepyMeasurer([gpu], builders=8, build_seconds=by_digit) as measurer:
        one, two = batch(f"a {TWIN} 5", "b0"), batch(f"a {TWIN} 0", first=2)
        measurer.start(one)
        measurer.start(two)
        found = measurer.all_of(one) | measurer.all_of(two)
        assert {t: m.duplicate_of for t, m in found.items()} == {0: None, 1: None, 2: 0}
        third = measurer.all_of(batch(f"a {TWIN} 1", first=3))
    assert third[3].duplicate_of == 0 and third[3].outcome is None


def test_the_same_binary_launched_otherwise_is_another_candidate() -> None:
    small, large = (Launch("k", (1, 1, 1)),), (Launch("k", (2, 1, 1)),)
    with SleepyMeasurer([SleepyGpu()]) as measurer:
        found = measurer.all_of(batch("a", "a", "a", launches=(small, large, small)))
    assert {t: m.duplicate_of for t, m in found.items()} == {0: None, 1: None, 2: 0}


def test_failed_builds_cost_no_device_time() -> None:
    gpu = SleepyGpu()
    with SleepyMeasurer([gpu]) as measurer:
        found = measurer.all_of(batch("#error", "a"))
    assert isinstance(found[0].outcome, Failure) and found[0].outcome.failure == "compile_error"
    assert len(gpu.ran) == 1


def test_those_that_want_to_be_alone_run_last_with_nothing_beside_them() -> None:
    gpus = [SleepyGpu(0.05), SleepyGpu(0.05)]
    with SleepyMeasurer(gpus, builders=8) as measurer:
        one, two = batch("a", "b", "c", "d", alone=(0, 1)), batch("e", "f", first=4)
        measurer.start(one)
        measurer.start(two)
        assert len(measurer.all_of(one)) == 4 and len(measurer.all_of(two)) == 2
    runs = sorted((begin, end, str(b.path)) for gpu in gpus for begin, end, b in gpu.ran)
    assert sorted(name for _, _, name in runs[2:4]) == ["a", "b"]
    for begin, end, name in runs:
        beside = [other for b, e, other in runs if b < end and e > begin and other != name]
        assert not (name in "ab" and beside), (name, beside)


def test_every_device_takes_the_next_when_it_is_free() -> None:
    gpus = [SleepyGpu(0.02), SleepyGpu(0.06)]
    with SleepyMeasurer(gpus, builders=16) as measurer:
        assert len(measurer.all_of(batch(*"abcdefghijklmnop"))) == 16
        assert 0.1 < measurer.busy_seconds() < 1.0
    assert len(gpus[0].ran) > len(gpus[1].ran) > 0


def test_a_duplicate_comes_after_its_original_with_two_devices() -> None:
    ended = threading.Event()
    slow, quick = SleepyGpu(), SleepyGpu()

    def hold(binary: Binary) -> None:
        if str(binary.path).startswith("a"):
            assert ended.wait(20)

    slow.before = quick.before = hold
    with SleepyMeasurer([slow, quick], builders=8) as measurer:
        came = []
        for measured in measurer.finish(batch("a", f"a{TWIN}", "b", f"a{TWIN}2")):
            came.append(measured)
            ended.set()
    assert [m.trial for m in came] == [2, 0, 1, 3]
    assert [m.duplicate_of for m in came] == [None, None, 0, 0]


@pytest.mark.parametrize("stuck", ["build", "run"])
def test_at_the_deadline_what_is_built_or_run_is_left_out(stuck: str) -> None:
    seconds: Callable[[str], float] = lambda source: 0.6 if source == "slow" else 0.0  # noqa: E731
    gpu = SleepyGpu(0.0 if stuck == "build" else 0.25)
    with SleepyMeasurer([gpu], builders=4, build_seconds=seconds) as measurer:
        deadline = time.monotonic() + 0.4
        one = batch("slow", "a", f"a{TWIN}", "b", "c")
        two = batch("d", first=5)
        measurer.start(one, deadline)
        measurer.start(two, deadline)
        first = measurer.all_of(one, deadline)
        second = measurer.all_of(two, deadline)
        assert 0 not in first and len(second) == (stuck == "build")
        assert {1, 2, 3, 4} >= set(first) and first[2].duplicate_of == 1
        assert len(first) == (4 if stuck == "build" else 2)
        again = measurer.all_of(batch("e", "d", first=10))  # it goes on after that
        assert len(again) == 2


def test_a_build_that_outlives_its_run_is_nothing_to_the_next() -> None:
    seconds = {"slow": 0.3, "later": 0.6}
    with SleepyMeasurer([SleepyGpu(0.0)], builders=2, build_seconds=seconds.__getitem__) as one:
        deadline = time.monotonic() + 0.1
        one.start(batch("slow"), deadline)
        assert not one.all_of(batch("slow"), deadline)
        one.prepare([])
        (found,) = one.all_of(batch("later")).values()  # also trial 0, built when the other ended
        assert found.build.binary == hashlib.sha256(b"later").hexdigest()


def test_an_error_that_is_no_candidates_is_raised_where_results_are_awaited() -> None:
    gpu = SleepyGpu()

    def lose(binary: Binary) -> None:
        raise TargetError("the GPU fell off the bus")

    gpu.before = lose
    with SleepyMeasurer([gpu]) as measurer:
        one, two = batch("a"), batch("b", first=1)
        measurer.start(one)
        measurer.start(two)
        for waiting in (one, two):
            with pytest.raises(TargetError, match="bus"):
                list(measurer.finish(waiting))


def test_without_one_of_its_devices_a_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    lost, left = SleepyGpu(), SleepyGpu(0.01)

    def lose(binary: Binary) -> None:
        raise TargetError("cuInit failed: CUDA_ERROR_NO_DEVICE")

    lost.before = lose
    with SleepyMeasurer([lost, left]) as measurer:
        for first in (0, 8):
            assert len(measurer.all_of(batch(*f"abcdefgh{first}"[1:], first=first))) == 8
    assert not lost.ran and len(left.ran) == 9
    assert capsys.readouterr().err.count("without one GPU: cuInit failed") == 1


def test_close_ends_what_runs_and_every_thread() -> None:
    before = set(threading.enumerate())
    with SleepyMeasurer([SleepyGpu(60.0)]) as measurer:
        measurer.start(batch("a", "b"))
        time.sleep(0.1)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("kt-run")]


@pytest.fixture
def fake_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, ("gemm", "cuda"), (FakeFamily(),))


def tuned(folder: Path, devices: Sequence[SleepyGpu], lag: int = 1) -> Any:
    """A run of 96 trials over sleeping builders and devices, read back."""
    settings = Settings(trials=96, lag=lag)
    seconds: Callable[[str], float] = lambda source: 0.001 * (len(source) % 7)  # noqa: E731
    with SleepyMeasurer(devices, 4, seconds, settings) as measurer:
        target = measurer._target
        result = tune([WORKLOAD], target, folder / f"{len(devices)}.jsonl", measurer, settings)
    return read_run(result.log)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_proposals_do_not_depend_on_the_number_of_devices(
    tmp_path: Path, fake_space: None, lag: int
) -> None:
    one, eight = (tuned(tmp_path, [SleepyGpu(0.004) for _ in range(n)], lag) for n in (1, 8))
    assert [b.entries for b in one.batches] == [b.entries for b in eight.batches]
    assert len(one.trials) == len(eight.trials) == 96
    outcomes = [(t.outcome, t.duplicate_of) for _, t in sorted(one.trials.items())]
    assert outcomes == [(t.outcome, t.duplicate_of) for _, t in sorted(eight.trials.items())]
    for run in (one, eight):
        assert check_identity(run).exit_code == 0


def test_a_run_says_how_long_its_device_had_nothing_to_run(
    tmp_path: Path, fake_space: None
) -> None:
    gpu = SleepyGpu(0.01)
    seconds = tuned(tmp_path, [gpu]).stop.seconds
    busy = sum(end - begin for begin, end, _ in gpu.ran)
    assert 0 < seconds["idle"] < seconds["loop"] <= seconds["wall"]
    assert seconds["loop"] - seconds["idle"] == pytest.approx(busy, rel=0.2)


class Comparing(SleepyMeasurer):
    """Comparisons that note what is compared; a kernel `dies` ends one."""

    rounds: tuple[list[str], ...] = ()

    def compare_binaries(
        self, workload: object, binaries: Sequence[Binary], *, seconds: float = 9.0, **_: object
    ) -> Compared:
        names = [str(binary.path) for binary in binaries]
        self.rounds = (*self.rounds, names)
        assert seconds < 1.0
        if "dies" in names:
            return Compared((), names.index("dies"), "crash: SIGABRT")
        return Compared(tuple((len(name) * 1.0,) * 3 for name in names))

    def qualified(self, *sources: str, seconds: float = 60.0) -> list[tuple[int, float]]:
        found = pool.LocalMeasurer.qualify(
            self, WORKLOAD, batch(*sources).candidates, time.monotonic() + seconds
        )
        return [(entry.trial, entry.median_us) for entry in found]


def test_a_qualifying_round_times_what_is_built_when_there_is_time_for_the_final_too() -> None:
    with Comparing([SleepyGpu()]) as measurer:
        assert measurer.qualified("a", "b", seconds=3.9) == [] == list(measurer.rounds)
        assert measurer.qualified("#error", "four", "sixsix") == [(1, 4.0), (2, 6.0)]
        assert measurer.qualified("four", "dies", "sixsix") == []
    assert measurer.rounds == (["four", "sixsix"], ["four", "dies", "sixsix"])
