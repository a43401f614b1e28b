"""The NumPy opponent of attention computes what a kernel must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kt.spaces.workload import Attention, parse
from kt.tuner.backend import vendor_attention
from kt.tuner.backend.reference import NUMPY, load_dataset, make_dataset, make_inputs

WORKLOADS = (
    "attention 1x4x40x16",
    "attention 2x6x33x16 kv-heads=2 kv-len=50 causal=true lse=true layout=bhsd",
    "attention 2x6x33x16 kv-heads=3 kv-len=20 value-dim=5 causal=true lse=true",
    "attention 1x2x50x8 window=7 softcap=3 scale=0.7 dtype=fp64 lse=true",
)


@pytest.mark.parametrize("text", WORKLOADS)
@pytest.mark.parametrize("sizes", [(1,), (3000,), (100, 20_000, 2**20)])
def test_it_computes_attention(
    text: str, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor_attention, "_SCORE_BYTES", sizes)
    w = parse(text)
    assert isinstance(w, Attention)
    make_dataset(w, 3, tmp_path / "data")
    outputs = [np.full(x.shape, np.nan, NUMPY[x.dtype]) for x in w.outputs()]
    launch = vendor_attention.attention(w)
    for _ in range(2):
        launch([*make_inputs(w, 3).values(), *outputs])
        for got, want in zip(outputs, load_dataset(w, tmp_path / "data").expected, strict=True):
            np.testing.assert_allclose(got, want.value, rtol=1e-5, atol=1e-5)
