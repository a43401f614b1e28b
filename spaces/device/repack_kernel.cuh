// The kernel that repacks operands into the workspace, after the sums of split-K: copies whose rows start at multiples of
// 16 bytes. Comes after a kernel file has defined Splits, and A_REPACK_TRANSPOSES, B_REPACK_TRANSPOSES.
#ifndef KT_REPACK_KERNEL_CUH
#define KT_REPACK_KERNEL_CUH

#include "epilogue.cuh"
#include "repack.cuh"

#ifndef KT_REPACK_A
#define KT_REPACK_A 0
#endif
#ifndef KT_REPACK_B
#define KT_REPACK_B 0
#endif

using RepackedA = kt_repacked<A_K_MAJOR ? KT_M : KT_K, A_LD, A_REPACK_TRANSPOSES>;
using RepackedB = kt_repacked<B_K_MAJOR ? KT_N : KT_K, B_LD, B_REPACK_TRANSPOSES>;
constexpr u64 REPACKED_A = Splits::BYTES, REPACKED_B = REPACKED_A + (KT_REPACK_A ? RepackedA::BYTES : 0);
constexpr u64 WORKSPACE_BYTES = REPACKED_B + (KT_REPACK_B ? RepackedB::BYTES : 0);

#define KT_HAS_REPACK (KT_REPACK_A || KT_REPACK_B)
#if KT_HAS_REPACK
constexpr i64 VECTORS_A = KT_REPACK_A ? RepackedA::VECTORS : 0, VECTORS = VECTORS_A + (KT_REPACK_B ? RepackedB::VECTORS : 0);
static_assert(VECTORS < 1ll << 31, "32 bits count them: divisions are cheap");
// Of a thread, all loaded before the first is stored. Small copies rather have more threads.
constexpr int VECTORS_EACH = VECTORS >= 1 << 18 ? 4 : 1;
[[maybe_unused]] constexpr u64 REPACK_BLOCKS = kt_ceil_div<i64>(VECTORS, REPACK_THREADS * VECTORS_EACH);
#ifdef KT_EXPECT_REPACK_BLOCKS
static_assert(REPACK_BLOCKS == KT_EXPECT_REPACK_BLOCKS, "launch");
#endif

extern "C" __global__ void __launch_bounds__(REPACK_THREADS) kt_repack(KT_PARAMETERS) {
    (void)c;
    kt_release_next();
    kt_await_previous();
    const u32 first = blockIdx.x * (REPACK_THREADS * VECTORS_EACH) + threadIdx.x;
    kt_shifted x[VECTORS_EACH];
#pragma unroll
    for (int i = 0; i < VECTORS_EACH; i++) {
        const u32 vector = first + i * REPACK_THREADS;
        if (vector >= VECTORS) continue;
        if (KT_REPACK_A && vector < VECTORS_A) x[i] = RepackedA::load(a, vector);
        else x[i] = RepackedB::load(b, vector - (u32)VECTORS_A);
    }
#pragma unroll
    for (int i = 0; i < VECTORS_EACH; i++) {
        const u32 vector = first + i * REPACK_THREADS;
        if (vector >= VECTORS) continue;
        if (KT_REPACK_A && vector < VECTORS_A) RepackedA::store(workspace + REPACKED_A, x[i], vector);
        else RepackedB::store(workspace + REPACKED_B, x[i], vector - (u32)VECTORS_A);
    }
}
#endif

#endif
