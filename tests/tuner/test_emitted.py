"""Emitted kernels, built with plain `cc` and called as a user would, against NumPy."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import by_text
import numpy as np
import pytest
from numpy.typing import NDArray
from quick import Quick

from kt.logs.journal import read_log
from kt.logs.query import runs
from kt.logs.record import Timing
from kt.spaces.families import FAMILIES
from kt.spaces.target import detect_cpu
from kt.spaces.workload import parse
from kt.tuner import pool
from kt.tuner.api import effective_settings
from kt.tuner.tune import tune

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

Array = NDArray[Any]
ALIGN = 256

WORKLOADS = [
    "gemm 48x80x64 dtype=fp32",
    "gemm 33x17x65 layout=nt dtype=fp32",
    "gemm 31x47x29 batch=3 layout=tn epilogue=bias+gelu dtype=fp32",
    "gemm 19x64x23 layout=tt epilogue=scale+silu+residual dtype=fp32",
    "gemm 40x24x56 batch=2 layout=nt epilogue=bias+relu dtype=fp64",
    "gemm 1x70x50 epilogue=bias+residual dtype=fp64",
    "gemm 50x3x200 layout=tn dtype=fp64",
    "conv2d 2x9x11x13,24x3x5 stride=2x1 pad=1x2 epilogue=bias+relu+scale+shift dtype=fp32",
    "conv2d 1x12x10x8,8x3x3 pad=2 dilation=2 groups=8 epilogue=bias+residual+silu dtype=fp32",
    "attention 2x4x19x24 kv-heads=2 kv-len=33 causal=true lse=true dtype=fp32",
    "attention 1x3x21x16 kv-len=15 causal=true window=9 lse=true layout=bhsd dtype=fp32",
    "attention 1x2x30x20 value-dim=12 softcap=5.0 dtype=fp32",
]


WORKLOADS = [text for text in WORKLOADS if (text.split()[0], "cpu") in FAMILIES]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three measured trials of every workload."""
    path = tmp_path_factory.mktemp("emitted") / "log.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_CACHE_DIR", str(path.parent / "cache"))
        patch.setitem(pool._FINAL_SECONDS, "cpu", 0.2)
        settings = effective_settings(detect_cpu(), {
            "trials": 3, "batch_size": 3, "strategy": "random", "finalists": 1,
            "sample_seconds": 0.005,
        })  # fmt: skip
        with Quick(detect_cpu(), settings) as measurer:
            tune([parse(text) for text in WORKLOADS], detect_cpu(), path, measurer, settings)
    return path


def aligned(shape: tuple[int, ...], dtype: str, align: int = 16) -> tuple[Array, Array]:
    """An array that starts `align` bytes past a multiple of 256, and the memory around it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.full(size + 4 * ALIGN, 0xA5, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGN + ALIGN + align % ALIGN
    return memory[start : start + size].view(dtype).reshape(shape), memory


def built(real_kt, log: Path, folder: Path, *words: str) -> ctypes.CDLL:
    ran = real_kt("apply", log, *words)
    assert ran.code == 0, ran.err
    (folder / "k.c").write_text(ran.out)
    command = ["cc", "-O3", "-shared", "-fPIC", "-pthread", "-o", "k.so", "k.c", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(folder / "k.so"))
    library.kt_describe.restype = ctypes.c_char_p
    library.kt_workspace_bytes.restype = ctypes.c_size_t
    return library


def launch_and_check(library: ctypes.CDLL, text: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype, tolerance = ("f8", 1e-13) if "dtype=fp64" in text else ("f4", 2e-6)
    inputs, outputs = ([aligned(shape, dtype) for shape in group] for group in by_text.shapes(text))
    for array, _ in inputs:
        array[...] = rng.standard_normal(array.shape)
    for out, _ in outputs:
        out[...] = np.nan
    before = [memory.copy() for _, memory in inputs]
    size = library.kt_workspace_bytes()
    workspace, beyond = aligned((size,), "u1", align=0)
    operands = [array for array, _ in (*inputs, *outputs)]
    pointers = (ctypes.c_void_p * len(operands))(*(array.ctypes.data for array in operands))
    for _ in range(2):
        assert library.kt_launch(pointers, ctypes.c_void_p(workspace.ctypes.data)) == 0
        wanted = by_text.expected(text, operands[: len(inputs)])
        for (out, _), want in zip(outputs, wanted, strict=True):
            unseen = np.isinf(want)  # log-sum-exps of rows that see no key
            np.testing.assert_array_equal(out[unseen], want[unseen])
            out, want = out[~unseen], want[~unseen]
            np.testing.assert_allclose(out, want, rtol=0, atol=tolerance * 20 * np.abs(want).max())
            assert np.linalg.norm(out - want) <= tolerance * np.linalg.norm(want)
    for (_, memory), old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(memory, old)
    for view, memory in (*outputs, (workspace, beyond)):
        start = view.ctypes.data - memory.ctypes.data
        assert (memory[:start] == 0xA5).all() and (memory[start + view.nbytes :] == 0xA5).all()


@pytest.mark.parametrize("text", WORKLOADS)
def test_the_emitted_winner_agrees_with_numpy(
    real_kt, log: Path, tmp_path: Path, text: str
) -> None:
    library = built(real_kt, log, tmp_path, text)
    facts = json.loads(library.kt_describe())
    assert facts["workload"] == text and facts["kt_kernel"] == 1
    (run,) = runs(read_log(log).records)
    assert facts["trial"] == run.finals[text].best and facts["run"] == run.header.run
    launch_and_check(library, text, 1)


@pytest.mark.parametrize("text", WORKLOADS[1::2])
def test_every_measured_trial_agrees_with_numpy(
    real_kt, log: Path, tmp_path: Path, text: str
) -> None:
    (run,) = runs(read_log(log).records)
    trials = [t for t in run.trials.values() if t.workload == text]
    timed = [t for t in trials if isinstance(t.outcome, Timing)]
    assert len(trials) == 3 and len(timed) >= 2
    for trial in timed:
        folder = tmp_path / str(trial.trial)
        folder.mkdir()
        library = built(real_kt, log, folder, text, "--trial", str(trial.trial))
        assert json.loads(library.kt_describe())["theta"] == json.loads(trial.theta.key())
        launch_and_check(library, text, trial.trial)
