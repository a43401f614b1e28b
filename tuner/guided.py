"""The guided strategy: candidates by predicted score, diverse, with trials that explore."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kt.spaces.space import Points, Space

from .anneal import Score, anneal
from .picker import Picker
from .preset import Preset
from .state import State
from .surrogate import Surrogate

DISTRUST_SHARE = 0.5
"""Share of a batch that explores while the model does not predict."""
FILLING_POOL = 1024
_MORE_STEPS, _STEP_SHARE = 2, 0.5
"""Steps that a walk from a known point may take after its first, and how often it does."""


class Guided:
    """Annealing on the learned model, diverse picks, a neighbourhood sweep, exploration."""

    def __init__(self, surrogate: Surrogate, which: int, epsilon: float, preset: Preset) -> None:
        self._surrogate, self._which = surrogate, which
        self._epsilon, self._preset = epsilon, preset
        self._chains: Points | None = None

    def fill(self, picker: Picker, rng: np.random.Generator) -> None:
        state = picker.state
        if not len(state.measured) or not self._surrogate.ready():
            if self._surrogate.teacher:
                self._follow(picker, rng)
            if len(known := self._known(state)):
                picker.add(state.starts.likely, "likely", -(-picker.room // 2))
                near = wandered(state.space, known, rng, 4 * picker.room)
                picker.add(near, "near", round(self._preset.near * picker.room))
            picker.add(space_filling(picker, rng), "filling")
            picker.add_random(rng)
            return
        if self._preset.promising:
            most = max(1, round(self._preset.promising * picker.size))
            picker.add(self._promising(state), "likely", most)
        guided = max(1, picker.room - self._exploring(picker, rng))
        if state.stale >= self._preset.patience:
            swept = int(self._preset.sweep_share * guided)
            picker.add(self._sweep(state), "sweep", swept)
            guided -= swept
        found = self._candidates(state, rng)
        head = found[: 32 * max(guided, 1)]
        picker.add(diverse(head, state.space.coordinates(head), guided), "model", guided)
        if self._preset.exploration == "levels" and self._epsilon > 0:
            self._explore(picker, found, rng)
        picker.add_random(rng)

    def _follow(self, picker: Picker, rng: np.random.Generator) -> None:
        """Half of the room goes to what earlier logs predict best; the rest stays cold."""
        state, n = picker.state, picker.room // 2
        found = self._candidates(state, rng, lambda p: self._surrogate.taught(self._which, p))
        self._chains = None
        head = found[: 32 * max(n, 1)]
        picker.add(diverse(head, state.space.coordinates(head), n), "transfer", n)

    def _exploring(self, picker: Picker, rng: np.random.Generator) -> int:
        """How many trials of the batch explore."""
        if self._epsilon <= 0:
            return 0
        share = self._epsilon if self._surrogate.trusted else DISTRUST_SHARE
        if self._preset.exploration == "uniform":
            return max(1, round(share * picker.size))
        whole = math.floor(share * picker.size)  # a small batch explores now and then
        return whole + int(rng.random() < share * picker.size - whole)

    def _score(self, points: Points) -> NDArray[np.float32]:
        return self._surrogate.predict(self._which, points)

    def _candidates(
        self, state: State, rng: np.random.Generator, score: Score | None = None
    ) -> Points:
        """Points never proposed, by predicted score: all of a small space, else annealed ones."""
        score = score or self._score
        listed = state.space.listed
        if listed is not None and len(listed) <= self._preset.listing:
            points = listed[~np.isin(listed, state.proposed)]
            return points[np.lexsort((points, -score(points)))] if len(points) else points
        starts = self._starts(state, rng)
        preset = self._preset
        found = anneal(
            state.space,
            score,
            starts,
            rng,
            preset.steps,
            preset.temperature,
            preset.climbs,
            preset.at_once,
        )
        self._chains = found.chains
        return found.points[~np.isin(found.points, state.proposed)]

    def _starts(self, state: State, rng: np.random.Generator) -> Points:
        """Chains go on where they were, some restarted: at the best measured, and anew."""
        chains = self._preset.chains
        best = state.best_measured(chains // 8)
        if self._chains is not None:
            kept = self._chains.copy()
        elif len(known := self._known(state)):
            kept = wandered(state.space, np.concatenate([best, known]), rng, chains)
        else:
            fresh = state.space.sample(rng, chains - len(best), state.measured)
            starts = np.concatenate([best, fresh])
            return np.resize(starts if len(starts) else state.proposed, chains)
        kept[: len(best)] = best
        fresh = state.space.sample(rng, chains // self._preset.fresh, state.measured)
        kept[len(kept) - len(fresh) :] = fresh
        return kept

    def _known(self, state: State) -> Points:
        """What heuristics and earlier logs take for good, where the preset wants that."""
        if not self._preset.likely:
            return np.empty(0, dtype=np.int64)
        points = np.concatenate([state.starts.defaults, state.warm, state.starts.likely])
        return points[state.space.legal(points)]

    def _promising(self, state: State) -> Points:
        """What heuristics rank high of families whose best keeps up, or that have no result."""
        likely = state.starts.likely[~np.isin(state.starts.likely, state.proposed)].tolist()
        if not likely:
            return np.empty(0, dtype=np.int64)
        bests: dict[str, float] = {}
        for point, score in zip(state.measured.tolist(), state.throughput.tolist(), strict=True):
            name = state.space.family_of(point)
            bests[name] = max(score, bests.get(name, 0.0))
        least = self._preset.keeping_up
        kept = [p for p in likely if bests.get(state.space.family_of(p), 1.0) >= least]
        return np.array(kept, dtype=np.int64)

    def _sweep(self, state: State) -> Points:
        """Unproposed one-knob variations of the best few, by predicted score."""
        points = state.variations(3)
        if not len(points):
            return points
        return points[np.lexsort((points, -self._score(points)))]

    def _explore(self, picker: Picker, found: Points, rng: np.random.Generator) -> None:
        """The best predicted candidates of levels (choices of one knob) that the best lacks.

        A model that holds a level to be poor proposes none of it; its best point may be the best
        of all. Some trials stay uniform: candidates need not contain every level.
        """
        state = picker.state
        best = np.array([state.proposed[0] if state.best_point is None else state.best_point])
        incumbent = state.space.coordinates(best)[0]
        spots = state.space.coordinates(found)
        for _ in range(picker.room):
            if rng.random() < self._preset.uniform_share or not len(found):
                continue
            knob = int(rng.integers(len(incumbent)))
            levels = np.unique(spots[:, knob])
            levels = levels[levels != incumbent[knob]]
            if len(levels):
                level = levels[rng.integers(len(levels))]
                picker.add(found[spots[:, knob] == level], "level", 1)


def wandered(space: Space, bases: Points, rng: np.random.Generator, n: int) -> Points:
    """`n` legal points, one to three steps of a knob away from the bases in turn."""
    points = space.moves(np.resize(bases, n), rng)
    for _ in range(_MORE_STEPS):
        moved = space.moves(points, rng)
        points = np.where(rng.random(n) < _STEP_SHARE, moved, points)
    return points


def diverse(points: Points, coordinates: NDArray[np.float64], n: int) -> Points:
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


def space_filling(picker: Picker, rng: np.random.Generator) -> Points:
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
