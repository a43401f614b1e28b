"""`kt apply` of CUDA records without a GPU: texts, escaping, nvcc, NVRTC, the Python module."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cupy
import msgspec
import numpy as np
import pytest
from cuda_log import H200, write_log, zeroes_its_workspace

from kt.logs.record import TrialRecord
from kt.spaces.errors import SettingsError, TargetError
from kt.spaces.families import space_of
from kt.spaces.target import CUDA_TARGETS
from kt.spaces.workload import parse
from kt.tuner import apply, cli, cupy_tensors, devices, program
from kt.tuner.emit import is_ours

TEXT = "gemm 8x64x256 epilogue=bias+relu dtype=bf16"
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs the extra cuda-build"
)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.fixture
def cuda_log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", TEXT)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Callable[..., Any]:
    """Runs a command in an empty directory: code, out and err."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / "cache"))

    def command(*words: Any) -> Any:
        capfd.readouterr()
        code = program.run(cli.cli, [str(word) for word in words])
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return command


# -- the CUDA source ----------------------------------------------------------------------------


def test_the_source_says_how_it_is_built_and_called(cuda_log: Path) -> None:
    source = apply(cuda_log, any_device=True)
    head, body = source.split("#define KT_DESCRIBE ", 1)
    for text in ("/* kt kernel: gemm 8x64x256",
                 "nvcc -O3 -gencode=arch=compute_90a,code=sm_90a --shared", "void *stream)",
                 "const bf16 A[8][256]", "const bf16 bias[64]", "bf16 C[8][64]",
                 "NVIDIA H200 (sm_90a, 132 SMs)", "kt_workspace_zeroed_bytes()"):  # fmt: skip
        assert text in head
    described, rest = body.split("\n\n", 1)
    assert json.loads(json.loads(described))["workload"] == TEXT
    space = space_of(parse(TEXT), H200)
    assert rest == space.kernel(int(space.defaults()[0])).source
    assert is_ours(source.encode()) and "#include" not in rest


@needs_nvcc
def test_nvcc_compiles_it_alone(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", TEXT, zeroes_its_workspace)
    source = apply(log, any_device=True)
    (tmp_path / "kernel.cu").write_text(source)
    build = re.search(r"build +(nvcc .*)", source)
    assert build
    subprocess.run(build[1].split(), cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "kernel.so"))
    library.kt_describe.restype = ctypes.c_char_p
    assert json.loads(library.kt_describe())["workload"] == TEXT
    for name in ("bytes", "zeroed_bytes"):
        function = getattr(library, f"kt_workspace_{name}")
        function.restype = ctypes.c_size_t
        assert function() == int(re.search(rf"kt_workspace_{name}\(\) = (\d+)", source)[1])  # type: ignore[index]
    assert library.kt_launch


def test_records_of_a_gpu_that_is_not_here(run: Any, cuda_log: Path) -> None:
    refused = run("apply", cuda_log)
    assert refused.code == 1 and "measured on NVIDIA H200 (sm_90a, 132 SMs)" in refused.err
    with pytest.raises(TargetError, match="--any-device"):
        apply(cuda_log)


def test_the_gpu_that_is_here(cuda_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kt.tuner import chosen

    monkeypatch.setattr(chosen, "devices_like", lambda target: [CUDA_TARGETS["a100"], H200])
    assert apply(cuda_log).startswith("/* kt kernel")
    monkeypatch.setattr(chosen, "devices_like", lambda target: [CUDA_TARGETS["a100"]])
    with pytest.raises(TargetError, match="this is NVIDIA A100"):
        apply(cuda_log)


@pytest.mark.skipif(devices.has_nvidia_driver(), reason="there is a GPU")
@pytest.mark.parametrize("option", ["--verify", "--bench"])
def test_proofs_need_a_gpu(run: Any, cuda_log: Path, option: str) -> None:
    ran = run("apply", cuda_log, "--any-device", "-o", "k.cu", option)
    assert ran.code == 1 and "this machine has no GPU" in ran.err and "Traceback" not in ran.err
    assert not Path("k.cu").exists()


def test_a_missing_nvcc_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from kt.spaces.errors import ToolchainError
    from kt.tuner.backend import nvcc

    monkeypatch.setattr(nvcc, "_places", lambda: iter(["/no/such/nvcc"]))
    with pytest.raises(ToolchainError, match="nvcc, which was not found"):
        nvcc.find_nvcc()


@pytest.mark.parametrize(
    "fields",
    [
        {"arch": "sm_90a; rm -rf ~"}, {"arch": "sm_90a --keep"}, {"arch": "native"},
        {"shared_bytes": 0}, {"registers_sm": 2**40}, {"threads_sm": 0}, {"cores": 0},
    ],
)  # fmt: skip
def test_impossible_gpus(run: Any, cuda_log: Path, fields: dict[str, Any]) -> None:
    edit(cuda_log, lambda lines: lines[0]["target"].update(fields))
    ran = run("apply", cuda_log, "--any-device")
    assert ran.code == 1 and "no such device" in ran.err


# -- nothing of a log unescaped -----------------------------------------------------------------

NASTY = (
    "a*/ int evil; /* b", "\nevil = 1\n", '"; evil = 1; "', "'\nimport evil\n'", "end\\",
    '"""\nimport evil\n"""', "\r\nimport evil", "\u2028import evil", "\x00\x1b[31m",
    "é\ud800" * 900,
)  # fmt: skip


def edit(log: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    change(lines)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def hostile(log: Path, nasty: str) -> None:
    """Puts a text wherever a log may hold any text."""
    nasty = nasty.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line.update({"run": nasty, "time": nasty, "source": nasty})
        lines[0]["kt"] = nasty
        lines[0]["target"].update(processor=nasty, name=nasty)

    edit(log, change)


@pytest.mark.parametrize("nasty", NASTY)
def test_hostile_texts_in_the_source(cuda_log: Path, nasty: str) -> None:
    hostile(cuda_log, nasty)
    source = apply(cuda_log, any_device=True)
    comment, rest = source.split("*/", 1)
    assert (source.isascii() and "\n" not in nasty.strip("\n")) or "evil" not in comment.split("\n")
    outside = re.sub(r'"([^"\\]|\\.)*"', "", rest)
    assert "evil" not in outside and "*/" not in comment


@needs_nvrtc
@pytest.mark.parametrize("nasty", NASTY)
def test_hostile_texts_in_the_module(cuda_log: Path, nasty: str) -> None:
    clean = ast.parse(apply(cuda_log, any_device=True, form="python"))
    hostile(cuda_log, nasty)
    source = apply(cuda_log, any_device=True, form="python")
    assert source.isascii()
    tree = ast.parse(source)

    def without_texts(node: ast.AST) -> str:
        return re.sub(r"value='(?:[^'\\]|\\.)*'|value=\"(?:[^\"\\]|\\.)*\"", "", ast.dump(node))

    assert [without_texts(node) for node in tree.body] == [
        without_texts(node) for node in clean.body
    ]


# -- cubin --------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_cubin(run: Any, cuda_log: Path) -> None:
    ran = run("apply", cuda_log, "--any-device", "--format", "cubin")
    assert ran.code == 1 and "name a file with -o FILE" in ran.err
    assert run("apply", cuda_log, "--any-device", "--format", "cubin", "-o", "k.cubin").code == 0
    image = Path("k.cubin").read_bytes()
    assert image.startswith(b"\x7fELF") and is_ours(image)
    assert run("apply", cuda_log, "--any-device", "--format", "cubin", "-o", "k.cubin").code == 0
    Path("k.cubin").write_bytes(image.replace(b"kt_kernel", b"my_kernel"))
    refused = run("apply", cuda_log, "--any-device", "--format", "cubin", "-o", "k.cubin")
    assert refused.code == 1 and "not a kt kernel" in refused.err
    with pytest.raises(SettingsError, match="is no text"):
        apply(cuda_log, any_device=True, form="cubin")


# -- the Python module --------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cupy.Gpu]:
    """A CuPy and a driver that record what is asked of them."""
    made = fake_cupy.Gpu()
    monkeypatch.setitem(sys.modules, "cupy", made.cupy())
    yield made


def load(path: Path, source: str, gpu: fake_cupy.Gpu) -> Any:
    """The emitted module, imported from a folder where kt cannot help it."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._driver = lambda: gpu  # type: ignore[attr-defined]
    return module


@pytest.fixture
def module(tmp_path: Path, gpu: fake_cupy.Gpu) -> Any:
    log = write_log(tmp_path / "log.jsonl", TEXT, zeroes_its_workspace)
    return load(tmp_path / "emitted.py", apply(log, any_device=True, form="python"), gpu)


def operands() -> list[Any]:
    """A, B and bias as bits."""
    return [fake_cupy.tensor(shape, "<u2") for shape in ((8, 256), (256, 64), (64,))]


@needs_nvrtc
def test_the_module_needs_nothing_of_kt(module: Any) -> None:
    source = Path(module.__file__).read_text()
    assert source.startswith("# kt kernel: gemm 8x64x256") and is_ours(source.encode())
    tops = {
        name.name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert tops == {"base64", "ctypes", "functools", "sys", "threading", "zlib", "cupy"}
    assert json.loads(module.DESCRIPTION)["workload"] == TEXT


@needs_nvrtc
def test_launches(module: Any, gpu: fake_cupy.Gpu) -> None:
    inputs = operands()
    for _ in range(2):
        out = module.launch(*inputs)
    assert out.shape == (8, 64) and str(out.dtype) == "uint16"
    steps = module.KERNEL.steps
    assert [launched.entry for launched in gpu.launches] == 2 * [step.entry for step in steps]
    first = gpu.launches[0]
    assert (first.grid, first.block) == (steps[0].grid, steps[0].block)
    assert first.shared == steps[0].shared_bytes and first.cluster is None
    assert first.arguments[:3] == [x.address for x in inputs]
    assert first.arguments[3] != gpu.launches[-1].arguments[3]  # a new output each time
    assert first.arguments[4] == gpu.launches[-1].arguments[4]  # one workspace
    assert gpu.cubins == [module.KERNEL.cubin] and gpu.cubins[0].startswith(b"\x7fELF")
    workspaces = [a for a in gpu.arrays if a.address == first.arguments[4]]
    zeroed = module.KERNEL.zeroed_bytes
    assert len(workspaces) == 1 and not workspaces[0].array[:zeroed].any()
    gpu.stream = 77
    module.launch(*inputs)
    assert gpu.launches[-1].stream == 77
    assert gpu.launches[-1].arguments[4] != first.arguments[4]  # a workspace a stream


@needs_nvrtc
def test_outputs_of_the_caller(module: Any, gpu: fake_cupy.Gpu) -> None:
    out = fake_cupy.tensor((8, 64), "<u2")
    assert module.launch(*operands(), out=out) is out
    assert gpu.launches[0].arguments[3] == out.address


@needs_nvrtc
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda x: x[:2], TypeError, "missing 1 required positional argument: 'bias'"),
        (lambda x: [x[1], x[0], x[2]], ValueError, "A has shape (256, 64): accepts (8, 256)"),
        (lambda x: [fake_cupy.tensor((8, 256), "<f4"), *x[1:]], TypeError, "A is not bf16"),
        (lambda x: [np.ones(3), *x[1:]], ValueError, "A is not on a CUDA device"),
        (lambda x: ["text", *x[1:]], TypeError, "A is a str: accepts tensors"),
        (lambda x: [x[0], x[1].T, x[2]], ValueError, "B is not contiguous"),
        (lambda x: [*x[:2], fake_cupy.tensor((64,), "<u2", 2)], ValueError, "multiples of 16"),
        (lambda x: [*x[:2], fake_cupy.tensor((64,), "<u2", device=1)], ValueError,
         "bias is on device 1, A on 0"),
    ],
)  # fmt: skip
def test_what_the_kernel_was_not_built_for(
    module: Any, gpu: fake_cupy.Gpu, change: Any, error: type[Exception], says: str
) -> None:
    inputs = operands()
    if says.startswith("B is not contiguous"):
        inputs[1] = fake_cupy.tensor((64, 256), "<u2")
    with pytest.raises(error) as raised:
        module.launch(*change(inputs))
    assert says in str(raised.value) and "\n" not in str(raised.value)
    assert not gpu.launches


@needs_nvrtc
def test_an_output_over_an_input(module: Any) -> None:
    inputs = operands()
    out = fake_cupy.Tensor(inputs[0].array.reshape(-1)[: 8 * 64].reshape(8, 64), "<u2", 0)
    with pytest.raises(ValueError, match="the output overlaps A"):
        module.launch(*inputs, out=out)


@needs_nvrtc
def test_tensors_through_dlpack(module: Any, gpu: fake_cupy.Gpu) -> None:
    inputs = [fake_cupy.Capsuled(x.array.view(np.uint16)) for x in operands()]
    module.launch(*inputs)
    assert gpu.launches[0].arguments[:3] == [x.array.ctypes.data for x in inputs]
    assert inputs[0].streams == [1]  # the legacy stream, as DLPack numbers it


def test_small_elements_of_torch_go_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its protocols carry no fp8 in every version; another type is refused by its name."""
    array = fake_cupy.tensor((4, 16), "|u1")

    class Tensor:
        shape, dtype = (4, 16), "torch.float8_e4m3fn"

        def view(self, dtype: object) -> fake_cupy.Tensor:
            assert dtype == "bytes"
            return array

    Tensor.__module__ = "torch"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(uint8="bytes"))
    wanted = cupy_tensors.Operand("A", (4, 16), "fp8_e4m3")
    found = cupy_tensors.read_tensor(Tensor(), wanted, 0, [])
    assert (found.address, found.shape) == (array.address, (4, 16))
    assert cupy_tensors.read_tensor(array, wanted, 0, []).address == array.address
    with pytest.raises(TypeError, match=r"A is not fp8_e5m2: torch\.float8_e4m3fn"):
        cupy_tensors.read_tensor(Tensor(), wanted._replace(dtype="fp8_e5m2"), 0, [])


def test_launch_attributes(gpu: fake_cupy.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    import base64
    import zlib

    from kt.tuner import cupy_loader as loader

    monkeypatch.setattr(loader, "_driver", lambda: gpu)
    cubin = base64.b64encode(zlib.compress(b"\x7fELF")).decode()
    operand = loader.Operand("A", (4,), "fp32")
    steps = [
        loader.Step("first", (16, 2, 1), (64, 1, 1), (2, 1, 1), 0, early=True),
        loader.Step("second", (16, 1, 1), (64, 1, 1), (16, 1, 1), 100_000),
    ]
    kernel = loader.Kernel(cubin, "sm_90a", [operand, operand._replace(name="C")], steps, 0, 0)
    kernel(fake_cupy.tensor((4,), "<f4"))
    assert [launched.cluster for launched in gpu.launches] == [(2, 1, 1), (16, 1, 1)]
    assert [launched.early for launched in gpu.launches] == [True, False]
    assert gpu.attributes == [("first", 8, 0), ("second", 8, 100_000), ("second", 14, 1)]
    gpu.fails = 209
    with pytest.raises(RuntimeError, match="launching first failed: CUDA_ERROR_209"):
        kernel(fake_cupy.tensor((4,), "<f4"))


def test_formats(run: Any, cuda_log: Path) -> None:
    ran = run("apply", cuda_log, "--any-device", "--format", "c")
    assert ran.code == 1 and "a cuda kernel can be emitted as cu, cubin, python, json" in ran.err
    facts = json.loads(run("apply", cuda_log, "--any-device", "--format", "json").out)
    assert facts["workload"] == TEXT and msgspec.convert(facts["record"], TrialRecord)
