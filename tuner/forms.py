"""What a kernel can be emitted as: source, cubin, Python module or record."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from kt.logs.record import Failure
from kt.spaces.errors import SettingsError, ToolchainError
from kt.spaces.kernel import Kernel

from .chosen import Chosen
from .emit import json_text, source_text
from .emit_python import module_text
from .proof import Proven

FORMATS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("c", "json"), "cuda": ("cu", "cubin", "python", "json"),
}  # fmt: skip
"""What a record of each kind of target can be emitted as, the default first."""
SUFFIXES: Mapping[str, str] = {
    "c": ".c", "cu": ".cu", "cubin": ".cubin", "python": ".py", "json": ".json",
}  # fmt: skip
"""How the files of each end."""
_BUILD_SECONDS = 300.0


def form_of(chosen: Chosen, form: str) -> str:
    """The format asked for, or the default; raises SettingsError when the record has no such."""
    kind = chosen.best.target.kind
    accepted = FORMATS.get(kind, ())
    form = (form or accepted[0]).lower()
    if form not in accepted:
        raise SettingsError(
            f"--format {form}: a {kind} kernel can be emitted as {', '.join(accepted)}"
        )
    return form


def refuse_suffix(output: Path, form: str) -> None:
    """Raises SettingsError for a file whose name says that another format is in it."""
    suffix = output.suffix.lower()
    if suffix in SUFFIXES.values() and suffix != SUFFIXES[form]:
        other = next(name for name, ending in SUFFIXES.items() if ending == suffix)
        raise SettingsError(
            f"-o {output}: {form} is written, whose files end in {SUFFIXES[form]} "
            f"({suffix} is that of --format {other})"
        )


def emitted(chosen: Chosen, form: str, log: str) -> bytes:
    """The content of the file; a cubin is built here, which needs NVRTC and no GPU."""
    best, kernel, workload = chosen.best, chosen.kernel, chosen.workload
    if form == "json":
        return json_text(best).encode()
    if form in ("c", "cu"):
        return source_text(best, kernel, workload, log).encode()
    cubin = cubin_of(kernel, best.target.arch)
    return cubin if form == "cubin" else module_text(best, kernel, workload, cubin, log).encode()


def proven(chosen: Chosen, form: str, log: str) -> Proven:
    """What `--verify` and `--bench` are to compile: the emitted source, or the emitted cubin's."""
    kernel, kind = chosen.kernel, chosen.best.target.kind
    as_cubin = form in ("cubin", "python")
    source = kernel.source
    if not as_cubin:
        source = emitted(chosen, FORMATS[kind][0], log).decode()
    language = "cuda" if as_cubin else {"cpu": "c", "cuda": "nvcc"}[kind]
    return Proven(source, language, kernel, chosen.default, kind)


def cubin_of(kernel: Kernel, arch: str) -> bytes:
    """The kernel's binary, from the cache or built; raises ToolchainError when it has none."""
    from .backend.build import Builder
    from .backend.cache import BinaryCache, cache_directory
    from .backend.nvrtc import find_nvrtc

    nvrtc = find_nvrtc()
    with tempfile.TemporaryDirectory() as spare:
        builder = Builder(BinaryCache(cache_directory()), BinaryCache(Path(spare)))
        built = builder.build(kernel.source, nvrtc, arch, _BUILD_SECONDS)
        if isinstance(built, Failure):
            raise ToolchainError(f"NVRTC cannot build this kernel for {arch}: {built.message}")
        return built.path.read_bytes()
