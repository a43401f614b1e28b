"""Files of many tuned products: made of sampled kernels, built, and launched as a user would."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cuda_emulator
import gemm_cases
import numpy as np
from cuda_emulator import Guarded

from kt.spaces.families import space_of
from kt.spaces.gemm import many
from kt.spaces.kernel import Kernel
from kt.spaces.target import Target
from kt.spaces.together import c_apart, cuda_apart, system_headers
from kt.spaces.workload import Gemm

WARNINGS = ("-Wall", "-Wextra", "-Werror")


def sampled(workloads: Sequence[Gemm], target: Target, seed: int, families: Sequence[str]) -> Any:
    """A random kernel of each product, of one of these families where it serves it."""
    rng, kernels = np.random.default_rng(seed), []
    for workload in workloads:
        space = space_of(workload, target)
        points = [*space.sample(rng, 256).tolist(), *space.defaults().tolist()]
        kernels.append(space.kernel(next(p for p in points if space.family_of(p) in families)))
    return kernels


def source_of(kernels: Sequence[Kernel], target: Target, other: Gemm | None = None) -> str:
    """One file of these kernels, the one for any extents (of `other`'s type), and the dispatch."""
    first = other or kernels[0].workload
    assert isinstance(first, Gemm)
    sources = [*(kernel.source for kernel in kernels), many.any_source(first, target)]
    prefixes = [*(f"kt{i}" for i in range(len(kernels))), "kt_any"]
    if target.kind == "cpu":
        pool = dict[str, str]()
        parts = [system_headers(sources)]
        parts += [c_apart(*pair, pool) for pair in zip(sources, prefixes, strict=True)]
    else:
        parts = [cuda_apart(*pair) for pair in zip(sources, prefixes, strict=True)]
    dispatch = many.dispatch_source(kernels, prefixes[:-1], "kt_any", '"{}"', target)
    return "".join([*parts, dispatch])


class Library:
    """A built file of many shapes."""

    def __init__(self, library: ctypes.CDLL, cuda: bool) -> None:
        self.library, self._stream = library, [None] if cuda else []
        for name in ("kt_workspace_bytes_gemm", "kt_workspace_zeroed_bytes_gemm"):
            getattr(library, name).restype = ctypes.c_size_t
        library.kt_describe_gemm.restype = library.kt_describe.restype = ctypes.c_char_p

    def workspace_bytes(self, *extents: int) -> int:
        return int(self.library.kt_workspace_bytes_gemm(*map(ctypes.c_int64, extents)))

    def workspace(self, workloads: Sequence[Gemm]) -> Guarded:
        """One that serves all of them, poisoned but for its zeroed bytes."""
        size = max(self.workspace_bytes(w.m, w.n, w.k, w.batch) for w in workloads)
        content = np.full(size, 0xFF, np.uint8)
        content[: self.library.kt_workspace_zeroed_bytes_gemm()] = 0
        return Guarded(content)

    def launch(self, extents: Sequence[int], addresses: Sequence[int], workspace: int) -> int:
        """What kt_launch_gemm returns."""
        arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        return int(self.library.kt_launch_gemm(
            *map(ctypes.c_int64, extents), arguments, ctypes.c_void_p(workspace), *self._stream,
        ))  # fmt: skip

    def check(self, w: Gemm, workspace: Guarded, rng: np.random.Generator) -> None:
        """Two launches agree with the reference and write nowhere else."""
        inputs = gemm_cases.inputs(w, rng)
        held = [Guarded(x) for x in inputs]
        for _ in range(2):
            out = Guarded(gemm_cases.poison(w))
            addresses = [x.address for x in (*held, out)]
            extents = (w.m, w.n, w.k, w.batch)
            assert self.launch(extents, addresses, workspace.address) == 0, str(w)
            worst = gemm_cases.reference(w, inputs).worst(w, out.array)
            assert worst <= 1, f"{w}: {worst}"
            assert all(x.intact() for x in (*held, out, workspace)), f"{w} wrote outside"


def built_by_cc(source: str, directory: Path, *flags: str) -> Library:
    """With warnings as errors."""
    (directory / "many.c").write_text(source)
    command = ["cc", *(flags or ("-O3",)), *WARNINGS, "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", "many.so", "many.c", "-lm"], cwd=directory, check=True)
    return Library(ctypes.CDLL(str(directory / "many.so")), cuda=False)


def emulated(source: str, directory: Path) -> Library:
    """A CUDA file on the CPU."""
    return Library(cuda_emulator.build_many(source, 4, directory), cuda=True)
