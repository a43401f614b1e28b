"""Every CUDA family's text is also CUDA C++ as nvcc understands it, not only as NVRTC does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kt.spaces.families import space_of
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import parse

TEXTS = (
    "gemm 100x7x333 epilogue=bias+gelu dtype=bf16", "gemm 100x70x33 layout=tt dtype=fp64",
    "conv2d 2x9x9x32,32x3x3 pad=1 epilogue=bias+relu dtype=bf16",
    "conv2d 2x9x9x16,16x3x3 pad=1 groups=4 dtype=fp16",
    "conv2d 2x9x9x16,16x3x3 pad=1 groups=16 dtype=bf16",
    "attention 1x4x7x64 kv-heads=1 kv-len=300 lse=true dtype=fp16",
)  # fmt: skip
H200 = CUDA_TARGETS["h200"]
FAMILIES = [
    (text, part.family.name) for text in TEXTS for part in space_of(parse(text), H200).parts
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("text", "family"), FAMILIES)
def test_the_default_compiles_with_nvcc(text: str, family: str, tmp_path: Path) -> None:
    space = space_of(parse(text), H200)
    point = next(p for p in space.defaults().tolist() if space.family_of(p) == family)
    (tmp_path / "kernel.cu").write_text(space.kernel(point).source)
    command = ["nvcc", f"-arch={H200.arch}", "--ptx", "kernel.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr[:2000]
