"""Search strategies: each proposes a batch from what is known of one workload.

`kt` anneals on the learned model; `forest` does the same with scikit-learn's forest; `anneal`
walks on measured times alone; `random` and `grid` need no explanation. None revisits a point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kt.spaces.space import Points, Space

from .anneal import CHAINS, anneal
from .state import State
from .surrogate import Surrogate

DISTRUST_SHARE = 0.5
"""Random share of a batch while the model does not predict."""
STALE_BATCHES = 2
"""After this many batches without a better best, part of a batch sweeps its neighbourhood."""
FILLING_POOL = 1024


class Strategy(Protocol):
    """Fills a batch with new legal points; it stays short only when the space ends."""

    def fill(self, picker: Picker, rng: np.random.Generator) -> None: ...


class Picker:
    """A batch being collected: distinct points, never proposed before, at most `size`."""

    def __init__(self, state: State, size: int) -> None:
        self.state, self.size = state, size
        self._points: list[int] = []
        self.sources: list[str] = []
        self._taken = set(state.proposed.tolist())

    @property
    def room(self) -> int:
        return self.size - len(self._points)

    @property
    def points(self) -> Points:
        return np.array(self._points, dtype=np.int64)

    @property
    def taken(self) -> Points:
        """Everything proposed before or collected here, ascending."""
        return np.array(sorted(self._taken), dtype=np.int64)

    def add(self, points: Points, source: str, most: int | None = None) -> None:
        """Collects the first new ones of `points`, `most` of them at most."""
        left = self.room if most is None else min(most, self.room)
        for point in points.tolist():
            if left <= 0:
                return
            if point not in self._taken:
                self._taken.add(point)
                self._points.append(point)
                self.sources.append(source)
                left -= 1

    def add_random(self, rng: np.random.Generator) -> None:
        """Fills the room with uniform legal points."""
        if self.room > 0:
            self.add(self.state.space.sample(rng, self.room, self.taken), "random")


class Random:
    """Uniform legal points."""

    def fill(self, picker: Picker, rng: np.random.Generator) -> None:
        picker.add_random(rng)


class Grid:
    """Legal points at even distances in canonical order, the distances halving."""

    def fill(self, picker: Picker, rng: np.random.Generator) -> None:
        end = 4 * (len(picker.taken) + picker.size) + 64
        for i in range(end):
            if not picker.room:
                return
            picker.add(self._near(picker.state.space, _van_der_corput(i)), "grid")
        picker.add_random(rng)  # the lattice ran into itself: finish the space

    def _near(self, space: Space, fraction: float) -> Points:
        """The first legal point at or after this fraction of the space."""
        if space.listed is not None:
            return space.listed[int(fraction * len(space.listed)) :][:1]
        start = int(fraction * space.size)
        points = np.arange(start, min(start + 4096, space.size), dtype=np.int64)
        return points[space.legal(points)][:1]


def _van_der_corput(i: int) -> float:
    """The i-th point of the base-2 low-discrepancy sequence in [0, 1)."""
    value, scale = 0.0, 0.5
    while i:
        value += scale * (i & 1)
        i, scale = i >> 1, scale / 2
    return value


class Anneal:
    """Annealing on measurements alone: as many chains as a batch has places, one step a batch."""

    START, DECAY = 0.2, 0.9

    def __init__(self) -> None:
        self._chains: list[int] = []
        self._origin: dict[int, int] = {}  # proposed point -> chain it left
        self._seen = 0

    def fill(self, picker: Picker, rng: np.random.Generator) -> None:
        self._accept(picker, rng)
        if self._chains:
            chains = np.array(self._chains, dtype=np.int64)
            starts = chains[rng.integers(len(chains), size=4 * picker.size)]
            moved = picker.state.space.neighbours(starts, rng)
            picker.add(moved, "anneal")
            self._origin |= dict(zip(moved.tolist(), starts.tolist(), strict=True))
        picker.add_random(rng)

    def _accept(self, picker: Picker, rng: np.random.Generator) -> None:
        """Moves the chains by the outcomes that are new since the last batch."""
        state = picker.state
        points = state.measured.tolist()
        scores = dict(zip(points, state.throughput.tolist(), strict=True))
        temperature = self.START * self.DECAY**state.batches
        for point in points[self._seen :]:
            origin = self._origin.pop(point, None)
            if origin in self._chains:
                loss = min(0.0, scores[point] - scores[origin])
                if rng.random() < np.exp(loss / temperature):
                    self._chains[self._chains.index(origin)] = point
            elif len(self._chains) < picker.size and scores[point] > 0:
                self._chains.append(point)
        self._seen = len(points)


class Guided:
    """Annealing on the learned model, diverse picks, a neighbourhood sweep, random exploration."""

    def __init__(self, surrogate: Surrogate, which: int, epsilon: float) -> None:
        self._surrogate, self._which, self._epsilon = surrogate, which, epsilon
        self._chains: Points | None = None

    def fill(self, picker: Picker, rng: np.random.Generator) -> None:
        state = picker.state
        if not len(state.measured) or not self._surrogate.ready():
            picker.add(_space_filling(picker, rng), "filling")
            picker.add_random(rng)
            return
        share = self._epsilon if self._surrogate.trusted else DISTRUST_SHARE
        random = max(1, round(share * picker.size)) if self._epsilon > 0 else 0
        guided = max(1, picker.room - random)
        if state.stale >= STALE_BATCHES:
            picker.add(self._sweep(state), "sweep", guided // 2)
            guided -= guided // 2
        picker.add(self._annealed(state, rng, guided), "model", guided)
        picker.add_random(rng)

    def _score(self, points: Points) -> NDArray[np.float32]:
        return self._surrogate.predict(self._which, points)

    def _annealed(self, state: State, rng: np.random.Generator, n: int) -> Points:
        """Points by predicted score, the `n` first of them mutually diverse."""
        found = anneal(state.space, self._score, self._starts(state, rng), rng)
        self._chains = found.chains
        fresh = ~np.isin(found.points, state.proposed)
        points = found.points[fresh][: 32 * max(n, 1)]
        return _diverse(points, state.space.coordinates(points), n)

    def _starts(self, state: State, rng: np.random.Generator) -> Points:
        """Chains go on where they were, a quarter restarted: at the best measured, and anew."""
        best = state.best_measured(CHAINS // 8)
        if self._chains is None:
            fresh = state.space.sample(rng, CHAINS - len(best), state.measured)
            starts = np.concatenate([best, fresh])
            return np.resize(starts if len(starts) else state.proposed, CHAINS)
        kept = self._chains.copy()
        kept[: len(best)] = best
        fresh = state.space.sample(rng, CHAINS // 8, state.measured)
        kept[len(kept) - len(fresh) :] = fresh
        return kept

    def _sweep(self, state: State) -> Points:
        """Unproposed one-knob variations of the best few, by predicted score."""
        around = [state.space.around(int(point)) for point in state.best_measured(3)]
        points = np.unique(np.concatenate(around)) if around else np.empty(0, dtype=np.int64)
        points = points[~np.isin(points, state.proposed)]
        if not len(points):
            return points
        return points[np.lexsort((points, -self._score(points)))]


def _diverse(points: Points, coordinates: NDArray[np.float64], n: int) -> Points:
    """`points` reordered: first up to `n` that differ pairwise in two knobs or more."""
    chosen: list[int] = []
    for i in range(len(points)):
        if len(chosen) >= n:
            break
        differing = (coordinates[chosen] != coordinates[i]).sum(axis=1)
        if not chosen or differing.min() >= 2:
            chosen.append(i)
    rest = np.setdiff1d(np.arange(len(points)), chosen)
    return np.concatenate([points[chosen], points[rest]]) if len(points) else points


def _space_filling(picker: Picker, rng: np.random.Generator) -> Points:
    """Legal points far from each other and from what was taken (greedy maximin)."""
    space, n = picker.state.space, picker.room
    pool = space.sample(rng, FILLING_POOL, picker.taken)
    if len(pool) <= n:
        return pool
    spots = space.coordinates(pool)
    taken = space.coordinates(picker.taken)
    distance = np.full(len(pool), np.inf)
    for spot in taken:
        distance = np.minimum(distance, np.abs(spots - spot).sum(axis=1))
    chosen: list[int] = []
    for _ in range(n):
        i = int(np.argmax(distance)) if np.isfinite(distance).any() else 0
        chosen.append(i)
        distance = np.minimum(distance, np.abs(spots - spots[i]).sum(axis=1))
        distance[i] = -1.0
    return pool[chosen]


Maker = Callable[[Surrogate, int, float], Strategy]

STRATEGIES: Mapping[str, Maker] = {
    "kt": Guided,
    "forest": Guided,
    "anneal": lambda surrogate, which, epsilon: Anneal(),
    "random": lambda surrogate, which, epsilon: Random(),
    "grid": lambda surrogate, which, epsilon: Grid(),
}
"""What `--strategy` accepts."""
MODEL_OF: Mapping[str, str] = {"kt": "kt", "forest": "forest"}
"""The cost model of the strategies that use one."""
