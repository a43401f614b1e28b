"""Compilers, the cache, and everything that can go wrong between a source and a binary."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from c_kernels import gemm, kernel, source
from served import wait_gone

from kt.logs.record import BuildFacts, Failure
from kt.spaces.errors import ToolchainError
from kt.tuner.backend import cache as cache_module
from kt.tuner.backend.build import Binary, Builder
from kt.tuner.backend.builders import BuilderPool
from kt.tuner.backend.cache import BinaryCache, cache_key, file_digest
from kt.tuner.backend.cc import CCompiler, find_compiler

WORKLOAD = gemm("gemm 8x8x8 dtype=fp32")
SOURCE = source(WORKLOAD)
Compiler = Callable[[str], CCompiler]


@pytest.fixture
def cache(tmp_path: Path) -> BinaryCache:
    return BinaryCache(tmp_path / "cache")


@pytest.fixture
def builder(cache: BinaryCache, tmp_path: Path) -> Builder:
    return Builder(cache, BinaryCache(tmp_path / "spare"))


@pytest.fixture
def fake(tmp_path: Path) -> Compiler:
    """A compiler made of a shell script's body."""

    def make(body: str) -> CCompiler:
        path = tmp_path / "fakecc"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return CCompiler((str(path),), "fake 1.0")

    return make


def build(builder: Builder, text: str = SOURCE, compiler: CCompiler | None = None) -> Binary:
    built = builder.build(text, compiler or find_compiler(), "", 30.0)
    assert isinstance(built, Binary), built
    return built


def refused(builder: Builder, compiler: CCompiler, timeout: float = 30.0) -> Failure:
    built = builder.build(SOURCE, compiler, "", timeout)
    assert isinstance(built, Failure)
    return built


def test_equal_code_gives_equal_binaries_whatever_the_text(builder: Builder) -> None:
    first = build(builder)
    second = build(builder, "/* another text */\n" + SOURCE)
    assert first.path != second.path and not second.facts.cached
    assert first.facts.binary == second.facts.binary == file_digest(second.path)
    assert build(builder, SOURCE.replace("K)", "K - 1)")).facts.binary != first.facts.binary


def test_a_hit_keeps_the_facts_and_costs_little(builder: Builder) -> None:
    first, again = build(builder), build(builder)
    assert again.facts.cached and again.path == first.path
    assert again.facts.seconds == first.facts.seconds > 0


def test_another_compiler_is_another_entry(builder: Builder) -> None:
    compiler = find_compiler()
    newer = CCompiler(compiler.command, "99.0")
    assert build(builder).path != build(builder, compiler=newer).path


def test_the_first_error_is_the_message_and_the_output_the_detail(builder: Builder) -> None:
    failure = builder.build("int f( { return x; }\nint g() { return y; }", find_compiler(), "", 30)
    assert isinstance(failure, Failure) and failure.failure == "compile_error"
    assert "error:" in failure.message and "\n" not in failure.message
    assert failure.message.splitlines()[0] in failure.detail


def test_undefined_symbols_and_warnings_show(builder: Builder) -> None:
    missing = builder.build("int nowhere(void); int f(void) { return nowhere(); }",
                            find_compiler(), "", 30)  # fmt: skip
    assert isinstance(missing, Failure) and "nowhere" in missing.detail
    warned = build(builder, SOURCE + "static int unused_function(void) { return 1; }")
    assert any("unused_function" in warning for warning in warned.facts.warnings)


def test_a_compiler_that_hangs_is_killed_with_its_children(
    builder: Builder, fake: Compiler, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    compiler = fake(f"sleep 60 & echo $! $$ > {pids}; wait")
    begin = time.monotonic()
    failure = refused(builder, compiler, timeout=3.0)
    assert failure.failure == "build_timeout" and time.monotonic() - begin < 30
    assert not wait_gone({int(pid) for pid in pids.read_text().split()})


def test_endless_output_is_bounded(builder: Builder, fake: Compiler) -> None:
    failure = refused(builder, fake("yes 'kernel.c:1: error: no end'"), timeout=1.0)
    assert failure.failure == "build_timeout" and len(failure.detail) < 5000
    loud = fake("head -c 30000000 /dev/zero | tr '\\0' x; echo; echo 'fatal error: last'; exit 1")
    failure = refused(builder, loud)
    assert failure.message == "fatal error: last" and len(failure.detail) < 5000


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("exit 4", "compile_error", "exit code 4"),
        ("kill -SEGV $$", "compile_error", "Segmentation fault"),
        ("exit 0", "compile_error", "wrote no output file"),
        ("echo 'cc1: out of memory allocating 8 bytes'; exit 1", "resource", "out of memory"),
    ],
)
def test_odd_ends_of_a_compiler(
    builder: Builder, fake: Compiler, body: str, kind: str, text: str
) -> None:
    failure = refused(builder, fake(body))
    assert failure.failure == kind and text in failure.message


def test_no_compiler_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ToolchainError, match="apt-get install gcc"):
        find_compiler()
    monkeypatch.setenv("CC", "nocc -m64")
    with pytest.raises(ToolchainError, match=r"\$CC names was not found: nocc"):
        find_compiler()


def test_cc_may_hold_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -fno-math-errno")
    assert find_compiler().command == ("cc", "-fno-math-errno")


@pytest.mark.parametrize("damage", ["truncate", "change", "facts", "remove"])
def test_a_damaged_entry_is_rebuilt(builder: Builder, damage: str) -> None:
    binary = build(builder)
    match damage:
        case "truncate":
            os.truncate(binary.path, 100)
        case "change":
            data = bytearray(binary.path.read_bytes())
            data[len(data) // 2] ^= 1
            binary.path.write_bytes(data)
        case "facts":
            (binary.path.parent / "facts.json").write_text("{")
        case "remove":
            binary.path.unlink()
    again = build(builder)
    assert not again.facts.cached and file_digest(again.path) == binary.facts.binary


_RACER = """
import sys, time
from pathlib import Path
from kt.logs.record import BuildFacts
from kt.tuner.backend.cache import BinaryCache, file_digest
cache = BinaryCache(Path(sys.argv[1]))
for i in range(60):
    with cache.staging() as path:
        (path / "kernel.so").write_bytes(b"same")
        facts = BuildFacts(1.0, binary=file_digest(path / "kernel.so"))
        cache.publish(f"{i:064d}", path, "kernel.so", facts)
    assert cache.find(f"{i:064d}", "kernel.so")
"""


def test_two_processes_may_publish_the_same_keys(cache: BinaryCache) -> None:
    racers = [subprocess.Popen([sys.executable, "-c", _RACER, str(cache.root)]) for _ in range(2)]
    assert [racer.wait() for racer in racers] == [0, 0]
    assert len(list(cache.root.glob("??/*/facts.json"))) == 60
    assert not list((cache.root / "staging").iterdir())


def test_prune_removes_what_was_not_used_for_longest(cache: BinaryCache) -> None:
    for i in range(4):
        with cache.staging() as path:
            (path / "kernel.so").write_bytes(bytes(1000))
            facts = BuildFacts(1.0, binary=file_digest(path / "kernel.so"))
            cache.publish(cache_key(str(i)), path, "kernel.so", facts)
        os.utime(cache.entry(cache_key(str(i))) / "facts.json", (i, i))
    assert cache.find(cache_key("0"), "kernel.so")  # used just now
    cache.prune(2500)
    left = [i for i in range(4) if cache.entry(cache_key(str(i))).exists()]
    assert left == [0, 3]


def test_key_parts_do_not_run_together() -> None:
    assert cache_key("ab", "c") != cache_key("a", "bc")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def unusable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KT_CACHE_DIR", "/dev/null/cache")
    yield


@pytest.mark.usefixtures("unusable")
def test_an_unusable_cache_costs_one_line(tmp_path: Path, notes: list[str]) -> None:
    pool = BuilderPool(tmp_path, 1, notes.append)
    built = [pool.submit(SOURCE, "c", "", 30).result() for _ in range(2)]
    pool.close()
    assert all(isinstance(one, Binary) and one.path.is_file() for one in built)
    assert len(notes) == 1 and "/dev/null/cache" in notes[0] and "\n" not in notes[0]


def test_a_cache_that_fills_up_costs_one_line(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / "cache"))
    pool = BuilderPool(tmp_path, 1, notes.append)
    (tmp_path / "cache" / "staging").rmdir()
    (tmp_path / "cache" / "staging").write_text("in the way")
    for text in (SOURCE, SOURCE + "int more;"):
        assert isinstance(pool.submit(text, "c", "", 30).result(), Binary)
    pool.close()
    assert len(notes) == 1 and "not cached" in notes[0]


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_CACHE_DIR", "/a")
    assert cache_module.cache_directory() == Path("/a")
    monkeypatch.delenv("KT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_module.cache_directory() == Path("/b/kt")


def test_closing_a_pool_ends_its_builds(
    tmp_path: Path, fake: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    fake(f'case "$*" in *--version*) echo 1; exit;; esac; echo $$ >> {pid}; exec sleep 60')
    monkeypatch.setenv("CC", str(tmp_path / "fakecc"))
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / "cache"))
    pool = BuilderPool(tmp_path, 2)
    builds = [pool.submit(kernel(WORKLOAD, top=f"int x{i};").source, "c", "", 60) for i in range(5)]
    end = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 30 and all(build.done() for build in builds)
    assert not wait_gone({int(number) for number in pid.read_text().split()})


def test_builders_give_way_and_cancelled_builds_that_began_go_on(tmp_path: Path) -> None:
    pool = BuilderPool(tmp_path, 1, cache=BinaryCache(tmp_path / "cache"))
    try:
        texts = [f"{SOURCE}\n/* {i} */\n" for i in range(3)]
        builds = [pool.submit(text, "c", "", 30.0) for text in texts]
        while not builds[0].running():
            time.sleep(0.001)
        left = pool.cancel(builds)
        assert left == {builds[0]} and builds[1].cancelled() and builds[2].cancelled()
        assert isinstance(builds[0].result(), Binary)
        builder = pool._workers[0].pid
        assert builder is not None
        assert os.getpriority(os.PRIO_PROCESS, builder) > os.getpriority(os.PRIO_PROCESS, 0)
        assert isinstance(pool.submit(texts[1], "c", "", 30.0).result(), Binary)
        assert pool._workers[0].pid == builder  # nobody killed it
    finally:
        pool.close()
