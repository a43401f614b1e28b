"""`kt apply --dispatch --verify` and `--bench`: the emitted file, at every shape."""

from __future__ import annotations

from pathlib import Path

from kt.logs.record import Settings
from kt.spaces.kernel import stub
from kt.spaces.workload import Gemm

from .emit import c_string
from .proof import BUILD_SECONDS, SEEDS, Proven, Say, bench_lines, built, verify
from .shapes import Shapes

_SHIM = Path(__file__).with_name("one_shape.c")


def prove_shapes(shapes: Shapes, source: str, verified: bool, bench: bool, say: Say) -> None:
    """Compiles the source and does what is asked; `say` gets the results as lines.

    Every tuned shape is verified, and the kernel for any extents at the edges of its tiles; every
    tuned shape is timed. Raises ProofError for the first thing that is wrong.
    """
    from .pool import LocalMeasurer

    kind = shapes.target.kind
    language = {"cpu": "c", "cuda": "nvcc"}[kind]
    proofs = [Proven(source, language, c.kernel, c.default, kind) for c in shapes.chosen]
    workloads = [*shapes.workloads, *(shapes.edges() if verified else [])]
    settings = Settings(build_timeout=BUILD_SECONDS * len(proofs))
    with LocalMeasurer(proofs[0].target(), settings, SEEDS[0]) as measurer:
        library = built(measurer, source, language, "the emitted file").path
        binaries = [
            built(measurer, one_shape(library, workload), language, f"the call of '{workload}'")
            for workload in workloads
        ]
        for i, (workload, binary) in enumerate(zip(workloads, binaries, strict=True)):
            measurer.prepare([workload])
            if verified:
                what = f"{workload} ({'tuned' if i < len(proofs) else 'any extents'})"
                say(f"{what}: {verify(measurer, binary, workload, what)}")
            if bench and i < len(proofs):
                first, *rest = bench_lines(measurer, binary, proofs[i])
                say(f"{workload}: {first}")
                for line in rest:
                    say(line)


def one_shape(library: Path, w: Gemm) -> str:
    """A source with the ABI of one shape, which calls the library."""
    extents = f"{w.m}, {w.n}, {w.k}, {w.batch}"
    return stub({"KT_FILE": c_string(str(library)), "KT_EXTENTS": extents}) + _SHIM.read_text()
