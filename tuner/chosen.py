"""Which kernel of a log a command is about: chosen, checked against its space, made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kt.logs.query import Best, Run, best_of, timed
from kt.logs.record import Failure, TrialRecord
from kt.spaces.errors import LogError, SpaceError, TargetError
from kt.spaces.families import space_of
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.target import Target, checked_target, detect_cpu
from kt.spaces.workload import Workload, parse

from .devices import devices_like
from .lookup import failure_text, one_trial, workloads_in
from .request import listed
from .summary import device_text


@dataclass(frozen=True)
class Chosen:
    """A logged kernel made again from its θ, which was checked against its space."""

    best: Best
    run: Run
    workload: Workload
    space: Space
    kernel: Kernel

    @property
    def default(self) -> Kernel:
        """The kernel of the default θ that the run compared its best with."""
        return self.space.kernel(default_point(self.space, self.run, self.best))


def default_point(space: Space, run: Run, best: Best) -> int:
    """The faster default of the run's final; without one, the first family's."""
    trial = run.trials.get(best.final.default) if best.final else None
    if trial is None:
        return int(space.defaults()[0])
    return checked_point(space, run, trial)


def checked_point(space: Space, run: Run, trial: TrialRecord) -> int:
    """The point of a logged trial; raises LogError for a θ of another version of the space."""
    try:
        return space.check(trial.family, trial.theta)
    except SpaceError as error:
        header = run.header
        logged = dict(zip(header.workloads, header.spaces, strict=False)).get(trial.workload)
        if logged == space.digest:
            raise
        raise LogError(
            f"trial {trial.trial} of run {header.run} was measured in another version of this "
            f"space: {error}"
        ) from None


def choose(
    found: Sequence[Run],
    words: Sequence[str],
    flags: Mapping[str, str | None],
    any_device: bool,
    trial: int | None,
) -> Chosen:
    """The best trial (or trial number `trial`) of the one workload that is asked for."""
    texts = workloads_in(found, words, flags)
    if trial is not None:
        run, best = _of_trial(found, texts, trial)
    elif len(texts) > 1:
        raise LogError(f"the log has several workloads, name one: {listed(texts)}")
    else:
        run, best = _fastest(found, texts[0])
    if not any_device:
        refuse_other_device(best.target)
    workload = parse(best.workload)
    space = space_of(workload, checked_target(best.target), run.header.settings.family)
    kernel = space.kernel(checked_point(space, run, best.trial))
    return Chosen(best, run, workload, space, kernel)


def _fastest(found: Sequence[Run], text: str) -> tuple[Run, Best]:
    """The fastest best of all runs, those of this device first."""
    bests = [(r, best) for r in found if (best := best_of(r, text)) and timed(best.trial)]
    if not bests:
        failed = [
            t.outcome for run in found for t in run.of(text) if isinstance(t.outcome, Failure)
        ]
        why = f"; the first failure: {failure_text(failed[0])}" if failed else ""
        raise LogError(f"the log has no valid result for '{text}'{why}")
    return min(bests, key=lambda pair: (not _is_here(pair[1].target), pair[1].rank))


def _of_trial(found: Sequence[Run], texts: Sequence[str], number: int) -> tuple[Run, Best]:
    """One trial, failed or not: so that a failure can be looked into."""
    run, trial = one_trial(found, texts, number)
    best = best_of(run, trial.workload)
    default = best.default_us if best else None
    us = timed(trial) or 0.0
    return run, Best(trial.workload, run.header.target, trial, us, default, None)


def _is_here(target: Target) -> bool:
    """Whether this machine has such a device."""
    return any(target.same_device(device) for device in devices_like(target))


def refuse_other_device(target: Target) -> None:
    """Raises TargetError when this machine has no such device."""
    if not _is_here(target):
        here = " and ".join(map(device_text, devices_like(target) or [detect_cpu()]))
        raise TargetError(
            f"measured on {device_text(target)}, this is {here}: "
            "its speed says nothing here (--any-device emits it all the same)"
        )
