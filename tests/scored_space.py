"""A made-up recorded space and runs of a made-up strategy on it, for the score."""

from __future__ import annotations

import numpy as np

from kt.tuner.score import Baseline, Floats

SIDE = 24


def baseline() -> Baseline:
    """Two knobs of 24 values, some failures, unequal costs."""
    x, y = (a.ravel() for a in np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"))
    us = 1000.0 + 3 * (x - 13) ** 2 + 5 * (y - 7) ** 2 + 9 * ((7 * x + 3 * y) % 11) + 0.01 * x * y
    us = np.where(x + y > 42, np.nan, us)
    return Baseline(us, 1.0 + (x * y % 5) / 10.0)


def orders(count: int, greed: float) -> list[list[int]]:
    """Runs that prefer fast configurations, the more so the greater `greed`."""
    us = np.nan_to_num(baseline().us, nan=3000.0)
    found = []
    for seed in range(count):
        noise = np.random.default_rng(seed).random(len(us)) * 1000.0
        found.append(np.argsort(greed * us + noise, kind="stable")[:120].tolist())
    return found


def runs(count: int, greed: float) -> list[tuple[Floats, Floats]]:
    """The same as (seconds elapsed, best so far)."""
    where = baseline()
    return [
        (np.cumsum(where.seconds[o]), np.fmin.accumulate(where.us[o])) for o in orders(count, greed)
    ]


def t4() -> dict[str, object]:
    """The space as a T4 document, in seconds."""
    where = baseline()
    results = []
    for i, (us, seconds) in enumerate(zip(where.us.tolist(), where.seconds.tolist(), strict=True)):
        valid = us == us
        results.append(
            {
                "configuration": {"x": i // SIDE, "y": i % SIDE},
                "times": {"compilation": seconds, "runtimes": [0.0], "framework": 0.0,
                          "search_algorithm": 0.0, "validation": 0.0},
                "invalidity": "correct" if valid else "runtime", "correctness": int(valid),
                "measurements": [{"name": "time", "value": us if valid else "failed", "unit": ""}],
                "objectives": ["time"],
            }
        )  # fmt: skip
    return {"schema_version": "1.0.0", "metadata": {"timeunit": "seconds"}, "results": results}
