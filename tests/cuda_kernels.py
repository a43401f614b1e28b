"""Tiny CUDA kernels for tests on a device: a right one, and one for every way to be wrong."""

from __future__ import annotations

from dataclasses import dataclass

from kt.spaces.kernel import Kernel, Launch
from kt.spaces.theta import Theta
from kt.spaces.workload import Gemm, parse

_THREADS = 128
_FRAME = """
#define M {m}
#define N {n}
#define K {k}
{top}
extern "C" __device__ int kt_tag{tag} = {tag};
__device__ int kt_ctas = 0;
extern "C" __global__ void kt_kernel(float *a, float *b, float *c, unsigned char *workspace) {{
    __shared__ int ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(&kt_ctas, 1);
    __syncthreads();
    const int at = blockIdx.x * {threads} + threadIdx.x, launches = ticket / (int)gridDim.x;
    (void)workspace, (void)launches;
    float sum = 0;
    if (at < M * N)
        for (int k = 0; k < K; k++) sum += a[at / N * K + k] * b[k * N + at % N];
    if (at < M * N) c[at] = sum;
    {body}
}}
"""


@dataclass(frozen=True)
class Fault:
    """What follows a right product, and how such a kernel is started."""

    body: str = ""
    top: str = ""
    shared_bytes: int = 0
    threads: int = _THREADS
    cluster: int = 1
    workspace_bytes: int = 0


# Every thread of the grid reaches `body`; `at` is its number, `launches` how many went before.
FAULTS = {
    "right": Fault(),
    "hang": Fault('for (;;) asm volatile("nanosleep.u32 1000;");'),
    "hang_later": Fault('while (launches > 5) asm volatile("nanosleep.u32 1000;");'),
    "illegal_address": Fault("if (at == 7) *(volatile float *)((size_t)c + (1ull << 45)) = 1;"),
    "illegal_address_later": Fault("if (launches > 3) *(volatile float *)(size_t)(4 * at) = 1;"),
    "misaligned": Fault("*(volatile float *)((size_t)c + 2) = 1;"),
    "trap": Fault('if (at == 3) asm volatile("trap;");'),
    "too_much_shared": Fault(shared_bytes=300 * 1024),
    "too_many_threads": Fault(threads=2048),
    "too_large_cluster": Fault(cluster=64),
    "too_much_workspace": Fault(workspace_bytes=2**42),
    "no_entry": Fault(top="#define kt_kernel other_name"),
    "wrong": Fault("if (at == M * N / 2) c[at] = sum + 1;"),
    "drops_one": Fault("if (at < M * N) c[at] -= a[at / N * K] * b[at % N];"),
    "nan": Fault("if (at == 3) c[at] = 0.0f / (sum - sum);"),
    "idle": Fault("if (at < M * N) c[at] = __int_as_float(-1);"),
    "past_output": Fault("if (at == 0) c[M * N + 1] = 0;"),
    "before_output": Fault("if (at == 0) c[-2] = 0;"),
    "past_workspace": Fault("if (at == 0) workspace[100] = 0;", workspace_bytes=100),
    "modifies_input": Fault("if (at == 5) b[5] = 0;"),
    "sometimes_wrong": Fault("if (at == 7 && launches % 3 == 2) c[at] = sum + 1;"),
    "works_once": Fault(top="#define SKIPS"),
}  # fmt: skip


def gemm(text: str = "gemm 48x40x64 dtype=fp32") -> Gemm:
    workload = parse(text)
    assert isinstance(workload, Gemm)
    return workload


def fault(workload: Gemm, name: str, tag: int = 0) -> Kernel:
    """A kernel with a fault; different tags are different binaries."""
    kind = FAULTS[name]
    source = _FRAME.format(
        m=workload.m, n=workload.n, k=workload.k, top=kind.top, body=kind.body, tag=tag,
        threads=_THREADS,
    )  # fmt: skip
    if "SKIPS" in kind.top:
        source = source.replace("float sum = 0;", "float sum = 0; if (launches) return;")
    blocks = -(-workload.m * workload.n // _THREADS)
    launch = Launch(
        "kt_kernel", (-(-blocks // kind.cluster) * kind.cluster, 1, 1), (kind.threads, 1, 1),
        cluster=(kind.cluster, 1, 1), shared_bytes=kind.shared_bytes,
    )  # fmt: skip
    return Kernel(
        workload, "test", Theta(), "cuda", source, (launch,), workspace_bytes=kind.workspace_bytes
    )
