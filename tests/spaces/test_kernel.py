"""Kernel sources: stubs, headers expanded once, digests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt.spaces.kernel import DEVICE_HEADERS, Kernel, expand, stub
from kt.spaces.theta import Theta
from kt.spaces.workload import parse


def test_a_stub_is_one_define_a_line() -> None:
    assert stub({"BM": 64, "T": "float"}) == "#define BM 64\n#define T float\n"


def test_headers_are_expanded_once_each_where_first_included(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#include "b.h"\nint a;\n')
    (tmp_path / "b.h").write_text("int b;\n")
    (tmp_path / "k.c").write_text(
        '#include <stdio.h>\n#include "a.h" // first\n#include "b.h"\n#include "a.h"\nint k;\n'
    )
    text = expand(tmp_path / "k.c", tmp_path)
    assert text == "#include <stdio.h>\nint b;\nint a;\nint k;\n"


def test_headers_that_include_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#include "b.h"\nint a;\n')
    (tmp_path / "b.h").write_text('#include "a.h"\nint b;\n')
    (tmp_path / "k.c").write_text('#include "a.h"\n')
    assert expand(tmp_path / "k.c", tmp_path) == "int b;\nint a;\n"


def test_a_missing_header_is_a_bug_not_silence(tmp_path: Path) -> None:
    (tmp_path / "k.c").write_text('#include "gone.h"\n')
    with pytest.raises(FileNotFoundError, match=r"gone\.h"):
        expand(tmp_path / "k.c", tmp_path)


def test_our_headers_expand_to_text_without_own_includes() -> None:
    headers = sorted(DEVICE_HEADERS.glob("*.h"))
    assert headers
    for header in headers:
        assert '#include "' not in expand(header), header.name


def test_the_digest_is_of_the_source_alone() -> None:
    workload = parse("gemm 8x8x8")
    a = Kernel(workload, "f", Theta(), "c", "int a;\n")
    b = Kernel(workload, "g", Theta(tile={"x": 1}), "c", "int a;\n")
    c = Kernel(workload, "f", Theta(), "c", "int a; \n")
    assert a.digest == b.digest != c.digest
    assert len(a.digest) == 64
