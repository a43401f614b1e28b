"""How often a kernel is launched until its time is known."""

from __future__ import annotations

import ctypes
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("timing.c")

GROUP_US = 20.0
"""Samples of shorter kernels hold several launches, so that reading the clock does not show."""
CUT_RATIO = 2.0
"""A candidate whose best sample is this many times slower than the incumbent is cut."""
CONFIRM_RATIO = 0.98
"""A median below this share of the incumbent is confirmed by a second group of samples."""
SLOW_US = 100_000.0
"""Longer launches are not repeated just to warm up or to look again."""
SPREAD = 0.01
"""Sampling stops when the median is known to this relative half-width (95 %)."""
_FEWEST, _MOST, _CHUNK = 3, 200, 5
_MOST_GROUP = 4096

_DoublePointer = ctypes.POINTER(ctypes.c_double)


class Plan(ctypes.Structure):
    """`kt_plan` of timing.c."""

    _fields_ = (
        ("sets", ctypes.c_void_p), ("set_count", ctypes.c_long), ("arg_count", ctypes.c_long),
        ("next", ctypes.c_long), ("group", ctypes.c_long),
        ("least", ctypes.c_long), ("most", ctypes.c_long),
        ("budget_us", ctypes.c_double), ("cut_us", ctypes.c_double),
    )  # fmt: skip


class Comparison(ctypes.Structure):
    """`kt_comparison` of timing.c."""

    _fields_ = (
        ("error_squares", ctypes.c_double), ("reference_squares", ctypes.c_double),
        ("gain_squares", ctypes.c_double),
        ("bad", ctypes.c_long), ("worst", ctypes.c_long),
        ("worst_value", ctypes.c_double), ("worst_reference", ctypes.c_double),
    )  # fmt: skip


@functools.cache
def native(path: Path) -> Any:
    """The built timing.c with its signatures declared."""
    library = ctypes.CDLL(str(path))
    library.kt_time.restype = ctypes.c_long
    library.kt_time.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(Plan), _DoublePointer,
        ctypes.POINTER(ctypes.c_int),
    ]  # fmt: skip
    for name in ("kt_compare_fp32", "kt_compare_fp64"):
        getattr(library, name).restype = None
        getattr(library, name).argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long,
            ctypes.c_double, ctypes.c_double, ctypes.POINTER(Comparison),
        ]  # fmt: skip
    library.kt_read_us.restype = ctypes.c_double
    library.kt_read_us.argtypes = [
        ctypes.c_void_p, ctypes.c_long, ctypes.POINTER(ctypes.c_uint64)
    ]  # fmt: skip
    library.kt_flush.restype = ctypes.c_int
    library.kt_flush.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return library


@dataclass(frozen=True)
class Order:
    """What the sampler asks of a launcher: at least/most samples, budget and cut in µs."""

    group: int
    least: int
    most: int
    budget_us: float
    cut_us: float = 0.0


Launcher = Callable[[Order], list[float]]
"""Launches and returns samples, microseconds a launch; raises LaunchFailed."""


class LaunchFailed(Exception):
    """`kt_launch` returned a code other than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(f"kt_launch returned {code}")
        self.code = code


class KernelLauncher:
    """Launches one loaded kernel over rotating sets through timing.c."""

    def __init__(
        self, library: Any, launch: int, workspace: int, table: Any, set_count: int, arg_count: int
    ) -> None:
        self._library, self._launch, self._workspace, self._table = (
            library, launch, workspace, table,
        )  # fmt: skip
        sets = ctypes.cast(table, ctypes.c_void_p)
        self._plan = Plan(sets=sets, set_count=set_count, arg_count=arg_count)

    def __call__(self, order: Order) -> list[float]:
        plan, status = self._plan, ctypes.c_int()
        plan.group, plan.least, plan.most = order.group, order.least, order.most
        plan.budget_us, plan.cut_us = order.budget_us, order.cut_us
        samples = (ctypes.c_double * order.most)()
        count = self._library.kt_time(
            self._launch, self._workspace, ctypes.byref(plan), samples, ctypes.byref(status)
        )
        if status.value:
            raise LaunchFailed(status.value)
        return list(samples[:count])


@dataclass(frozen=True)
class Samples:
    """Raw samples and how they ended: cut early, or with a surprise confirmed."""

    us: tuple[float, ...]
    cut: bool = False
    confirmed: bool = False

    @property
    def median_us(self) -> float:
        return statistics.median(self.us)


def group_size(us: float) -> int:
    """Launches a sample of a kernel that takes `us` microseconds."""
    return min(_MOST_GROUP, max(1, round(GROUP_US / max(us, 1e-3)))) if us < GROUP_US else 1


def warm(launch: Launcher) -> float:
    """Launches until the time of one is roughly known; microseconds."""
    us = launch(Order(group=1, least=1, most=1, budget_us=0.0))[0]
    if us < GROUP_US:
        us = min(launch(Order(group=group_size(us), least=2, most=2, budget_us=0.0)))
    return us


def sample(launch: Launcher, seconds: float, incumbent_us: float | None) -> Samples:
    """Times a kernel in about `seconds`, exceeded by no more than one sample once three are there.

    Cut when clearly slower than the incumbent; a surprising best is confirmed by a second,
    independent group of samples, and the result is the union of both.
    """
    cut_us = CUT_RATIO * incumbent_us if incumbent_us else 0.0
    us = warm(launch)
    group = group_size(us)
    # A launch beyond the budget needs no warming up: it counts as the first sample.
    begun = [us] if us > seconds * 1e6 else []
    first = _group(launch, group, seconds, cut_us, begun)
    if cut_us and min(first) > cut_us:
        return Samples(tuple(first), cut=True)
    if not incumbent_us or statistics.median(first) >= CONFIRM_RATIO * incumbent_us:
        return Samples(tuple(first))
    warm(launch)
    second = _group(launch, group, seconds, 0.0, [])
    return Samples((*first, *second), confirmed=True)


def _group(
    launch: Launcher, group: int, seconds: float, cut_us: float, samples: list[float]
) -> list[float]:
    """`samples` and those that follow, until the median is known or the budget is spent."""
    left_us = seconds * 1e6 - sum(samples) * group
    while len(samples) < _MOST and (len(samples) < _FEWEST or left_us > 0):
        least = max(1, _FEWEST - len(samples))
        got = launch(Order(group, least, _CHUNK, left_us, cut_us))
        samples += got
        left_us -= sum(got) * group
        if cut_us and min(samples) > cut_us:
            break
        if len(samples) >= _CHUNK and relative_half_width(samples) < SPREAD:
            break
    return samples


def relative_half_width(samples: Sequence[float]) -> float:
    """Half-width of the median's 95 % interval by order statistics, relative to the median."""
    ordered, n = sorted(samples), len(samples)
    reach = 0.98 * n**0.5
    low, high = max(0, int((n - 1) / 2 - reach)), min(n - 1, -int(-((n - 1) / 2 + reach) // 1))
    middle = statistics.median(ordered)
    return (ordered[high] - ordered[low]) / (2 * middle) if middle > 0 else 0.0
