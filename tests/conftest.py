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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not has_nvidia_driver():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def fake_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GEMM on the CPU is served by the fake family alone."""
    monkeypatch.setattr(families, "FAMILIES", {("gemm", "cpu"): (FakeFamily(),)})
    yield
