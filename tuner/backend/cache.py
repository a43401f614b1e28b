"""Binaries by content: a directory an entry, published by one atomic rename.

    <root>/<key[:2]>/<key>/   source, binary, facts.json
    <root>/staging/           entries being made

The key hashes everything that decides the binary: source, flags, compiler version, architecture.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kt.logs.record import BuildFacts

LIMIT_BYTES = 2 * 2**30
_YOUNG_SECONDS = 60.0  # one without a lock may be just being made
_STALE_SECONDS = 3600.0  # where the file system has no locks
_FACTS = "facts.json"


def cache_key(*parts: str) -> str:
    """SHA-256 of the parts, each length-prefixed so that no two lists collide."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape")  # paths need not be UTF-8
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BinaryCache:
    """A cache under `root`. Every method may raise OSError; a damaged entry is a miss."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entry(self, key: str) -> Path:
        return self.root / key[:2] / key

    def find(self, key: str, binary: str) -> BuildFacts | None:
        """Facts of an intact entry whose file `binary` has the recorded hash, else None."""
        entry = self.entry(key)
        try:
            facts = msgspec.json.decode((entry / _FACTS).read_bytes(), type=BuildFacts)
            intact = file_digest(entry / binary) == facts.binary
        except (OSError, msgspec.MsgspecError):
            return None
        if not intact:
            return None
        with contextlib.suppress(OSError):
            os.utime(entry / _FACTS)  # prune removes what was not used for longest
        return facts

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty directory on the cache's file system, locked, and removed afterwards."""
        (self.root / "staging").mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=self.root / "staging"))
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def publish(self, key: str, staged: Path, binary: str, facts: BuildFacts) -> BuildFacts:
        """Makes `staged` the entry of `key`; returns the facts of the entry that is there then.

        Losing the race to another process is fine: its entry is as good. A damaged one is replaced.
        """
        (staged / _FACTS).write_bytes(msgspec.json.encode(facts))
        entry = self.entry(key)
        entry.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            try:
                os.rename(staged, entry)
                return facts
            except OSError:
                if not entry.is_dir():
                    raise
            present = self.find(key, binary)
            if present is not None:
                return present
            self._discard(entry)
        raise OSError(f"cannot replace the damaged cache entry {entry}")

    def _discard(self, entry: Path) -> None:
        """Moves an entry away in one step, then removes it."""
        with contextlib.suppress(FileNotFoundError), self.staging() as grave:
            os.rename(entry, grave / "entry")

    def prune(self, limit_bytes: int = LIMIT_BYTES) -> None:
        """Removes the least recently used entries beyond `limit_bytes`, and dead staging."""
        entries = []
        for facts in self.root.glob(f"??/*/{_FACTS}"):
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in facts.parent.iterdir())
                entries.append((facts.stat().st_mtime, size, facts.parent))
        excess = sum(size for _, size, _ in entries) - limit_bytes
        for _, size, entry in sorted(entries):
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                self._discard(entry)
            excess -= size
        for path in self.root.glob("staging/*"):
            with contextlib.suppress(OSError):
                if _abandoned(path):
                    shutil.rmtree(path, ignore_errors=True)


def _abandoned(staged: Path) -> bool:
    """Whether the process that made a staging directory is dead."""
    age = time.time() - staged.stat().st_mtime
    if age < _YOUNG_SECONDS:
        return False
    lock = os.open(staged, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age > _STALE_SECONDS
    finally:
        os.close(lock)
    return True


def cache_directory() -> Path:
    """`KT_CACHE_DIR`, else `kt` in the XDG cache directory; raises OSError without a home for ~."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = os.environ.get("KT_CACHE_DIR") or os.path.join(base, "kt")
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError:
        raise OSError(errno.ENOENT, "no such home directory", chosen) from None


def writable(cache: BinaryCache) -> str | None:
    """Why nothing can be stored in the cache, or None when it can."""
    try:
        with cache.staging() as path:
            (path / "probe").write_bytes(b"\0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return None
