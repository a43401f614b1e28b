"""nvcc: an emitted CUDA file to a shared library with the C ABI, to prove that it works."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kt.logs.record import BuildFacts, Failure
from kt.spaces.errors import ToolchainError

from .cc import judge, warnings_of
from .child import run_child

FLAGS = ("-O3", "--shared", "-Xcompiler", "-fPIC")
_VERSION_SECONDS = 20.0


def code_flag(arch: str) -> str:
    """The option for code of that architecture alone.

    `-arch=sm_90a` would also compile for sm_90, which lacks the instructions of sm_90a.
    """
    number = arch.removeprefix("sm_")
    return f"-gencode=arch=compute_{number},code=sm_{number}"


@dataclass(frozen=True)
class Nvcc:
    """A working nvcc and the last line of its `--version`."""

    command: str
    version: str

    language = "nvcc"
    source_name = "kernel.cu"
    binary_name = "kernel.so"

    def identity(self, arch: str) -> str:
        """All that decides the binary besides the source."""
        return "\n".join((self.command, self.version, code_flag(arch), *FLAGS))

    def compile(self, directory: Path, arch: str, timeout: float) -> BuildFacts | Failure:
        """Compiles `kernel.cu` to `kernel.so` in `directory`."""
        flags = (code_flag(arch), *FLAGS)
        command = [self.command, *flags, "-o", self.binary_name, self.source_name]
        done = run_child(command, directory, timeout, os.environ | {"TMPDIR": str(directory)})
        failure = judge(done, timeout)
        if failure is not None:
            return failure
        return BuildFacts(seconds=round(done.seconds, 4), warnings=warnings_of(done.output))


def find_nvcc() -> Nvcc:
    """nvcc of PATH, CUDA_HOME or /usr/local/cuda; raises ToolchainError without one."""
    for command in _places():
        try:
            done = subprocess.run(
                [command, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return Nvcc(command, done.stdout.strip().splitlines()[-1])
    raise ToolchainError(
        "compiling the emitted file needs nvcc, which was not found (tried PATH, $CUDA_HOME, "
        "/usr/local/cuda): install the CUDA toolkit"
    )


def _places() -> Iterator[str]:
    if found := shutil.which("nvcc"):
        yield found
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield str(Path(root) / "bin" / "nvcc")
