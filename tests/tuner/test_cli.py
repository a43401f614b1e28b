"""The command line: what it accepts, what it prints, how it ends."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kt.spaces.errors import LogError, SettingsError, WorkloadError
from kt.spaces.target import CUDA_TARGETS, detect_cpu
from kt.tuner import api, cli, request
from kt.tuner.strategy import STRATEGIES

TUNE = ("tune", "gemm", "64x64x64", "--strategy", "random", "--trials", "20")
HEAVY = ("numpy", "xgboost", "sklearn", "scipy", "cupy", "msgspec", "rich", "matplotlib")


@pytest.mark.parametrize("words", [["--help"], ["tune", "--help"], ["apply", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom kt.tuner import cli, program\n"
        f"assert program.run(cli.cli, {words!r}) == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "Usage: kt" in done.stdout


def test_help_is_fast() -> None:
    command = [sys.executable, "-c", "from kt.tuner.cli import main; main(['--help'])"]
    times = []
    for _ in range(3):
        begin = processor_seconds()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        times.append(processor_seconds() - begin)
    assert min(times) < 0.6  # 0.11 s on the slow machine this was written on


def processor_seconds() -> float:
    """Of the processes that this one waited for: other people's load counts little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_strategies_are_those_of_the_search() -> None:
    assert tuple(STRATEGIES) == cli.STRATEGIES


def test_ranges_hold_the_defaults() -> None:
    for target in (detect_cpu(), CUDA_TARGETS["h200"]):
        settings = api.effective_settings(target, {})
        assert settings.trials == {"cpu": 128, "cuda": 256}[target.kind]
        for field, (option, low, high) in api._RANGES.items():
            assert low <= getattr(settings, field) <= high, option
            for value in (low, high):
                assert getattr(api.effective_settings(target, {field: value}), field) == value
            for value in (low - 1, high * 2):
                with pytest.raises(SettingsError, match=f"^{option} "):
                    api.effective_settings(target, {field: value})


def test_python_interface(kt, tmp_path: Path) -> None:
    import kt.tuner.tune  # noqa: F401  (a module of the same name must not hide the function)
    from kt.tuner import apply, tune

    result = tune("gemm 32x32x32", trials=8, strategy="random", log=tmp_path / "a.jsonl")
    assert result.reason == "trials" and result.trials == 8
    assert apply(result.log).startswith("/* kt kernel: gemm 32x32x32 dtype=fp32")


# -- workloads ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["gemm", "64x32x16", "--layout", "nt", "--dtype", "fp64"],
        ["gemm", "64x32x16", "layout=nt", "dtype=fp64"],
        ["gemm 64x32x16 layout=nt dtype=fp64"],
        ["--layout", "NT", "gemm", "64x32x16 dtype=fp64", "--dtype", "fp64"],
    ],
)
def test_words_and_flags_name_the_same_workload(kt, words: list[str]) -> None:
    ran = kt("space", *words)
    assert ran.code == 0 and ran.out.startswith("gemm 64x32x16 layout=nt dtype=fp64 on cpu")


def test_several_workloads(kt, tmp_path: Path) -> None:
    file = tmp_path / "shapes.txt"
    file.write_text("\ufeff# shapes\ngemm 8x8x8  # small\n\ngemm 16x16x16 layout=nt\n")
    ran = kt("tune", "--workloads", file, *TUNE[3:], "--json", "gemm", "4x4x4", "gemm", "2x2x2")
    start = json.loads(ran.out.splitlines()[0])
    assert start["workloads"] == [
        "gemm 4x4x4 dtype=fp32", "gemm 2x2x2 dtype=fp32", "gemm 8x8x8 dtype=fp32",
        "gemm 16x16x16 layout=nt dtype=fp32",
    ]  # fmt: skip
    assert json.loads(ran.out.splitlines()[-1])["trials"] == 80


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no workload: accepts gemm MxNxK"),
        ([""], "unknown operator ''"),
        (["gem", "1x1x1"], "unknown operator 'gem': accepts gemm, conv2d, attention"),
        (["gemm"], "accepts MxNxK"),
        (["gemm", "0x1x1"], "M: 0 is not between 1"),
        (["gemm -4x1x1"], "M: -4 is not between 1"),
        (["gemm", "99999999999x1x1"], "is not between 1 and 2147483647"),
        (["gemm", "2000000000x2000000000x1"], "elements exceed"),
        (["gemm", "1x1"], "shape '1x1'"),
        (["gemm", "1x1x1", "dtype=fp12"], "dtype=fp12: accepts fp64, fp32"),
        (["gemm", "1x1x1", "--dtype", "fp12"], "dtype=fp12: accepts fp64, fp32"),
        (["gemm", "1x1x1", "--causal"], "gemm has no option --causal: accepts --batch"),
        (["gemm", "1x1x1", "--batch", "0"], "batch: 0 is not between"),
        (["gemm", "1x1x1", "--batch", "x"], "batch=x: accepts a whole number, 1 or more"),
        (["attention", "1x1x4x4", "--window", "-1"], "window=-1: accepts a whole number, 0 or"),
        (["conv2d", "1x4x4x1,1x3x3", "--pad", "-1"], "pad=-1: accepts a whole number or HxW, 0 or"),
        (["gemm", "1x1x1", "--epilogue", "bias+relu+bias"], "bias+relu+bias: bias is repeated"),
        (["gemm", "1x1x1", "layout=nt", "--layout", "nn"], "--layout nn contradicts 'layout=nt'"),
        (["gemm", "1x1x1", "causal=true"], "gemm option 'causal=true': accepts batch="),
        (["gemm", "1x1x1", "gemm", "1x1x1"], "is given twice"),
        (["gemm", "1x1x1\x1b[31m\x07"], "\\x1b[31m\\x07"),
        (["gemm", "1" * 10_000_000], "characters)"),
        (["conv2d", "1x4x4x1,1x3x3"], "no kernel family serves"),
        (["attention", "1x1x4x4", "--causal"], "no kernel family serves"),
        (["gemm", "1x1x1", "--no-such"], "No such option"),
    ],
)
def test_impossible_workloads(kt, words: list[str], says: str) -> None:
    ran = kt("tune", *words)
    assert ran.refused(says)
    assert "\x1b" not in ran.err and len(ran.err) < 3000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no workload in this file"),
        (b"# nothing\n\n", "no workload in this file"),
        (b"gemm 1x1x1\n\ngemm 1x1\n", "shapes.txt:3: gemm shape '1x1'"),
        (b"gemm 1x1x1\ngemm 1x1x1 dtype=fp32\n", "shapes.txt:2: 'gemm 1x1x1 dtype=fp32' is given"),
        (b"gemm 1x1x1\nattention 1x1x4x4\n", "shapes.txt:2: attention has no option --batch"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"x" * (5 * 2**20), "larger than"),
    ],
)
def test_bad_workload_files(kt, tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "shapes.txt").write_bytes(content)
    flags = ["--batch", "2"] if b"attention" in content else []
    assert kt("tune", "--workloads", "shapes.txt", *flags).refused(says)
    assert not (tmp_path / "kt-logs").exists()


def test_missing_workload_file(kt) -> None:
    assert kt("tune", "--workloads", "no.txt").refused("cannot read --workloads no.txt")
    assert kt("tune", "--workloads", "/").refused("cannot read --workloads /: Is a directory")


def test_the_nearest_logged_workloads_are_listed_first() -> None:
    logged = ["nonsense", *(f"gemm {size}x8x8 dtype=fp32" for size in range(1, 100, 9))]
    with pytest.raises(LogError) as refused:
        request.choose_logged(logged, ["gemm", "32x8x8"], {})
    assert "it has 'gemm 28x8x8 dtype=fp32', 'gemm 37x8x8 dtype" in str(refused.value)
    assert str(refused.value).endswith("' … and 7 more") and str(refused.value).count("gemm") == 6


def test_words_and_flags_choose_among_logged_workloads() -> None:
    logged = (
        "gemm 8x8x8 dtype=fp32", "nonsense", "gemm 8x8x8 layout=nt dtype=fp32",
        "conv2d 1x8x8x8,8x3x3 pad=1 dtype=fp32", "gemm 9x9x9 layout=nt dtype=bf16",
    )  # fmt: skip

    def chosen(*words: str, **flags: str) -> list[int]:
        return [logged.index(text) for text in request.choose_logged(logged, words, flags)]

    assert chosen() == [0, 1, 2, 3, 4]
    assert chosen("gemm") == [0, 2, 4] and chosen("conv2d") == [3]
    assert chosen(layout="nt") == [2, 4] and chosen("gemm", layout="nt", dtype="fp32") == [2]
    assert chosen("gemm", "8x8x8") == [0] and chosen("gemm 8x8x8", layout="nt") == [2]
    assert chosen("conv2d gemm 9x9x9 layout=nt") == [3, 4]
    for words, flags, says in (
        (
            ("attention",),
            {},
            "the log has no attention; it has 'gemm 8x8x8 dtype=fp32', 'nonsense'",
        ),
        (("gemm",), {"layout": "tt"}, "the log has no gemm with --layout tt; it has 'gemm 8x8x8"),
        ((), {"kv_heads": "2"}, "the log has no workload with --kv-heads 2; it has 'gemm"),
    ):
        with pytest.raises(LogError, match=says):
            chosen(*words, **flags)
    with pytest.raises(WorkloadError, match=r"layout.*: accepts nn"):
        chosen("gemm", layout="row")


def test_flags_are_not_invented_for_unknown_words() -> None:
    with pytest.raises(WorkloadError, match="unknown operator"):
        request.workloads_of(["nope"], {"dtype": "fp32"}, "fp32")


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--trials", "0"), ("--trials", "-3"), ("--trials", "1000000000000"), ("--trials", "many"),
        ("--trials", "9" * 5000), ("--time", "5x"), ("--time", "0"), ("--time", "-1"),
        ("--time", ""), ("--time", "nan"), ("--time", "1e9"), ("--time", "99999h"),
        ("--epsilon", "nan"), ("--epsilon", "2"), ("--epsilon", "-1%"), ("--epsilon", "%"),
        ("--batch-size", "0"), ("--batch-size", "100000"), ("--near-bound", "-5%"),
        ("--finalists", "0"), ("--patience", "-1"), ("--seed", "-1"), ("--seed", str(2**63)),
        ("--build-timeout", "0"), ("--run-timeout", "5 minutes"), ("--sample-time", "1h"),
        ("--builders", "0"), ("--builders", "-1"), ("--builders", "100000"),
        ("--max-failures", "0"), ("--strategy", "genetic"), ("--target", "h2000"),
        ("--target", "cuda"), ("--target", "h200"), ("--target", ""),
    ],
)  # fmt: skip
def test_impossible_settings(kt, option: str, value: str, tmp_path: Path) -> None:
    ran = kt("tune", "gemm", "8x8x8", option, value)
    assert ran.refused(option if option != "--target" else "target")
    assert len(ran.err) < 3000
    assert not (tmp_path / "kt-logs").exists()


def test_a_driver_without_a_gpu(kt, monkeypatch: pytest.MonkeyPatch) -> None:
    from kt.tuner import devices

    assert kt("tune", "gemm", "8x8x8", "--target", "cuda").refused("no NVIDIA driver")
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert kt("tune", "gemm", "8x8x8", "--target", "cuda").refused("no usable GPU")
    assert kt(*TUNE).code == 0  # auto falls back to the CPU


def test_durations_and_shares() -> None:
    from kt.tuner.options import duration, share

    assert [duration(t) for t in ("90", "90s", "1.5m", "1h30m", "2h")] == [90, 90, 90, 5400, 7200]
    assert share()("5%") == 0.05 and share()("0.5") == 0.5 and share(0, 10)("200%") == 2.0


# -- other commands -----------------------------------------------------------------------------


def test_version(kt) -> None:
    ran = kt("--version")
    assert ran.code == 0 and ran.out.startswith("kt ")


def test_unknown_command(kt) -> None:
    assert kt("tun").refused("No such command 'tun'", "kt --help")
    assert kt("show").refused("Missing argument 'LOG'", "kt show --help")


def test_no_command_shows_the_help(kt) -> None:
    ran = kt()
    assert ran.code == 0 and "kt tune gemm 512x512x512" in ran.out


def test_targets(kt, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rtx4090" in kt("target").out
    assert "sm_90a" in kt("target", "h200").out
    assert json.loads(kt("target", "cpu", "--json").out)["kind"] == "cpu"
    assert len(json.loads(kt("target", "--json").out)) == 7
    assert kt("target", "nope").refused("unknown target 'nope': accepts auto, cpu")
    assert "built a test kernel in" in kt("target", "cpu").out
    monkeypatch.setenv("CC", "false")
    assert "it cannot build a kernel" in kt("target", "cpu").out
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in kt("target", "cpu").out


def test_space(kt) -> None:
    ran = kt("space", "gemm", "64x64x64")
    for text in ("family fake: 23,328 points", "the fake has no loops", "cache", "2,880"):
        assert text in ran.out
    facts = json.loads(kt("space", "gemm", "64x64x64", "--json").out)
    assert facts["families"][0]["rules"] == {"cache": 2880}
    assert facts["families"][0]["default"]["tile"]["bm"] == 8


def test_a_space_needs_a_workload(kt) -> None:
    ran = kt("space")
    assert ran.refused("no workload: accepts gemm MxNxK") and "--workloads" not in ran.err
    assert "--workloads" in kt("tune").err


def test_space_checks_a_theta(kt) -> None:
    theta = json.loads(kt("space", "gemm", "64x64x64", "--json").out)["families"][0]["default"]
    ask = ("space", "gemm", "64x64x64", "--check")
    assert "legal in family fake" in kt(*ask, json.dumps(theta)).out
    assert kt(*ask, json.dumps({"family": "fake", "theta": theta})).code == 0
    theta["tile"] |= {"bm": 256, "bn": 256}
    assert kt(*ask, json.dumps(theta)).refused("tile 256x256 exceeds 4096 elements")
    theta["tile"]["bm"] = 3
    assert kt(*ask, json.dumps(theta)).refused("tile.bm=3: accepts 1, 2")
    assert kt(*ask, '{"tiles": {}}').refused("unknown component tiles")
    for text in ("", "{", "[]", "1", '"x"', "[" * 5000, '{"theta": 1}', '{"tile": {"bm": []}}'):
        assert kt(*ask, text).refused("--check")
    assert kt(*ask, '{"family": "other", "theta": {}}').refused("no family 'other'")


def test_space_for_a_gpu(kt) -> None:
    assert kt("space", "gemm", "8x8x8", "--target", "h200").refused("no kernel family serves")
    assert kt("space", "gemm", "8x8x8", "--target", "cuda").refused("name the GPU")


def test_bugs_are_one_line_unless_debugging(kt, monkeypatch: pytest.MonkeyPatch) -> None:
    from kt.tuner import describe

    def broken(*_: object, **__: object) -> int:
        raise ValueError("boom")

    monkeypatch.setattr(describe, "target_command", broken)
    ran = kt("target")
    assert ran.code == 1 and ran.err == (
        "kt: error: internal error, ValueError: boom (KT_DEBUG=1 shows where)\n"
    )
    monkeypatch.setenv("KT_DEBUG", "1")
    with pytest.raises(ValueError, match="boom"):
        kt("target")
