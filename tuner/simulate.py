"""A search run on recorded outcomes, as if they were measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from kt.logs.record import Settings
from kt.spaces.space import Points, Space

from .preset import Preset
from .search import Proposal, Search
from .state import Observation


def trace(
    space: Space,
    outcomes: Mapping[int, Observation],
    settings: Settings,
    seed: int,
    budget: int,
    preset: Preset | None = None,
) -> Points:
    """The points that a search evaluates, in order: `budget` of them, or all there are.

    Batches are proposed `settings.lag` batches ahead of their outcomes, as in a real run.
    """
    search = Search([space], [np.empty(0, dtype=np.int64)], settings, seed, preset)
    window: deque[Proposal] = deque()
    spent: list[int] = []
    while len(spent) < budget:
        while len(window) > settings.lag:
            proposal = window.popleft()
            search.observe(proposal, [outcomes[p] for p in proposal.points.tolist()])
        proposed = search.propose([budget - len(spent)])
        if proposed is None:
            break
        spent += proposed.points.tolist()
        window.append(proposed)
    return np.array(spent, dtype=np.int64)
