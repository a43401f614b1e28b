"""A legal kernel compiles without spilling or warnings, and fits the device as it promised."""

from __future__ import annotations

from pathlib import Path

from kt.spaces.kernel import Kernel
from kt.spaces.target import Target


def check_limits(kernel: Kernel, target: Target, directory: Path, most_spill: int = 0) -> None:
    """Compiles with NVRTC; `most_spill` are the bytes of spills and of stack that are no fault."""
    from kt.logs.record import BuildFacts
    from kt.tuner.backend.nvrtc import find_nvrtc

    (directory / "kernel.cu").write_text(kernel.source)
    facts = find_nvrtc().compile(directory, target.arch, 120.0)
    where = f"{kernel.workload} on {target.name}: {kernel.theta}\n{facts}"
    assert isinstance(facts, BuildFacts), where
    assert max(facts.spill_bytes, facts.stack_bytes) <= most_spill, where
    assert not facts.warnings, where
    for launch in kernel.launches:
        blocks = int(kernel.theta.map["blocks"]) if launch.entry == "kt_kernel" else 1
        assert launch.block[0] * facts.registers * blocks <= target.registers_sm, where
        assert launch.block[0] <= 1024 and 1 <= launch.grid[0] < 2**31, where
        assert facts.shared_bytes + launch.shared_bytes <= target.shared_bytes, where
