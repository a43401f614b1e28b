"""The pool of builders: compilers, the binary cache and the processes that compile."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kt.logs.record import Failure
from kt.spaces.target import usable_cores

from .build import Binary, Builder, Toolchain
from .cache import BinaryCache, cache_directory, writable
from .cc import find_compiler
from .nvcc import find_nvcc
from .nvrtc import find_nvrtc
from .worker import Died, Done, Ended, TimedOut, Worker

# A compiler that is a process of its own is killed on time by the builder; NVRTC runs inside it.
_MARGIN_SECONDS = {"c": 10.0, "nvcc": 10.0, "cuda": 0.0}
_WARM_SECONDS = 30.0
_NICE = 5
_FINDERS: Mapping[str, Callable[[], Toolchain]] = {
    "c": find_compiler, "nvcc": find_nvcc, "cuda": find_nvrtc,
}  # fmt: skip


def print_note(text: str) -> None:
    """One line to the user that is not an error."""
    print(f"kt: {text}", file=sys.stderr)


def polite_builder(*args: Any) -> Builder:
    """A Builder in a process that gives way to the search and to the runners of devices."""
    os.nice(_NICE)
    return Builder(*args)


class BuilderPool:
    """`count` builder processes (default: the usable cores), shaped like an Executor.

    A builder that hangs or dies costs its one build. `directory` is the session's, for what the
    cache cannot take; `note` gets a line, once, when that happens. `cache` replaces the user's
    binary cache; binaries are first looked for in `bundles`, which are caches that are only read.
    """

    def __init__(
        self,
        directory: Path,
        count: int | None = None,
        note: Callable[[str], None] = print_note,
        bundles: Sequence[BinaryCache] = (),
        cache: BinaryCache | None = None,
    ) -> None:
        self.count = count or usable_cores()
        self._note, self._noted, self._lock = note, set[str](), threading.Lock()
        self._toolchains: dict[str, Toolchain] = {}
        spare = BinaryCache(directory / "binaries")
        cache = self._open(cache, spare)
        self._workers = [
            Worker(polite_builder, (cache, spare, tuple(bundles)), directory / f"builder{i}.log")
            for i in range(self.count)
        ]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._busy = set[Worker]()
        self._warm = False
        self._submitted = set[Future[Binary | Failure]]()
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="kt-build")

    def toolchain(self, language: str) -> Toolchain:
        """The compiler of a language (`nvcc` is CUDA with its host's side); ToolchainError if none.

        The message has the install command.
        """
        if language not in self._toolchains:
            self._toolchains[language] = _FINDERS[language]()
        return self._toolchains[language]

    def submit(
        self, source: str, language: str, arch: str, timeout: float
    ) -> Future[Binary | Failure]:
        """Begins a build; the compiler has `timeout` seconds, queue wait not counted.

        Raises ToolchainError without a compiler for the language.
        """
        build = self._threads.submit(self._build, source, self.toolchain(language), arch, timeout)
        self._submitted.add(build)
        build.add_done_callback(self._submitted.discard)
        return build

    def warm(self, language: str, arch: str) -> None:
        """Starts every builder process, behind the caller's back, so that builds find them ready.

        Loading NVRTC into them takes longer than many a build. Does nothing the second time.
        """
        if self._warm:
            return
        self._warm = True
        toolchain = self.toolchain(language)
        for _ in self._workers:
            self._threads.submit(self._call, "warm", toolchain, arch, limit=_WARM_SECONDS)

    def cancel(self, builds: Iterable[Future[Binary | Failure]]) -> set[Future[Binary | Failure]]:
        """Cancels builds that have not begun; returns the others, which go on."""
        return {build for build in builds if not build.cancel()}

    def abandon(self, builds: Iterable[Future[Binary | Failure]]) -> None:
        """Cancels builds; those under way end as failures before this returns."""
        left = self.cancel(builds)
        while any(not build.done() for build in left):
            with self._lock:
                for worker in self._busy:
                    worker.kill()
            wait(left, 0.02)

    def close(self) -> None:
        """Ends every builder; builds under way are lost."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.abandon(list(self._submitted))
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.stop()

    def _build(
        self, source: str, toolchain: Toolchain, arch: str, timeout: float
    ) -> Binary | Failure:
        limit = timeout + _MARGIN_SECONDS[toolchain.language]
        match ended := self._call("build", source, toolchain, arch, timeout, limit=limit):
            case Done(Binary() as binary):
                if binary.note:
                    self._say(f"binaries are not cached ({binary.note})")
                return binary
            case Done(Failure() as failure):
                return failure
            case TimedOut():
                message = f"the compiler did not finish within {timeout:g} s and was killed"
                return Failure("build_timeout", "build", message, ended.log)
            case Died():
                return Failure("compile_error", "build", f"the compiler died: {ended}", ended.log)
            case _:
                raise AssertionError(ended)

    def _call(self, method: str, *args: object, limit: float) -> Ended:
        """Calls a builder that is free."""
        worker = self._idle.get()
        with self._lock:
            self._busy.add(worker)
        try:
            return worker.call(method, *args, limit=limit)
        finally:
            with self._lock:
                self._busy.discard(worker)
            self._idle.put(worker)

    def _open(self, cache: BinaryCache | None, spare: BinaryCache) -> BinaryCache:
        """The cache, or the user's; `spare` when it cannot be used."""
        try:
            cache = cache or BinaryCache(cache_directory())
        except OSError as error:
            place, reason = error.filename, error.strerror
        else:
            place, reason = cache.root, writable(cache)
        if cache is None or reason:
            self._say(f"the binary cache {place} is not usable ({reason}): building anew")
            return spare
        cache.prune()
        return cache

    def _say(self, text: str) -> None:
        with self._lock:
            if text in self._noted:
                return
            self._noted.add(text)
        self._note(text)
