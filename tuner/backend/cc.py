"""The C compiler: found once, run in a killable group, its output made reproducible."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kt.logs.record import BuildFacts, Failure
from kt.spaces.errors import ToolchainError

from .child import Finished, run_child, signal_name

# No -march: the sources choose their instruction set themselves. Relative names, no debug
# information, no build id and stripping make equal code give equal binaries.
FLAGS = (
    "-O3", "-shared", "-fPIC", "-pthread", "-s", "-Wall", "-Wl,--build-id=none", "-Wl,-z,defs",
)  # fmt: skip
LIBRARIES = ("-lm",)
_NAMES = ("cc", "gcc", "clang")
_VERSION_SECONDS = 10.0
_WARNINGS = 8
_DETAIL_CHARACTERS = 4000
_OUT_OF_MEMORY = ("out of memory", "memory exhausted", "cannot allocate memory")


@dataclass(frozen=True)
class CCompiler:
    """A working compiler command and the first line of its `--version`."""

    command: tuple[str, ...]
    version: str

    language = "c"
    source_name = "kernel.c"
    binary_name = "kernel.so"

    def identity(self, arch: str) -> str:
        """All that decides the binary besides the source (the instruction set is in there)."""
        return "\n".join((*self.command, self.version, *FLAGS, *LIBRARIES))

    def compile(self, directory: Path, arch: str, timeout: float) -> BuildFacts | Failure:
        """Compiles `kernel.c` to `kernel.so` in `directory`."""
        command = [*self.command, *FLAGS, "-o", self.binary_name, self.source_name, *LIBRARIES]
        # The compiler's own temporary files then go when the directory goes, even after a kill.
        env = os.environ | {"LC_ALL": "C", "TMPDIR": str(directory)}
        try:
            done = run_child(command, directory, timeout, env)
        except OSError as error:
            return Failure("compile_error", "build", f"cannot start {command[0]}: {error.strerror}")
        failure = judge(done, timeout)
        if failure is not None:
            return failure
        if not (directory / self.binary_name).is_file():
            return Failure("compile_error", "build", f"{self.command[0]} wrote no output file")
        return BuildFacts(seconds=round(done.seconds, 4), warnings=warnings_of(done.output))


def find_compiler() -> CCompiler:
    """The compiler of `CC` or the first of cc, gcc, clang; raises ToolchainError without one."""
    chosen = os.environ.get("CC", "")
    if chosen.strip():
        command = tuple(shlex.split(chosen))
        if shutil.which(command[0]) is None:
            raise ToolchainError(f"the C compiler that $CC names was not found: {command[0]}")
        return CCompiler(command, _version(command))
    for name in _NAMES:
        if shutil.which(name):
            return CCompiler((name,), _version((name,)))
    raise ToolchainError(
        f"no C compiler found (tried $CC, {', '.join(_NAMES)}): install one, e.g. "
        "apt-get install gcc"
    )


def _version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, timeout=_VERSION_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{shlex.join(command)} --version failed: {error}") from None
    lines = done.stdout.decode(errors="replace").splitlines()
    return lines[0].strip() if lines else "unknown"


def judge(done: Finished, timeout: float) -> Failure | None:
    """The failure that a compiler's end means, or None for success."""
    detail = done.output[-_DETAIL_CHARACTERS:].strip()
    if done.code is None:
        message = f"the compiler did not finish within {timeout:g} s and was killed"
        return Failure("build_timeout", "build", message, detail)
    if done.code == 0:
        return None
    if any(text in done.output.lower() for text in _OUT_OF_MEMORY):
        return Failure("resource", "build", "the compiler ran out of memory", detail)
    message = first_error(done.output)
    if not message:
        how = signal_name(-done.code) if done.code < 0 else f"exit code {done.code}"
        message = f"the compiler ended with {how}"
    return Failure("compile_error", "build", message, detail)


def first_error(output: str) -> str:
    """The first error line of a compiler's output, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors[0] if errors else lines[-1] if lines else "")[:400]


def warnings_of(output: str) -> tuple[str, ...]:
    """Distinct warning lines, the first few."""
    lines = (line.strip() for line in output.splitlines() if "warning" in line.lower())
    return tuple(dict.fromkeys(line[:200] for line in lines))[:_WARNINGS]
