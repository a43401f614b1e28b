"""The CPU GEMM families: every legal θ computes the product, and touches nothing else."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cpu_kernels import (
    TARGETS,
    Array,
    Fenced,
    Loaded,
    build,
    compile_alone,
    inputs_of,
    needs_compiler,
    output_of,
)
from scipy.special import erf

from kt.spaces.families import FAMILIES
from kt.spaces.gemm.cpu import GemmCpu
from kt.spaces.gemm.cpu_skinny import GemmCpuSkinny
from kt.spaces.kernel import Kernel
from kt.spaces.space import Space
from kt.spaces.workload import EPILOGUE_OPS, LAYOUTS, Gemm

CPU = FAMILIES["gemm", "cpu"]
SOURCES = Path(GemmCpu.kernel.__code__.co_filename).parent
EXTENTS = (1, 2, 3, 7, 16, 17, 31, 64, 65, 100, 129, 200)
TOLERANCE = {"fp32": 2e-6, "fp64": 1e-13}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemm")


def product(workload: Gemm, a: Array, b: Array) -> Array:
    """A · B in float64, [batch,] M, N."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    a = np.swapaxes(a, -1, -2) if workload.layout[0] == "t" else a
    b = np.swapaxes(b, -1, -2) if workload.layout[1] == "t" else b
    return np.matmul(a, b)


def reference(workload: Gemm, inputs: list[Array]) -> Array:
    x = product(workload, inputs[0], inputs[1])
    names = [operand.name for operand in workload.inputs()]
    extra = {name: value.astype(np.float64) for name, value in zip(names, inputs, strict=True)}
    for op in workload.epilogue:
        match op:
            case "bias" | "residual" | "shift":
                x = x + extra[op]
            case "scale" | "tensor_scale":
                x = x * extra[op]
            case "relu":
                x = np.maximum(x, 0)
            case "gelu":
                x = x * 0.5 * (1 + erf(x / np.sqrt(2)))
            case _:
                x = x / (1 + np.exp(-x))
    return x


def assert_close(workload: Gemm, got: Array, want: Array) -> None:
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error < TOLERANCE[workload.dtype], error


# -- random schedules ---------------------------------------------------------------------------


def random_workload(rng: np.random.Generator) -> Gemm:
    m, n, k = (int(rng.choice(EXTENTS)) for _ in range(3))
    chain = rng.permutation(EPILOGUE_OPS)[: rng.integers(0, 4) * rng.integers(0, 2)]
    return Gemm(
        m=m, n=n, k=k, batch=int(rng.choice([1, 1, 2, 3])), layout=str(rng.choice(LAYOUTS)),
        dtype=str(rng.choice(["fp32", "fp32", "fp64"])), epilogue=tuple(map(str, chain)),
    )  # fmt: skip


def random_kernel(rng: np.random.Generator) -> tuple[Gemm, Kernel]:
    """A legal point of a space made for three cores, so that shares are uneven."""
    workload = random_workload(rng)
    target = msgspec.structs.replace(TARGETS[rng.integers(len(TARGETS))], cores=3)
    space = Space(workload, target, [f for f in CPU if f.refuses(workload, target) is None])
    return workload, space.kernel(int(space.sample(rng, 1)[0]))


@needs_compiler
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_compute_the_product(seed: int, folder: Path) -> None:
    rng = np.random.default_rng(seed)
    workload, kernel = random_kernel(rng)
    inputs, output = inputs_of(workload, rng), output_of(workload)
    loaded = Loaded(build(kernel, folder))
    with Fenced([*inputs, output], end=seed % 2 == 0) as fenced:
        loaded.launch(*fenced.arrays)
        got = fenced.arrays[-1].copy()
        assert fenced.intact()
        for before, after in zip(inputs, fenced.arrays, strict=False):
            np.testing.assert_array_equal(before, after)
    loaded.close()
    assert_close(workload, got, reference(workload, inputs))


# -- special values, one kernel of each kind ----------------------------------------------------


def default_kernel(workload: Gemm, family: GemmCpu | GemmCpuSkinny, **changes: Any) -> Kernel:
    """The family's default for two cores, with some knobs changed."""
    target = msgspec.structs.replace(TARGETS[0], cores=2)
    space = Space(workload, target, [family])
    theta = space.theta(int(space.defaults()[0]))
    for path, value in changes.items():
        component, knob = path.split("__")
        theta = msgspec.structs.replace(
            theta, **{component: getattr(theta, component) | {knob: value}}
        )
    return space.kernel(space.check(family.name, theta))


CASES = [
    (Gemm(m=61, n=75, k=50), GemmCpu(), {"mem__pack_a": "panel", "mem__pack_b": "panel"}),
    (
        Gemm(m=61, n=75, k=50),
        GemmCpu(),
        {"tile__mr": 6, "tile__nv": 2, "mem__pack_a": "none", "mem__pack_b": "none"},
    ),
    (Gemm(m=61, n=75, k=50, layout="tt"), GemmCpu(), {}),
    (Gemm(m=61, n=75, k=600), GemmCpu(), {"map__grid_k": 2, "map__grid_n": 1}),
    (Gemm(m=3, n=300, k=129), GemmCpuSkinny(), {}),
    (Gemm(m=300, n=3, k=129), GemmCpuSkinny(), {"map__slices": 2}),
]


@pytest.fixture(params=range(len(CASES)), scope="module")
def case(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Gemm, Loaded]]:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    workload, family, changes = CASES[request.param]
    loaded = Loaded(build(default_kernel(workload, family, **changes), folder))
    yield workload, loaded
    loaded.close()


def test_special_values_reach_their_outputs_only(case: tuple[Gemm, Loaded]) -> None:
    workload, loaded = case
    a, b = inputs_of(workload, np.random.default_rng(1))
    (a.T if workload.layout[0] == "t" else a)[-1, 5] = np.inf
    (b.T if workload.layout[1] == "t" else b)[7, -1] = np.nan
    output = output_of(workload)
    loaded.launch(a, b, output)
    want = product(workload, a, b)
    np.testing.assert_array_equal(np.isnan(output), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(output), np.isinf(want))


def test_concurrent_callers(case: tuple[Gemm, Loaded]) -> None:
    workload, loaded = case
    inputs = [inputs_of(workload, np.random.default_rng(i)) for i in range(4)]
    wants = [reference(workload, i) for i in inputs]
    errors: list[BaseException] = []

    def call(i: int) -> None:
        try:
            for _ in range(50):
                output = output_of(workload)
                loaded.launch(*inputs[i], output)
                assert_close(workload, output, wants[i])
        except BaseException as error:  # reported by the main thread
            errors.append(error)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not errors


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes_too(case: tuple[Gemm, Loaded]) -> None:
    workload, loaded = case
    inputs, output = inputs_of(workload, np.random.default_rng(2)), output_of(workload)
    loaded.launch(*inputs, output)
    child = os.fork()
    if child == 0:
        again = output_of(workload)
        loaded.launch(*inputs, again)
        os._exit(0 if np.array_equal(again, output) else 1)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)


@needs_compiler
def test_unloading_leaves_no_thread(folder: Path) -> None:
    workload = Gemm(m=40, n=80, k=30)
    library = build(default_kernel(workload, GemmCpu(), map__threads=2, map__grid_m=2), folder)
    inputs = inputs_of(workload, np.random.default_rng(3))
    before = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        loaded = Loaded(library)
        loaded.launch(*inputs, output_of(workload))
        loaded.close()
    assert len(os.listdir("/proc/self/task")) == before


# -- sources and declarations -------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", ["cpu.c", "cpu_skinny.c"])
def test_a_kernel_file_compiles_on_its_own(name: str, tmp_path: Path) -> None:
    compile_alone(SOURCES / name, tmp_path / "kernel.o")


@pytest.mark.parametrize("seed", range(20))
def test_defaults_are_legal_and_features_finite(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workload = replace(random_workload(rng), m=int(rng.integers(1, 5000)))
    for target in TARGETS:
        for cores in (1, 2, 6, 64):
            space = Space(workload, msgspec.structs.replace(target, cores=cores), CPU)
            assert all(space.why_illegal(int(point)) is None for point in space.defaults())
            for part in space.parts:
                alone = Space(workload, space.target, [part.family])
                assert np.isfinite(alone.encode(alone.sample(rng, 64))).all()


def test_rules_give_reasons() -> None:
    space = Space(Gemm(m=512, n=512, k=512), TARGETS[0], [GemmCpu()])
    part, rng = space.parts[0], np.random.default_rng(0)
    reasons = {part.why_illegal(int(point)) for point in part.draw(rng, 200)} - {None}
    assert any("vector registers" in str(reason) for reason in reasons)


def test_the_skinny_family_refuses_square_products() -> None:
    why = GemmCpuSkinny().refuses(Gemm(m=64, n=64, k=64), TARGETS[0])
    assert why is not None and "64" in why
