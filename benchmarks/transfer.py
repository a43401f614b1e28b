"""How soon a search finds the best of a recorded workload, cold and taught by logs of other shapes.

    python benchmarks/transfer.py [SPACE...] [--teachers LOG...] [--seeds 10]

A SPACE is the log of one workload of which a random sample was measured (default: all of
benchmarks/spaces); its trials are what there is to find. Every LOG of another workload teaches
(default: all of benchmarks/logs). `zero` is the recorded schedule that the model of
`kt apply --predict` likes best, unmeasured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rows import HERE, LIBRARIES, commit, versions, write_document

from kt.logs.journal import read_log
from kt.logs.query import Run, runs, timed
from kt.spaces.errors import KtError
from kt.spaces.families import space_of
from kt.spaces.target import Target, checked_target
from kt.spaces.workload import Workload, parse
from kt.tuner.api import effective_settings
from kt.tuner.predict import predicted_scores, teaching
from kt.tuner.recorded import RecordedSpace
from kt.tuner.replay import LEAST_POINTS, observation
from kt.tuner.simulate import trace
from kt.tuner.state import Observation
from kt.tuner.transfer import Lesson, lessons, lessons_of
from kt.tuner.warm import nearest, warm_points

BUDGETS = (16, 64)
RESULT = HERE / "results" / "transfer.json"


@dataclass(frozen=True)
class Log:
    """The only workload of a log's first run."""

    path: Path
    run: Run

    @property
    def workload(self) -> Workload:
        return parse(self.run.header.workloads[0])

    @property
    def target(self) -> Target:
        return checked_target(self.run.header.target)

    @cached_property
    def outcomes(self) -> dict[int, Observation]:
        """What was recorded, by point. Raises KtError when the space has changed since."""
        space = space_of(self.workload, self.target, self.run.header.settings.family)
        found: dict[int, Observation] = {}
        for trial in self.run.of(str(self.workload)):
            seen = observation(space, trial)
            found.setdefault(seen.point, seen)
        return found

    @cached_property
    def space(self) -> RecordedSpace:
        space = space_of(self.workload, self.target, self.run.header.settings.family)
        return RecordedSpace(space, np.array(sorted(self.outcomes), dtype=np.int64))

    @property
    def best_us(self) -> float:
        times = (timed(trial) for trial in self.run.of(str(self.workload)))
        return min(us for us in times if us is not None)


def in_folder(name: str) -> list[Path]:
    """The compressed logs of a folder of benchmarks/."""
    return sorted((HERE / name).glob("*.jsonl.gz"))


def reached(log: Log, points: Sequence[int], budget: int) -> float:
    """Recorded best over the best of the first `budget` points."""
    seen = [log.outcomes[p] for p in points[:budget]]
    times = [o.us for o in seen if o.us is not None and not o.censored]
    return log.best_us / min(times) if times else 0.0


def row_of(log: Log, others: Sequence[Log], seeds: int) -> dict[str, Any]:
    """One workload: the mean share of its recorded best, cold and taught."""
    records = [
        r
        for other in others
        for r in (other.run.header, *other.run.batches, *other.run.trials.values())
    ]
    near = nearest(records, log.workload, log.target)
    starts = (*near, *lessons(records, log.workload, log.target))
    taught = lessons_of({str(log.workload): starts}, log.target)
    warm = warm_points(log.space, near)
    settings = effective_settings(log.target, {})
    row: dict[str, Any] = {"class": "transfer", "workload": str(log.workload),
                           "points": len(log.outcomes), "log": log.path.name}  # fmt: skip
    for name, start, given in (("cold", warm[:0], ()), ("taught", warm, taught)):
        orders = [
            trace(log.space, log.outcomes, settings, seed, BUDGETS[-1], None, start, given).tolist()
            for seed in range(seeds)
        ]
        for budget in BUDGETS:
            shares = [reached(log, order, budget) for order in orders]
            row[f"{name}_{budget}"] = round(float(np.mean(shares)), 4)
    row["zero"] = zero_of(log, teaching(records, log.workload, log.target))
    return row | {"teachers": len(taught), "seeds": seeds}


def zero_of(log: Log, taught: Sequence[Lesson]) -> float | None:
    """Share of the best that the recorded point reaches which `kt apply --predict` likes best."""
    if not taught:
        return None
    points = np.array(sorted(log.outcomes), dtype=np.int64)
    best = int(points[int(np.argmax(predicted_scores(log.space, taught, points)))])
    return round(reached(log, [best], 1), 4)


def opened(paths: Sequence[Path]) -> list[Log]:
    """The first run of each log."""
    return [Log(path, runs(read_log(path).records)[0]) for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("spaces", nargs="*", type=Path, default=in_folder("spaces"))
    parser.add_argument("--teachers", nargs="*", type=Path, default=in_folder("logs"))
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    teachers = opened(options.teachers)
    rows = []
    for log in opened(options.spaces):
        try:
            if len(log.outcomes) < LEAST_POINTS:
                raise KtError(f"only {len(log.outcomes)} points")
            others = [other for other in teachers if other.workload != log.workload]
            rows.append(row_of(log, others, options.seeds))
        except KtError as error:
            print(f"{log.path.name}: left out: {error}", flush=True)
            continue
        print(json.dumps(rows[-1]), flush=True)
    if not rows:
        return
    names = [f"{name}_{budget}" for name in ("cold", "taught") for budget in BUDGETS]
    print("mean", {name: round(float(np.mean([r[name] for r in rows])), 4) for name in names})
    about = {"kt": commit(), "libraries": versions(LIBRARIES)}
    write_document(RESULT, "python benchmarks/transfer.py", about, rows)


if __name__ == "__main__":
    main()
