"""Feature tables over several spaces."""

from __future__ import annotations

import numpy as np
from fakes import FakeFamily

from kt.costmodel.features import FeatureTable
from kt.spaces.family import Family
from kt.spaces.knob import Knob, Ordinal
from kt.spaces.space import Space
from kt.spaces.target import Target, detect_cpu
from kt.spaces.workload import Workload, parse


class Wider(FakeFamily):
    """The fake with one more knob, for operators that are not gemm."""

    name = "wider"

    def knobs(self, workload: Workload, target: Target) -> tuple[Knob, ...]:
        return (*super().knobs(workload, target), Ordinal("map", "threads", (1, 2)))

    def default(self, workload: Workload, target: Target) -> dict[str, bool | int | str]:
        return {**super().default(workload, target), "threads": 1}


def space(text: str, *families: Family) -> Space:
    return Space(parse(text), detect_cpu(), families)


GEMM = space("gemm 64x64x64", FakeFamily())
CONV = space("conv2d 1x8x8x4,4x3x3", Wider())


def test_a_single_space_keeps_its_own_columns() -> None:
    table = FeatureTable([GEMM])
    points = GEMM.sample(np.random.default_rng(0), 20)
    assert table.names == GEMM.feature_names
    np.testing.assert_array_equal(table.encode(0, points), GEMM.encode(points))


def test_shared_columns_hold_both_and_a_missing_one_is_nan() -> None:
    table = FeatureTable([GEMM, CONV])
    assert set(table.names) == set(GEMM.feature_names) | set(CONV.feature_names)
    assert len(set(table.names)) == len(table.names)
    for which, space in enumerate((GEMM, CONV)):
        points = space.sample(np.random.default_rng(0), 20)
        rows, own = table.encode(which, points), space.encode(points)
        assert rows.shape == (20, len(table.names)) and rows.dtype == np.float32
        for i, name in enumerate(table.names):
            if name in space.feature_names:
                np.testing.assert_array_equal(rows[:, i], own[:, space.feature_names.index(name)])
            else:
                assert np.isnan(rows[:, i]).all(), name
    assert {"workload.m", "map.threads"} <= set(GEMM.feature_names) ^ set(CONV.feature_names)


def test_two_shapes_of_one_operator_differ_in_the_workloads_columns_alone() -> None:
    other = space("gemm 128x64x64", FakeFamily())
    table = FeatureTable([GEMM, other])
    assert table.names == GEMM.feature_names
    a, b = (table.encode(i, GEMM.defaults())[0] for i in range(2))
    differing = {name for name, x, y in zip(table.names, a, b, strict=True) if x != y}
    assert differing == {"workload.m", "workload.flops", "workload.bytes"}
