"""Runs a CUDA kernel of ours on the CPU: its source, with `emulator/ptx.cuh` for the PTX, by g++.

The kernel's own host launcher (`kt_launch`) is what runs, so that is tested too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kt.spaces.kernel import DEVICE_HEADERS, Kernel

EMULATOR = Path(__file__).parent / "emulator"
Array = NDArray[np.generic]


def available() -> bool:
    return shutil.which("g++") is not None


def planted(kernel: Kernel, correct: str, wrong: str) -> Kernel:
    """The kernel with a bug in the place of a correct text, which it must have."""
    assert correct in kernel.source
    return dataclasses.replace(kernel, source=kernel.source.replace(correct, wrong))


def _headers() -> tuple[str, str]:
    """The body of the PTX header, and what the emulator puts in its place."""
    real = (DEVICE_HEADERS / "ptx.cuh").read_text()
    fake = (EMULATOR / "ptx.cuh").read_text()
    start, end = "// ---- conversions and approximations", "#endif\n"
    body = real[real.index(start) : real.rindex(end)]
    return body, fake[fake.index("// ---- CUDA") : fake.rindex(end)]


def _arguments(count: str) -> str:
    return f"\nextern const int emu_arguments; const int emu_arguments = {count};\n"


def _source(kernel: Kernel) -> str:
    """The kernel's text with the emulator in the place of the PTX header."""
    body, fake = _headers()
    assert kernel.source.count(body) == 1, "the source holds the PTX header once"
    return kernel.source.replace(body, fake) + _arguments("KT_ARGUMENTS + 1")


def _source_of_many(source: str, extents: int) -> str:
    """The text of kernels in namespaces, each with an emulator of its own; the one for any shape
    takes `extents` more arguments."""
    body, fake = _headers()
    headers = "\n".join(re.findall(r"^#include <.*>$", fake, re.MULTILINE))
    fake = re.sub(r"^#include <.*>$", "", fake, flags=re.MULTILINE)
    source = source.replace(body, fake)

    def close(match: re.Match[str]) -> str:
        more = extents if match[1] == "kt_any" else 0
        return _arguments(f"KT_ARGUMENTS + 1 + {more}") + match[0]

    return headers + "\n" + re.sub(r"^} // namespace (\w+)$", close, source, flags=re.MULTILINE)


def build(kernel: Kernel, directory: Path) -> ctypes.CDLL:
    return _build(_source(kernel), directory)


def build_many(source: str, extents: int, directory: Path) -> ctypes.CDLL:
    return _build(_source_of_many(source, extents), directory)


def _build(text: str, directory: Path) -> ctypes.CDLL:
    directory.mkdir(parents=True, exist_ok=True)
    source, library = directory / "kernel.cpp", directory / "kernel.so"
    source.write_text(text)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-include",
               str(EMULATOR / "cuda_keywords.h"), "-o", str(library), str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))


class Guarded:
    """An array between guard zones, its start a multiple of 256."""

    GUARD = 2**16

    def __init__(self, content: Array) -> None:
        size = content.nbytes
        self._raw = np.full(size + 3 * self.GUARD, 0xA5, np.uint8)
        self._begin = self.GUARD + -(self._raw.ctypes.data + self.GUARD) % 256
        self.array = self._raw[self._begin : self._begin + size].view(content.dtype)
        self.array = self.array.reshape(content.shape)
        self.array[...] = content

    @property
    def address(self) -> int:
        return self._raw.ctypes.data + self._begin

    def intact(self) -> bool:
        end = self._begin + self.array.nbytes
        return bool((self._raw[: self._begin] == 0xA5).all() and (self._raw[end:] == 0xA5).all())


def run(kernel: Kernel, inputs: Sequence[Array], output: Array, directory: Path) -> list[Array]:
    """`run_all` of a kernel with one output."""
    return [out for (out,) in run_all(kernel, inputs, [output], directory)]


def run_all(
    kernel: Kernel, inputs: Sequence[Array], outputs: Sequence[Array], directory: Path
) -> list[list[Array]]:
    """The outputs of two launches over one workspace; `outputs` is what they hold before each."""
    library = build(kernel, directory)
    for function in (library.kt_workspace_bytes, library.kt_workspace_zeroed_bytes):
        function.restype = ctypes.c_size_t
    assert library.kt_workspace_bytes() == kernel.workspace_bytes
    assert library.kt_workspace_zeroed_bytes() == kernel.zeroed_bytes
    workspace = np.full(kernel.workspace_bytes + 1, 0xFF, np.uint8)
    workspace[: kernel.zeroed_bytes] = 0
    held, space = [Guarded(x) for x in inputs], Guarded(workspace)
    results = []
    for _ in range(2):
        outs = [Guarded(x) for x in outputs]
        addresses = [x.address for x in (*held, *outs)]
        arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        code = library.kt_launch(arguments, ctypes.c_void_p(space.address), None)
        assert code == 0, f"kt_launch returned {code}"
        assert all(x.intact() for x in (*held, *outs, space)), "wrote outside"
        assert space.array[-1] == 0xFF, "wrote past the workspace"
        assert not space.array[: kernel.zeroed_bytes].any(), "the workspace was not left zero"
        for mine, given in zip(held, inputs, strict=True):
            assert np.array_equal(
                mine.array.view(np.uint8), np.ascontiguousarray(given).view(np.uint8)
            )
        results.append([x.array.copy() for x in outs])
    return results
