"""Bundles: built without the device, refused where they do not fit, and not built again."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kt.logs.journal import read_log
from kt.logs.query import runs
from kt.spaces.errors import KtError, SettingsError
from kt.spaces.families import space_of
from kt.spaces.target import CUDA_TARGETS, Target, detect_cpu
from kt.spaces.workload import Workload, parse
from kt.tuner import tune
from kt.tuner.api import effective_settings
from kt.tuner.backend.builders import BuilderPool
from kt.tuner.bundle import build_bundle, open_bundle

GEMM = parse("gemm 24x40x16 dtype=fp32")
THIN = parse("gemm 1x256x256 dtype=bf16")
H200 = CUDA_TARGETS["h200"]
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs the extra cuda-build"
)


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / "cache"))


def make(path: Path, workload: Workload, target: Target, seed: int = 0, **given: Any) -> Any:
    return build_bundle([workload], target, path, effective_settings(target, given), seed, 2)


@needs_cc
def test_a_run_takes_its_first_binaries_from_the_bundle(tmp_path: Path) -> None:
    made = make(tmp_path / "bundle", GEMM, detect_cpu(), batch_size=3)
    assert (made.batches, made.candidates, made.built, made.failure) == (1, 3, 3, "")
    settings = {"batch_size": 3, "trials": 4, "finalists": 1, "sample_seconds": 0.01}
    result = tune(str(GEMM), log=tmp_path / "log.jsonl", target="cpu",
                  bundle=tmp_path / "bundle", **settings)  # fmt: skip
    (run,) = runs(read_log(result.log).records)
    cached = [run.trials[i].build.cached for i in range(4)]  # type: ignore[union-attr]
    assert cached == [True, True, True, False]
    (proposed,) = runs(read_log(tmp_path / "bundle" / "proposals.jsonl").records)
    assert proposed.batches[0].entries == run.batches[0].entries
    assert not list((tmp_path / "bundle").rglob("staging"))


@needs_cc
def test_strategies_that_do_not_learn_are_bundled_whole(tmp_path: Path) -> None:
    given = {"batch_size": 2, "trials": 5, "strategy": "random"}
    made = make(tmp_path / "bundle", GEMM, detect_cpu(), **given)
    assert (made.batches, made.candidates) == (3, 5)


@needs_nvrtc
def test_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    made = make(tmp_path / "bundle", THIN, H200, batch_size=2, epsilon=0.5)
    assert (made.batches, made.built) == (3, 6)  # the lag is 2
    settings = effective_settings(H200, {"batch_size": 2, "epsilon": 0.5, "trials": 7})
    detected = msgspec.structs.replace(H200, memory_bytes=H200.memory_bytes - 10**9)
    binaries = open_bundle(tmp_path / "bundle", [THIN], detected, settings, 0)
    default = space_of(THIN, detected).kernel(int(space_of(THIN, detected).defaults()[0]))
    pool = BuilderPool(tmp_path, 1, bundles=[binaries])
    try:
        found = pool.submit(default.source, "cuda", H200.arch, 60.0).result()
    finally:
        pool.close()
    assert found.facts.cached and found.facts.registers > 0  # type: ignore[union-attr]
    assert found.path.is_relative_to(tmp_path / "bundle")  # type: ignore[union-attr]


@needs_cc
@pytest.mark.parametrize(
    ("workload", "seed", "given", "says"),
    [
        ("gemm 24x40x17 dtype=fp32", 0, {}, "made with the workloads gemm 24x40x16 dtype=fp32"),
        (str(GEMM), 1, {}, "made with --seed 0, not 1"),
        (str(GEMM), 0, {"batch_size": 3}, "made with --batch-size 2, not 3"),
        (str(GEMM), 0, {"strategy": "grid"}, "made with --strategy kt, not grid"),
    ],
)
def test_bundles_that_do_not_fit(
    tmp_path: Path, workload: str, seed: int, given: dict[str, Any], says: str
) -> None:
    make(tmp_path / "bundle", GEMM, detect_cpu(), batch_size=2)
    settings = effective_settings(detect_cpu(), {"batch_size": 2} | given)
    with pytest.raises(SettingsError, match=says):
        open_bundle(tmp_path / "bundle", [parse(workload)], detect_cpu(), settings, seed)


@needs_cc
def test_other_compilers_spaces_and_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kt.tuner import bundle

    make(tmp_path / "bundle", GEMM, detect_cpu(), batch_size=2)
    settings = effective_settings(detect_cpu(), {"batch_size": 2})
    monkeypatch.setattr(bundle, "_compiler", lambda target: "other 1.0")
    with pytest.raises(SettingsError, match=r"the compiler cc .*, not other 1.0"):
        open_bundle(tmp_path / "bundle", [GEMM], detect_cpu(), settings, 0)
    other = msgspec.structs.replace(detect_cpu(), arch="sse2", simd_bytes=16, vector_registers=16)
    with pytest.raises(SettingsError, match=r"made with --target \w+, not sse2"):
        open_bundle(tmp_path / "bundle", [GEMM], other, settings, 0)


def test_places_that_are_no_bundle(tmp_path: Path) -> None:
    settings = effective_settings(detect_cpu(), {})
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(SettingsError, match=r"no bundle, which has proposals\.jsonl"):
            open_bundle(place, [GEMM], detect_cpu(), settings, 0)
    (tmp_path / "proposals.jsonl").write_text("")
    with pytest.raises(KtError, match="the log is empty"):
        open_bundle(tmp_path, [GEMM], detect_cpu(), settings, 0)


def test_nothing_is_overwritten_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kt.tuner import bundle

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    for place in (tmp_path / "mine", tmp_path / "mine" / "file"):
        with pytest.raises(SettingsError, match="exists: name a new directory"):
            make(place, GEMM, detect_cpu())

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle, "_builds", broken)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "new", GEMM, detect_cpu())
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["mine"]


@needs_cc
def test_commands(kt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("tune", "gemm", "64x64x64", "--target", "cpu")
    assert kt(*words, "--build-only").refused("--build-only writes a new bundle: it needs -o DIR")
    assert kt(*words, "-o", "b").refused("-o needs it")
    assert kt(*words, "--build-only", "-o", "b", "--bundle", "c").refused("a new bundle")
    assert kt(*words[:3], "--build-only", "-o", "b", "--target", "cuda").refused("name the GPU")
    ran = kt(*words, "--build-only", "-o", "b", "--batch-size", "2")  # the fake compiles to nothing
    assert ran.code == 0 and "wrote b: 2 kernels of 1 batch for cpu" in ran.out
    assert kt(*words, "--gpus", "0,x").refused("accepts GPU numbers like 0,1")
    assert kt(*words, "--gpus", "1,1").refused("names a GPU twice")
