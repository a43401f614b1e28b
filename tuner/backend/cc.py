"""The C compiler: found once, run in a killable group, its output made reproducible."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kt.logs.record import BuildFacts, Failure
from kt.spaces.errors import ToolchainError

from .child import Finished, run_child, signal_name
from .environment import plain

# No -march: the sources choose their instruction set themselves. Relative names, no debug
# information, no build id and stripping make equal code give equal binaries.
FLAGS = (
    "-O3", "-shared", "-fPIC", "-pthread", "-s", "-Wall", "-Wl,--build-id=none", "-Wl,-z,defs",
)  # fmt: skip
LIBRARIES = ("-lm",)
_NAMES = ("cc", "gcc", "clang")
_VERSION_SECONDS = 10.0
_ELF = b"\x7fELF"
_WARNINGS = 8
_DETAIL_CHARACTERS = 4000
_OUT_OF_MEMORY = ("out of memory", "memory exhausted", "cannot allocate memory")
_DISK_FULL = ("no space left on device", "disk quota exceeded")
_NOT_STARTED = (126, 127)  # the exit codes of a shell that could not start the command


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
        return plain("\n".join((*self.command, self.version, *FLAGS, *LIBRARIES)))

    def compile(self, directory: Path, arch: str, timeout: float) -> BuildFacts | Failure:
        """Compiles `kernel.c` to `kernel.so` in `directory`; OSError when its disk is full."""
        command = [*self.command, *FLAGS, "-o", self.binary_name, self.source_name, *LIBRARIES]
        # The compiler's own temporary files then go when the directory goes, even after a kill.
        env = os.environ | {"LC_ALL": "C", "TMPDIR": str(directory)}
        try:
            done = run_child(command, directory, timeout, env)
        except OSError as error:
            message = f"cannot start {plain(command[0])}: {error.strerror}"
            return Failure("compile_error", "build", message)
        failure = judge(done, timeout)
        if failure is not None:
            return failure
        if wrong := _wrong_output(directory / self.binary_name):
            return Failure("compile_error", "build", f"{plain(self.command[0])} wrote {wrong}")
        return BuildFacts(seconds=round(done.seconds, 4), warnings=warnings_of(done.output))


def find_compiler() -> CCompiler:
    """The compiler of `CC` or the first of cc, gcc, clang; raises ToolchainError without one."""
    chosen = os.environ.get("CC", "")
    if chosen.strip():
        try:
            name, *options = shlex.split(chosen)
        except ValueError as error:
            raise ToolchainError(f"$CC is no command ({error}): {chosen}") from None
        found = _found(name)
        if found is None:
            raise ToolchainError(f"the C compiler that $CC names was not found: {name}")
        return CCompiler((found, *options), _version((found, *options)))
    for name in _NAMES:
        if found := _found(name):
            return CCompiler((found,), _version((found,)))
    raise ToolchainError(
        f"no C compiler found (tried $CC, {', '.join(_NAMES)}): install one, e.g. "
        "apt-get install gcc"
    )


def _found(name: str) -> str | None:
    """The command `name`, absolute where it depends on this directory; None without such a file."""
    found = shutil.which(name)
    if found is None:
        return None
    return name if os.path.isabs(found) else os.path.abspath(found)


def _version(command: tuple[str, ...]) -> str:
    asked = f"{shlex.join(command)} --version"
    try:
        done = run_child(
            [*command, "--version"], Path("/"), _VERSION_SECONDS, os.environ, subprocess.DEVNULL
        )
    except OSError as error:
        raise ToolchainError(f"{asked} failed: {error.strerror}") from None
    if done.code is None:
        raise ToolchainError(f"{asked} did not answer within {_VERSION_SECONDS:g} s")
    if done.code in _NOT_STARTED:
        raise ToolchainError(f"{asked} cannot be started")
    lines = done.output.splitlines()
    return lines[0].strip() if lines else "unknown"


def _wrong_output(path: Path) -> str:
    """What a compiler that reported success left instead of a library, "" for a library."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "no regular output file"
    except FileNotFoundError:
        return "no output file"
    with path.open("rb") as file:
        return "" if file.read(len(_ELF)) == _ELF else "an output file that is no ELF library"


def judge(done: Finished, timeout: float) -> Failure | None:
    """The failure that a compiler's end means, or None for success.

    Raises OSError when the disk is full, which is not the source's fault: another disk may do.
    """
    detail = done.output[-_DETAIL_CHARACTERS:].strip()
    if done.code is None:
        message = f"the compiler did not finish within {timeout:g} s and was killed"
        return Failure("build_timeout", "build", message, detail)
    if done.code == 0:
        return None
    output = done.output.lower()
    if any(text in output for text in _DISK_FULL):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if any(text in output for text in _OUT_OF_MEMORY):
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
