"""Simulated annealing on predicted scores: many chains at once, as array operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kt.spaces.space import Points, Space

Score = Callable[[Points], NDArray[np.floating]]

SPREAD = 8
"""Neighbours of each of the best points that a climb looks at."""


@dataclass(frozen=True)
class Annealed:
    """Where the chains ended, and every distinct point they saw, best first."""

    chains: Points
    points: Points
    scores: NDArray[np.float64]


def anneal(
    space: Space,
    score: Score,
    starts: Points,
    rng: np.random.Generator,
    steps: int,
    temperature: float,
    climbs: int = 0,
    at_once: bool = False,
) -> Annealed:
    """Maximises `score` from `starts` (one chain each).

    The temperature begins at `temperature`, in units of the score, and falls linearly to zero.
    Then `climbs` times, as many neighbours as there are chains of the best points seen are scored.
    `at_once` takes `Space.moves` for neighbours.
    """
    move = space.moves if at_once else space.neighbours
    chains = starts.copy()
    current = np.asarray(score(chains), dtype=np.float64)
    seen, seen_scores = [chains], [current]
    for step in range(steps):
        now = temperature * (1 - step / steps)
        moved = move(chains, rng)
        scores = np.asarray(score(moved), dtype=np.float64)
        accept = rng.random(len(chains)) < np.exp(np.minimum(0, scores - current) / now)
        chains = np.where(accept, moved, chains)
        current = np.where(accept, scores, current)
        seen.append(moved)
        seen_scores.append(scores)
    points, scores = _ranked(seen, seen_scores)
    for _ in range(climbs):
        top = points[: max(1, len(starts) // SPREAD)]
        moved = move(np.repeat(top, SPREAD), rng)
        fresh = np.setdiff1d(moved, points)
        if not len(fresh):
            break
        points, scores = _ranked([points, fresh], [scores, np.asarray(score(fresh))])
    return Annealed(chains, points, scores)


def _ranked(
    points: Sequence[Points], scores: Sequence[NDArray[np.floating]]
) -> tuple[Points, NDArray[np.float64]]:
    """Distinct points with their scores, best first."""
    distinct, first = np.unique(np.concatenate(points), return_index=True)
    kept = np.concatenate(scores)[first].astype(np.float64)
    order = np.lexsort((distinct, -kept))
    return distinct[order], kept[order]
