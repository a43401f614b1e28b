"""Warm starts from earlier logs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fake_runs import CPU, GEMM, THETA, header, proposed, read_run, trial, tuned
from fakes import analytic_us
from odd_families import space

from kt.logs.journal import encode_records
from kt.logs.record import Record, WarmStart
from kt.spaces.theta import Theta, theta_from_flat
from kt.spaces.workload import parse
from kt.tuner.replay import check_identity
from kt.tuner.warm import MOST, distance, nearest, warm_points


def logged(text: str, us: float = 5.0, theta: Theta = THETA, **fields: object) -> list[Record]:
    """A run with one trial; `text` is also the run's name."""
    return proposed(header(text, workloads=(text,), **fields),
                    trial(3, us, run=text, workload=text, theta=theta))  # fmt: skip


def test_the_nearest_workloads_of_the_operator_come_first() -> None:
    far, near, other, same, conv = (
        "gemm 4096x4096x4096 dtype=fp32", "gemm 64x64x128 dtype=fp32", "gemm 64x64x64 dtype=fp64",
        "gemm 64x64x64 dtype=fp32", "conv2d 1x8x8x4,4x3x3 dtype=fp32",
    )  # fmt: skip
    records = [r for text in (far, conv, other, near, same) for r in logged(text)]
    starts = nearest(records, parse(GEMM), CPU)
    assert [start.workload for start in starts] == [same, near, other, far]
    for start in starts:
        assert (start.run, start.trial) == (start.workload, 3)
        assert (start.family, start.knobs) == ("fake", THETA)


def test_only_the_same_device_counts_and_only_a_few() -> None:
    elsewhere = msgspec.structs.replace(CPU, cores=CPU.cores + 1)
    assert nearest(logged(GEMM, target=elsewhere), parse(GEMM), CPU) == ()
    many = [r for i in range(1, 12) for r in logged(f"gemm {i}x8x8 dtype=fp32")]
    assert len(nearest(many, parse(GEMM), CPU)) == MOST
    assert nearest([], parse(GEMM), CPU) == ()


def test_the_digest_is_of_the_records_content() -> None:
    digests = [
        nearest(logged(GEMM, us), parse(GEMM), CPU)[0].digest for us in (5.0, 5.0, 6.0)
    ]  # fmt: skip
    assert digests[0] == digests[1] != digests[2] and len(digests[0]) == 16


@pytest.mark.parametrize("text", ["", "gemm", "gemm axb", "winograd 3x3", "gemm 0x0x0"])
def test_workloads_that_cannot_be_read_are_left_out(text: str) -> None:
    starts = nearest([*logged(text), *logged(GEMM)], parse(GEMM), CPU)
    assert [start.workload for start in starts] == [GEMM]


def test_thetas_that_do_not_exist_for_this_space_are_left_out() -> None:
    where = space("fake")
    flat = THETA.flat()
    thetas = [
        THETA, theta_from_flat(flat | {"tile.bm": 256, "tile.bn": 256}),  # illegal
        theta_from_flat(flat | {"tile.bm": 7}), theta_from_flat(flat | {"map.x": 1}), Theta(),
        theta_from_flat(flat | {"tile.bm": 16}),
    ]  # fmt: skip
    starts = [WarmStart("r", i, GEMM, "fake", theta, "") for i, theta in enumerate(thetas)]
    starts.append(WarmStart("r", 9, GEMM, "absent", THETA, ""))
    assert warm_points(where, starts).tolist() == [where.point("fake", thetas[0]),
                                                   where.point("fake", thetas[5])]  # fmt: skip
    assert warm_points(where, []).dtype == np.int64


@pytest.mark.usefixtures("fake_families")
def test_a_second_run_starts_from_the_first_and_replays_alone(tmp_path: Path) -> None:
    first = tuned(tmp_path / "a.jsonl", "gemm 64x64x32 dtype=fp32", trials=48)
    tuned(tmp_path / "a.jsonl", trials=24, strategy="random")
    text = (tmp_path / "a.jsonl").read_bytes()
    second = text[text.rindex(b'{"type":"run"') :]
    (tmp_path / "alone.jsonl").write_bytes(second)  # the first run's records are gone
    run = read_run(tmp_path / "alone.jsonl")
    (start,) = run.header.warm[GEMM]
    assert (start.run, start.trial) == (first.run, first.best["gemm 64x64x32 dtype=fp32"])
    assert [entry.source for entry in run.batches[0].entries[:3]] == ["default", "warm", "random"]
    assert run.trials[1].theta == start.knobs and analytic_us(start.knobs) < 120
    assert check_identity(run).exit_code == 0


@pytest.mark.usefixtures("fake_families")
def test_a_hostile_warm_start_is_only_ever_a_member_of_the_space(tmp_path: Path) -> None:
    lines = encode_records(logged(GEMM)).splitlines()
    evil = [json.loads(line) for line in lines]
    evil[1]["entries"][3]["knobs"]["mem"]["pack"] = '"; rm -rf / #'
    evil[2]["theta"]["mem"]["pack"] = '"; rm -rf / #'
    (tmp_path / "a.jsonl").write_bytes(b"".join(json.dumps(e).encode() + b"\n" for e in evil))
    result = tuned(tmp_path / "a.jsonl", trials=8, strategy="random")
    assert result.trials == 8
    sources = [json.loads(line).get("source") for line in result.log.read_bytes().splitlines()]
    assert "warm" not in sources and "default" in sources


def test_a_type_with_the_same_instructions_is_near() -> None:
    half, same, half_as_deep, full = (
        parse(f"gemm 64x64x{k} dtype={dtype}")
        for k, dtype in ((64, "fp16"), (64, "bf16"), (32, "fp16"), (64, "fp32"))
    )
    assert 0 < distance(half, same) < distance(half, half_as_deep) < distance(half, full)
