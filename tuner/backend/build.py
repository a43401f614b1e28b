"""The Builder: a kernel's source becomes a Binary, without a device, through the cache."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from kt.logs.record import BuildFacts, Failure
from kt.spaces.kernel import Kernel, Launch

from .cache import BinaryCache, cache_key, file_digest
from .environment import plain


@dataclass(frozen=True)
class Binary:
    """A built kernel: its file, what the compiler said, and the seconds that getting it took.

    `note` says why the binary is not in the cache, where that is so.
    """

    path: Path
    facts: BuildFacts
    seconds: float
    note: str = ""
    launches: tuple[Launch, ...] = ()
    workspace_bytes: int = 0
    zeroed_bytes: int = 0

    def started_by(self, kernel: Kernel) -> Binary:
        """The binary with what a CUDA runner must know to start `kernel`."""
        return replace(
            self, launches=kernel.launches, workspace_bytes=kernel.workspace_bytes,
            zeroed_bytes=kernel.zeroed_bytes,
        )  # fmt: skip


class Toolchain(Protocol):
    """A compiler of one language. Writes `binary_name` beside `source_name` in a directory."""

    @property
    def language(self) -> str: ...
    @property
    def source_name(self) -> str: ...
    @property
    def binary_name(self) -> str: ...
    def identity(self, arch: str) -> str: ...
    def compile(self, directory: Path, arch: str, timeout: float) -> BuildFacts | Failure: ...


class Builder:
    """Builds in the calling process.

    `spare` takes what the cache cannot store; `bundles` are looked into first and never written.
    """

    def __init__(
        self, cache: BinaryCache, spare: BinaryCache, bundles: Sequence[BinaryCache] = ()
    ) -> None:
        self._cache, self._spare, self._bundles = cache, spare, bundles

    def build(
        self, source: str, toolchain: Toolchain, arch: str, timeout: float
    ) -> Binary | Failure:
        """The binary of `source`, from the cache or built; the compiler has `timeout` seconds."""
        begin = time.monotonic()
        key = cache_key(toolchain.language, source, toolchain.identity(arch))
        for bundle in self._bundles:
            if found := self._cached(bundle, key, toolchain):
                path = bundle.entry(key) / toolchain.binary_name
                return Binary(path, found, time.monotonic() - begin)
        note = ""
        for cache in (self._cache, self._spare):
            try:
                facts = self._cached(cache, key, toolchain) or self._make(
                    cache, key, source, toolchain, arch, timeout
                )
            except OSError as error:
                note = plain(f"{cache.root}: {error.strerror or error}")
                continue
            if isinstance(facts, Failure):
                return facts
            path = cache.entry(key) / toolchain.binary_name
            return Binary(path, facts, time.monotonic() - begin, note)
        return Failure("resource", "build", f"no room for the binary: {note}")

    def warm(self, toolchain: Toolchain, arch: str) -> None:
        """Loads a compiler that runs in this process, by compiling nothing."""
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / toolchain.source_name).touch()
            toolchain.compile(Path(name), arch, 0.0)

    def _cached(self, cache: BinaryCache, key: str, toolchain: Toolchain) -> BuildFacts | None:
        facts = cache.find(key, toolchain.binary_name)
        return msgspec.structs.replace(facts, cached=True) if facts else None

    def _make(
        self,
        cache: BinaryCache,
        key: str,
        source: str,
        toolchain: Toolchain,
        arch: str,
        timeout: float,
    ) -> BuildFacts | Failure:
        with cache.staging() as directory:
            (directory / toolchain.source_name).write_text(source)
            made = toolchain.compile(directory, arch, timeout)
            if isinstance(made, Failure):
                return made
            digest = file_digest(directory / toolchain.binary_name)
            facts = msgspec.structs.replace(made, binary=digest)
            return cache.publish(key, directory, toolchain.binary_name, facts)
