"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import FakeFamily

from kt.spaces import families


@pytest.fixture
def fake_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GEMM on the CPU is served by the fake family alone."""
    monkeypatch.setattr(families, "FAMILIES", {("gemm", "cpu"): (FakeFamily(),)})
    yield
