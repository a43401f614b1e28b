"""Hostile surroundings: full disks, odd compilers, closed files, names that are not UTF-8."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import click
import msgspec
import numpy as np
import pytest
from c_kernels import RIGHT, gemm, kernel, source
from served import Served, wait_gone

from kt.logs.record import Failure, Settings, Timing
from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.target import detect_cpu
from kt.tuner import program
from kt.tuner.backend import cc, child, reference, session
from kt.tuner.backend.build import Binary, Builder
from kt.tuner.backend.builders import BuilderPool
from kt.tuner.backend.cache import BinaryCache, cache_directory, cache_key
from kt.tuner.backend.cc import CCompiler, find_compiler
from kt.tuner.backend.cpu import CpuRunner
from kt.tuner.backend.environment import describe
from kt.tuner.backend.host import _failure
from kt.tuner.backend.probe import measure_bound
from kt.tuner.backend.worker import Died, Worker, WorkerBug
from kt.tuner.measure import Candidate, FrozenBatch
from kt.tuner.pool import LocalMeasurer

WORKLOAD = gemm("gemm 8x8x8 dtype=fp32")
SOURCE = source(WORKLOAD)
SETTINGS = Settings(run_timeout=5.0, sample_seconds=0.02)
TARGET = msgspec.structs.replace(detect_cpu(), memory_bytes=2**29)
ODD = os.fsdecode(b"od\xffd")
ROOT = Path(__file__).parents[2]

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """A compiler made of a shell script's body."""

    def make(body: str) -> Path:
        path = tmp_path / "fakecc"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def builder(tmp_path: Path) -> Builder:
    return Builder(BinaryCache(tmp_path / "cache"), BinaryCache(tmp_path / "spare"))


# -- what the end of a runner means ---------------------------------------------------------


def test_a_large_parent_does_not_make_a_crash_a_lack_of_memory(own_cache: Path) -> None:
    ballast = np.ones(2**26)  # 512 MiB: as much as the target has
    with LocalMeasurer(TARGET, SETTINGS, builders=1) as measurer:
        found = measured(measurer, "*(volatile int *)(intptr_t)zero = 1;")
    assert isinstance(found, Failure) and (found.failure, found.message) == ("crash", "SIGSEGV")
    assert ballast[-1] == 1


@pytest.mark.parametrize("end", ["abort()", "_exit(1)"])
def test_a_kernel_that_says_that_memory_is_short_lacked_memory(own_cache: Path, end: str) -> None:
    fill = "for (;;) { p = malloc(1 << 24); if (!p) break; memset(p, 1, 1 << 24); }"
    words = f'fputs("std::bad_alloc\\n", stderr); {end};'
    with LocalMeasurer(TARGET, SETTINGS, builders=1) as measurer:
        found = measured(measurer, f"static char *volatile p; {fill} {words}")
        assert isinstance(found, Failure) and found.failure == "out_of_memory", found
        assert isinstance(measured(measurer, RIGHT), Timing)


@pytest.mark.parametrize(
    ("code", "log", "kind"),
    [
        (-signal.SIGKILL, "", "out_of_memory"),
        (-signal.SIGABRT, "giving up", "crash"),
        (-signal.SIGABRT, "MemoryError", "out_of_memory"),
        (-signal.SIGSEGV, "out of memory", "crash"),
        (1, "kernel: Out of memory", "out_of_memory"),
        (1, "", "crash"),
    ],
)
def test_kinds_of_death(code: int, log: str, kind: str) -> None:
    assert _failure(Died("check", code, log)).failure == kind


def measured(measurer: LocalMeasurer, body: str) -> object:
    measurer.prepare([WORKLOAD])
    batch = FrozenBatch(0, WORKLOAD, (Candidate(0, kernel(WORKLOAD, body)),), None)
    measurer.start(batch)
    (one,) = measurer.finish(batch)
    return one.outcome


def test_a_long_sample_time_extends_the_limit_of_a_run(own_cache: Path) -> None:
    settings = Settings(run_timeout=0.5, sample_seconds=0.6)
    with LocalMeasurer(TARGET, settings, builders=1) as measurer:
        body = f"{RIGHT} usleep(10000 + launches % 7 * 1000);"
        found = measured(measurer, body)
    assert isinstance(found, Timing), found


def test_a_runner_lives_within_the_limits_of_its_caller(tmp_path: Path) -> None:
    words = "tune gemm 8x8x8 --dtype fp32 --target cpu --trials 2 --quiet --log a.jsonl"
    kt = f"{sys.executable} -c 'from kt.tuner.cli import main; main()' {words}"
    done = subprocess.run(
        ["/bin/bash", "-c", f"ulimit -f 20000 -d 2000000 && {kt}"],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done


# -- compilers ------------------------------------------------------------------------------

_FULL = 'echo "/usr/bin/ld: final link failed: No space left on device"; exit 1'


def test_a_full_cache_disk_moves_the_build_to_the_spare(tmp_path: Path, script: Script) -> None:
    path = script(f'case "$PWD" in */cache/*) {_FULL};; esac; exec cc "$@"')
    built = builder(tmp_path).build(SOURCE, CCompiler((str(path),), "1"), "", 30.0)
    assert isinstance(built, Binary) and built.path.is_relative_to(tmp_path / "spare")
    assert "No space left on device" in built.note and not built.facts.cached


@pytest.mark.parametrize("said", ["No space left on device", "Disk quota exceeded"])
def test_two_full_disks_are_a_lack_of_resources(tmp_path: Path, script: Script, said: str) -> None:
    compiler = CCompiler((str(script(f"echo 'as: {said}'; exit 1")),), "1")
    failure = builder(tmp_path).build(SOURCE, compiler, "", 30.0)
    assert isinstance(failure, Failure) and failure.failure == "resource"
    assert "no room for the binary" in failure.message


def test_a_relative_cc_works_from_any_directory(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script('exec cc "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./fakecc -g0")
    compiler = find_compiler()
    assert compiler.command == (str(tmp_path / "fakecc"), "-g0")
    assert isinstance(builder(tmp_path).build(SOURCE, compiler, "", 30.0), Binary)
    monkeypatch.delenv("CC")
    (tmp_path / "fakecc").rename(tmp_path / "cc")
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    assert find_compiler().command == (str(tmp_path / "cc"),)


@pytest.mark.parametrize("chosen", ["gcc '", "''"])
def test_a_malformed_cc_is_one_line(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("CC", chosen)
    with pytest.raises(ToolchainError, match=r"\$CC") as refused:
        find_compiler()
    assert "\n" not in str(refused.value)


def test_a_version_that_never_comes_is_killed_with_its_children(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setattr(cc, "_VERSION_SECONDS", 1.0)
    monkeypatch.setenv("CC", str(script(f"sleep 60 & echo $! $$ > {pids}; wait")))
    begin = time.monotonic()
    with pytest.raises(ToolchainError, match="did not answer within 1 s"):
        find_compiler()
    assert time.monotonic() - begin < 20
    assert not wait_gone({int(pid) for pid in pids.read_text().split()})


def test_a_version_is_read_from_stdout_alone(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(script("echo warning >&2; echo fake 2.0")))
    assert find_compiler().version == "fake 2.0"
    path = script("")
    path.write_text("#!/nonexistent/interpreter\n")
    with pytest.raises(ToolchainError, match="cannot be started"):
        find_compiler()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("echo text > kernel.so", "no ELF library"),
        (": > kernel.so", "no ELF library"),
        ("ln -s /bin/sh kernel.so", "no regular output file"),
        ("mkdir kernel.so", "no regular output file"),
        ("mkfifo kernel.so", "no regular output file"),
    ],
)
def test_only_an_elf_file_is_a_binary(tmp_path: Path, script: Script, body: str, text: str) -> None:
    failure = builder(tmp_path).build(SOURCE, CCompiler((str(script(body)),), "1"), "", 30.0)
    assert isinstance(failure, Failure) and failure.failure == "compile_error"
    assert text in failure.message
    assert not list((tmp_path / "cache").glob("??/*"))


def test_own_libraries_that_cannot_be_loaded_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.so").write_bytes(b"\x7fELF")
    library = str(tmp_path / "own.so")
    worker = Worker(CpuRunner, (TARGET, library), tmp_path / "log")
    with pytest.raises(ToolchainError, match="kt's own library cannot be loaded"):
        worker.call("evidence", limit=60)
    with pytest.raises(ToolchainError, match="kt's own library cannot be loaded"):
        measure_bound(library, TARGET)


def test_own_libraries_outlive_the_cache(own_cache: Path) -> None:
    with LocalMeasurer(TARGET, SETTINGS, builders=1) as measurer:
        shutil.rmtree(own_cache)
        assert isinstance(measured(measurer, RIGHT), Timing)


def test_a_compiler_cannot_outlive_a_parent_that_died_at_once(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        child._lead_group(os.getpid())  # this process is not its own parent
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


# -- names ----------------------------------------------------------------------------------


def test_names_that_are_not_utf8_reach_log_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ODD
    path.write_text('#!/bin/sh\nexec cc "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    compiler = find_compiler()
    place = tmp_path / f"cache{ODD}"
    built = Builder(BinaryCache(place), BinaryCache(place)).build(SOURCE, compiler, "", 30.0)
    assert isinstance(built, Binary)
    facts = describe(TARGET, " ".join(compiler.command))
    assert b"od\\\\udcffd" in msgspec.json.encode(facts)
    msgspec.json.encode(compiler.identity(""))
    assert cache_key(ODD) != cache_key(ODD + "x")
    path.write_text("#!/bin/sh\n")
    failure = builder(tmp_path).build(SOURCE, compiler, "", 30.0)
    assert isinstance(failure, Failure)
    msgspec.json.encode(failure)


@pytest.mark.parametrize("chosen", ["~nouser/x", ""])
def test_a_cache_without_a_home_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    notes: list[str] = []
    monkeypatch.setenv("KT_CACHE_DIR", chosen)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", _nobody)
    with pytest.raises(OSError, match="no such home directory"):
        cache_directory()
    pool = BuilderPool(tmp_path, 1, notes.append)
    built = pool.submit(SOURCE, "c", "", 30).result()
    pool.close()
    assert isinstance(built, Binary) and built.path.is_relative_to(tmp_path)
    assert len(notes) == 1 and "not usable (no such home directory)" in notes[0]


def _nobody(uid: int) -> Any:
    raise KeyError(uid)


# -- leftovers ------------------------------------------------------------------------------


def test_dead_staging_is_swept_and_living_is_not(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from kt.tuner.backend.cache import BinaryCache"
        "\nwith BinaryCache(Path(sys.argv[1])).staging() as path:"
        "\n    print(path, flush=True); time.sleep(60)"
    )
    made = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    dead, living = (Path(_stdout(process).readline().strip()) for process in made)
    made[0].kill()
    made[0].wait()
    cache.prune()
    assert dead.is_dir()  # young: its owner may be about to lock it
    for path in (dead, living):
        os.utime(path, (0, 0))
    cache.prune()
    assert not dead.exists() and living.is_dir()
    made[1].kill()
    made[1].wait()
    for process in made:
        _stdout(process).close()


def _stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def test_a_young_session_that_is_not_locked_yet_is_not_swept(tmp_path: Path) -> None:
    lock = tmp_path / "owner.lock"
    lock.touch()
    assert not session._abandoned(tmp_path)
    os.utime(lock, (0, 0))
    assert session._abandoned(tmp_path)
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not session._abandoned(tmp_path)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError("8 requested and 0 written")],
)
def test_a_full_disk_for_operands_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(TargetError, match=r"No space left on device|8 requested and 0"):
        reference.make_dataset(WORKLOAD, 0, tmp_path / "data")


# -- the program ----------------------------------------------------------------------------


def test_a_workers_bug_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker(Served, (), tmp_path / "log")
    with pytest.raises(WorkerBug) as bug:
        worker.call("bug", limit=30)
    worker.stop()

    @click.command()
    @click.argument("word")
    def command(word: str) -> None:
        raise bug.value

    assert program.run(command, ["word"]) == 1
    expected = "internal error, WorkerBug: ZeroDivisionError: a bug (KT_DEBUG=1 shows where)"
    assert capsys.readouterr().err == f"kt: error: {expected}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [("--help", 0), ("target", 0), ("show nowhere", 1)])
def test_closed_standard_files_are_no_trouble(
    tmp_path: Path, closed: str, words: str, code: int
) -> None:
    kt = f"{sys.executable} -c 'from kt.tuner.cli import main; main()'"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{kt} {words} {closed}"],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1


def test_sighup_ends_a_run_in_good_order(tmp_path: Path) -> None:
    code = (
        "import os, signal, time; from kt.tuner.signals import Interrupts\n"
        "with Interrupts() as interrupts:\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGHUP); time.sleep(10)\n"
        "    except KeyboardInterrupt:\n"
        "        print('in good order', flush=True)\n"
        "raise SystemExit(interrupts.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (129, "in good order\n", "")
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.close(ours)  # each write to the terminal fails from now on
        assert process.wait() == 129


# -- the pool of a kernel's threads ---------------------------------------------------------

_POOL = """
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#define KT_THREADS 4
#include "cpu_pool.h"
static void body(void *context, int thread, int threads) {
    (void)thread;
    for (int i = 0; i < 20; i++) kt_barrier(context, threads);
    if (getenv("LEAVE") && thread == 0) exit(0);
}
static void *launch(void *argument) {
    for (;;) { unsigned arrived = 0; kt_parallel(body, &arrived); }
    return argument;
}
int main(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, launch, NULL);
    usleep(getenv("LEAVE") ? 5000000 : 3000 + getpid() % 50 * 100);
    exit(0);
}
"""


@pytest.fixture(scope="module")
def pool_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("pool")
    (folder / "pool.c").write_text(_POOL)
    include = ROOT / "spaces" / "device"
    subprocess.run(
        ["cc", "-O2", "-pthread", f"-I{include}", "-o", folder / "pool", folder / "pool.c"],
        check=True,
    )
    yield folder / "pool"


def test_exit_while_another_thread_launches_does_not_hang(pool_program: Path) -> None:
    for _ in range(60):
        assert subprocess.run([pool_program], timeout=20).returncode == 0


def test_exit_inside_a_launch_does_not_hang(pool_program: Path) -> None:
    begin = time.monotonic()
    left = subprocess.run([pool_program], env=os.environ | {"LEAVE": "1"}, timeout=20)
    assert left.returncode == 0 and time.monotonic() - begin < 4
