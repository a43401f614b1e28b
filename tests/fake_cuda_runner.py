"""A runner process that answers as a GPU's would; the program's path says what happens."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from kt.logs.record import Failure, Timing
from kt.tuner.backend.cpu import Compared, Ran
from kt.tuner.backend.cuda import opponent_stage
from kt.tuner.backend.driver import LOST, CudaError, sticky
from kt.tuner.backend.serve import report


class FakeCudaRunner:
    """Loses its context for good after a sticky error, as a process does on a GPU."""

    def __init__(self, broken: str = "") -> None:
        if broken and Path(broken).exists():
            raise CudaError("cuInit", 100, "CUDA_ERROR_NO_DEVICE")
        self._lost = 0

    def pid(self) -> int:
        return os.getpid()

    def run(self, program: Any, text: str, seed: int, seconds: float, incumbent_us: Any) -> Ran:
        report("load")
        word, _, number = Path(program.path).name.partition(" ")
        report("check")
        if word == "hang":
            time.sleep(60)
        if word == "slow":
            time.sleep(float(number))
        if word == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "nobody":
            raise CudaError("cuMemAlloc", int(number), f"error {number}")
        code = self._lost or (int(number) if word == "code" else 0)
        if not code:
            return Ran(Timing((5.0,), 5.0), 0.1, 0.1)
        self._lost = code if sticky(code) or code in LOST else 0
        return Ran(Failure(_kind(code), "check", f"cuCtxSynchronize failed: {code}"), 0.1, 0.0)

    def compare(
        self, programs: Any, text: str, seed: int, seconds: float, vendor: bool,
        opponents: tuple[str, ...], rested: bool,
    ) -> Compared:  # fmt: skip
        """Takes as long to make an opponent as its name says, and as long to load a program."""
        for i, program in enumerate(programs):
            report(str(i))
            time.sleep(float(Path(program.path).name))
        for name in opponents:
            report(opponent_stage(name))
            time.sleep(float(name))
        return Compared(((1.0,),) * len(programs), opponents={name: (1.0,) for name in opponents})


def _kind(code: int) -> Any:
    from kt.tuner.backend.cuda import _kind

    return _kind(code)
