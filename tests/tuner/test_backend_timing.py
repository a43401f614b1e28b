"""When sampling stops: spread, budget, cut, confirmation, groups of short launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kt.tuner.backend.timing import (
    Order,
    group_size,
    relative_half_width,
    sample,
)


class Clock:
    """A launcher whose launches take what `us` says, in microseconds."""

    def __init__(self, us: Callable[[int], float]) -> None:
        self._us, self.launches, self.orders = us, 0, list[Order]()

    def __call__(self, order: Order) -> list[float]:
        self.orders.append(order)
        samples: list[float] = []
        spent = 0.0
        while len(samples) < order.most:
            times = [self._us(self.launches + i) for i in range(order.group)]
            self.launches += order.group
            spent += sum(times)
            samples.append(sum(times) / order.group)
            if order.cut_us and len(samples) >= 2 and min(samples) > order.cut_us:
                break
            if len(samples) >= order.least and spent > order.budget_us:
                break
        return samples


def steady(us: float) -> Clock:
    return Clock(lambda _: us)


def test_a_steady_kernel_needs_few_samples() -> None:
    clock = steady(100.0)
    assert sample(clock, 0.1, None).us == (100.0,) * 5
    assert clock.launches == 6  # one to warm up


def test_a_noisy_kernel_gets_samples_up_to_the_limit() -> None:
    assert len(sample(Clock(lambda i: 100.0 + i * 37 % 101), 10.0, None).us) == 200


def test_the_budget_is_kept_to_one_launch() -> None:
    noise = itertools.cycle([1000.0, 3000.0, 2000.0, 5000.0])
    samples = sample(Clock(lambda _: next(noise)), 0.1, None)
    assert 100_000 < sum(samples.us) < 105_000 + 1


def test_a_slow_kernel_gets_three() -> None:
    clock = steady(1e6)
    assert len(sample(clock, 0.1, None).us) == 3 and clock.launches == 3


def test_a_slow_candidate_is_cut_after_two() -> None:
    cut = sample(steady(1e5), 0.1, incumbent_us=4e4)
    assert cut.cut and len(cut.us) == 2
    assert not sample(steady(1e5), 0.1, incumbent_us=6e4).cut


def test_a_surprising_best_is_confirmed_by_a_second_group() -> None:
    samples = sample(steady(90.0), 0.1, incumbent_us=100.0)
    assert samples.confirmed and len(samples.us) == 10
    assert not sample(steady(99.0), 0.1, incumbent_us=100.0).confirmed


def test_a_lucky_first_group_is_corrected_by_the_second() -> None:
    samples = sample(Clock(lambda i: 50.0 if i < 6 else 150.0), 0.1, incumbent_us=100.0)
    assert samples.confirmed and samples.median_us > 50.0


@pytest.mark.parametrize(("us", "group"), [(20.0, 1), (10.0, 2), (1.0, 20), (0.0, 4096)])
def test_short_launches_are_grouped(us: float, group: int) -> None:
    assert group_size(us) == group


def test_short_launches_are_timed_in_groups() -> None:
    clock = steady(0.5)
    assert sample(clock, 0.1, None).median_us == 0.5
    assert clock.orders[-1].group == 40


def test_half_width_is_that_of_the_median() -> None:
    assert relative_half_width([5.0] * 10) == 0.0
    assert relative_half_width([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(4 / 6)
    many = [100.0 + (i % 10) * 0.1 for i in range(200)] + [1000.0]
    assert relative_half_width(many) < 0.01
