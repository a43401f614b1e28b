"""How the CUDA runner times a kernel, without a device: a slow launch is no slow kernel."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kt.tuner.backend.cuda import CudaRunner

SETS = 4


class Replayed:
    """A graph of so many launches; it counts those that are not destroyed yet."""

    alive: ClassVar[list[Replayed]] = []

    def __init__(self, count: int) -> None:
        self.count = count
        self.alive.append(self)

    def replay(self, stream: Any) -> None:
        pass

    def destroy(self) -> None:
        self.alive.remove(self)


class Runner(CudaRunner):
    """A kernel of `kernel_us` on a host that takes `host_us` for a launch."""

    def __init__(self, kernel_us: float, host_us: float) -> None:
        self.kernel_us, self.host_us = kernel_us, host_us
        self._device: Any = SimpleNamespace(stream=0, synchronize=lambda: None)
        self.made: list[int] = []

    def _warm(self, loaded: Any, held: Any) -> float:
        return max(self.kernel_us, self.host_us)

    def _graph(self, loaded: Any, held: Any, count: int) -> Any:
        self.made.append(count)
        return Replayed(count)

    def _replays(self, graph: Any, count: int, times: int) -> list[float]:
        """The host takes as long to start a graph as to launch a kernel."""
        assert graph in Replayed.alive and graph.count == count
        return [max(self.kernel_us, self.host_us / count)] * times

    def time(self, incumbent_us: float | None) -> Any:
        held: Any = SimpleNamespace(sets=SimpleNamespace(count=SETS))
        return self._time(None, held, 0.01, incumbent_us)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def all_destroyed() -> Iterator[None]:
    yield
    assert not Replayed.alive


@pytest.mark.parametrize("host_us", [10.0, 40.0, 80.0, 300.0])
@pytest.mark.parametrize("incumbent_us", [None, 2.0, 3.0])
def test_a_slow_host_neither_cuts_a_short_kernel_nor_shortens_its_samples(
    incumbent_us: float | None, host_us: float
) -> None:
    runner = Runner(kernel_us=3.0, host_us=host_us)
    timing = runner.time(incumbent_us)
    assert not timing.censored and runner.made[-1] * 3.0 >= 190 and runner.made[-1] % SETS == 0
    assert timing.median_us == 3.0


def test_a_host_that_stalls_once_cuts_nothing() -> None:
    class Stalled(Runner):
        def _warm(self, loaded: Any, held: Any) -> float:
            return 2000.0

    timing = Stalled(kernel_us=90.0, host_us=20.0).time(100.0)
    assert not timing.censored and timing.median_us == 90.0


def test_a_kernel_far_slower_than_the_incumbent_is_cut_by_a_few_launches() -> None:
    runner = Runner(kernel_us=130.0, host_us=80.0)
    timing = runner.time(30.0)
    assert timing.censored and timing.median_us == 130.0 and timing.bound_us == 60.0
    assert len(runner.made) == 1 and runner.made[0] < 20


def test_a_kernel_slower_than_the_incumbent_is_cut_by_whole_samples() -> None:
    runner = Runner(kernel_us=7.0, host_us=80.0)
    timing = runner.time(3.0)
    assert timing.censored and len(timing.us) > 1 and runner.made[-1] * 7.0 >= 190


def test_a_long_kernel_is_launched_once_to_know_its_time() -> None:
    runner = Runner(kernel_us=3000.0, host_us=80.0)
    assert runner.time(2900.0).median_us == 3000.0
    assert runner.made == [1, SETS]
    assert Runner(kernel_us=0.5, host_us=0.8).time(None).median_us == 0.5  # no graph is too long
    cut = Runner(kernel_us=3000.0, host_us=80.0)
    assert cut.time(700.0).censored and cut.made == [1]
