"""Writing a command's result to a file: whole or not at all, and over our own files only."""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from kt.spaces.errors import SettingsError

_LOOKED_AT = 16 * 2**20
_GZIP = b"\x1f\x8b"


def refuse_overwriting(
    path: Path, force: bool, is_ours: Callable[[bytes], bool], what: str
) -> None:
    """Raises SettingsError for an existing file, not empty, that is not `what` kt writes there,
    for a log, and for what cannot be looked at."""
    _refuse_always(path)
    if force or not path.is_file():
        return
    with open(path, "rb") as file:
        content = file.read(_LOOKED_AT)
    if content and not is_ours(content):
        raise SettingsError(f"{path} exists and is not a {what}: --force overwrites it")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a whole file or nothing; what is no regular file (a pipe, a device) gets it.

    Raises SettingsError where that fails, and where it would replace a log of kt.
    """
    _refuse_always(path)
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            _replace(path, content)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from None


def _refuse_always(path: Path) -> None:
    """A loop of links is found here: only some Pythons' `resolve` raises for it."""
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from None
    if _is_log(path):
        raise SettingsError(f"{path} is a log: its measurements would be lost; name another file")


def _is_log(path: Path) -> bool:
    """Whether a file begins as a log does, compressed or not."""
    if not path.is_file():
        return False
    with contextlib.suppress(OSError, EOFError, zlib.error):
        with open(path, "rb") as file:
            zipped = file.read(len(_GZIP)) == _GZIP
        with gzip.open(path) if zipped else open(path, "rb") as file:
            first = file.readline(_LOOKED_AT)
        return first.startswith(b"{") and b'"type":"run"' in first.replace(b" ", b"")
    return False


def _replace(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, path.stat().st_mode if path.exists() else 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
