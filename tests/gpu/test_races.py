"""Races planted in a sound kernel, and what catches them: repeated checks, or the sanitizer.

    PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -s -m gpu tests/gpu/test_races.py

A table of what the numbers said is printed last.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutants import MUTANTS, TEXT, mutant, sound

from kt.logs.record import Settings
from kt.spaces.kernel import Kernel
from kt.spaces.target import Target
from kt.spaces.workload import parse
from kt.tuner.backend.build import Binary
from kt.tuner.pool import LocalMeasurer

pytestmark = pytest.mark.gpu

SEEDS = (0, 1, 2)
SANITIZER_FOUND = 9


@pytest.fixture(scope="module")
def target() -> Target:
    from kt.tuner.devices import detect_gpu

    return detect_gpu("the test")


@pytest.fixture(scope="module")
def measurer(target: Target) -> Iterator[LocalMeasurer]:
    with LocalMeasurer(target, Settings(run_timeout=20.0)) as made:
        made.prepare([parse(TEXT)])
        yield made


def verdict(measurer: LocalMeasurer, kernel: Kernel) -> str:
    """What repeated verification says of a kernel; empty when it found nothing."""
    built = measurer.build_source(kernel.source, "cuda")
    assert isinstance(built, Binary), built
    return measurer.verify_binary(built.started_by(kernel), kernel.workload, SEEDS).failure


@pytest.mark.parametrize("name", MUTANTS)
def test_the_kernel_without_the_race_is_sound(
    name: str, measurer: LocalMeasurer, target: Target
) -> None:
    assert verdict(measurer, sound(target, name)) == ""


def test_repeated_verification_sees_planted_races(measurer: LocalMeasurer, target: Target) -> None:
    found = {name: verdict(measurer, mutant(target, name)) for name in MUTANTS}
    print()
    for name, said in found.items():
        print(f"{name:52} {said[:100] or 'nothing'}")
    for name, change in MUTANTS.items():
        if change.by_numbers:
            assert found[name].startswith(("race: ", "wrong_result: ")), (name, found[name])
    assert any(said.startswith("race: ") for said in found.values())


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("name", [name for name, one in MUTANTS.items() if one.by_racecheck])
def test_racecheck_sees_the_race_and_only_that(name: str) -> None:
    """Races on shared memory, also those that the numbers do not show."""
    script = Path(__file__).with_name("sanitize.py")
    codes = {}
    for which in ("--race", "--sound"):
        command = [
            "compute-sanitizer", "--tool", "racecheck", "--error-exitcode", str(SANITIZER_FOUND),
            sys.executable, str(script), which, name,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        codes[which] = done.returncode
        print(done.stdout[-1500:], done.stderr[-500:])
    assert codes == {"--race": SANITIZER_FOUND, "--sound": 0}
