"""`kt apply --dispatch`: one file for many shapes, end to end, and what it refuses."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cuda_log import write_log
from many_shapes import Library
from quick import Quick

from kt.logs.journal import read_log
from kt.logs.query import best_trials
from kt.logs.record import Failure
from kt.spaces.errors import KtError
from kt.spaces.gemm import many
from kt.spaces.kernel import Kernel
from kt.spaces.target import CUDA_TARGETS, detect_cpu
from kt.spaces.workload import Gemm, parse
from kt.tuner import apply, pool, proof_shapes, shapes
from kt.tuner.api import effective_settings
from kt.tuner.emit import is_ours
from kt.tuner.emit_shapes import shapes_text
from kt.tuner.lookup import open_runs
from kt.tuner.tune import tune

Kt = Callable[..., Any]
OPTIONS = "layout=nt epilogue=bias+relu dtype=fp32"
TUNED = [f"gemm {shape} {OPTIONS}" for shape in ("48x80x64", "1x70x50", "33x17x65 batch=3")]
OTHER = ["gemm 48x80x64 dtype=fp64"]
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two logs with measured trials; the first workload is in both."""
    folder = tmp_path_factory.mktemp("dispatch") / "logs"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_CACHE_DIR", str(folder.parent / "cache"))
        patch.setitem(pool._FINAL_SECONDS, "cpu", 0.2)
        settings = effective_settings(detect_cpu(), {
            "trials": 2, "batch_size": 2, "strategy": "random", "finalists": 1,
            "sample_seconds": 0.005,
        })  # fmt: skip
        for name, texts in (("a", TUNED + OTHER), ("b", TUNED[:1])):
            with Quick(detect_cpu(), settings) as measurer:
                workloads = [parse(text) for text in texts]
                tune(workloads, detect_cpu(), folder / f"{name}.jsonl", measurer, settings)
    return folder


def edited(log: Path, to: Path, change: Callable[[list[dict[str, Any]]], object]) -> Path:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    change(lines)
    to.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return to


def gemm(text: str) -> Gemm:
    workload = parse(text)
    assert isinstance(workload, Gemm)
    return workload


# -- end to end on the CPU ------------------------------------------------------------------------


@needs_cc
def test_one_file_serves_every_shape(real_kt: Kt, logs: Path, tmp_path: Path) -> None:
    ran = real_kt("apply", logs, "gemm", "--dispatch", "--dtype", "fp32", "-o", "kernel.c")
    assert ran.code == 0 and "wrote kernel.c: gemm, 3 tuned shapes and any other" in ran.out
    source = (tmp_path / "kernel.c").read_text()
    assert is_ours(source.encode()) and source == apply(logs, " ".join(TUNED), dispatch=True)
    build = re.search(r"build +(cc .*)", source)
    assert build
    subprocess.run(build[1].split(), cwd=tmp_path, check=True)
    library = Library(ctypes.CDLL(str(tmp_path / "kernel.so")), cuda=False)
    described = json.loads(library.library.kt_describe())
    assert described["layout"] == "nt" and sorted(described["workloads"]) == sorted(TUNED)
    tuned, rng = [gemm(text) for text in TUNED], np.random.default_rng(0)
    bests = {best.workload: best for best in best_trials(read_log(logs).records)}
    for w in tuned:
        facts = describe(library, w)
        best = bests[str(w)]  # of both logs
        assert (facts["run"], facts["trial"]) == (best.trial.run, best.trial.trial)
    workspace = library.workspace(tuned)
    for text in (*TUNED, f"gemm 131x1x7 {OPTIONS}", f"gemm 48x80x65 {OPTIONS}"):
        library.check(gemm(text), workspace, rng)
    assert describe(library, gemm(f"gemm 48x80x65 {OPTIONS}")) == {}


def describe(library: Library, w: Gemm) -> dict[str, Any]:
    extents = map(ctypes.c_int64, (w.m, w.n, w.k, w.batch))
    found: dict[str, Any] = json.loads(library.library.kt_describe_gemm(*extents))
    return found


@needs_cc
def test_verify_and_bench(real_kt: Kt, logs: Path) -> None:
    words = ("apply", logs, *TUNED[:2], "--dispatch", "-o", "k.c", "--verify", "--bench")
    ran = real_kt(*words)
    assert ran.code == 0, ran.err
    for text in TUNED[:2]:
        assert f"{text} (tuned): verified:" in ran.out and f"{text}: bench" in ran.out
    assert ran.out.count("(any extents): verified:") == 5 and ran.out.count("default") == 2


@needs_cc
@pytest.mark.parametrize(
    ("find", "put", "says"),
    [
        ("#define KT_M 48\n", "#define KT_M 47\n", r"48x80x64 .*\(tuned\) is wrong"),
        ("DEPTH = 128,", "DEPTH = 128, NONE = sizeof(,", "the emitted file does not compile"),
        ("kt_min(DEPTH, p->k - k0)", "kt_min(DEPTH - 1, p->k - k0)", r"\(any extents\) is wrong"),
    ],
)
def test_an_unsound_file_is_refused(logs: Path, find: str, put: str, says: str) -> None:
    found, _ = open_runs(logs)
    chosen, _ = shapes.choose_shapes(found, TUNED[:1], {}, False)
    source = shapes_text(chosen, "logs")
    assert find in source
    with pytest.raises(KtError, match=says):
        proof_shapes.prove_shapes(chosen, source.replace(find, put), True, False, print)


def test_the_python_function(logs: Path) -> None:
    text = apply(logs, " ".join(TUNED[:2]), dispatch=True)
    assert text.startswith("/* kt kernel: gemm of many shapes, layout=nt epilogue=bias+relu")
    assert text.count("/* -- gemm ") == 2


# -- refusals -------------------------------------------------------------------------------------


def test_one_file_has_one_set_of_options(real_kt: Kt, logs: Path) -> None:
    ran = real_kt("apply", logs, "--dispatch")
    assert ran.refused("one file has one layout", "nt of '", "nn of '", "restrict it with --layout")
    assert real_kt("apply", logs, "--dispatch", "--layout", "tt").refused("with --layout tt")
    assert real_kt("apply", logs, "conv2d", "--dispatch").refused("the log has no conv2d; it has")
    assert real_kt("apply", logs, "gemm", "7x7x7", "--dispatch").refused("has no 'gemm 7x7x7'")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--trial", "1"), "leave --trial out"),
        (("--predict",), "leave --predict out"),
        (("--format", "json"), "--dispatch writes c"),
    ],
)
def test_options_that_do_not_go_with_it(
    real_kt: Kt, logs: Path, words: tuple[str, ...], says: str
) -> None:
    assert real_kt("apply", logs, *TUNED, "--dispatch", *words).refused(says)


def test_a_shape_without_a_result_is_left_out(real_kt: Kt, logs: Path, tmp_path: Path) -> None:
    def fail(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["type"] == "trial" and line["workload"] == TUNED[1]:
                line["outcome"] = msgspec.to_builtins(Failure("crash", "run", "SIGSEGV"))
        lines[:] = [x for x in lines if x["type"] != "final" or x["workload"] != TUNED[1]]

    log = edited(logs / "a.jsonl", tmp_path / "log.jsonl", fail)
    ran = real_kt("apply", log, "--dispatch", "--dtype", "fp32", "-o", "k.c")
    assert ran.code == 0 and "2 tuned shapes" in ran.out
    assert f"left out: '{TUNED[1]}': the log has no valid result" in ran.err
    assert real_kt("apply", log, TUNED[1], "--dispatch").refused("no valid result", "SIGSEGV")


def test_one_file_is_for_one_device(real_kt: Kt, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for name, text in (("h200", "gemm 8x64x256 dtype=bf16"), ("a100", "gemm 9x64x256 dtype=bf16")):
        write_log(folder / f"{name}.jsonl", text, target=CUDA_TARGETS[name], run=name)
    ran = real_kt("apply", folder, "--dispatch", "--any-device")
    assert ran.refused("for one device", "NVIDIA H200", "NVIDIA A100", "'gemm 8x64x256 dtype=bf16'")


def test_what_another_device_measured_is_left_out(real_kt: Kt, logs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    shutil.copytree(logs, folder)
    write_log(folder / "h200.jsonl", f"gemm 7x64x256 {OPTIONS}")
    ran = real_kt("apply", folder, "--dispatch", "--dtype", "fp32", "-o", "k.c")
    assert ran.code == 0 and "3 tuned shapes" in ran.out
    assert f"left out: 'gemm 7x64x256 {OPTIONS}': measured on NVIDIA H200" in ran.err


def test_other_operators(real_kt: Kt, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", "conv2d 1x8x8x8,8x3x3 dtype=bf16")
    ran = real_kt("apply", log, "conv2d", "--dispatch", "--any-device")
    assert ran.refused("--dispatch: serves gemm alone, not 'conv2d 1x8x8x8,8x3x3 dtype=bf16'")
    ran = real_kt("apply", log, "--dispatch", "--any-device")
    assert ran.refused("the log has no gemm; it has 'conv2d 1x8x8x8,8x3x3 dtype=bf16'")


# -- CUDA -----------------------------------------------------------------------------------------


@pytest.fixture
def cuda_logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for i, m in enumerate((8, 128)):
        write_log(folder / f"{i}.jsonl", f"gemm {m}x64x256 dtype=bf16", run=f"run{i}")
    return folder


def test_a_cuda_file(real_kt: Kt, cuda_logs: Path) -> None:
    ran = real_kt("apply", cuda_logs, "--dispatch", "--any-device")
    assert ran.code == 0
    for text in ("nvcc -O3 -gencode=arch=compute_90a,code=sm_90a --shared", "void *stream)",
                 "kt_workspace_zeroed_bytes_gemm()", "/* -- gemm 8x64x256 dtype=bf16",
                 "namespace kt1 {", "namespace kt_any {", "not aligned to 16"):  # fmt: skip
        assert text in ran.out
    assert real_kt("apply", cuda_logs, "--dispatch").refused("measured on NVIDIA H200")
    words = ("apply", cuda_logs, "--dispatch", "--any-device", "--format", "python")
    assert real_kt(*words).refused("--dispatch writes cu")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_builds_it(cuda_logs: Path, tmp_path: Path) -> None:
    write_log(cuda_logs / "2.jsonl", "gemm 128x72x136 dtype=bf16", is_for_hopper, run="run2")
    source = apply(cuda_logs, any_device=True, dispatch=True)
    (tmp_path / "kernel.cu").write_text(source)
    build = re.search(r"build +(nvcc .*)", source)
    assert build
    subprocess.run(build[1].split(), cwd=tmp_path, check=True)
    library = Library(ctypes.CDLL(str(tmp_path / "kernel.so")), cuda=True)
    w = gemm("gemm 128x72x136 dtype=bf16")
    assert describe(library, w)["family"] == "wgmma"
    assert describe(library, replace(w, m=127)) == {}
    assert library.launch((128, 72, 0, 1), [4096] * 3, 4096) == -1
    assert library.launch((128, 72, 136, 1), [4096, 4096, 4104], 4096) == -2
    shim = proof_shapes.one_shape(tmp_path / "kernel.so", w)
    (tmp_path / "one.cu").write_text(shim)
    command = [*build[1].split()[:-3], "-o", "one.so", "one.cu"]
    subprocess.run(command, cwd=tmp_path, check=True)
    one = ctypes.CDLL(str(tmp_path / "one.so"))
    one.kt_workspace_bytes.restype = ctypes.c_size_t
    assert one.kt_workspace_bytes() == library.workspace_bytes(128, 72, 136, 1)
    assert one.kt_launch((ctypes.c_void_p * 3)(4096, 4096, 4104), None, None) == -2


def is_for_hopper(kernel: Kernel) -> bool:
    return kernel.family == "wgmma"


@pytest.mark.parametrize(
    "nasty", ["a*/ int evil; /* b", "\nint evil;\n", '"; int evil; "', "evil\\"]
)
def test_hostile_texts_in_the_file(cuda_logs: Path, nasty: str) -> None:
    for log in cuda_logs.iterdir():
        edited(log, log, lambda lines: [line.update(time=nasty) for line in lines])
    source = apply(cuda_logs, any_device=True, dispatch=True)
    outside = re.sub(r'/\*.*?\*/|"([^"\\]|\\.)*"', "", source, flags=re.DOTALL)
    assert "evil" in source and "evil" not in outside


def test_element_types_without_a_kernel_for_any_extents(
    real_kt: Kt, cuda_logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(many.DTYPES, "cuda", ("fp32",))  # type: ignore[index]
    ran = real_kt("apply", cuda_logs, "--dispatch", "--any-device")
    assert ran.refused("--dispatch: serves fp32, not bf16")
