"""The journal: an append-only JSON Lines file that survives crashes and hostile content.

Appends are whole lines under an exclusive lock, so two writers never interleave. A torn last line
(a crash, a full disk) is repaired before the next append and tolerated by readers; a bad line in
the middle is reported and skipped. A log is untrusted: decoding only ever yields frozen records.
"""

from __future__ import annotations

import fcntl
import gc
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from kt.spaces.errors import LogError

from .record import SCHEMA, Record, RunRecord

SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_LINE_BYTES = 16 * 2**20
MAX_FILE_BYTES = 4 * 2**30
"""Decompressed; a few megabytes of gzip can hold more than any disk."""
BAD_KEPT = 100
"""Bad lines that are kept with their reasons; the others are counted."""
BAD_REFUSED = 10_000
"""A file with this many lines that are no records, and fewer that are, is not a log."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


@dataclass(frozen=True)
class BadLine:
    """A line that is not a record, with the reason."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: skipped, {self.reason}"


class BadLines(list[BadLine]):
    """The first BAD_KEPT bad lines; `total` counts all."""

    total = 0

    def add(self, bad: BadLine) -> None:
        self.total += 1
        if len(self) < BAD_KEPT:
            self.append(bad)


@dataclass
class Log:
    """What was read: records in file order, and the lines that were skipped."""

    records: list[Record] = field(default_factory=list)
    bad: BadLines = field(default_factory=BadLines)


class Journal:
    """Appends records to one file. Use as a context manager; safe with several writers."""

    def __init__(self, path: Path) -> None:
        """Opens (creating parents) for appending; raises LogError when that cannot work."""
        if path.suffix == ".gz":
            raise LogError(f"{path}: compressed logs are read-only; give a .jsonl file")
        self.path = path
        try:
            if path.exists() and not path.is_file():
                raise LogError(f"cannot write log {path}: not a regular file")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._created = not path.exists()
            self._end = 0  # of this object's last append
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LogError(f"cannot write log {path}: {error.strerror}") from None
        if not self._appendable():
            self.close()
            raise LogError(f"{path} exists and is not a kt log; give another --log")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            if self._created and os.fstat(self._fd).st_size == 0 and not self._lost():
                self.path.unlink(missing_ok=True)  # nothing came of it
            os.close(self._fd)
            self._fd = -1

    def append(self, *records: Record, durable: bool = False) -> None:
        """Writes the records as one block of lines; `durable` waits until they are on disk.

        Raises LogError when the disk is full or gone; everything before the block stays intact.
        Raises LogError when the path no longer leads to the file, or the file lost lines.
        Raises msgspec.ValidationError, a bug, for a record that could not be read back.
        """
        block = b"".join(map(_line, records))
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                if lost := self._lost():
                    raise LogError(
                        f"the log {self.path} was {lost} while tuning; what is measured from here "
                        "on would be lost, so the run ends"
                    )
                end = self._repaired_end()
                self._write(block, end)
                self._end = end + len(block)
                if durable:
                    os.fsync(self._fd)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            raise LogError(
                f"cannot write log {self.path}: {error.strerror}; what was logged before is intact"
            ) from None

    def _lost(self) -> str:
        """What happened to the file that was opened, if its lines are no longer at the path."""
        mine = os.fstat(self._fd)
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return "removed"
        if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            return "replaced"
        return "truncated" if mine.st_size < self._end else ""

    def _write(self, block: bytes, end: int) -> None:
        view = memoryview(block)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, end)  # no half line stays behind
            raise

    def _repaired_end(self) -> int:
        """Size of the file after its last line was completed or, if torn, removed."""
        size = os.fstat(self._fd).st_size
        if size == 0 or os.pread(self._fd, 1, size - 1) == b"\n":
            return size
        start = max(0, size - MAX_LINE_BYTES)
        tail = os.pread(self._fd, size - start, start)
        last = tail[tail.rfind(b"\n") + 1 :]
        if _is_record(last):
            return size + os.write(self._fd, b"\n")
        os.ftruncate(self._fd, size - len(last))
        return self._repaired_end()  # a torn line may be longer than the tail looked at

    def _appendable(self) -> bool:
        """A file that holds no record at all is somebody's and is not appended to."""
        head = os.pread(self._fd, MAX_LINE_BYTES, 0)
        return _only_begun(head) or any(map(_is_record, head.split(b"\n")[:64]))


_BEGINNING = b'{"type":"run",'


def _only_begun(head: bytes) -> bool:
    """Whether a file with this beginning holds nothing, or no more than a torn first line."""
    return b"\n" not in head and (head.startswith(_BEGINNING) or _BEGINNING.startswith(head))


def holds_nothing(path: Path) -> bool:
    """Whether a log file is missing, empty or was torn inside its very first line."""
    try:
        if not path.is_file():
            return not path.exists()
        with open(path, "rb") as file:
            head = file.read(MAX_LINE_BYTES)
    except OSError as error:
        raise LogError(f"cannot read log {path}: {error.strerror}") from None
    return _only_begun(head) and not _is_record(head)


def _line(record: Record) -> bytes:
    line = _encoder.encode(record)
    _decoder.decode(line)  # strict on write: NaN, for one, would become null
    return line + b"\n"


def _is_record(line: bytes) -> bool:
    try:
        _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def log_files(path: Path) -> list[Path]:
    """The log files that `path` names: itself, or the logs of a directory, oldest name first."""
    try:
        if path.is_file():
            return [path]
        if not path.exists():
            raise LogError(f"{path}: no such log")
        if not path.is_dir():
            raise LogError(f"{path}: not a regular file")
        files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.is_file())
    except OSError as error:
        raise LogError(f"cannot read log {path}: {error.strerror}") from None
    if not files:
        raise LogError(f"{path}: no logs in this directory (looked for *.jsonl, *.jsonl.gz)")
    return files


def read_log(path: Path) -> Log:
    """All records of a log file or directory.

    Raises LogError when it is missing, empty, unreadable, of another format or of a newer schema.
    """
    log = Log()
    collecting = gc.isenabled()
    gc.disable()  # records hold no cycles; tracing a growing heap would double the time
    try:
        for file in log_files(path):
            _read_file(file, log)
    finally:
        if collecting:
            gc.enable()
    if not log.records:
        raise LogError(f"{path}: {_why_empty(log)}")
    return log


def _why_empty(log: Log) -> str:
    if not log.bad:
        return "the log is empty"
    return _foreign(log.bad[0])


def _foreign(first: BadLine | None) -> str:
    return f"not a kt log ({f'line {first.line}: {first.reason}' if first else 'empty lines'})"


def _read_file(path: Path, log: Log) -> None:
    number = refused = 0
    first: BadLine | None = None
    decode, keep = _decoder.decode, log.records.append
    try:
        for number, line in enumerate(_lines(path), 1):
            try:
                record = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                refused += 1
                if line.strip():
                    _refuse_newer(path, number, line)
                    torn = "torn line, " if not line.endswith(b"\n") else ""
                    bad = BadLine(path, number, torn + _short(error))
                    first = first or bad
                    log.bad.add(bad)
                if refused >= BAD_REFUSED and 2 * refused > number:
                    raise LogError(f"{path}: {_foreign(first)}") from None
            else:
                if type(record) is RunRecord and record.schema > SCHEMA:
                    raise _newer(path, number, record.schema)
                keep(record)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise LogError(f"cannot read log {path}: {error.strerror}") from None
        log.bad.add(BadLine(path, number + 1, f"compressed data ends or is damaged ({error})"))


def _compressed(file: BinaryIO, path: Path) -> bool:
    """Whether the file is gzip: by its name, or because it begins and decompresses like it.

    A torn or foreign first line of a plain log may begin with the same bytes.
    """
    magic = file.read(3) == b"\x1f\x8b\x08"
    file.seek(0)
    if not magic or path.suffix == ".gz":
        return magic
    try:
        gzip.GzipFile(fileobj=file).read(1)
        return True
    except (OSError, EOFError, zlib.error):
        return False
    finally:
        file.seek(0)


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        compressed = _compressed(file, path)
        source = gzip.GzipFile(fileobj=file) if compressed else file
        size, whole = 0, True
        while part := source.readline(MAX_LINE_BYTES):
            size += len(part)
            if size > MAX_FILE_BYTES:
                limit = f"{MAX_FILE_BYTES // 2**30} GiB"
                raise LogError(f"{path}: holds more than {limit}, too much for a log")
            if whole:
                yield part
            # The rest of a line that is too long for a record is passed over.
            whole = len(part) < MAX_LINE_BYTES or part.endswith(b"\n")


class _Envelope(msgspec.Struct):
    type: str
    schema: int = SCHEMA


def _refuse_newer(path: Path, number: int, line: bytes) -> None:
    try:
        envelope = msgspec.json.decode(line, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if envelope.type == "run" and envelope.schema > SCHEMA:
        raise _newer(path, number, envelope.schema)


def _newer(path: Path, number: int, schema: int) -> LogError:
    return LogError(
        f"{path}:{number}: written by a newer kt (log schema {schema}, this one reads up to "
        f"{SCHEMA}); upgrade kt to read it"
    )


def _short(error: Exception) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(error))
    return text if len(text) <= 200 else text[:197] + "..."


def encode_records(records: Iterable[Record]) -> bytes:
    """The lines of `records`, as `Journal.append` writes them."""
    return b"".join(map(_line, records))
