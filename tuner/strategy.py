"""Search strategies: each proposes a batch from what is known of one workload.

`kt` anneals on the learned model; `forest` does the same with scikit-learn's forest; `autotvm` has
that tuner's published settings; `anneal` walks on measured times alone; `random` and `grid` need no
explanation. None revisits a point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kt.spaces.space import Points, Space

from .guided import Guided
from .picker import Picker, Strategy
from .preset import Preset
from .surrogate import Surrogate


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


Maker = Callable[[Surrogate, int, float, Preset], Strategy]

STRATEGIES: Mapping[str, Maker] = {
    "kt": Guided,
    "forest": Guided,
    "autotvm": Guided,
    "anneal": lambda surrogate, which, epsilon, preset: Anneal(),
    "random": lambda surrogate, which, epsilon, preset: Random(),
    "grid": lambda surrogate, which, epsilon, preset: Grid(),
}
"""What `--strategy` accepts."""
MODEL_OF: Mapping[str, str] = {"kt": "kt", "forest": "forest", "autotvm": "kt"}
"""The cost model of the strategies that use one."""
