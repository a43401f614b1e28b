"""`kt show --explain`: which knobs mattered, where the model was wrong, how regret fell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kt.costmodel.attribution import attributions
from kt.logs.query import Best, Run, best_of, timed
from kt.logs.record import FinalRecord, Timing, TrialRecord
from kt.spaces.errors import KtError, SpaceError
from kt.spaces.families import space_of
from kt.spaces.space import Space
from kt.spaces.target import checked_target
from kt.spaces.theta import COMPONENTS, Value
from kt.spaces.workload import parse

from . import text

SHOWN_KNOBS, SHOWN_MISSES, SHOWN_VARIATIONS, SHOWN_LOADED = 8, 4, 12, 4
_BUDGETS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Variation:
    """A measured trial that differs from the winner in one knob."""

    knob: str
    winner: Value
    other: Value
    slowdown: float | None
    """Its time over the winner's; None when it failed."""
    trial: int


@dataclass(frozen=True)
class Miss:
    """A trial that the model misjudged: throughput relative to the best, 0 = failed."""

    trial: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Loaded:
    """A trial of the qualifying round: its time in turn with others, and alone; µs."""

    trial: int
    us: float
    alone_us: float


@dataclass(frozen=True)
class Explanation:
    """What a run tells of one workload."""

    workload: str
    components: dict[str, float]
    """Share of the seven components of θ in the effects of all knobs."""
    knobs: dict[str, float]
    variations: tuple[Variation, ...]
    misses: tuple[Miss, ...]
    regret: dict[int, float]
    """By number of trials: how much slower the best so far was than the best of the search."""
    loaded: tuple[Loaded, ...]
    """Fastest under load first; empty without such a round."""
    transfer: tuple[float, ...]
    """Weight of earlier logs' rows in each batch's model."""
    transfer_rows: int

    def facts(self) -> dict[str, Any]:
        """For machines."""
        return {
            "workload": self.workload, "components": self.components, "knobs": self.knobs,
            "variations": [vars(v) for v in self.variations],
            "misses": [vars(m) for m in self.misses], "regret": self.regret,
            "loaded": [vars(one) for one in self.loaded],
            "transfer": {"rows": self.transfer_rows, "weights": self.transfer},
        }  # fmt: skip


def explain(run: Run, workload: str) -> Explanation | None:
    """The explanation of one workload of a run; None when nothing of it has a time."""
    best, trials = best_of(run, workload), run.of(workload)
    if best is None:
        return None
    times = {trial.trial: timed(trial) for trial in trials}
    known = [us for us in times.values() if us is not None]
    fastest = min(known, default=0.0)
    scores = {n: fastest / us if us is not None else 0.0 for n, us in times.items()}
    knobs = _effects(run, workload, trials, scores)
    total = sum(knobs.values()) or 1.0
    components = {
        c: round(sum(v for k, v in knobs.items() if k.startswith(f"{c}.")) / total, 4)
        for c in COMPONENTS
    }
    reports = [batch.model for batch in run.batches if batch.workload == workload]
    return Explanation(
        workload, components, {k: round(v / total, 4) for k, v in knobs.items()},
        _variations(best, trials), _misses(trials, scores), _regret(trials),
        _loaded(run.finals.get(workload), times),
        tuple(report.transfer_weight for report in reports),
        max((report.transfer_rows for report in reports), default=0),
    )  # fmt: skip


def _effects(
    run: Run, workload: str, trials: Sequence[TrialRecord], scores: dict[int, float]
) -> dict[str, float]:
    """Effect of each knob of θ on the score, by a model that sees knobs alone."""
    try:
        target = checked_target(run.header.target)
        space = space_of(parse(workload), target, run.header.settings.family)
    except KtError:
        return {}
    points, actual = [], []
    for trial in trials:
        try:
            points.append(space.point(trial.family, trial.theta))
        except SpaceError:
            continue  # of a space that has changed since
        actual.append(scores[trial.trial])
    columns = [i for i, name in enumerate(space.feature_names) if _knob(space, name)]
    if not points or not columns:
        return {}
    features = space.encode(np.array(points, dtype=np.int64))[:, columns]
    names = [space.feature_names[i] for i in columns]
    found = attributions(features, np.array(actual, dtype=np.float32), names)
    by_knob: dict[str, float] = {}
    for name, effect in found.items():
        knob = _knob(space, name)
        by_knob[knob] = by_knob.get(knob, 0.0) + effect
    return dict(sorted(by_knob.items(), key=lambda item: -item[1]))


def _knob(space: Space, column: str) -> str:
    """The knob's path that a feature column belongs to; the family counts as one; else empty."""
    if column.startswith("family="):
        return "family"
    path = column.partition("=")[0]
    return path if path.partition(".")[0] in COMPONENTS else ""


def _variations(best: Best, trials: Sequence[TrialRecord]) -> tuple[Variation, ...]:
    """Trials that differ from the winner in one knob, in the search's own times."""
    mine, winner_us = best.trial.theta.flat(), timed(best.trial)
    found = []
    for trial in trials:
        theirs = trial.theta.flat()
        if trial.family != best.trial.family or theirs.keys() != mine.keys():
            continue
        differing = [knob for knob, value in mine.items() if theirs[knob] != value]
        if len(differing) == 1:
            (knob,) = differing
            us = timed(trial)
            slower = us / winner_us if us is not None and winner_us else None
            found.append(Variation(knob, mine[knob], theirs[knob], slower, trial.trial))
    return tuple(sorted(found, key=lambda v: (v.knob, -(v.slowdown or 0.0), v.trial)))


def _misses(trials: Sequence[TrialRecord], scores: dict[int, float]) -> tuple[Miss, ...]:
    """Where prediction and measurement differed most, worst first."""
    judged = [
        Miss(trial.trial, trial.predicted, round(scores[trial.trial], 4))
        for trial in trials
        if trial.predicted is not None
        and not (isinstance(trial.outcome, Timing) and trial.outcome.censored)
    ]
    judged.sort(key=lambda miss: (-abs(miss.predicted - miss.measured), miss.trial))
    return tuple(judged[:SHOWN_MISSES])


def _regret(trials: Sequence[TrialRecord]) -> dict[int, float]:
    times = [np.inf if (us := timed(trial)) is None else us for trial in trials]
    bests = np.minimum.accumulate(np.array(times))
    shown = [n for n in _BUDGETS if n < len(bests)] + [len(bests)]
    return {n: round(float(bests[n - 1] / bests[-1] - 1), 4) for n in shown
            if np.isfinite(bests[n - 1])}  # fmt: skip


def _loaded(final: FinalRecord | None, alone: Mapping[int, float | None]) -> tuple[Loaded, ...]:
    entries = {e.trial: e for e in (final.qualifying if final else ()) if e.sound}
    loaded = [Loaded(n, e.median_us, us) for n, e in entries.items() if (us := alone.get(n))]
    return tuple(sorted(loaded, key=lambda one: (one.us, one.trial)))


def lines_of(found: Explanation) -> list[str]:
    """For people."""
    lines = ["", f"{text.one_line(found.workload)}: what mattered"]
    if found.knobs:
        shares = (f"{c} {100 * v:.0f} %" for c, v in found.components.items() if v > 0)
        lines.append(f"  components  {', '.join(shares) or 'none'}")
        top = list(found.knobs.items())[:SHOWN_KNOBS]
        lines.append(f"  knobs       {', '.join(f'{k} {100 * v:.0f} %' for k, v in top)}")
    else:
        lines.append("  components  too few trials of this space to say")
    for v in found.variations[:SHOWN_VARIATIONS]:
        end = "failed" if v.slowdown is None else f"{v.slowdown:.3f}x the time"
        lines.append(
            f"  one knob    {text.one_line(v.knob)} {text.one_line(str(v.winner))} -> "
            f"{text.one_line(str(v.other))}: {end} (trial {v.trial})"
        )
    if more := len(found.variations) - SHOWN_VARIATIONS:
        lines += [f"              and {more} more"] if more > 0 else []
    for miss in found.misses:
        lines.append(
            f"  model       trial {miss.trial}: predicted {miss.predicted:.2f} of the best "
            f"throughput, measured {miss.measured:.2f}"
        )
    regret = (f"{n}: {100 * r:.1f} %" for n, r in found.regret.items())
    lines.append(f"  regret      after trials {', '.join(regret)}")
    if found.loaded:
        shown = list(found.loaded[:SHOWN_LOADED])
        first_alone = min(found.loaded, key=lambda one: one.alone_us)
        shown += [first_alone] if first_alone not in shown else []
        each = (
            f"{one.trial}: {text.time_of(one.us)} (alone {text.time_of(one.alone_us)})"
            for one in shown
        )
        lines.append(f"  under load  {len(found.loaded)} trials in turn; {', '.join(each)}")
    if found.transfer_rows:
        weights = " ".join(f"{w:.2f}" for w in found.transfer)
        lines.append(f"  transfer    {found.transfer_rows} rows of earlier logs, weight by batch "
                     f"{weights}")  # fmt: skip
    return lines
