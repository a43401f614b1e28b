"""One writer a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kt.logs.claim import Claim
from kt.spaces.errors import LogError

HOLD = """
import sys
from pathlib import Path
from kt.logs.claim import Claim
with Claim(Path(sys.argv[1]), "a"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_has_one_writer_and_other_runs_are_free(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    log.write_text("{}\n")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        with pytest.raises(LogError, match=r"run a of .* is being written by another process"):
            Claim(log, "a")
        with Claim(log, "b"):
            log.read_text()  # closing another descriptor of the file releases nothing
            with pytest.raises(LogError, match="run b"):
                Claim(log, "b")
    finally:
        holder.kill()
        holder.communicate()
    with Claim(log, "a"):  # it died with its process
        pass
