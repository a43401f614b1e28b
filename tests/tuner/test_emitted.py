"""Emitted kernels, built with plain `cc` and called as a user would, against NumPy."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from quick import Quick

from kt.logs.journal import read_log
from kt.logs.query import runs
from kt.logs.record import Timing
from kt.spaces.target import detect_cpu
from kt.spaces.workload import parse
from kt.tuner import pool
from kt.tuner.api import effective_settings
from kt.tuner.tune import tune

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

Array = NDArray[Any]
ALIGN = 256
EXTRA = ("bias", "residual", "scale")  # in the order of the arguments

WORKLOADS = [
    "gemm 48x80x64 dtype=fp32",
    "gemm 33x17x65 layout=nt dtype=fp32",
    "gemm 31x47x29 batch=3 layout=tn epilogue=bias+gelu dtype=fp32",
    "gemm 19x64x23 layout=tt epilogue=scale+silu+residual dtype=fp32",
    "gemm 40x24x56 batch=2 layout=nt epilogue=bias+relu dtype=fp64",
    "gemm 1x70x50 epilogue=bias+residual dtype=fp64",
    "gemm 50x3x200 layout=tn dtype=fp64",
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three measured trials of every workload."""
    path = tmp_path_factory.mktemp("emitted") / "log.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_CACHE_DIR", str(path.parent / "cache"))
        patch.setattr(pool, "_FINAL_SECONDS", 0.2)
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


def expected(text: str, inputs: list[Array]) -> Array:
    """The workload in float64, by its text alone."""
    words = dict(word.split("=") for word in text.split()[2:])
    layout, epilogue = words.get("layout", "nn"), words.get("epilogue", "").split("+")
    a, b, *more = (one.astype(np.float64) for one in inputs)
    extra = dict(zip((name for name in EXTRA if name in epilogue), more, strict=True))
    out = (a.swapaxes(-1, -2) if layout[0] == "t" else a) @ (
        b.swapaxes(-1, -2) if layout[1] == "t" else b
    )
    for step in filter(None, epilogue):
        if step in ("bias", "residual"):
            out = out + extra[step]
        elif step == "scale":
            out = out * extra[step]
        elif step == "relu":
            out = np.maximum(out, 0)
        elif step == "gelu":
            out = out / 2 * (1 + np.vectorize(math.erf)(out / math.sqrt(2)))
        else:
            out = out / (1 + np.exp(-out))
    return out


def shapes(text: str) -> list[tuple[int, ...]]:
    """Of the inputs in argument order and of the output, by the workload's text alone."""
    words = dict(word.split("=") for word in text.split()[2:])
    m, n, k = map(int, text.split()[1].split("x"))
    batch = (int(words["batch"]),) if "batch" in words else ()
    layout, epilogue = words.get("layout", "nn"), words.get("epilogue", "").split("+")
    extra = {"bias": (n,), "residual": (*batch, m, n), "scale": (n,)}
    return [
        (*batch, *((m, k) if layout[0] == "n" else (k, m))),
        (*batch, *((k, n) if layout[1] == "n" else (n, k))),
        *(extra[step] for step in EXTRA if step in epilogue),
        (*batch, m, n),
    ]


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
    *inputs, (out, around) = (aligned(shape, dtype) for shape in shapes(text))
    for array, _ in inputs:
        array[...] = rng.standard_normal(array.shape)
    out[...] = np.nan
    before = [memory.copy() for _, memory in inputs]
    size = library.kt_workspace_bytes()
    workspace, beyond = aligned((size,), "u1", align=0)
    operands = [array for array, _ in inputs] + [out]
    pointers = (ctypes.c_void_p * len(operands))(*(array.ctypes.data for array in operands))
    for _ in range(2):
        assert library.kt_launch(pointers, ctypes.c_void_p(workspace.ctypes.data)) == 0
        want = expected(text, [array for array, _ in inputs])
        np.testing.assert_allclose(out, want, rtol=0, atol=tolerance * 20 * np.abs(want).max())
        assert np.linalg.norm(out - want) <= tolerance * np.linalg.norm(want)
    for (_, memory), old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(memory, old)
    for view, memory in ((out, around), (workspace, beyond)):
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


@pytest.mark.parametrize("text", WORKLOADS[1:6:2])
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
