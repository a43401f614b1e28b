"""NVRTC: CUDA source to cubin for a named architecture, on a machine that needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt.logs.record import BuildFacts, Failure
from kt.spaces.errors import ToolchainError

from . import resources
from .cc import first_error

OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
_DETAIL_CHARACTERS = 4000
_TOO_MUCH = ("too much shared data", "uses too much", "out of resources", "insufficient register")


@dataclass(frozen=True)
class Nvrtc:
    """NVRTC of the extra `cuda-build`; compiles in the calling process, which may be killed."""

    version: str

    language = "cuda"
    source_name = "kernel.cu"
    binary_name = "kernel.cubin"

    def identity(self, arch: str) -> str:
        """All that decides the binary besides the source."""
        return "\n".join(("nvrtc", self.version, arch, *OPTIONS))

    def compile(self, directory: Path, arch: str, timeout: float) -> BuildFacts | Failure:
        """Compiles `kernel.cu` to `kernel.cubin` in `directory`; `timeout` is the caller's."""
        source = (directory / self.source_name).read_bytes()
        begin = time.monotonic()
        image, log = _compile(source, [f"--gpu-architecture={arch}", *OPTIONS])
        seconds = time.monotonic() - begin
        if image is None:
            kind = "resource" if any(t in log.lower() for t in _TOO_MUCH) else "compile_error"
            message = first_error(log) or "NVRTC failed without a message"
            return Failure(kind, "build", message, log[-_DETAIL_CHARACTERS:].strip())  # type: ignore[arg-type]
        (directory / self.binary_name).write_bytes(image)
        used, stated = resources.from_log(log), resources.from_cubin(image)
        return BuildFacts(
            seconds=round(seconds, 4),
            registers=used.registers or stated.registers,
            shared_bytes=used.shared_bytes or stated.shared_bytes,
            stack_bytes=used.stack_bytes or stated.stack_bytes,
            spill_bytes=used.spill_bytes, warnings=resources.advisories(log),
        )  # fmt: skip


def find_nvrtc() -> Nvrtc:
    """NVRTC if the extra is installed; raises ToolchainError with the command otherwise."""
    try:
        bindings = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        raise ToolchainError(
            "building for CUDA targets needs NVRTC: pip install -e '.[cuda-build]' where kt is"
        ) from None
    try:
        return Nvrtc(importlib.metadata.version("nvidia-cuda-nvrtc"))
    except importlib.metadata.PackageNotFoundError:  # a toolkit that pip did not install
        _, major, minor = bindings.nvrtcVersion()
        return Nvrtc(f"{major}.{minor}")


@functools.cache
def _library() -> Any:
    """The bindings, with NVRTC's builtins preloaded: pip's libnvrtc does not find them itself."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob("*/lib/libnvrtc-builtins.so*")):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    from cuda.bindings import nvrtc

    return nvrtc


def _compile(source: bytes, options: list[str]) -> tuple[bytes | None, str]:
    """(cubin or None, log)."""
    nvrtc = _library()
    program = _call(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", 0, None, None))
    try:
        encoded = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize(program)))
        _call(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return None, text or str(result)
        image = bytearray(_call(nvrtc.nvrtcGetCUBINSize(program)))
        _call(nvrtc.nvrtcGetCUBIN(program, image))
        return bytes(image), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(answer: tuple[Any, ...]) -> Any:
    """The value of a bindings call; a refusal here is a bug or a broken installation."""
    if int(answer[0]) != 0:
        raise RuntimeError(f"NVRTC: {answer[0]}")
    return answer[1] if len(answer) > 1 else None
