"""`kt replay` of another tool's recording: what is in it, and how a strategy searches it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from kt.logs.record import Settings
from kt.spaces.errors import LogError, SettingsError

from . import text
from .constraints import read_description
from .foreign import Recording
from .foreign_space import ForeignSpace, outcomes
from .preset import EPSILON, REVISION
from .replay import LEAST_POINTS
from .score import Baseline, reached, run_of
from .simulate import trace
from .strategy import STRATEGIES

_MARGIN = 1.2
SCORED_POINTS = 1000
"""Recorded points below which random search on them says little of random search."""
_SHOWN = (16, 64, 100, 400)


def replay_recording(
    recording: Recording,
    *,
    constraints: Path | None,
    strategy: str | None,
    budget: int | None,
    seeds: int,
) -> tuple[dict[str, Any], list[str]]:
    """Facts for machines, and lines for people, of a recording and of a strategy on it.

    `constraints` is a T1 file; its defaults begin the search and its conditions are checked.
    """
    description = read_description(constraints) if constraints else None
    space = ForeignSpace(recording, description)
    baseline = Baseline(
        np.array([np.nan if r.us is None else r.us for r in recording.results]),
        np.array([r.seconds for r in recording.results]),
    )
    facts, lines = _described(recording, space)
    if space.disagreements:
        raise LogError(
            f"{constraints}: {space.disagreements} recorded configurations break its conditions"
        )
    if strategy is None:
        return facts, lines
    found, more = _searched(recording, space, baseline, strategy, budget, seeds)
    return facts | found, lines + more


def _described(recording: Recording, space: ForeignSpace) -> tuple[dict[str, Any], list[str]]:
    valid = [r.us for r in recording.results if r.us is not None]
    if not valid:
        raise LogError(f"{recording.title}: no configuration in it has a time")
    failures = recording.failures
    facts = {
        "title": recording.title, "format": recording.form, "points": len(recording.results),
        "failures": failures, "optimum_us": min(valid),
        "parameters": {name: len(levels) for name, levels in recording.parameters.items()},
    }  # fmt: skip
    best = min(recording.results, key=lambda r: math.inf if r.us is None else r.us)
    named = zip(recording.parameters, best.values, strict=True)
    lines = [
        f"{recording.title} ({recording.form}): {len(recording.results)} configurations of "
        f"{space.size} in {len(recording.parameters)} parameters; "
        f"failures: {text.counts(failures)}",
        f"  best {text.time_of(min(valid))}: {', '.join(f'{n}={v}' for n, v in named)}",
    ]
    return facts, lines


def _searched(
    recording: Recording,
    space: ForeignSpace,
    baseline: Baseline,
    strategy: str,
    budget: int | None,
    seeds: int,
) -> tuple[dict[str, Any], list[str]]:
    if strategy not in STRATEGIES:
        raise SettingsError(f"--strategy {strategy}: accepts {', '.join(STRATEGIES)}")
    points = len(recording.results)
    if points < LEAST_POINTS:
        raise SettingsError(
            f"--strategy: at least {LEAST_POINTS} points must be recorded; this file has {points}"
        )
    wanted = math.ceil(_MARGIN * baseline.grid[-1] / baseline.mean_seconds)
    most = min(points, budget or max(wanted, _SHOWN[-1]))
    known, index = outcomes(space, recording), _positions(space)
    settings = Settings(strategy=strategy, revision=REVISION, epsilon=EPSILON)
    runs = []
    for seed in range(seeds):
        order = [index[p] for p in trace(space, known, settings, seed, most).tolist()]
        runs.append((baseline.us[order], baseline.seconds[order]))
    score = (
        baseline.score([run_of(*one) for one in runs])
        if most >= wanted and points >= SCORED_POINTS
        else None
    )
    shares = {
        n: float(np.mean([reached(baseline.optimum, us, n) for us, _ in runs]))
        for n in dict.fromkeys((*(n for n in _SHOWN if n < most), most))
    }
    facts = {
        "strategy": strategy,
        "budget": most,
        "seeds": seeds,
        "score": score,
        "of_best": shares,
    }
    line = ", ".join(f"{n}: {100 * share:.1f} %" for n, share in shares.items())
    ended = "" if score is None else f"; score {score:.3f} (0 = random search, 1 = the optimum)"
    return facts, [f"  {strategy} over {seeds} seeds, of the best after trials {line}{ended}"]


def _positions(space: ForeignSpace) -> dict[int, int]:
    return {point: i for i, point in enumerate(space.order.tolist())}
