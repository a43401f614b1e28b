"""A job that holds a device's turn, and notes when."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kt.tuner.backend.turn import Turn


class Holder:
    """Takes the turn `name` of a folder; writes one line `begin end` a job."""

    def __init__(self, folder: str, name: str = "gpu") -> None:
        self._folder = Path(folder)
        self._turn = Turn(name, self._folder)

    def hold(self, seconds: float, times: int = 1) -> None:
        for _ in range(times):
            with self._turn:
                begin = time.monotonic()
                time.sleep(seconds)
                end = time.monotonic()
            with open(self._folder / "held", "a") as file:
                file.write(f"{begin} {end}\n")

    def die_holding(self) -> None:
        with self._turn:
            os.kill(os.getpid(), signal.SIGKILL)

    def held(self) -> list[tuple[float, float]]:
        lines = (self._folder / "held").read_text().splitlines()
        return sorted((float(begin), float(end)) for begin, end in map(str.split, lines))
