"""Tiny C kernels for tests of the backend: a right one, and one for every way to be wrong."""

from __future__ import annotations

from kt.spaces.kernel import Kernel
from kt.spaces.theta import Theta
from kt.spaces.workload import Gemm, parse

_FRAME = """
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <unistd.h>
enum {{ M = {m}, N = {n}, K = {k} }};
typedef {real} real;
static void product(const real *a, const real *b, real *c, int depth) {{
    for (int i = 0; i < M; i++) {{
        for (int j = 0; j < N; j++) c[i * N + j] = 0;
        for (int k = 0; k < depth; k++)
            for (int j = 0; j < N; j++) c[i * N + j] += a[i * K + k] * b[k * N + j];
    }}
}}
{top}
#ifndef WORKSPACE
#define WORKSPACE 0
#endif
size_t kt_workspace_bytes(void) {{ return (size_t)(WORKSPACE); }}
int kt_launch(void *const *args, void *workspace) {{
    real *a = args[0], *b = args[1], *c = args[2];
    static volatile int launches, zero;
    (void)workspace, (void)launches, (void)zero;
    launches++;
    {body}
    return 0;
}}
"""
RIGHT = "product(a, b, c, K);"

FAULTS: dict[str, tuple[str, str]] = {
    "segfault": ("", "*(volatile int *)(intptr_t)zero = 1;"),
    "division": ("", "return 12345 / zero;"),
    "abort": ("", 'fputs("giving up\\n", stderr); abort();'),
    "exit": ("", "exit(3);"),
    "exit_zero": ("", "_exit(0);"),
    "hang": ("", "for (;;) launches++;"),
    "hang_at_unload": (
        "__attribute__((destructor)) static void stay(void) { for (;;) pause(); }", RIGHT,
    ),
    "huge_workspace": ("#define WORKSPACE (1ull << 50)", RIGHT),
    "memory": (
        "static char *volatile p;", "for (;;) { p = malloc(1 << 24); memset(p, 1, 1 << 24); }",
    ),
    "killed": ("", "raise(SIGKILL);"),
    "wrong": ("", RIGHT + "c[M * N / 2] += 1;"),
    "drops_one": ("", "product(a, b, c, K - 1);"),
    "nan": ("", RIGHT + "c[3] /= 0; c[3] -= c[3];"),
    "idle": ("", ""),
    "past_output": ("", RIGHT + "c[M * N + 1] = 0;"),
    "before_output": ("", RIGHT + "c[-2] = 0;"),
    "past_workspace": ("#define WORKSPACE 100", RIGHT + "((char *)workspace)[100] = 0;"),
    "modifies_input": ("", RIGHT + "b[5] = 0;"),
    "refuses": ("", "return 7;"),
    "refuses_later": ("", RIGHT + "return launches > 3 ? 9 : 0;"),
    "works_once": ("", f"if (launches == 1) {RIGHT}"),
    "wrong_later": ("", RIGHT + "if (launches > 5) c[7] += 1;"),
    "no_symbol": ("#define kt_launch other_name", RIGHT),
    "constructor": (
        "__attribute__((constructor)) static void trap(void) { raise(SIGILL); }", RIGHT,
    ),
}  # fmt: skip


def source(workload: Gemm, body: str = RIGHT, top: str = "") -> str:
    """A C kernel of a plain row-major product."""
    real = {"fp32": "float", "fp64": "double"}[workload.dtype]
    return _FRAME.format(m=workload.m, n=workload.n, k=workload.k, real=real, top=top, body=body)


def kernel(workload: Gemm, body: str = RIGHT, top: str = "") -> Kernel:
    return Kernel(workload, "test", Theta(), "c", source(workload, body, top))


def fault(workload: Gemm, name: str) -> Kernel:
    top, body = FAULTS[name]
    return kernel(workload, body, top)


def gemm(text: str) -> Gemm:
    workload = parse(text)
    assert isinstance(workload, Gemm)
    return workload
