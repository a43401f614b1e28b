"""Planted races fit the kernel's current text, and compile."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from mutants import MUTANTS, SMALL, TEXT, mutant, sound

from kt.logs.record import BuildFacts
from kt.spaces.target import CUDA_TARGETS


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs the extra cuda-build")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_race_is_a_kernel(name: str, tmp_path: Path) -> None:
    from kt.tuner.backend.nvrtc import find_nvrtc

    target = CUDA_TARGETS["h200"]
    assert mutant(target, name, SMALL).source != mutant(target, name, TEXT).source
    planted, healthy = mutant(target, name), sound(target, name)
    assert planted.source != healthy.source and planted.launches == healthy.launches
    (tmp_path / "kernel.cu").write_text(planted.source)
    facts = find_nvrtc().compile(tmp_path, target.arch, 60)
    assert isinstance(facts, BuildFacts), facts
