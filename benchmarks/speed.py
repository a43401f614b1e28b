"""How fast the search proposes: a refit on 2000 records, and points scored a second.

    python benchmarks/speed.py [LOG...] [--threads 2]

LOG is a log with that many trials of one workload (default: all of benchmarks/spaces). A proposal
is a whole batch: chains anneal through the space (moves, their legality, features, predictions),
then diverse points are picked. "predicted" is features and predictions alone, of many points at
once. The best of several repetitions counts; the machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rows import HERE, LIBRARIES, commit, versions, write_document
from transfer import in_folder, opened

from kt.logs.record import Settings
from kt.spaces.families import space_of
from kt.spaces.space import Points
from kt.tuner.guided import Guided
from kt.tuner.picker import Picker
from kt.tuner.preset import CUDA_REVISION, EPSILON, REVISION, preset_of
from kt.tuner.state import State
from kt.tuner.surrogate import Surrogate

RECORDS, REPEATS, BATCH = 2000, 5, 16
RESULT = HERE / "results" / "speed.json"
NOTHING = np.empty(0, dtype=np.int64)


def best_seconds(work: Callable[[], object]) -> float:
    """The shortest of several repetitions."""
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def row_of(path: Path, threads: int) -> dict[str, Any]:
    """Refit and proposal speed of the search that new runs of a workload use."""
    (log,) = opened([path])
    revision = CUDA_REVISION if log.target.kind == "cuda" else REVISION
    space = space_of(log.workload, log.target, "all")
    seen = list(log.outcomes.values())[:RECORDS]
    preset = preset_of(Settings(revision=revision))
    state = State(space, NOTHING)
    state.propose(np.array([o.point for o in seen], dtype=np.int64))
    state.observe(seen)

    def fitted() -> Surrogate:
        model = Surrogate([state], "kt", 0, threads, preset)
        model.learn(0, seen)
        model.ready()
        return model

    surrogate = fitted()
    scored = [0]

    def counted(which: int, points: Points) -> np.ndarray[Any, Any]:
        scored[0] += len(points)
        return Surrogate.predict(surrogate, which, points)

    surrogate.predict = counted  # type: ignore[method-assign]
    guided = Guided(surrogate, 0, EPSILON, preset)

    def propose() -> None:
        scored[0] = 0
        guided.fill(Picker(state, BATCH), np.random.default_rng(0))

    refit, proposal = best_seconds(fitted), best_seconds(propose)
    many = np.concatenate([space.sample(np.random.default_rng(i), 10_000) for i in range(2)])
    return {
        "class": "speed", "workload": str(log.workload), "revision": revision,
        "records": len(seen), "threads": threads, "refit_seconds": round(refit, 3),
        "proposal_seconds": round(proposal, 3), "scored": scored[0],
        "proposed_per_second": round(scored[0] / proposal),
        "predicted_per_second": round(len(many) / best_seconds(lambda: counted(0, many))),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("logs", nargs="*", metavar="LOG", type=Path, default=in_folder("spaces"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rows = [row_of(log, options.threads) for log in options.logs]
    for row in rows:
        print(json.dumps(row))
    about = {"kt": commit(), "cores": os.cpu_count(), "libraries": versions(LIBRARIES)}
    write_document(RESULT, "python benchmarks/speed.py", about, rows)


if __name__ == "__main__":
    main()
