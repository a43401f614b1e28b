"""One writer a run: a lock that a process holds on a log while it tunes, and that dies with it."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from pathlib import Path

from kt.spaces.errors import LogError

# An open-file-description lock: other descriptors of this process, which readers open and close,
# do not release it (as they would a POSIX lock). One byte far beyond any log stands for each run.
_BASE = 2**61


class Claim:
    """Holds `run` of the log at `path` until the context ends.

    Raises LogError when another process holds it. Where the file system has no locks there is
    no claim.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        where = _BASE + zlib.crc32(run.encode())
        wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, where, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(self._fd)
                raise LogError(f"run {run} of {path} is being written by another process") from None

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
