"""Shared fixtures; tests marked `gpu` run where there is a driver."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
from fakes import FakeFamily

from kt.spaces import families
from kt.tuner.devices import has_nvidia_driver

# A loaded machine is slow, and says nothing about the code.
hypothesis.settings.register_profile(
    "kt",
    deadline=None,
    derandomize=True,  # what CI judges does not depend on luck
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kt")


ALONE = frozenset({
    "test_backend_build", "test_backend_cuda_host", "test_backend_timing", "test_backend_turn",
    "test_backend_worker",
    "test_bench", "test_claim", "test_cli_tune", "test_console", "test_dispatch", "test_faults",
    "test_hardening", "test_hostile", "test_journal", "test_memory", "test_model", "test_pool",
    "test_real_runs", "test_stop", "test_store",
})  # fmt: skip
"""Modules that time, kill, or fill disks and memory: nothing may run beside them."""


@pytest.hookimpl(tryfirst=True)  # `-m` selects by these marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)
    if not has_nvidia_driver():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def fake_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GEMM on the CPU is served by the fake family alone."""
    monkeypatch.setattr(families, "FAMILIES", {("gemm", "cpu"): (FakeFamily(),)})
    yield
