"""Offline replay: are a log's proposals the same, and what would another strategy have done."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kt.logs.query import Run, timed
from kt.logs.record import Settings, Timing, TrialRecord
from kt.spaces.errors import LogError, SettingsError, SpaceError
from kt.spaces.families import space_of
from kt.spaces.space import Space
from kt.spaces.target import checked_target
from kt.spaces.workload import parse

from .recorded import RecordedSpace
from .search import Proposal, Search
from .session import mismatch, search_of, version_difference
from .simulate import trace
from .state import Observation

LEAST_POINTS = 64
"""Recorded points below which a simulated search says nothing."""


@dataclass(frozen=True)
class Identity:
    """Whether a run's proposals are recomputed from its header and outcomes alone."""

    run: str
    batches: int
    difference: str = ""
    versions: str = ""

    @property
    def exit_code(self) -> int:
        """0 identical; 1 different under the same versions; 2 not comparable."""
        if not self.difference:
            return 0
        return 2 if self.versions else 1


def check_identity(run: Run) -> Identity:
    """Recomputes every batch of `run` and compares it with the logged one."""
    other_versions = version_difference(run.header)
    name, count = run.header.run, len(run.batches)
    target = checked_target(run.header.target)
    try:
        only = run.header.settings.family
        spaces = [space_of(parse(text), target, only) for text in run.header.workloads]
        difference = _other_space(run, spaces) or _first_difference(
            run, search_of(run.header, spaces, run.batches), spaces
        )
    except SpaceError as error:
        difference = str(error)
    return Identity(name, count, difference or "", other_versions)


def _other_space(run: Run, spaces: Sequence[Space]) -> str | None:
    for text, logged, space in zip(run.header.workloads, run.header.spaces, spaces, strict=False):
        if space.digest != logged:
            return f"the space of '{text}' has changed"
    return None


def _first_difference(run: Run, search: Search, spaces: Sequence[Space]) -> str | None:
    lag = run.header.settings.lag
    window: deque[tuple[Proposal, int]] = deque()
    first_trial = 0
    for expected, logged in enumerate(run.batches):
        if logged.batch != expected:
            raise LogError(f"run {run.header.run}: batch {expected} is missing from the log")
        while len(window) > lag:
            _observe(run, search, spaces, *window.popleft())
        proposal = search.propose([len(logged.entries)] * len(spaces))
        difference = mismatch(spaces, proposal, logged)
        if proposal is None or difference:
            return difference
        window.append((proposal, first_trial))
        first_trial += len(logged.entries)
    return None


def _observe(
    run: Run, search: Search, spaces: Sequence[Space], proposal: Proposal, first: int
) -> None:
    observations = [
        observation(spaces[proposal.which], trial)
        for i in range(len(proposal.points))
        if (trial := run.trials.get(first + i))
    ]
    search.observe(proposal, observations)


def observation(space: Space, trial: TrialRecord) -> Observation:
    """A trial's final event as the search sees it."""
    point = space.point(trial.family, trial.theta)
    outcome = trial.outcome
    if isinstance(outcome, Timing):
        return Observation(point, outcome.median_us, outcome.censored)
    return Observation(point, None)


@dataclass(frozen=True)
class Simulation:
    """A strategy re-run on recorded outcomes: the best of `optimum_us` reached, by seed."""

    strategy: str
    budget: int
    points: int
    optimum_us: float
    best_us: tuple[float, ...]

    @property
    def reached(self) -> float:
        """Median over seeds of optimum / best: 1 = the recorded optimum was found."""
        return statistics.median(self.optimum_us / us if us > 0 else 0.0 for us in self.best_us)


def simulate(
    runs: Sequence[Run], workload: str, strategy: str, budget: int | None, seeds: int = 5
) -> Simulation:
    """Runs `strategy` on the points that `runs` recorded for `workload`.

    Raises SettingsError, with the number, when too few points were recorded for that to mean
    anything: fewer than LEAST_POINTS, or fewer than twice the budget.
    """
    header = runs[0].header
    base = space_of(parse(workload), checked_target(header.target))
    alike = [run for run in runs if run.header.target.same_device(header.target)]
    trials = [trial for run in alike for trial in run.of(workload)]
    outcomes: dict[int, Observation] = {}
    for trial in trials:
        seen = observation(base, trial)
        outcomes.setdefault(seen.point, seen)
    if len(outcomes) < LEAST_POINTS:
        raise SettingsError(
            f"--strategy: at least {LEAST_POINTS} points of '{workload}' must be recorded; "
            f"this log has {len(outcomes)}"
        )
    most = len(outcomes) // 2
    if budget is not None and budget > most:
        raise SettingsError(
            f"--budget {budget}: at least twice as many points must be recorded; this log has "
            f"{len(outcomes)} of '{workload}', so it accepts 1 to {most}"
        )
    budget = budget or most
    times = [us for trial in trials if (us := timed(trial)) is not None]
    if not times:
        raise SettingsError(f"'{workload}' has no recorded result to search for")
    space = RecordedSpace(base, np.array(sorted(outcomes), dtype=np.int64))
    settings = msgspec.structs.replace(header.settings, strategy=strategy)
    found = [_best(space, outcomes, settings, seed, budget) for seed in range(seeds)]
    return Simulation(strategy, budget, len(outcomes), min(times), tuple(found))


def _best(
    space: Space, outcomes: dict[int, Observation], settings: Settings, seed: int, budget: int
) -> float:
    seen = [outcomes[p] for p in trace(space, outcomes, settings, seed, budget).tolist()]
    return min((o.us for o in seen if o.us is not None and not o.censored), default=0.0)
