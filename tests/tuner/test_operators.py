"""Every operator's options in every command, and runs that search some families only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeFamily

from kt.logs.journal import read_log
from kt.logs.query import runs
from kt.spaces import families
from kt.spaces.errors import SettingsError
from kt.spaces.target import Target, detect_cpu
from kt.spaces.theta import Value
from kt.spaces.workload import OPERATORS, Workload, parse
from kt.tuner.replay import check_identity

SEARCH = ("--strategy", "random", "--trials", "8", "--seed", "1")


class OtherFamily(FakeFamily):
    """The same by another name, with a better default."""

    name = "other"

    def default(self, workload: Workload, target: Target) -> Mapping[str, Value]:
        return dict(super().default(workload, target)) | {"bm": 32, "pack": "both"}


@pytest.fixture
def both(kt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two families for every operator on the CPU."""
    every = {(operator, "cpu"): (FakeFamily(), OtherFamily()) for operator in OPERATORS}
    monkeypatch.setattr(families, "FAMILIES", every)


GIVEN = [
    (
        ["conv2d", "2x9x8x16,24x3x5", "--stride", "2x1", "--pad", "1x2", "--dilation", "1",
         "--groups", "2", "--epilogue", "bias+relu+scale+shift", "--dtype", "fp64", 
         "--acc", "fp64"],
        "conv2d 2x9x8x16,24x3x5 stride=2x1 pad=1x2 groups=2 epilogue=bias+relu+scale+shift "
        "dtype=fp64",
    ),
    (
        ["attention", "2x4x6x8", "--kv-heads", "2", "--kv-len", "9", "--value-dim", "4", "--causal",
         "--window", "3", "--scale", "0.5", "--softcap", "20", "--lse", "--layout", "bhsd"],
        "attention 2x4x6x8 kv-heads=2 kv-len=9 value-dim=4 causal=true window=3 scale=0.5 "
        "softcap=20.0 lse=true layout=bhsd dtype=fp32",
    ),
    (
        ["gemm", "2x4x6", "--batch", "3", "--layout", "tt", "--epilogue", "residual+shift"],
        "gemm 2x4x6 batch=3 layout=tt epilogue=residual+shift dtype=fp32",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "text"), GIVEN, ids=[words[0] for words, _ in GIVEN])
def test_options_are_the_same_everywhere(
    kt: Any, both: None, tmp_path: Path, words: list[str], text: str
) -> None:
    assert set(w for w in words if w.startswith("--")) <= {
        f"--{option.key}" for option in OPERATORS[words[0]].OPTIONS
    }
    space = kt("space", *words)
    assert space.code == 0 and space.out.startswith(f"{text} on cpu")
    log = tmp_path / "log.jsonl"
    done = kt("tune", *words, "--log", log, *SEARCH)
    assert done.code == 0, done.err
    assert runs(read_log(log).records)[0].header.workloads == (text,)
    for command in (("show", log), ("apply", log)):
        named = kt(*command, *words)
        assert named.code == 0 and text in named.out, named.err
    refused = kt("show", log, words[0], words[1])
    assert refused.code == 1 and f"it has '{text}'" in refused.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["conv2d", "1x8x8x8,8x3x3", "--causal"],
            "conv2d has no option --causal: accepts --stride",
        ),
        (["conv2d", "1x8x8x8"], "conv2d shape '1x8x8x8': accepts NxHxWxC,KxRxS"),
        (["conv2d", "1x8x8x8,8x3x3", "--groups", "3"], "groups: 3 does not divide C=8"),
        (["conv2d", "1x8x8x8,8x9x9"], "a filter that reaches 9 exceeds the padded input 8"),
        (["conv2d", "1x8x8x8,8x3x3", "--stride", "0"], "stride: 0x0 is not between 1"),
        (["conv2d", "1x8x8x8,8x3x3", "--pad", "1x2x3"], "pad=1x2x3: accepts a whole number or HxW"),
        (["attention", "1x4x8x8", "--kv-heads", "3"], "kv-heads: 3 does not divide H=4"),
        (["attention", "1x4x8x8", "--epilogue", "bias"], "attention has no option --epilogue"),
        (["attention", "1x4x8x8", "--layout", "nn"], "layout=nn: accepts bshd, bhsd"),
        (["attention", "1x4x8x8", "--scale", "big"], "scale=big: accepts a number"),
        (["attention", "1x4x8"], "attention shape '1x4x8': accepts BxHxSxD"),
    ],
)
@pytest.mark.parametrize("command", ["tune", "space", "bench"])
def test_what_an_operator_does_not_accept(
    kt: Any, both: None, command: str, words: list[str], says: str
) -> None:
    assert kt(command, *words).refused(says)


# -- some families only ---------------------------------------------------------------------------


def families_of(log: Path) -> set[str]:
    (run,) = runs(read_log(log).records)
    return {trial.family for trial in run.trials.values()}


def test_a_run_may_search_one_family(kt: Any, both: None, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    words = ("tune", "attention", "1x4x8x8", "--log", log, *SEARCH)
    assert kt(*words, "--family", "fake").code == 0
    (run,) = runs(read_log(log).records)
    assert families_of(log) == {"fake"} and run.header.settings.family == "fake"
    assert check_identity(run).exit_code == 0
    assert kt("apply", log).code == 0
    resumed = kt(*words, "--resume")
    assert resumed.refused("it has --family fake, not all")
    assert kt(*words[:-3], "16", "--seed", "1", "--resume", "--family", "fake").code == 0
    assert families_of(log) == {"fake"} and len(runs(read_log(log).records)[0].trials) == 16


def test_several_families_are_named_with_commas(kt: Any, both: None, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert kt("tune", "gemm", "8x8x8", "--log", log, *SEARCH, "--family", "other, fake").code == 0
    assert families_of(log) == {"fake", "other"}


def test_families_that_are_not_there(kt: Any, both: None) -> None:
    ran = kt("tune", "conv2d", "1x8x8x8,8x3x3", "--family", "fake,mma")
    assert ran.refused("--family mma: conv2d on cpu has fake, other")
    with pytest.raises(SettingsError, match="--family : gemm on cpu has"):
        families.space_of(parse("gemm 1x1x1"), detect_cpu(), "")


def test_opponents_by_name_are_for_cuda(kt: Any, both: None) -> None:
    ran = kt("bench", "gemm", "8x8x8", "--target", "cpu", "--opponents", "flex")
    assert ran.refused("--opponents: for CUDA")


def test_the_default_of_a_log_is_the_one_it_was_compared_with(
    kt: Any, both: None, tmp_path: Path
) -> None:
    from kt.tuner.chosen import choose

    log = tmp_path / "log.jsonl"
    assert kt("tune", "gemm", "8x8x8", "--log", log, *SEARCH).code == 0
    found = runs(read_log(log).records)
    chosen = choose(found, [], {}, True, None)
    final = found[0].finals["gemm 8x8x8 dtype=fp32"]
    default = found[0].trials[final.default]
    assert (chosen.default.family, chosen.default.theta) == (default.family, default.theta)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert records[0]["settings"]["family"] == "all"
