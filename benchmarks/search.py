"""Scores search strategies offline on recorded spaces: ours and other tools', in one run.

    python benchmarks/search.py DATA [--spaces …] [--strategies …] [--seeds 25] [--seconds 480]
    python benchmarks/search.py DATA --report        (table, curves, results/search.json)

DATA is a folder of T4 files and Kernel Tuner caches. Runs are kept in build/search, one line each,
so that a later call goes on where this one stopped; `--seconds` ends it. Each configuration is
charged once and failures are kept in. See `kt.tuner.score` for the score.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import search_peers
from rows import HERE, commit, versions, write_document

from kt.logs.record import Settings
from kt.tuner.api import DEFAULTS
from kt.tuner.foreign import Recording, read_recording
from kt.tuner.foreign_space import ForeignSpace, outcomes
from kt.tuner.preset import EPSILON, REVISION, REVISIONS, Preset
from kt.tuner.score import Baseline, Floats, reached, run_of
from kt.tuner.simulate import trace

RUNS = HERE.parent / "build" / "search"
RESULT = HERE / "results" / "search.json"
PICTURE = HERE / "results" / "search.png"
SEEDS = 25
BUDGETS = (100, 400)
LIBRARIES = ("numpy", "xgboost", "xgboost-cpu", "scikit-learn", "kernel_tuner", "optuna")

OURS: Mapping[str, Settings] = {
    "kt": msgspec.convert(DEFAULTS["cpu"], Settings),
    "kt gpu": msgspec.convert(DEFAULTS["cuda"], Settings),
    "kt revision 1": Settings(revision=1),
    "forest": Settings(strategy="forest", revision=REVISION, epsilon=EPSILON),
    "autotvm": Settings(strategy="autotvm", batch_size=64, epsilon=0.05),
    "anneal": Settings(strategy="anneal"),
    "random": Settings(strategy="random"),
}
"""Strategies of kt. `kt` and `kt gpu` have the settings of runs on the CPU and on a GPU."""


def _varied() -> dict[str, Preset]:
    """Presets among which the constants were chosen, by the spaces that they are not scored on."""
    base = REVISIONS[REVISION]
    trees = base.trees
    return {
        "kt annealed": dataclasses.replace(base, listing=0),
        "kt base 1": dataclasses.replace(base, trees=dataclasses.replace(trees, base=1.0)),
        "kt refit 10 %": dataclasses.replace(base, growth=1.1),
        "kt 120 x 0.1": dataclasses.replace(
            base, trees=dataclasses.replace(trees, rounds=120, eta=0.1)
        ),
        "kt uniform": dataclasses.replace(base, exploration="uniform"),
        "kt no ramp": dataclasses.replace(base, ramp=()),
    }


VARIED = _varied()


@dataclass(frozen=True)
class Recorded:
    """A recorded space with its baseline."""

    name: str
    recording: Recording

    @cached_property
    def space(self) -> ForeignSpace:
        return ForeignSpace(self.recording)

    @cached_property
    def baseline(self) -> Baseline:
        results = self.recording.results
        return Baseline(
            np.array([np.nan if r.us is None else r.us for r in results]),
            np.array([r.seconds for r in results]),
        )

    @property
    def budget(self) -> int:
        """Evaluations that reach the end of the scored time with some margin."""
        wanted = math.ceil(1.2 * self.baseline.grid[-1] / self.baseline.mean_seconds)
        return min(len(self.recording.results), max(wanted, *BUDGETS))

    def order(self, strategy: str, seed: int) -> list[int]:
        """Indices of the results that a strategy evaluates, in order."""
        if strategy not in OURS and strategy not in VARIED:
            return search_peers.order_of(self.recording, strategy, seed, self.budget)
        settings, preset = OURS.get(strategy, OURS["kt"]), VARIED.get(strategy)
        index = {point: i for i, point in enumerate(self.space.order.tolist())}
        known = outcomes(self.space, self.recording)
        points = trace(self.space, known, settings, seed, self.budget, preset)
        return [index[point] for point in points.tolist()]

    def evaluated(self, order: Sequence[int]) -> tuple[Floats, Floats]:
        """Times and costs of results in order."""
        return self.baseline.us[list(order)], self.baseline.seconds[list(order)]


def spaces_in(folder: Path, wanted: Sequence[str]) -> list[Recorded]:
    """The recordings of a folder; of two files of one space the T4 file counts."""
    found: dict[str, Recorded] = {}
    for path in sorted(folder.glob("*.json*")):
        name = path.name.split(".")[0]
        space = name.removesuffix("_T4").removesuffix("_cache")
        if name.endswith(("_T4", "_cache")) and space not in found:
            if wanted and space not in wanted:
                continue
            if recording := read_recording(path):
                found[space] = Recorded(space, recording)
    return list(found.values())


def kept(space: str, strategy: str) -> dict[int, list[int]]:
    """Orders by seed that earlier calls left behind."""
    path = _file(space, strategy)
    lines = path.read_text().splitlines() if path.exists() else []
    return {one["seed"]: one["order"] for one in map(json.loads, lines)}


def _file(space: str, strategy: str) -> Path:
    return RUNS / f"{space}+{strategy.replace('/', '+').replace(' ', '-')}.jsonl"


def run(spaces: Sequence[Recorded], strategies: Sequence[str], seeds: int, seconds: float) -> bool:
    """Runs what is missing; False when the time ended first."""
    end = time.monotonic() + seconds
    RUNS.mkdir(parents=True, exist_ok=True)
    for space in spaces:
        for strategy in strategies:
            done = kept(space.name, strategy)
            for seed in (s for s in range(seeds) if s not in done):
                if time.monotonic() > end:
                    return False
                order = [int(i) for i in space.order(strategy, seed)]
                with _file(space.name, strategy).open("a") as file:
                    file.write(json.dumps({"seed": seed, "order": order}) + "\n")
            print(f"{space.name}: {_summary(space, strategy, seeds)}", flush=True)
    return True


def _summary(space: Recorded, strategy: str, seeds: int) -> str:
    row = row_of(space, strategy, seeds)
    if row is None:
        return f"{strategy}: no runs"
    first = BUDGETS[0]
    return f"{strategy:32s} score {row['score']:6.3f}  at {first} {row[f'at_{first}']:.3f}"


def row_of(space: Recorded, strategy: str, seeds: int) -> dict[str, Any] | None:
    """The score of a strategy on a space; None without a run."""
    orders = [order for seed, order in sorted(kept(space.name, strategy).items()) if seed < seeds]
    if not orders:
        return None
    found = [space.evaluated(order) for order in orders]
    curve = space.baseline.improvement([run_of(*one) for one in found])
    optimum = space.baseline.optimum
    return {
        "class": "hub", "space": space.name, "strategy": strategy,
        "score": round(float(curve.mean()), 4),
        **{f"at_{n}": round(float(np.mean([reached(optimum, us, n) for us, _ in found])), 4)
           for n in BUDGETS},
        "evaluations": space.budget, "seeds": len(orders),
        "curve": [round(float(v), 3) for v in curve[:: max(1, len(curve) // 50)]],
    }  # fmt: skip


def left_out(
    spaces: Sequence[Recorded], seeds: int, choices: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Each space's row with the preset that was best in the mean on the other spaces.

    Only presets that ran on every space count, all with the seeds that they have in common.
    """
    ran = {n: min(len(kept(s.name, n)) for s in spaces) for n in choices}
    whole = [name for name in choices if ran[name]]
    common = min([seeds, *(ran[name] for name in whole)])
    rows = {name: {s.name: row_of(s, name, common) for s in spaces} for name in whole}
    for space in spaces if len(spaces) > 1 and whole else ():
        chosen = max(whole, key=lambda name: _mean_but(rows[name], space.name))
        row = rows[chosen][space.name]
        assert row is not None
        yield {**row, "strategy": "kt left out", "preset": chosen}


def _mean_but(rows: Mapping[str, Mapping[str, Any] | None], space: str) -> float:
    """The mean score on all spaces but one."""
    return float(np.mean([row["score"] for name, row in rows.items() if row and name != space]))


def report(spaces: Sequence[Recorded], seeds: int) -> None:
    """Writes results/search.json and the picture, and prints the table."""
    strategies = [*OURS, *VARIED, *search_peers.peers()]
    rows = [row for s in spaces for name in strategies if (row := row_of(s, name, seeds))]
    rows = with_earlier(rows + list(left_out(spaces, seeds, ["kt", *VARIED])))
    about = {"kt": commit(), "libraries": versions(LIBRARIES)}
    write_document(RESULT, "python benchmarks/search.py DATA --report", about, rows)
    print(table(rows))
    draw(rows, PICTURE)


def with_earlier(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows`, after the reported ones that they do not replace: their runs may be gone."""
    earlier = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    replaced = {(row["strategy"], row["space"]) for row in rows}
    return [r for r in earlier if (r["strategy"], r["space"]) not in replaced] + list(rows)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Strategies by mean score as Markdown; only those that ran on every space are ranked."""
    spaces = list(dict.fromkeys(row["space"] for row in rows))
    by: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["strategy"], {})[row["space"]] = row
    whole = {name: found for name, found in by.items() if set(found) == set(spaces)}
    mean = {
        name: float(np.mean([found[s]["score"] for s in spaces])) for name, found in whole.items()
    }
    head = ["strategy", "mean score", *spaces, *(f"of the best at {n}" for n in BUDGETS)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in sorted(whole, key=lambda n: -mean[n]):
        found = whole[name]
        cells = [f"{found[s]['score']:.3f}" for s in spaces]
        ends = [f"{np.mean([found[s][f'at_{n}'] for s in spaces]):.3f}" for n in BUDGETS]
        lines.append("| " + " | ".join([name, f"{mean[name]:.3f}", *cells, *ends]) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean improvement over random search along the scored time."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is missing (pip install matplotlib)", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    spaces = {row["space"] for row in rows}
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in dict.fromkeys(row["strategy"] for row in rows if row["strategy"] not in VARIED):
        curves = [row["curve"] for row in rows if row["strategy"] == name]
        if len(curves) == len(spaces) and name != "kt left out":
            mean = np.mean(np.array(curves), axis=0)
            ours = name in OURS
            axes.plot(
                np.linspace(0, 1, len(mean)), mean, label=f"{name} {mean.mean():.2f}",
                linewidth=2.5 if name == "kt" else 1.2, linestyle="-" if ours else "--",
            )  # fmt: skip
    axes.set_xlabel("share of the scored time")
    axes.set_ylabel("improvement over random search (1 = the optimum)")
    axes.set_ylim(-0.5, 1.05)
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drew {path}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="folder of T4 files and Kernel Tuner caches")
    parser.add_argument("--spaces", nargs="*", default=[])
    parser.add_argument("--strategies", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--seconds", type=float, default=480.0, help="stop after so long")
    parser.add_argument("--report", action="store_true", help="only report what was run")
    options = parser.parse_args()
    known = [*OURS, *search_peers.peers(), *VARIED]
    if unknown := set(options.strategies) - set(known):
        parser.error(f"unknown strategy {', '.join(sorted(unknown))}: accepts {', '.join(known)}")
    absent = search_peers.missing()
    for package, command in absent.items():
        print(f"{package} is not installed: its strategies are left out ({command})")
    present = [n for n in known if search_peers.peers().get(n) not in absent]
    spaces = spaces_in(options.data, options.spaces)
    if not spaces:
        parser.error(f"{options.data}: no recorded space found")
    if not options.report:
        chosen = [n for n in options.strategies if n in present] or present
        if not run(spaces, chosen, options.seeds, options.seconds):
            print("stopped by --seconds: run again to go on")
            return
    report(spaces_in(options.data, []), options.seeds)


if __name__ == "__main__":
    main()
