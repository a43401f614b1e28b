"""A search run on recorded outcomes, as if they were measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from kt.logs.record import Settings
from kt.spaces.space import Points, Space

from .preset import Preset
from .search import Proposal, Search
from .state import Observation
from .transfer import Lesson


def trace(
    space: Space,
    outcomes: Mapping[int, Observation],
    settings: Settings,
    seed: int,
    budget: int,
    preset: Preset | None = None,
    warm: Points | None = None,
    lessons: Sequence[Lesson] = (),
) -> Points:
    """The points that a search evaluates, in order: `budget` of them, or all there are.

    Batches are proposed `settings.lag` batches ahead of their outcomes, as in a real run.
    """
    starts = np.empty(0, dtype=np.int64) if warm is None else warm
    search = Search([space], [starts], settings, seed, preset, lessons)
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
