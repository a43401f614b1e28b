"""Several kernels in one source file: each as it was measured, its names and macros kept apart."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .kernel import DEVICE_HEADERS

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+([A-Za-z]\w*)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
_OURS = re.compile(r"\bkt_\w+")
_ENUM = re.compile(r"\benum\b[^{};()]*\{([^}]*)\}")
_PARENTHESES = re.compile(r"\([^()]*\)")
_ENUMERATOR = re.compile(r"(?:^|,)\s*(\w+)")
_EXPORTED = re.compile(r'extern "C"[^{;]*?\b(kt_\w+)\(')
_SYSTEM_HEADER = re.compile(r"^#include <[\w./]+>$", re.MULTILINE)
_THREADS = re.compile(r"^#define KT_THREADS (\d+)$", re.MULTILINE)
_POOL = DEVICE_HEADERS / "cpu_pool.h"


def system_headers(sources: Sequence[str]) -> str:
    """What C sources include of the system: above all of them, where no name of theirs is
    another's yet."""
    found = {line for source in sources for line in _SYSTEM_HEADER.findall(source)}
    lines = ["#ifndef _GNU_SOURCE", "#define _GNU_SOURCE", "#endif", *sorted(found)]
    return "".join(f"{line}\n" for line in lines)


def reached(prefix: str, name: str, language: str) -> str:
    """How code outside calls the function `name` of the source that was set apart as `prefix`."""
    own = _renamed(prefix, name)
    return own if language == "c" else f"{prefix}::{own}"


def cuda_apart(source: str, prefix: str) -> str:
    """A CUDA source in a namespace of its own, and what it exports under names of its own.

    It leaves no macro behind; its text is unchanged.
    """
    exported = sorted(set(_EXPORTED.findall(_without_comments(source, keep_strings=True))))
    renames = {name: _renamed(prefix, name) for name in exported}
    return _framed(source, renames, f"namespace {prefix} {{\n", f"}} // namespace {prefix}\n")


def c_apart(source: str, prefix: str, pool: dict[str, str]) -> str:
    """A C source whose names at file scope are its own: those that begin with `kt_`, and
    enumerators. It leaves no macro behind; its text is unchanged.

    `pool` has the prefix of the source that holds the thread pool of so many threads, and grows:
    kernels of one thread count share their workers.
    """
    threads = found[1] if (found := _THREADS.search(source)) else ""
    owner = pool.setdefault(threads, prefix)
    pool_names = _c_names(_POOL.read_text())
    renames = {
        name: _renamed(owner if name in pool_names else prefix, name)
        for name in sorted(_c_names(source))
    }
    opened = "" if owner == prefix else "#define KT_CPU_POOL_H /* shared, above */\n"
    return _framed(source, renames, opened, "")


def _framed(source: str, renames: dict[str, str], opened: str, closed: str) -> str:
    macros = _MACRO.findall(source)
    define = "".join(f"#define {name} {other}\n" for name, other in renames.items())
    undefine = "".join(f"#undef {name}\n" for name in sorted({*macros, *renames}))
    return f"{define}{opened}{source}{closed}{undefine}"


def _renamed(prefix: str, name: str) -> str:
    """`kt_launch` of `kt3` is `kt3_launch`, `LANES` is `kt3_LANES`."""
    return f"{prefix}_{name.removeprefix('kt_')}"


def _c_names(source: str) -> set[str]:
    """Names that a C source of ours may declare at file scope, and no macro."""
    code = _without_comments(source)
    bodies = _ENUM.findall(_DIRECTIVE.sub("", code))
    names = {name for body in bodies for name in _enumerators(body)} | set(_OURS.findall(code))
    return names - set(_MACRO.findall(source))


def _enumerators(body: str) -> list[str]:
    while (flat := _PARENTHESES.sub("", body)) != body:
        body = flat
    return _ENUMERATOR.findall(body)


def _without_comments(source: str, keep_strings: bool = False) -> str:
    return _COMMENT.sub(lambda m: m[0] if keep_strings and m[0][0] == '"' else " ", source)
