"""Emitted Python modules of kernels that take tensor maps, launched on a driver that records."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from typing import Any

import fake_cupy
import pytest
from cuda_log import write_log

from kt.spaces.kernel import Kernel
from kt.tuner import apply

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs NVRTC: pip install -e '.[cuda-build]'"
)


class Hopper(fake_cupy.Gpu):
    """A driver that also encodes maps, and holds 30 clusters at once."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[tuple[int, int, list[int], list[int], list[int]]] = []

    def cuTensorMapEncodeTiled(
        self, found: Any, kind: int, rank: int, address: Any, extents: Any, strides: Any,
        box: Any, steps: Any, interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> int:  # fmt: skip
        assert ctypes.addressof(found) % 64 == 0 and list(steps) == [1] * rank
        assert (interleave, fill) == (0, 0)
        self.encoded.append((kind, address.value, list(extents), list(strides), list(box)))
        found[:4] = b"map%d" % swizzle
        return 0

    def cuOccupancyMaxActiveClusters(self, count: Any, function: Any, config: Any) -> int:
        count._obj.value = 30
        return 0


def module_of(path: Path, log: Path, gpu: Hopper, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The emitted module on that driver."""
    path.write_text(apply(log, any_device=True, form="python"))
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "cupy", gpu.cupy())
    monkeypatch.setattr(module, "_driver", lambda: gpu)
    return module


def takes_maps(kernel: Kernel) -> bool:
    return kernel.family == "wgmma"


@needs_nvrtc
def test_maps_are_encoded_once_and_passed_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "gemm 64x72x136 dtype=bf16"
    log, gpu = write_log(tmp_path / "log.jsonl", text, takes_maps), Hopper()
    module = module_of(tmp_path / "emitted.py", log, gpu, monkeypatch)
    a, b = (fake_cupy.tensor(shape, "<u2") for shape in ((64, 136), (136, 72)))
    c = fake_cupy.tensor((64, 72), "<u2")
    for _ in range(2):
        module.launch(a, b, out=c)
    (step,) = [step for step in module.KERNEL.steps if step.maps]
    assert len(gpu.encoded) == len(step.maps)  # not again for the same tensors
    assert gpu.encoded[0][:4] == (9, a.address, [136, 64, 1], [272, 64 * 272])
    assert gpu.encoded[1][:4] == (9, b.address, [72, 136, 1], [144, 136 * 144])
    (first, _) = [x for x in gpu.launches if x.entry == "kt_kernel"]
    assert first.arguments[:3] == [a.address, b.address, c.address]
    maps = [x.to_bytes(8, "little")[:3] for x in first.arguments[4:]]
    assert maps == [b"map"] * len(step.maps)


def reads_classes_of_rows(kernel: Kernel) -> bool:
    return kernel.family == "wgmma" and kernel.theta.mem["copy_a"] == "strided"


@needs_nvrtc
def test_maps_of_row_classes_begin_inside_a(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "gemm 64x72x134 dtype=bf16"  # rows of 268 bytes: four classes
    log, gpu = write_log(tmp_path / "log.jsonl", text, reads_classes_of_rows), Hopper()
    module = module_of(tmp_path / "emitted.py", log, gpu, monkeypatch)
    a, b = (fake_cupy.tensor(shape, "<u2") for shape in ((64, 134), (134, 72)))
    module.launch(a, b)
    starts = [0, 256, 528, 800]
    assert [x[1] for x in gpu.encoded[:5]] == [*(a.address + start for start in starts), b.address]
    assert [x[2][0] for x in gpu.encoded[:4]] == [134, 134 + 6, 134 + 4, 134 + 2]
    assert all(x[3][0] == 4 * 268 for x in gpu.encoded[:4])


def fills_the_device(kernel: Kernel) -> bool:
    return kernel.family == "wgmma" and kernel.launches[-1].resident


@needs_nvrtc
def test_the_grid_is_cut_to_the_clusters_that_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "gemm 2048x2048x64 dtype=bf16"
    log, gpu = write_log(tmp_path / "log.jsonl", text, fills_the_device), Hopper()
    module = module_of(tmp_path / "emitted.py", log, gpu, monkeypatch)
    a, b = (fake_cupy.tensor(shape, "<u2") for shape in ((2048, 64), (64, 2048)))
    module.launch(a, b)
    launched = next(x for x in gpu.launches if x.entry == "kt_kernel")
    assert launched.cluster is not None
    size = launched.cluster[0]
    planned = next(step.grid[0] for step in module.KERNEL.steps if step.maps)
    assert launched.grid[0] == min(30 * size, planned)
