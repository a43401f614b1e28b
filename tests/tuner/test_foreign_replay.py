"""`kt replay` of other tools' files and `kt export`, as commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import scored_space
from foreign_files import cache, t1, t4, write

Kt = Callable[..., object]


def facts(ran: object) -> dict[str, object]:
    assert ran.code == 0, ran  # type: ignore[attr-defined]
    found: dict[str, object] = json.loads(ran.out)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("make", [t4, cache])
def test_a_recording_is_described(real_kt: Kt, tmp_path: Path, make: Callable[[], object]) -> None:
    path = write(tmp_path / "r.json.gz", make())
    found = facts(real_kt("replay", path, "--json"))
    assert found["points"] == 30 and found["optimum_us"] == 1000.0
    shown = real_kt("replay", path)
    assert "30 configurations of 32 in 3 parameters" in shown.out  # type: ignore[attr-defined]
    assert "x=4, y=48, mode=a" in shown.out  # type: ignore[attr-defined]


def test_a_damaged_archive_is_read_as_other_commands_read_it(real_kt: Kt, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json.gz", t4())
    raw = bytearray(path.read_bytes())
    raw[-8:] = bytes(8)  # its checksum
    path.write_bytes(raw)
    refused, shown = real_kt("replay", path), real_kt("show", path)
    assert "Error -3" not in refused.err and refused.err == shown.err  # type: ignore[attr-defined]
    assert refused.code == shown.code != 0  # type: ignore[attr-defined]


def test_a_strategy_searches_a_recording(real_kt: Kt, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", scored_space.t4())
    words = ("--strategy", "random", "--seeds", "3", "--budget", "40", "--json")
    found = facts(real_kt("replay", path, *words))
    shares = found["of_best"]
    assert isinstance(shares, dict)
    assert list(shares) == ["16", "40"] and 0 < shares["16"] <= shares["40"] <= 1
    assert found["score"] is None  # too few points were recorded for it to mean anything
    kt = facts(real_kt("replay", path, "--strategy", "kt", *words[2:]))
    assert kt["of_best"]["40"] > shares["40"]  # type: ignore[index]


def test_a_description_is_checked_against_the_recording(real_kt: Kt, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", t4())
    good, bad = (
        write(tmp_path / f"{i}.json", t1(f"x * y <= {n}")) for i, n in enumerate((384, 100))
    )
    assert real_kt("replay", path, "--constraints", good).code == 0  # type: ignore[attr-defined]
    refused = real_kt("replay", path, "--constraints", bad)
    assert refused.refused("recorded configurations break its conditions")  # type: ignore[attr-defined]


def test_what_makes_no_sense_is_refused(real_kt: Kt, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", t4())
    few = real_kt("replay", path, "--strategy", "kt")
    assert few.refused("at least 64 points", "this file has 30")  # type: ignore[attr-defined]
    big = write(tmp_path / "big.json", scored_space.t4())
    assert real_kt("replay", big, "--strategy", "magic").refused("--strategy magic", "autotvm")  # type: ignore[attr-defined]


def test_a_log_goes_out_and_comes_back(kt: Kt, log: Path, tmp_path: Path) -> None:
    for form in ("t4", "kernel-tuner"):
        output = tmp_path / f"{form}.json"
        assert kt("export", log, "--format", form, "-o", output).code == 0  # type: ignore[attr-defined]
        assert facts(kt("replay", output, "--json"))["points"] == 20
        printed = kt("export", log, "--format", form).out  # type: ignore[attr-defined]
        assert json.loads(printed) == json.loads(output.read_text())
    assert kt("export", log, "--format", "csv").refused("accepts t4, kernel-tuner")  # type: ignore[attr-defined]
    assert kt("replay", log, "--constraints", output).refused("--constraints")  # type: ignore[attr-defined]
