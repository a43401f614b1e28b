"""The repository: import direction, packaging, pins, nothing of the machine it was made on."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
ORDER = ("spaces", "logs", "costmodel", "tuner")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked() -> list[Path]:
    """Files in version control, or that would be if added; in a plain copy, all of ours."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:
        ours = (*ORDER, "tests", "benchmarks")
        names = [str(path.relative_to(ROOT)) for top in ours for path in (ROOT / top).rglob("*.*")]
    return [ROOT / name for name in names if (ROOT / name).is_file() and "__pycache__" not in name]


def sources(*tops: str) -> list[Path]:
    found = [p for p in tracked() if p.suffix == ".py"]
    return [p for p in found if not tops or p.relative_to(ROOT).parts[0] in tops]


def imports(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Full names of every module that a file imports, anywhere in it."""
    package = ["kt", *path.relative_to(root).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module or ""]).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_the_packages_import_in_one_direction() -> None:
    checked = 0
    for path in sources(*ORDER):
        own = ORDER.index(path.relative_to(ROOT).parts[0])
        for name in imports(path):
            parts = name.split(".")
            assert parts[0] not in ORDER, f"{path}: bare import of {name}"
            if parts[0] == "kt":
                assert parts[1] in ORDER, f"{path}: {name}"
                assert ORDER.index(parts[1]) <= own, f"{path} imports {name}"
                checked += 1
    assert checked > 100


def test_the_direction_check_sees_every_form_of_import(tmp_path: Path) -> None:
    text = "import kt.tuner\nfrom kt import logs\ndef f():\n    from .a import b\nimport spaces.x\n"
    path = tmp_path / "spaces" / "deep" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = ["kt.tuner", "kt.logs", "spaces.x", "kt.spaces.deep.a.b"]
    assert list(imports(path, tmp_path)) == found


def test_the_pure_packages_import_no_device_library() -> None:
    for path in sources("spaces", "logs", "costmodel"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & {"cupy", "cuda", "torch", "subprocess", "multiprocessing", "pebble"}, path


def test_every_package_is_listed() -> None:
    packages = {
        ".".join(["kt", *path.parent.relative_to(ROOT).parts])
        for path in sources(*ORDER)
        if path.name == "__init__.py"
    }
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in sources(*ORDER)}
    assert all((folder / "__init__.py").exists() for folder in folders)
    assert all((ROOT / name / "py.typed").exists() for name in ORDER)


def test_every_kernel_file_is_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    folders = {path.parent for path in sources(*ORDER) if path.name == "__init__.py"}
    packaged = {found for folder in folders for p in patterns for found in folder.glob(p)}
    kernels = [p for p in tracked() if p.suffix in (".c", ".h", ".cu", ".cuh")
               and p.relative_to(ROOT).parts[0] in ORDER]  # fmt: skip
    assert len(kernels) > 5
    assert [path for path in kernels if path not in packaged] == []


def requirements() -> dict[str, list[str]]:
    """Every requirement of the project by the list that holds it."""
    project = PROJECT["project"]
    return {"": project["dependencies"], **project["optional-dependencies"],
            **PROJECT["dependency-groups"]}  # fmt: skip


def pins() -> list[Requirement]:
    lines = map(str.strip, (ROOT / "constraints.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_the_pins_satisfy_the_project_and_pin_everything_it_names() -> None:
    pinned: dict[str, list[Requirement]] = {}
    for pin in pins():
        pinned.setdefault(canonicalize_name(pin.name), []).append(pin)
    for group, texts in requirements().items():
        for wanted in map(Requirement, texts):
            if canonicalize_name(wanted.name) == "kt":
                continue
            found = pinned.get(canonicalize_name(wanted.name), [])
            assert found, f"{wanted} of '{group}' is not pinned"
            for pin in found:
                (exact,) = pin.specifier
                assert exact.operator == "==" and "*" not in exact.version, str(pin)
                assert wanted.specifier.contains(exact.version), f"{pin} breaks {wanted}"


def test_the_pins_hold_no_address_and_no_path() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert "://" not in line and " @ " not in line and "--index" not in line.split("#")[0], line
    assert all(pin.url is None for pin in pins()) and len(pins()) > 20


def test_no_file_holds_a_path_or_an_index_of_this_machine() -> None:
    home = str(Path.home())
    homes = [home + "/"] if home not in ("/", "/root") else ["/" + "root/"]
    names = [*homes, "/" + "work/", str(ROOT) + "/", "/tmp/" + "dev"]
    pattern = re.compile("|".join(re.escape(name) for name in names))
    index = re.compile(r"(--(extra-)?index-url[ =]+|index-url\s*=\s*\"?)https?://", re.IGNORECASE)
    checked = 0
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a picture or a compressed log
        found = pattern.search(text) or index.search(text)
        assert not found, f"{path.relative_to(ROOT)}: {found[0] if found else ''}"
        checked += 1
    assert checked > 50


def test_every_module_postpones_its_annotations() -> None:
    line = "from __future__ import annotations"
    for path in sources():
        body = ast.parse(path.read_text()).body
        only_docstring = len(body) == 1 and isinstance(body[0], ast.Expr)
        assert not body or only_docstring or line in path.read_text().splitlines(), path


UNTESTED = {"__init__", "errors", "family", "families"}  # declarations alone


def test_modules_mirror_tests() -> None:
    """Every module of the pure packages has a test file of its name."""
    for top in ORDER[:3]:
        modules = {path.stem for path in (ROOT / top).glob("*.py")} - UNTESTED

        tests = {p.stem.removeprefix("test_") for p in (ROOT / "tests" / top).glob("test_*.py")}
        assert modules <= tests, top
