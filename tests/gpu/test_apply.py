"""Emitted CUDA kernels on the device: nvcc's library, the Python module, bundles, `kt bench`.

PYTHONPATH=<folder with kt>:tests python3 -m pytest -q -m gpu tests/gpu/test_apply.py
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda_log import write_log, zeroes_its_workspace

from kt.spaces.families import space_of
from kt.spaces.target import Target
from kt.spaces.workload import parse
from kt.tuner import apply

pytestmark = pytest.mark.gpu

TEXT = "gemm 24x1000x2048 layout=nt epilogue=bias+relu dtype=bf16"
M, N, K = 24, 1000, 2048


def here() -> Target:
    from kt.tuner.devices import detect_gpu

    return detect_gpu("the test")


def kt(*words: Any) -> subprocess.CompletedProcess[str]:
    code = "from kt.tuner.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True
    )
    print(done.stdout, done.stderr)
    return done


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial that splits K over one launch and keeps counters in its workspace."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    return write_log(path, TEXT, zeroes_its_workspace, here())


@pytest.fixture(scope="module")
def launch(log: Path) -> Any:
    return launch_of(log)


def launch_of(log: Path) -> Any:
    """The function of the log's emitted module."""
    path = log.with_name("emitted_kernel.py")
    path.write_text(apply(log, form="python"))
    spec = importlib.util.spec_from_file_location("emitted_kernel", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.launch


@pytest.fixture(scope="module")
def tensors() -> Any:
    """A, B, bias and the expected output as torch tensors."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    a, b, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in ((M, K), (N, K), (N,)))
    return a, b, bias, torch.relu(a.double() @ b.double().T + bias.double())


def close(out: Any, expected: Any) -> bool:
    error = (out.double() - expected).norm() / expected.norm()
    return bool(error < 0.01)


# -- the CUDA file --------------------------------------------------------------------------------


def test_verify_and_bench(log: Path, tmp_path: Path) -> None:
    done = kt("apply", log, "-o", tmp_path / "k.cu", "--verify", "--bench")
    assert done.returncode == 0, done.stderr
    for text in ("verified:", "emitted", "tuned", "default", "emitted / tuned: ", "wrote "):
        assert text in done.stdout
    ratio = float(done.stdout.split("emitted / tuned: ")[1].split()[0])
    assert 0.9 < ratio < 1.1  # 2 % where the kernel is longer than the noise


def test_verify_of_a_cubin(log: Path, tmp_path: Path) -> None:
    done = kt("apply", log, "--format", "cubin", "-o", tmp_path / "k.cubin", "--verify")
    assert done.returncode == 0 and "verified:" in done.stdout


def test_a_wrong_file_is_refused(log: Path) -> None:
    from kt.tuner import proof

    space = space_of(parse(TEXT), here())
    default = space.kernel(int(space.defaults()[0]))
    source = apply(log).replace("#define KT_OP_RELU x = x < 0", "#define KT_OP_RELU x = x < 1", 1)
    wrong = proof.Proven(source, "nvcc", default, default, "cuda")
    with pytest.raises(proof.ProofError, match="is wrong: wrong_result"):
        proof.prove(wrong, True, False, print)


def test_one_file_of_many_shapes(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    options = "layout=nt epilogue=bias+relu dtype=bf16"
    shapes = ("24x1000x2048", "8x1024x1024", "256x512x320", "33x17x65 batch=3")
    for i, shape in enumerate(shapes):
        wanted = zeroes_its_workspace if i < 2 else None
        write_log(folder / f"{i}.jsonl", f"gemm {shape} {options}", wanted, here(), f"run{i}")
    done = kt("apply", folder, "--dispatch", "-o", tmp_path / "k.cu", "--verify", "--bench")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(tuned): verified:") == len(shapes)
    assert done.stdout.count("(any extents): verified:") >= 4
    ratios = [float(x.split()[0]) for x in done.stdout.split("emitted / tuned: ")[1:]]
    assert len(ratios) == len(shapes) and all(0.85 < ratio < 1.15 for ratio in ratios)


@pytest.mark.parametrize("dtype", ["fp16", "tf32", "fp32", "fp64", "int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_any_extents(dtype: str, layout: str, tmp_path: Path) -> None:
    if "fp8" in dtype and here().arch != "sm_90a":
        pytest.skip("needs sm_90a")
    log = write_log(
        tmp_path / "log.jsonl", f"gemm 96x64x40 layout={layout} epilogue=scale+relu dtype={dtype}",
        target=here(),
    )  # fmt: skip
    done = kt("apply", log, "--dispatch", "-o", tmp_path / "k.cu", "--verify")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(any extents): verified:") == 5


# -- the module -----------------------------------------------------------------------------------


def test_torch(launch: Any, tensors: Any) -> None:
    import torch

    a, b, bias, expected = tensors
    out = launch(a, b, bias)
    assert out.dtype == torch.bfloat16 and out.device == a.device and close(out, expected)
    given = torch.empty_like(out)
    assert launch(a, b, bias, out=given) is given
    assert close(given, expected)  # atomic sums have no fixed order


def test_fp8_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if here().arch != "sm_90a":
        pytest.skip("needs sm_90a")
    text = "gemm 200x320x512 layout=nt epilogue=tensor_scale+bias dtype=fp8_e4m3"
    scaled = launch_of(write_log(tmp_path / "log.jsonl", text, target=here()))
    a, b = (torch.randn(n, 512, device="cuda").to(torch.float8_e4m3fn) for n in (200, 320))
    bias, scale = torch.randn(320, device="cuda").bfloat16(), torch.full((1,), 0.25, device="cuda")
    expected = 0.25 * a.double() @ b.double().T + bias.double()
    for operands in ((a, b), (a.view(torch.uint8), b.view(torch.uint8))):
        out = scaled(*operands, bias, scale)
        assert out.dtype == torch.bfloat16 and close(out, expected)
    with pytest.raises(TypeError, match=r"A is not fp8_e4m3: torch\.float8_e5m2"):
        scaled(a.to(torch.float8_e5m2), b, bias, scale)


def test_streams_and_graphs(launch: Any, tensors: Any) -> None:
    import torch

    a, b, bias, expected = tensors
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outs = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            outs.append(launch(a, b, bias))
    torch.cuda.synchronize()
    assert all(close(out, expected) for out in outs)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(outs[0])
    with torch.cuda.graph(graph, stream=streams[0]):  # its workspace is there
        launch(a, b, bias, out=out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert close(out, expected)


def test_gradients_are_refused(launch: Any, tensors: Any) -> None:
    import torch

    a, b, bias, expected = tensors
    weight = b.detach().requires_grad_()
    with pytest.raises(TypeError, match="B requires a gradient"):
        launch(a, weight, bias)
    with torch.no_grad():
        assert close(launch(a, weight, bias), expected)


def test_what_does_not_fit(launch: Any, tensors: Any) -> None:
    a, b, bias, _ = tensors
    with pytest.raises(ValueError, match="A is not on a CUDA device"):
        launch(a.cpu(), b, bias)
    with pytest.raises(ValueError, match="B is not contiguous"):
        launch(a, b.T.contiguous().T, bias)
    with pytest.raises(TypeError, match=r"A is not bf16: torch\.float16"):
        launch(a.half(), b, bias)
    with pytest.raises(ValueError, match=r"A has shape \(23, 2048\)"):
        launch(a[:23], b, bias)


def test_cupy(launch: Any, tensors: Any) -> None:
    cupy = pytest.importorskip("cupy")
    import torch

    *inputs, expected = tensors
    bits = [cupy.from_dlpack(x.view(torch.uint16)) for x in inputs]
    out = launch(*bits)
    assert isinstance(out, cupy.ndarray)
    assert close(torch.from_dlpack(out).view(torch.bfloat16), expected)


def test_jax(launch: Any, tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    import torch

    *inputs, expected = tensors
    try:
        arrays = [jax.dlpack.from_dlpack(x) for x in inputs]
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU here: {error}")
    out = launch(*arrays)
    assert isinstance(out, jax.Array) and str(out.dtype) == "bfloat16"
    assert close(torch.from_dlpack(out), expected)


# -- bundles and bench ----------------------------------------------------------------------------


def test_a_bundle_starts_a_run(tmp_path: Path) -> None:
    words = ["tune", TEXT, "--batch-size", "4"]
    name = here().name
    if name == "cuda":
        pytest.skip("this GPU has no name that --build-only takes")
    made = kt(*words, "--target", name, "--build-only", "-o", tmp_path / "b")
    assert made.returncode == 0
    more = ["--target", "cuda", "--trials", "8", "--finalists", "1", "--log", tmp_path / "l.jsonl"]
    tuned = kt(*words, *more, "--bundle", tmp_path / "b", "--plain")
    assert tuned.returncode == 0, tuned.stderr
    lines = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    builds = [line["build"] for line in lines if line["type"] == "trial"]
    assert len(builds) == 8 and all(build.get("cached") for build in builds)


def test_bench(log: Path) -> None:
    done = kt("bench", log, "--time", "0.3s", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    ours = row["us"].keys() - row["facts"].keys()  # a fact may also say why a library is left out
    assert ours == {"tuned", "default"}
