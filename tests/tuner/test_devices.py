"""Which devices a command uses."""

from __future__ import annotations

import pytest

from kt.spaces.errors import SettingsError
from kt.spaces.target import CUDA_TARGETS, detect_cpu
from kt.tuner import devices

H200, A100 = CUDA_TARGETS["h200"], CUDA_TARGETS["a100"]


@pytest.fixture(autouse=True)
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "devices_like", lambda target: [H200, A100, H200])


def test_all_that_are_alike_by_default() -> None:
    assert devices.chosen_gpus(H200, None) == (0, 2)
    assert devices.chosen_gpus(A100, None) == (1,)
    assert devices.chosen_gpus(detect_cpu(), None) == ()


def test_those_that_are_asked_for() -> None:
    assert devices.chosen_gpus(H200, (2,)) == (2,)
    with pytest.raises(SettingsError, match=r"--gpus 0,1: no NVIDIA H200 at 1; accepts 0,2"):
        devices.chosen_gpus(H200, (0, 1))
    with pytest.raises(SettingsError, match=r"--gpus 9: no NVIDIA A100.* at 9; accepts 1"):
        devices.chosen_gpus(A100, (9,))
    with pytest.raises(SettingsError, match="--gpus is for CUDA targets: this one is "):
        devices.chosen_gpus(detect_cpu(), (0,))


def test_the_cpu_is_always_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert devices.devices_like(detect_cpu()) == [detect_cpu()]
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: False)
    assert devices.devices_like(H200) == [] and devices.chosen_gpus(H200, None) == (0,)
