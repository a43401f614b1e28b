"""Commands run in this process against the fakes, and a log made by one of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fake_kt
import pytest

from kt.tuner import api, cli, program


@dataclass(frozen=True)
class Ran:
    """A command's end."""

    code: int
    out: str
    err: str

    def refused(self, *words: str) -> bool:
        """One clear line with these words, a non-zero exit, no traceback."""
        lines = [line for line in self.err.splitlines() if line.startswith("kt: error:")]
        missing = [word for word in words if word not in self.err]
        assert self.code in (1, 2) and len(lines) == 1 and not missing, (self, missing)
        assert "Traceback" not in self.err and "internal error" not in self.err, self.err
        return True


Kt = Callable[..., Ran]
TUNE = ("tune", "gemm", "64x64x64", "--strategy", "random", "--trials", "20")


@pytest.fixture
def real_kt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Kt:
    """Runs a command in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | os.PathLike[str]) -> Ran:
        capfd.readouterr()
        code = program.run(cli.cli, [os.fspath(word) for word in words])
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run


@pytest.fixture
def kt(fake_families: None, monkeypatch: pytest.MonkeyPatch, real_kt: Kt) -> Kt:
    """Runs a command against the fakes in an empty directory."""
    monkeypatch.setattr(api, "local_measurer", fake_kt.measurer)
    return real_kt


@pytest.fixture
def log(kt: Kt, tmp_path: Path) -> Path:
    """A log of one small run."""
    path = tmp_path / "log.jsonl"
    assert kt(*TUNE, "--log", path).code == 0
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of `time.monotonic`, which only sleeping moves on."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now
