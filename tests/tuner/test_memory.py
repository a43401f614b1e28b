"""Memory of a long run."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
from fake_runs import GEMM
from fakes import AnalyticMeasurer

from kt.logs.record import Settings, TrialRecord
from kt.spaces.target import detect_cpu
from kt.spaces.workload import parse
from kt.tuner.session import Session
from kt.tuner.tune import Quiet, tune

TRIALS, WARM, MEBIBYTE = 2000, 500, 2**20


class Weighing(Quiet):
    """Weighs this process after every 250 trials."""

    def __init__(self) -> None:
        self.trials, self.bytes = 0, dict[int, int]()

    def trial(self, session: Session, record: TrialRecord) -> None:
        self.trials += 1
        if self.trials % 250 == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.bytes[self.trials] = pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(("strategy", "batch_size"), [("random", 16), ("anneal", 16), ("kt", 250)])
def test_memory_is_flat(
    fake_families: None, strategy: str, batch_size: int, tmp_path: Path
) -> None:
    view = Weighing()
    settings = Settings(strategy=strategy, trials=TRIALS, batch_size=batch_size)
    result = tune(
        [parse(GEMM)], detect_cpu(), tmp_path / "a.jsonl", AnalyticMeasurer(), settings, view=view
    )
    assert result.trials == TRIALS and max(view.bytes) == TRIALS
    grown = max(view.bytes[at] for at in view.bytes if at > WARM) - view.bytes[WARM]
    assert grown < 40 * MEBIBYTE, {at: size / MEBIBYTE for at, size in view.bytes.items()}
