"""Several kernels in one file: names, macros, the shared thread pool, unchanged texts."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from cpu_kernels import needs_compiler

from kt.spaces.kernel import DEVICE_HEADERS, expand
from kt.spaces.together import c_apart, cuda_apart, reached, system_headers

C = """#include <stddef.h>
#define LIMIT 3
#define TWICE(a, b) ((a) + (b))
/* enum { NOT = 1 } and kt_comment */
enum { FIRST = TWICE(1, LIMIT), SECOND, /* a comment, with a comma */
#if LIMIT > 2
       THIRD = sizeof(int), // the last
#endif
};
typedef struct kt_pair { int first; } kt_pair;
static const char *kt_text(void) { return "kt_text, enum { INSIDE }"; }
int kt_launch(void) { return FIRST + SECOND + (int)kt_text()[0] * 0; }
"""
CUDA = """#define BM 64
enum : int { TILE = BM };
extern "C" __global__ void __launch_bounds__(TILE, 1)
    kt_kernel(int x) {}
// extern "C" int kt_comment(int)
extern "C" int kt_launch(void) { return TILE; }
static int kt_own() { return 1; }
"""


def test_names_at_file_scope_are_a_sources_own() -> None:
    text = c_apart(C, "kt7", {})
    assert C in text
    defined = dict(line.split()[1:3] for line in text.partition(C)[0].splitlines())
    assert defined == {
        "FIRST": "kt7_FIRST", "SECOND": "kt7_SECOND", "THIRD": "kt7_THIRD",
        "kt_launch": "kt7_launch", "kt_pair": "kt7_pair", "kt_text": "kt7_text",
    }  # fmt: skip
    undefined = {line.split()[1] for line in text.partition(C)[2].splitlines()}
    assert undefined == {*defined, "LIMIT", "TWICE"}
    assert reached("kt7", "kt_launch", "c") == "kt7_launch"


@needs_compiler
def test_two_of_them_build_together(tmp_path: Path) -> None:
    other = C.replace("LIMIT 3", "LIMIT 5")
    pool = dict[str, str]()
    text = system_headers([C, other]) + c_apart(C, "kt0", pool) + c_apart(other, "kt1", pool)
    text += "int sum(void) { return kt0_launch() * 100 + kt1_launch(); }\n"
    (tmp_path / "k.c").write_text(text)
    command = ["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", "k.so", "k.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert ctypes.CDLL(str(tmp_path / "k.so")).sum() == 9 * 100 + 13


def test_kernels_of_one_thread_count_share_their_workers() -> None:
    pool_text = expand(DEVICE_HEADERS / "cpu_pool.h")
    body = "void kt_run(void) { kt_parallel(0, 0); }\n"
    sources = [f"#define KT_THREADS {n}\n{pool_text}{body}" for n in (4, 2, 4)]
    pool = dict[str, str]()
    texts = [c_apart(source, f"kt{i}", pool) for i, source in enumerate(sources)]
    assert pool == {"4": "kt0", "2": "kt1"}
    for text, owner in zip(texts, ("kt0", "kt1", "kt0"), strict=True):
        assert f"#define kt_parallel {owner}_parallel\n" in text
    skipped = ["#define KT_CPU_POOL_H /*" in text for text in texts]
    assert skipped == [False, False, True]
    assert "#define kt_run kt2_run\n" in texts[2]


def test_a_cuda_source_is_in_a_namespace() -> None:
    text = cuda_apart(CUDA, "kt7")
    head, _, tail = text.partition(CUDA)
    assert head == ("#define kt_kernel kt7_kernel\n#define kt_launch kt7_launch\nnamespace kt7 {\n")
    assert tail == "} // namespace kt7\n#undef BM\n#undef kt_kernel\n#undef kt_launch\n"
    assert reached("kt7", "kt_launch", "cuda") == "kt7::kt7_launch"
