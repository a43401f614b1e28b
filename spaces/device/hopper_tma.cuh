// The tensor memory accelerator (TMA) of sm_90: boxes of a tensor between global and shared memory.
#ifndef KT_HOPPER_TMA_CUH
#define KT_HOPPER_TMA_CUH

#include "ptx.cuh"

// What cuTensorMapEncodeTiled fills in on the host; an argument `const __grid_constant__ kt_tensor_map`.
struct alignas(64) kt_tensor_map {
    u64 words[16];
};

// ---- instructions

KT_DEVICE void kt_prefetch_map(const kt_tensor_map &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// Asks L2 for the box at (x, y, z).
KT_DEVICE void kt_prefetch_box(const kt_tensor_map &map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map), "r"(x), "r"(y), "r"(z) : "memory");
}

// The box at (x, y, z), innermost first, to shared memory; its whole size counts at `barrier`, also where it lies outside
// the tensor and becomes zeros.
KT_DEVICE void kt_load_box(u32 to, const kt_tensor_map &map, u32 barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}
// The same to every CTA of the cluster whose bit is set in `ctas`, at the same place and barrier of each.
KT_DEVICE void kt_load_box_to(u32 to, const kt_tensor_map &map, u32 barrier, int x, int y, int z, u16 ctas) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5}], [%2], %6;"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(ctas) : "memory");
}

// The box from shared memory to (x, y, z); nothing outside the tensor is written. One group of its own.
KT_DEVICE void kt_store_box(const kt_tensor_map &map, u32 from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(&map), "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most PENDING of the thread's groups have yet to read shared memory.
template <int PENDING> KT_DEVICE void kt_store_box_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, and holds of each matrix the
// elements (l / 4, 2 * (l % 4) + {0, 1}).
KT_DEVICE void kt_stmatrix(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// 16 bytes of the shared memory of CTA `rank` of the cluster, at the same address there.
KT_DEVICE kt_words<4> kt_load_of_cta(u32 address, u32 rank) {
    kt_words<4> x;
    asm volatile("{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %4, %5;\n\t"
                 "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [there];\n\t}"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "r"(address), "r"(rank) : "memory");
    return x;
}

// Makes what the thread wrote to shared memory known to the TMA and to wgmma.
KT_DEVICE void kt_fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif
