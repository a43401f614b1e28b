"""`kt apply`: what is emitted, what is refused, and that a log cannot smuggle anything in."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kt.logs.record import Failure
from kt.spaces.errors import KtError, LogError
from kt.spaces.families import space_of
from kt.spaces.target import detect_cpu
from kt.spaces.workload import parse
from kt.tuner import apply, proof
from kt.tuner.emit import c_string, comment_text

Lines = list[dict[str, Any]]
TUNE = ("tune", "gemm", "64x64x64", "--strategy", "random", "--trials", "20")


def edit(log: Path, change: Callable[[Lines], object]) -> Path:
    """Rewrites a log by its decoded lines."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    change(lines)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return log


def each(kind: str, **fields: Any) -> Callable[[Lines], None]:
    """Sets fields of every record of a type."""

    def change(lines: Lines) -> None:
        for line in lines:
            if line["type"] == kind:
                line.update(fields)

    return change


# -- what is emitted ----------------------------------------------------------------------------


def test_the_measured_source_with_its_provenance(kt, log: Path) -> None:
    source = kt("apply", log).out
    head, body = source.split("#define KT_DESCRIBE ", 1)
    winner = json.loads(kt("show", log, "--json").out)["workloads"][0]
    for text in ("/* kt kernel: gemm 64x64x64 dtype=fp32", f"trial {winner['trial']} of log.jsonl",
                 "cc -O3 -shared -fPIC -pthread", "const float A[64][64]"):  # fmt: skip
        assert text in head
    theta = msgspec.convert(winner["theta"], type=dict)
    described, rest = body.split("\n\n", 1)
    assert json.loads(json.loads(described))["theta"] == theta
    keys = json.loads(rest.removeprefix("// "))
    assert keys == theta  # the fake's source is its θ
    assert apply(log) == source


def test_json(kt, log: Path) -> None:
    facts = json.loads(kt("apply", log, "--format", "json").out)
    assert facts["workload"] == "gemm 64x64x64 dtype=fp32" and facts["record"]["type"] == "trial"


def test_one_trial(kt, log: Path) -> None:
    assert "trial 3 of" in kt("apply", log, "--trial", "3").out
    assert kt("apply", log, "--trial", "99").refused("no trial 99 in this log: accepts 0 to 19")
    assert kt("apply", log, "--trial", "-1").refused("no trial -1")
    kt(*TUNE, "--log", log)
    assert kt("apply", log, "--trial", "3").refused("2 runs have a trial 3: choose one with --run")
    run = json.loads(log.read_text().splitlines()[0])["run"]
    assert f"in run {run}, trial 3" in kt("apply", log, "--trial", "3", "--run", run[:6]).out
    assert kt("apply", log, "--run", "zz").refused("no run 'zz'; it has")


def test_a_failed_trial_can_be_looked_into(kt, log: Path) -> None:
    outcome = msgspec.to_builtins(Failure("crash", "run", "SIGSEGV"))
    edit(log, each("trial", outcome=outcome))
    ran = kt("apply", log, "--trial", "2")
    assert ran.code == 0 and "this trial failed: crash in run: SIGSEGV" in ran.err
    assert "time       none" in ran.out
    assert kt("apply", log, "-o", "k.c").refused("no valid result", "crash in run: SIGSEGV")


def test_the_workload_is_needed_when_there_are_several(kt, log: Path) -> None:
    kt("tune", "gemm", "64x64x64", "--dtype", "fp64", *TUNE[3:], "--log", log)
    assert kt("apply", log).refused("several workloads, name one: 'gemm 64x64x64 dtype=fp32', 'g")
    assert kt("apply", log, "gemm", "64x64x64").refused("several workloads")
    for words in (["gemm", "64x64x64", "--dtype", "fp64"], ["gemm 64x64x64 dtype=fp64"]):
        assert "double A[64][64]" in kt("apply", log, *words).out
    assert kt("apply", log, "gemm", "1x1x1").refused("has no 'gemm 1x1x1'; it has 'gemm 64x64x64")
    assert kt("apply", log, "gemm", "1x1").refused("accepts MxNxK")
    assert "double A[64][64]" in kt("apply", log, "--dtype", "fp64").out
    assert kt("apply", log, "--dtype", "bf16").refused("the log has no workload with --dtype bf16")


# -- where it is written ------------------------------------------------------------------------


def test_files_are_replaced_whole_and_only_our_own(kt, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "k"
    assert kt("apply", log, "-o", out).out.startswith(f"wrote {out}")
    out.chmod(0o640)
    assert kt("apply", log, "-o", out, "--format", "json").code == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert kt("apply", log, "-o", out).code == 0
    out.write_text("int main;\n")
    assert kt("apply", log, "-o", out).refused("is not a kt kernel: --force")
    assert out.read_text() == "int main;\n"
    (tmp_path / "link.c").symlink_to(out)
    assert kt("apply", log, "-o", tmp_path / "link.c", "--force").code == 0
    assert (tmp_path / "link.c").is_symlink() and out.read_text().startswith("/* kt kernel")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k", "link.c", "log.jsonl"]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("no/such/k.c", "No such file or directory"), ("/proc/k.c", "cannot write"),
        (".", "Is a directory"), ("/dev/full", "No space left"), ("n" * 300, "File name too long"),
        ("log.jsonl", "is a log"), ("log.jsonl/k.c", "Not a directory"),
        ("loop", "cannot write loop: Too many levels"), ("loop/k.c", "Too many levels"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_places_that_cannot_be_written(
    kt, log: Path, tmp_path: Path, place: str, says: str, force: tuple[str, ...]
) -> None:
    before = log.read_bytes()
    (tmp_path / "loop").symlink_to("back")
    (tmp_path / "back").symlink_to("loop")
    assert kt("apply", log, "-o", place, *force).refused(says)
    assert kt("export", log, "-o", place, *force).refused(says)
    assert log.read_bytes() == before and (tmp_path / "loop").is_symlink()


def test_devices_are_written_to_and_not_replaced(kt, log: Path) -> None:
    assert kt("apply", log, "-o", "/dev/null").code == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form"), [("k.cu", "cu"), ("k.py", "python"), ("k.CUBIN", "cubin")]
)
def test_a_file_named_like_another_format(
    kt, log: Path, tmp_path: Path, name: str, form: str
) -> None:
    refused = kt("apply", log, "-o", tmp_path / name, "--force")
    assert refused.refused("c is written, whose files end in .c")
    assert f"that of --format {form})" in refused.err
    assert not (tmp_path / name).exists()
    assert kt("apply", log, "-o", tmp_path / "k.txt").code == 0


@pytest.mark.parametrize("form", ["cu", "cubin", "python", "exe"])
def test_formats_of_other_devices(kt, log: Path, form: str) -> None:
    assert kt("apply", log, "--format", form).refused(f"--format {form}", "c, json")


def test_records_of_another_device(kt, log: Path) -> None:
    def change(lines: Lines) -> None:
        lines[0]["target"]["processor"] = "Other CPU"

    edit(log, change)
    ran = kt("apply", log)
    assert ran.refused("measured on Other CPU (", "this is ", "--any-device")
    with pytest.raises(KtError, match="Other CPU"):
        apply(log)
    ran = kt("apply", log, "--any-device")
    assert ran.code == 0 and "device     Other CPU (" in ran.out


def test_a_gpu_record(kt, log: Path) -> None:
    from kt.spaces.target import CUDA_TARGETS

    edit(log, each("run", target=msgspec.to_builtins(CUDA_TARGETS["h200"])))
    assert kt("apply", log).refused("measured on NVIDIA H200 (sm_90a, 132 SMs)")
    assert kt("apply", log, "--any-device").refused("no kernel family serves")


@pytest.mark.parametrize(
    "fields",
    [
        {"arch": "avx512\n#include </etc/passwd>"}, {"cores": 10**9}, {"cores": 0},
        {"l1_bytes": 0}, {"l2_bytes": -1}, {"simd_bytes": 7}, {"vector_registers": 10**6},
    ],
)  # fmt: skip
def test_impossible_devices(kt, log: Path, fields: dict[str, Any]) -> None:
    edit(log, lambda lines: lines[0]["target"].update(fields))
    assert kt("apply", log, "--any-device").refused("no such device")


@pytest.mark.parametrize(
    ("theta", "says"),
    [
        ({"tile": {}}, "needs a value"),
        ({"tile": {"bm": 3, "bn": 8, "bk": 8}}, "accepts 1, 2, 4"),
        ({"tile": {"bm": True, "bn": 8, "bk": 8}}, "accepts 1, 2, 4"),
        ({"tile": {"bm": 2**62, "bn": 8, "bk": 8}}, "accepts 1, 2, 4"),
        ({"tile": {"bm": "8*/ system()", "bn": 8, "bk": 8}}, "accepts 1, 2, 4"),
        ({"tile": {"bm": 256, "bn": 256, "bk": 8}}, "exceeds 4096 elements"),
        ({"map": {"x": 1}}, "has no knob map.x"),
    ],
)
def test_absurd_thetas(kt, log: Path, theta: dict[str, Any], says: str) -> None:
    def change(lines: Lines) -> None:
        for line in lines:
            if line["type"] == "trial":
                line["theta"].update(theta)
            for entry in line.get("entries", ()) if line["type"] == "batch" else ():
                entry["knobs"].update(theta)

    edit(log, change)
    assert kt("apply", log, "-o", "k.c").refused(says)
    assert not Path("k.c").exists()


def test_a_log_of_another_version_of_the_space(kt, log: Path) -> None:
    def change(lines: Lines) -> None:
        lines[0]["spaces"] = ["0" * 16]
        for line in lines:
            if line["type"] == "trial":
                line["theta"].update({"tile": {}})
            for entry in line.get("entries", ()) if line["type"] == "batch" else ():
                entry["knobs"].update({"tile": {}})

    edit(log, change)
    assert kt("apply", log).refused("was measured in another version of this space: ")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n\n", b"not json\n", b"\xff\xfe\x00\x01" * 100, b"{}\n", b"[" * 100_000,
        b'{"type":"run"}\n', b'{"type":"run","schema":99}\n', b"x" * 20_000_000,
        b"\x1f\x8b\x08\x00broken", b'{"a":' * 3000 + b"\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["apply", "show"])
def test_files_that_are_no_logs(kt, tmp_path: Path, command: str, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    ran = kt(command, "a.jsonl")
    assert ran.refused("a.jsonl") and len(ran.err) < 3000


@pytest.mark.parametrize("command", ["apply", "show"])
def test_places_without_logs(kt, tmp_path: Path, command: str) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "x.txt").write_text("mine")
    assert kt(command, "no.jsonl").refused("no.jsonl: no such log")
    assert kt(command, "dir").refused("dir: no logs in this directory")
    assert kt(command, "/dev/null").refused("not a regular file")
    assert kt(command).refused("LOG")


def test_a_log_without_trials(kt, log: Path) -> None:
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    assert kt("apply", log).refused("no trials in this log")


# -- nothing of a log reaches the C text unescaped ----------------------------------------------

NASTY = (
    'a*/ int evil; /* b', "??/\n*/int evil;", "\\\n*/ int evil;", '"; int evil; "', "\u202eevil",
    "*??/\n/ int evil;", "end\\", "\x00\x07\x1b[31m", "/*/", "**//", "???/", "%s%n", "é" * 3000,
)  # fmt: skip


@pytest.mark.parametrize("nasty", NASTY)
def test_escapes(nasty: str) -> None:
    comment = comment_text(nasty)
    assert all(" " <= c <= "~" for c in comment)
    assert not re.search(r"\*/|/\*|\?\?|\\", comment)
    string = c_string(nasty)
    assert re.fullmatch(r'"([ !#-\[\]-~]|\\["\\?]|\\[0-7]{3})*"', string) and "??" not in string


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_strings_and_comments_compile_to_what_they_say(tmp_path: Path) -> None:
    functions = [
        f"/* {comment_text(text)} */ const char *f{i}(void) {{ return {c_string(text)}; }}\n"
        for i, text in enumerate(NASTY)
    ]
    (tmp_path / "a.c").write_text("".join(functions))
    command = ["cc", "-std=c99", "-Wall", "-Werror", "-shared", "-fPIC", "-o", "a.so", "a.c"]
    subprocess.run(command, cwd=tmp_path, check=True)  # c99: with trigraphs
    library = ctypes.CDLL(str(tmp_path / "a.so"))
    for i, text in enumerate(NASTY):
        function = getattr(library, f"f{i}")
        function.restype = ctypes.c_char_p
        assert function() == text.encode().split(b"\0")[0]


@pytest.mark.parametrize("nasty", NASTY)
def test_hostile_texts_in_a_log(kt, log: Path, nasty: str) -> None:
    def change(lines: Lines) -> None:
        for line in lines:
            line.update({"run": nasty, "time": nasty})
            if line["type"] == "trial":
                line["source"] = nasty
        lines[0]["kt"] = nasty
        lines[0]["target"]["processor"] = nasty

    edit(log, change)
    ran = kt("apply", log, "--any-device")
    comment = ran.out.split("*/", 1)[0]
    assert ran.code == 0 and "evil" not in re.sub(r'"([^"\\]|\\.)*"', "", ran.out[len(comment) :])
    assert ran.out.isascii() and "\x1b" not in ran.out + ran.err
    shown = kt("show", log)
    assert shown.code == 0 and not re.search("[\x00-\x09\x0b-\x1f\u202e]", shown.out + shown.err)


def test_other_sources_are_pointed_out(kt, log: Path) -> None:
    edit(log, lambda lines: lines[0]["versions"].update(search="0123"))
    assert "other sources than measured" in kt("apply", log).err


def test_an_interrupted_run_is_pointed_out(kt, log: Path) -> None:
    edit(log, lambda lines: lines.__delitem__(slice(-2, None)))
    assert "no finalists' comparison" in kt("apply", log).err


def test_api_errors(kt, log: Path) -> None:
    with pytest.raises(LogError, match="has no 'gemm 1x1x1'"):
        apply(log, "gemm 1x1x1")


# -- real kernels -------------------------------------------------------------------------------


REAL = "gemm 24x40x16 epilogue=bias+relu dtype=fp32"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two measured trials of a real kernel."""
    from kt.tuner import tune

    log = tmp_path_factory.mktemp("real") / "log.jsonl"
    tune(REAL, log=log, trials=2, strategy="random", finalists=1, sample_seconds=0.01)
    return log


@needs_cc
def test_verify_and_bench(real: Path, tmp_path: Path) -> None:
    code = "from kt.tuner.cli import main; main()"
    words = ["apply", str(real), "-o", "k.c", "--verify", "--bench"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for text in ("verified:", "float64 reference", "emitted", "default", "vendor", "wrote k.c"):
        assert text in done.stdout
    build = re.search(r"build +(cc .*)", (tmp_path / "k.c").read_text())
    assert build
    (tmp_path / "k.c").rename(tmp_path / "kernel.c")
    subprocess.run(build[1].split(), cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "kernel.so"))
    library.kt_describe.restype = ctypes.c_char_p
    assert json.loads(library.kt_describe())["workload"] == REAL


@needs_cc
@pytest.mark.parametrize(
    ("find", "put", "says"),
    [
        ("int kt_launch(", "int kt_launch((", "does not compile"),
        ("#define KT_M 24", "#define KT_M 23", "is wrong"),
    ],
)
def test_an_unsound_kernel_is_refused(real: Path, find: str, put: str, says: str) -> None:
    workload = parse(REAL)
    space = space_of(workload, detect_cpu())
    source = apply(real)
    assert find in source
    with pytest.raises(KtError, match=says):
        default = space.kernel(int(space.defaults()[0]))
        wrong = proof.Proven(source.replace(find, put), "c", default, default)
        proof.prove(wrong, True, False, print)
