"""The score of a search strategy on a recorded space: 0 = random search, 1 = the optimum at once.

The methodology of Willemsen et al. 2024 (doi 10.1016/j.future.2024.05.021) for minimisation:
strategies are compared with random search without replacement between the budgets at which that
is expected to cover 1 % and 95 % of the way from the median to the optimum, over time. An
evaluation costs what was recorded for it, whatever its outcome, and each configuration is
evaluated once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

START, END = 0.01, 0.95
"""Share of the way from the median to the optimum where scoring begins and ends."""
RESOLUTION = 1000
MARGIN = 0.1

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Baseline:
    """A recorded space as random search sees it. `us` is NaN where a configuration failed."""

    us: Floats
    seconds: Floats

    @cached_property
    def ascending(self) -> Floats:
        """Times of the valid configurations, best first."""
        return np.sort(self.us[~np.isnan(self.us)])

    @property
    def optimum(self) -> float:
        return float(self.ascending[0])

    def evaluations(self, share: float) -> int:
        """Evaluations in which random search is expected to cover `share` of the way."""
        descending = self.ascending[::-1]
        n = len(descending)
        target = self.optimum + (float(np.median(descending)) - self.optimum) * (1 - share)
        i = int(np.argmax(descending <= target))
        if share < 1 and i > 0 and descending[i] == self.optimum:
            i -= 1
        return math.ceil(i / (n + 1 - i))

    @cached_property
    def grid(self) -> Floats:
        """The times at which strategies are compared, seconds."""
        first, last = self.evaluations(START), self.evaluations(END)
        if last - first < 2:
            first, last = (first, last + 2) if first == 0 else (first - 1, last + 1)
        median = float(np.median(self.seconds))
        return np.linspace(first * median, last * median, RESOLUTION)

    @property
    def mean_seconds(self) -> float:
        """What an evaluation costs random search."""
        failed = np.isnan(self.us)
        if not failed.any():
            return float(self.seconds.mean())
        share = float(failed.mean())
        return float(self.seconds[~failed].mean() + share * self.seconds[failed].mean())

    @cached_property
    def random(self) -> Floats:
        """Expected best of random search on the grid, smoothed between whole evaluations."""
        from scipy.interpolate import PchipInterpolator

        counts = np.round(np.maximum(self.grid / self.mean_seconds, 1)).astype(int)
        descending, n = self.ascending[::-1], len(self.ascending)
        ranks = [min(n - 1, round(k * (n + 1) / (k + 1))) for k in counts.tolist()]
        distinct, first = np.unique(counts, return_index=True)
        values = descending[ranks]
        if len(distinct) < 2:
            return values
        smooth: Floats = PchipInterpolator(distinct, values[first])(
            np.linspace(counts[0], counts[-1], len(counts))
        )
        return smooth

    def curve(self, runs: Sequence[tuple[Floats, Floats]]) -> Floats:
        """A strategy's expected best on the grid, from runs of (seconds elapsed, best so far).

        An isotonic regression of the best's rank on time, pooled over the runs; before a run's
        first valid evaluation it has no rank.
        """
        from sklearn.isotonic import IsotonicRegression

        elapsed = np.concatenate([run[0] for run in runs])
        best = np.concatenate([run[1] for run in runs])
        margin = MARGIN + 0.25 / max(len(run[0]) for run in runs)
        inside = (elapsed >= self.grid[0] * (1 - margin)) & (
            elapsed <= self.grid[-1] * (1 + margin)
        )
        kept = inside & ~np.isnan(best)
        ranks = np.searchsorted(self.ascending, best[kept]).astype(np.float64)
        model = IsotonicRegression(increasing=False, out_of_bounds="clip")
        predicted = model.fit(elapsed[kept], ranks).predict(self.grid)
        curve = self.ascending[np.round(predicted).astype(int)]
        return self._held(curve, runs)

    def _held(self, curve: Floats, runs: Sequence[tuple[Floats, Floats]]) -> Floats:
        """The curve held constant after more than half of the runs ended."""
        ends = np.sort([run[0][~np.isnan(run[1])].max() for run in runs])
        later = ends[ends > np.median(ends)]
        stopped = np.flatnonzero(self.grid > later[0]) if len(later) else np.empty(0, int)
        if len(stopped):
            curve[stopped[0] :] = curve[stopped[0]]
        return curve

    def improvement(self, runs: Sequence[tuple[Floats, Floats]]) -> Floats:
        """The normalised improvement over random search on the grid."""
        improved: Floats = (self.curve(runs) - self.random) / (self.optimum - self.random)
        return improved

    def score(self, runs: Sequence[tuple[Floats, Floats]]) -> float:
        """The mean improvement."""
        return float(self.improvement(runs).mean())


def run_of(us: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """A run as (seconds elapsed, best so far) from its evaluations' times and costs in order."""
    return np.cumsum(seconds), np.fmin.accumulate(us)


def reached(optimum: float, us: Floats, evaluations: int) -> float:
    """Optimum over the best of the first `evaluations` (0 without a valid one)."""
    head = us[:evaluations]
    return float(optimum / np.nanmin(head)) if np.isfinite(head).any() else 0.0
