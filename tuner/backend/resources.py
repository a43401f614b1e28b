"""What a CUDA kernel uses: read from the ptxas log and, independently, from the cubin itself."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

_LOG = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
}
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# Attributes of .nv.info as `cuobjdump -elf` names them: EIFMT_SVAL, EIATTR_REGCOUNT, _FRAME_SIZE.
_SIZED, _REGISTER_COUNT, _FRAME_SIZE = 0x04, 0x2F, 0x11
# From sm_90 on the system keeps 1 KiB of a block's shared memory, and the section contains it.
_HOPPER, _SYSTEM_SHARED = 90, 1024
_WARNINGS = 8


@dataclass(frozen=True)
class Resources:
    """Largest use over a binary's kernels; bytes of shared memory are the static ones."""

    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0


def from_log(log: str) -> Resources:
    """Resources that `--ptxas-options=-v` prints; zeros where the log is silent."""
    spills = [int(stores) + int(loads) for stores, loads in _SPILLS.findall(log)]
    values = {
        name: max((int(found) for found in pattern.findall(log)), default=0)
        for name, pattern in _LOG.items()
    }
    return Resources(**values, spill_bytes=max(spills, default=0))


def from_cubin(image: bytes) -> Resources:
    """Resources that the cubin's ELF sections state (spills are not among them)."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(image))
    reserved = _SYSTEM_SHARED if elf["e_flags"] >> 8 & 0xFF >= _HOPPER else 0
    shared, attributes = 0, dict[int, int]()
    for section in elf.iter_sections():
        if section.name == ".nv.info":
            attributes = _symbol_attributes(section.data())
        elif section.name.startswith(".nv.shared.") and section["sh_size"]:
            shared = max(shared, section["sh_size"] - reserved)
    return Resources(
        registers=attributes.get(_REGISTER_COUNT, 0), shared_bytes=shared,
        stack_bytes=attributes.get(_FRAME_SIZE, 0),
    )  # fmt: skip


def _symbol_attributes(data: bytes) -> dict[int, int]:
    """Largest value by attribute of `.nv.info`: entries of format, code, size, symbol, value."""
    found: dict[int, int] = {}
    at = 0
    while at + 4 <= len(data):
        kind, code, size = data[at], data[at + 1], int.from_bytes(data[at + 2 : at + 4], "little")
        if kind != _SIZED:
            at += 4
            continue
        if size == 8:
            value = int.from_bytes(data[at + 8 : at + 12], "little")
            found[code] = max(found.get(code, 0), value)
        at += 4 + size
    return found


def advisories(log: str) -> tuple[str, ...]:
    """Distinct warnings and ptxas advisories (C75xx …) of a log, the first few."""
    lines = (line.strip() for line in log.splitlines())
    kept = (x[:200] for x in lines if "warning" in x.lower() or re.search(r"\bC7\d{3}\b", x))
    return tuple(dict.fromkeys(kept))[:_WARNINGS]
