"""Other tools' search strategies on a recorded space: the order in which each evaluates it.

Every strategy sees the same recorded points, failures included, and is asked for a number of
distinct evaluations; what it proposes again, or outside the recording, costs nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import warnings
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from kt.tuner.foreign import Recording

KERNEL_TUNER = (
    "genetic_algorithm", "adaptive_tabu_greywolf", "hybrid_vndx", "dual_annealing", "diff_evo",
    "simulated_annealing", "greedy_ils", "pso",
)  # fmt: skip
OPTUNA = ("tpe",)
_MODULES = {"kernel_tuner": "kernel_tuner", "optuna": "optuna"}
_ATTEMPTS = 10
"""Proposals that Optuna may make for one new recorded configuration; then it is given one.

Restricted spaces are small parts of the product of their parameters, which is all that Optuna
knows: left alone it spends minutes on the first hundred evaluations of `gemm_RTX3060`.
"""


def peers() -> dict[str, str]:
    """Strategy by name, with the package that it needs."""
    named = {f"kernel_tuner/{name}": "kernel_tuner" for name in KERNEL_TUNER}
    return named | {f"optuna/{name}": "optuna" for name in OPTUNA}


def missing() -> dict[str, str]:
    """Packages of peers that are not installed, with the command that installs them."""
    return {
        package: f"pip install {package}"
        for package, module in _MODULES.items()
        if util.find_spec(module) is None
    }


def order_of(recording: Recording, strategy: str, seed: int, budget: int) -> list[int]:
    """Indices of the results that `strategy` evaluates, first evaluations only, in order."""
    package, _, name = strategy.partition("/")
    if package == "optuna":
        return _optuna(recording, seed, budget)
    with tempfile.TemporaryDirectory() as folder:
        return _kernel_tuner(recording, name, seed, budget, Path(folder))


def _optuna(recording: Recording, seed: int, budget: int) -> list[int]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = list(recording.parameters)
    position = {result.values: i for i, result in enumerate(recording.results)}
    worst = max(r.us for r in recording.results if r.us is not None)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    spaces = {
        name: optuna.distributions.CategoricalDistribution(levels)
        for name, levels in recording.parameters.items()
    }
    values = [10 * worst if result.us is None else result.us for result in recording.results]
    given = iter(np.random.default_rng(seed).permutation(len(values)).tolist())
    order: dict[int, None] = {}
    while len(order) < budget:
        for _ in range(_ATTEMPTS):
            trial = study.ask(spaces)
            index = position.get(tuple(trial.params[name] for name in names))
            if index is None:  # outside the recording: told as a failure, not charged
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            study.tell(trial, values[index])
            if index not in order:
                break
        else:
            index = next(i for i in given if i not in order)
            params = dict(zip(names, recording.results[index].values, strict=True))
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=spaces, value=values[index])
            )
        order[index] = None
    return list(order)


def _kernel_tuner(
    recording: Recording, name: str, seed: int, budget: int, folder: Path
) -> list[int]:
    import kernel_tuner

    random.seed(seed)
    np.random.seed(seed % 2**32)
    cache = folder / "cache.json"
    cache.write_text(json.dumps(_cache(recording)))
    position = {result.values: i for i, result in enumerate(recording.results)}
    parameters = {name: list(levels) for name, levels in recording.parameters.items()}

    def recorded(values: dict[str, Any]) -> bool:
        return tuple(values[key] for key in parameters) in position

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        results, _ = kernel_tuner.tune_kernel(
            "recorded", "__global__ void recorded() {}", 1, [], parameters, restrictions=recorded,
            strategy=name, strategy_options={"max_fevals": budget}, simulation_mode=True,
            cache=str(cache), lang="CUDA", quiet=True, objective="time",
            objective_higher_is_better=False, iterations=1,
        )  # fmt: skip
    order: dict[int, None] = {}
    for result in results:
        index = position.get(tuple(result[key] for key in parameters))
        if index is not None:
            order.setdefault(index)
    return list(order)[:budget]


def _cache(recording: Recording) -> dict[str, Any]:
    """The recording as a Kernel Tuner cache, with what its simulation needs."""
    names = list(recording.parameters)
    entries = {}
    for result in recording.results:
        entry: dict[str, Any] = dict(zip(names, result.values, strict=True))
        if result.us is None:
            entry |= {"time": "RuntimeFailedConfig", "__error__": "RuntimeFailedConfig"}
        else:
            entry |= {"time": result.us / 1e3, "times": [result.us / 1e3]}
        entry |= {
            "compile_time": 1e3 * result.seconds, "verification_time": 0, "benchmark_time": 0,
            "strategy_time": 0, "framework_time": 0, "timestamp": "",
        }  # fmt: skip
        entries[",".join(str(value) for value in result.values)] = entry
    return {
        "device_name": "recorded", "kernel_name": "recorded", "problem_size": 1,
        "tune_params_keys": names, "tune_params": {n: list(recording.parameters[n]) for n in names},
        "objective": "time", "cache": entries,
    }  # fmt: skip
