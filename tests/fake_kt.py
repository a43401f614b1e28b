"""`kt` with the fake family and measurer, in this process or as a program of its own.

    python tests/fake_kt.py tune gemm 64x64x64 --strategy random

`KT_FAKE_SECONDS` is the time of a trial; `KT_FAKE_FAIL` makes every trial fail.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__)

if __name__ == "__main__":
    sys.path.insert(0, str(PROGRAM.parent))


def measurer(*_: Any, **__: Any) -> Any:
    """Stands in for `LocalMeasurer`."""
    from fakes import AnalyticMeasurer, analytic_outcome

    from kt.logs.record import Failure, Outcome
    from kt.spaces.theta import Theta

    def failing(theta: Theta) -> Outcome:
        number = theta.tile["bm"]
        return Failure("compile_error", "build", f"error: no {number}", "kernel.c:1: detail")

    outcome = failing if os.environ.get("KT_FAKE_FAIL") else analytic_outcome
    return AnalyticMeasurer(outcome, seconds=float(os.environ.get("KT_FAKE_SECONDS", "0")))


def main() -> None:
    """The program."""
    from fakes import FakeFamily

    from kt.spaces import families
    from kt.tuner import api
    from kt.tuner.cli import main as kt

    families.FAMILIES = {("gemm", "cpu"): (FakeFamily(),)}
    api.local_measurer = measurer  # type: ignore[assignment]
    kt()


if __name__ == "__main__":
    main()
