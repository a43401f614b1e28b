"""Versions that decide whether two runs of the search are comparable."""

from __future__ import annotations

import hashlib
import importlib
import platform
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_SEARCH_SOURCES = (
    "tuner/anneal.py", "tuner/guided.py", "tuner/picker.py", "tuner/preset.py", "tuner/search.py",
    "tuner/state.py", "tuner/strategy.py", "tuner/surrogate.py", "tuner/teacher.py",
    "tuner/transfer.py", "costmodel/*.py", "spaces/*.py", "spaces/*/*.py",
)  # fmt: skip


_PACKAGES = {"numpy": "numpy", "xgboost": "xgboost", "scikit-learn": "sklearn"}


def _package(name: str, module: str) -> str:
    """A package's version, and its distribution where that is another than the usual.

    xgboost-cpu is compiled otherwise than xgboost: where splits tie, the two may grow other trees.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        found = str(importlib.import_module(module).__version__)
        others = metadata.packages_distributions().get(module, [])
        return f"{found} ({others[0]})" if others else found


def kt_version() -> str:
    """The installed version; a bare checkout has none."""
    try:
        return metadata.version("kt")
    except metadata.PackageNotFoundError:
        return "0+checkout"


def search_digest() -> str:
    """Content hash of the sources that decide what is proposed."""
    digest = hashlib.sha256()
    for pattern in _SEARCH_SOURCES:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """What a replay must share with the run to promise identical proposals."""
    from kt.costmodel import features

    found = {name: _package(name, module) for name, module in _PACKAGES.items()}
    return {
        "kt": kt_version(), "search": search_digest(), "features": str(features.VERSION),
        "python": platform.python_version(), **found,
    }  # fmt: skip
