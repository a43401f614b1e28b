"""NVRTC builds for named GPUs on a machine without one; skipped without the extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kt.logs.record import Failure
from kt.spaces.errors import ToolchainError
from kt.tuner.backend import nvrtc, resources
from kt.tuner.backend.build import Binary, Builder
from kt.tuner.backend.builders import BuilderPool
from kt.tuner.backend.cache import BinaryCache

PLAIN = """
extern "C" __global__ void kt_kernel(const float *x, float *y) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[255 - threadIdx.x] * 2.0f;
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) kt_kernel(const float *x, float *y) {
    float v[96];
    #pragma unroll
    for (int i = 0; i < 96; i++) v[i] = x[threadIdx.x + i * 1024];
    #pragma unroll 1
    for (int r = 0; r < 10; r++) {
        #pragma unroll
        for (int i = 0; i < 96; i++) v[i] = v[i] * v[(i * 37 + 11) % 96] + 1.0f;
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < 96; i++) y[threadIdx.x + i * 1024] = v[i];
}
"""
GREEDY = """
extern "C" __global__ void kt_kernel(float *y) {
    __shared__ float tile[80000];
    tile[threadIdx.x] = 1;
    y[0] = tile[3];
}
"""


@pytest.fixture(scope="module")
def toolchain() -> nvrtc.Nvrtc:
    pytest.importorskip("cuda.bindings.nvrtc")
    pytest.importorskip("elftools")
    return nvrtc.find_nvrtc()


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(BinaryCache(tmp_path / "cache"), BinaryCache(tmp_path / "spare"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_resources_come_from_the_log_and_from_the_cubin(
    toolchain: nvrtc.Nvrtc, builder: Builder, arch: str
) -> None:
    plain = builder.build(PLAIN, toolchain, arch, 60)
    assert isinstance(plain, Binary)
    assert plain.path.read_bytes()[:4] == b"\x7fELF"
    assert 4 <= plain.facts.registers <= 64 and plain.facts.shared_bytes >= 1024
    assert plain.facts.spill_bytes == plain.facts.stack_bytes == 0
    stated = resources.from_cubin(plain.path.read_bytes())
    assert (stated.registers, stated.shared_bytes) == (
        plain.facts.registers, plain.facts.shared_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_spills_are_seen(toolchain: nvrtc.Nvrtc, builder: Builder, arch: str) -> None:
    spilling = builder.build(SPILLING, toolchain, arch, 60)
    assert isinstance(spilling, Binary)
    assert spilling.facts.spill_bytes > 100 and spilling.facts.stack_bytes > 0
    assert spilling.facts.registers <= 32
    assert resources.from_cubin(spilling.path.read_bytes()).stack_bytes == (
        spilling.facts.stack_bytes
    )


def test_failures_say_why(toolchain: nvrtc.Nvrtc, builder: Builder) -> None:
    wrong = builder.build("__global__ void k() { undeclared(); }", toolchain, "sm_80", 60)
    assert isinstance(wrong, Failure) and wrong.failure == "compile_error"
    assert "undeclared" in wrong.message
    greedy = builder.build(GREEDY, toolchain, "sm_80", 60)
    assert isinstance(greedy, Failure) and greedy.failure == "resource"


def test_equal_code_gives_equal_cubins(toolchain: nvrtc.Nvrtc, builder: Builder) -> None:
    built = [builder.build(text, toolchain, "sm_90a", 60) for text in (PLAIN, "// other\n" + PLAIN)]
    first, second = (one for one in built if isinstance(one, Binary))
    assert first.facts.binary == second.facts.binary and first.path != second.path


def test_a_pool_builds_for_a_gpu_that_is_not_here(
    toolchain: nvrtc.Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / "cache"))
    pool = BuilderPool(tmp_path, 1)
    built = pool.submit(PLAIN, "cuda", "sm_90a", 60).result()
    late = pool.submit(SPILLING, "cuda", "sm_90a", 1e-3).result()
    pool.close()
    assert isinstance(built, Binary) and built.facts.registers > 0
    assert isinstance(late, Failure) and late.failure == "build_timeout"


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(ToolchainError, match=r"pip install -e '\.\[cuda-build\]'"):
        nvrtc.find_nvrtc()


def test_log_lines_are_read() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    528 bytes stack frame, 620 bytes spill stores, 700 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
"""
    assert resources.from_log(log) == resources.Resources(168, 1024, 528, 1320)
    assert len(resources.advisories(log)) == 1
