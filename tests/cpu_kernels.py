"""Built CPU kernels in this process: loading, launching, and operands between forbidden pages."""

from __future__ import annotations

import _ctypes
import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kt.spaces.kernel import DEVICE_HEADERS, Kernel
from kt.spaces.target import Target, detect_cpu
from kt.spaces.workload import Workload

Array = NDArray[Any]

CC = shutil.which("cc") or "cc"
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
DTYPES = {"fp32": np.float32, "fp64": np.float64}
GUARD = 0xA5
_WARNINGS = ("-O3", "-Wall", "-Wextra", "-Werror")


def narrower(target: Target) -> list[Target]:
    """This machine, and what it can also execute."""
    weaker = {"avx512": ("avx2", "sse2"), "avx2": ("sse2",)}.get(target.arch, ())
    sizes = {"avx2": 32, "sse2": 16}
    return [target] + [
        msgspec.structs.replace(target, arch=arch, simd_bytes=sizes[arch], vector_registers=16)
        for arch in weaker
    ]


TARGETS = narrower(detect_cpu())


def build(kernel: Kernel, folder: Path) -> Path:
    """The shared library of a kernel, built without any flag that names an instruction set."""
    source, library = folder / f"{kernel.digest}.c", folder / f"{kernel.digest}.so"
    source.write_text(kernel.source)
    command = [CC, *_WARNINGS, "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", library, source], check=True)
    return library


class Loaded:
    """A loaded kernel; `close` unloads the library."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.kt_workspace_bytes.restype = ctypes.c_size_t
        self.library.kt_describe.restype = ctypes.c_char_p

    def workspace(self) -> Array:
        """A 256-byte aligned workspace full of NaN."""
        size = self.library.kt_workspace_bytes()
        raw = np.full(size + 256, 0xFF, np.uint8)
        start = -raw.ctypes.data % 256
        return raw[start : start + size]

    def launch(self, *arrays: Array) -> None:
        workspace = self.workspace()
        pointers = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
        assert self.library.kt_launch(pointers, ctypes.c_void_p(workspace.ctypes.data)) == 0

    def close(self) -> None:
        _ctypes.dlclose(self.library._handle)


def compile_alone(source: Path, to: Path) -> None:
    """Compiles a kernel file without a stub, with its defaults."""
    command = [CC, *_WARNINGS, "-I", DEVICE_HEADERS, "-c", source, "-o", to]
    subprocess.run(command, check=True)


def inputs_of(workload: Workload, rng: np.random.Generator) -> list[Array]:
    """N(0, 1) operands in argument order."""
    return [
        rng.standard_normal(operand.shape).astype(DTYPES[operand.dtype])
        for operand in workload.inputs()
    ]


def output_of(workload: Workload) -> Array:
    """What the output holds before a launch: NaN."""
    return np.full(workload.output().shape, np.nan, DTYPES[workload.dtype])


class Fenced:
    """Copies of arrays, each touching a page that may not be accessed: after its last byte
    (`end`) or before its first. The rest of its own pages holds a pattern."""

    def __init__(self, arrays: list[Array], end: bool) -> None:
        self.arrays, self._rest, self._maps = [], [], []
        page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
        for array in arrays:
            size = -(-array.nbytes // page) * page
            memory = mmap.mmap(-1, size + 2 * page)
            whole = np.frombuffer(memory, np.uint8)
            for fence in (0, size + page):
                address = ctypes.c_void_p(whole.ctypes.data + fence)
                assert libc.mprotect(address, ctypes.c_size_t(page), 0) == 0
            body = whole[page : page + size]
            body[:] = GUARD
            used = slice(size - array.nbytes, size) if end else slice(0, array.nbytes)
            rest = slice(0, size - array.nbytes) if end else slice(array.nbytes, size)
            inner = body[used].view(array.dtype).reshape(array.shape)
            inner[...] = array
            self.arrays.append(inner)
            self._rest.append(body[rest])
            self._maps.append((memory, libc, whole.ctypes.data, size + 2 * page))

    def intact(self) -> bool:
        return all((rest == GUARD).all() for rest in self._rest)

    def __enter__(self) -> Fenced:
        return self

    def __exit__(self, *_: object) -> None:
        for _memory, libc, address, size in self._maps:
            libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 3)
