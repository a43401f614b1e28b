"""How soon a search finds the best of a recorded workload, cold and taught by logs of other shapes.

    python benchmarks/transfer.py LOG... [--seeds 10] [--spaces 3]

Every LOG is one recorded workload: its trials are the space. With N logs each is searched N − 1
logs wiser. `zero` is the recorded schedule that the others' model likes best, unmeasured.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rows import HERE, LIBRARIES, commit, versions

from kt.logs.journal import read_log
from kt.logs.query import Run, runs, timed
from kt.logs.record import Settings
from kt.spaces.errors import KtError
from kt.spaces.families import space_of
from kt.spaces.target import Target, checked_target
from kt.spaces.workload import Workload, parse
from kt.tuner.preset import EPSILON, REVISION
from kt.tuner.recorded import RecordedSpace
from kt.tuner.replay import LEAST_POINTS, observation
from kt.tuner.search import Search
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
    settings = Settings(revision=REVISION, epsilon=EPSILON, lag=log.run.header.settings.lag)
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
    return row | {"zero": zero_of(log, taught), "teachers": len(taught), "seeds": seeds}


def zero_of(log: Log, taught: Sequence[Lesson]) -> float | None:
    """Share of the best that the recorded point reaches which the lessons alone rank first."""
    if not taught:
        return None
    search = Search(
        [log.space], [np.empty(0, dtype=np.int64)], Settings(revision=REVISION), 0, None, taught
    )
    points = np.array(sorted(log.outcomes), dtype=np.int64)
    best = int(points[int(np.argmax(search.taught(0, points)))])
    return round(reached(log, [best], 1), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--spaces", type=int, default=0, help="only so many of the logs' spaces")
    options = parser.parse_args()
    logs = [Log(path, runs(read_log(path).records)[0]) for path in options.logs]
    rows = []
    for log in logs[: options.spaces or None]:
        try:
            if len(log.outcomes) < LEAST_POINTS:
                raise KtError(f"only {len(log.outcomes)} points")
            rows.append(row_of(log, [other for other in logs if other is not log], options.seeds))
        except KtError as error:
            print(f"{log.path.name}: left out: {error}", flush=True)
            continue
        print(json.dumps(rows[-1]), flush=True)
    if not rows:
        return
    names = [f"{name}_{budget}" for name in ("cold", "taught") for budget in BUDGETS]
    print("mean", {name: round(float(np.mean([r[name] for r in rows])), 4) for name in names})
    document = {
        "schema": 1, "command": "python benchmarks/transfer.py LOG...",
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "kt": commit(),
        "libraries": versions(LIBRARIES), "rows": rows,
    }  # fmt: skip
    draft = RESULT.with_suffix(".tmp")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(draft, RESULT)


if __name__ == "__main__":
    main()
