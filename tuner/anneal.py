"""Simulated annealing on predicted scores: many chains at once, as array operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kt.spaces.space import Points, Space

Score = Callable[[Points], NDArray[np.floating]]


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
) -> Annealed:
    """Maximises `score` from `starts` (one chain each).

    The temperature begins at `temperature`, in units of the score, and falls linearly to zero.
    """
    chains = starts.copy()
    current = np.asarray(score(chains), dtype=np.float64)
    seen, seen_scores = [chains], [current]
    for step in range(steps):
        now = temperature * (1 - step / steps)
        moved = space.neighbours(chains, rng)
        scores = np.asarray(score(moved), dtype=np.float64)
        accept = rng.random(len(chains)) < np.exp(np.minimum(0, scores - current) / now)
        chains = np.where(accept, moved, chains)
        current = np.where(accept, scores, current)
        seen.append(moved)
        seen_scores.append(scores)
    points, first = np.unique(np.concatenate(seen), return_index=True)
    scores = np.concatenate(seen_scores)[first]
    order = np.lexsort((points, -scores))
    return Annealed(chains, points[order], scores[order])
