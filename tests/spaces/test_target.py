"""Targets: the named ones are complete, this machine's is detected."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import pytest

from kt.spaces import target
from kt.spaces.errors import TargetError
from kt.spaces.target import CUDA_TARGETS, Target, detect_cpu, named_target, target_names


@pytest.mark.parametrize("name", CUDA_TARGETS)
def test_a_named_gpu_is_described_completely(name: str) -> None:
    gpu = named_target(name)
    assert gpu.name == name and gpu.kind == "cuda" and gpu.arch.startswith("sm_")
    for field in ("cores", "clock_mhz", "memory_bytes", "bandwidth", "l1_bytes", "l2_bytes",
                  "shared_bytes", "shared_bytes_sm", "registers_sm", "threads_sm"):  # fmt: skip
        assert getattr(gpu, field) > 0, field
    assert gpu.shared_bytes < gpu.shared_bytes_sm
    assert {"fp64", "fp32", "tf32", "fp16", "bf16", "int8"} <= gpu.peak.keys()
    assert all(value > 0 for value in gpu.peak.values())


def test_the_shared_memory_of_the_h200_is_that_of_its_architecture() -> None:
    assert named_target("h200").shared_bytes == 232448  # bytes a block may opt in to on sm_90


def test_an_unknown_target_is_refused_with_the_accepted_names() -> None:
    with pytest.raises(TargetError) as caught:
        named_target("h201")
    assert all(name in str(caught.value) for name in ("'h201'", *target_names()))
    assert "\n" not in str(caught.value)


def test_this_machines_cpu_is_detected() -> None:
    cpu = named_target("cpu")
    assert cpu == detect_cpu()
    assert cpu.kind == "cpu" and 1 <= cpu.cores <= (os.cpu_count() or 1)
    assert cpu.simd_bytes in (16, 32, 64) and cpu.vector_registers in (16, 32)
    assert 0 < cpu.l1_bytes <= cpu.l2_bytes and cpu.memory_bytes > 2**20
    assert cpu.peak["fp32"] == 2 * cpu.peak["fp64"] > 0
    assert all(math.isfinite(value) for value in cpu.descriptors().values())


def test_the_instruction_set_follows_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"avx512f", "avx512vl", "avx512dq", "avx512bw", "avx2", "fma"}
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    assert target._simd_arch(full) == "avx512"
    assert target._simd_arch(full - {"avx512bw"}) == "avx2"
    assert target._simd_arch({"avx2"}) == "sse2"
    monkeypatch.setattr(target.platform, "machine", lambda: "aarch64")
    assert target._simd_arch(set()) == "neon"
    monkeypatch.setattr(target.platform, "machine", lambda: "riscv64")
    assert target._simd_arch(set()) == "generic"


def test_a_cgroup_quota_limits_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for text, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("?", 8)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert target.usable_cores() == cores


def test_same_device_looks_at_the_device_only() -> None:
    cpu = detect_cpu()
    changed = msgspec.structs.replace
    assert cpu.same_device(changed(cpu, name="other", memory_bytes=1, clock_mhz=1))
    assert not cpu.same_device(changed(cpu, cores=cpu.cores + 1))
    assert not cpu.same_device(changed(cpu, processor="Another"))
    assert not cpu.same_device(named_target("h200"))


@pytest.mark.parametrize("name", ["cpu", *CUDA_TARGETS])
def test_a_target_survives_the_log(name: str) -> None:
    there = named_target(name)
    assert msgspec.json.decode(msgspec.json.encode(there), type=Target) == there
