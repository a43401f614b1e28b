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
constexpr u64 VECTORS_A = KT_REPACK_A ? RepackedA::VECTORS : 0, VECTORS = VECTORS_A + (KT_REPACK_B ? RepackedB::VECTORS : 0);
constexpr u64 REPACK_BLOCKS = kt_ceil_div<u64>(VECTORS, REPACK_THREADS);
static_assert(REPACK_BLOCKS < 1ull << 31, "grid");

extern "C" __global__ void __launch_bounds__(REPACK_THREADS) kt_repack(KT_PARAMETERS) {
    (void)c;
    kt_release_next();
    kt_await_previous();
    const u64 vector = (u64)blockIdx.x * REPACK_THREADS + threadIdx.x;
    if (vector >= VECTORS) return;
    if (KT_REPACK_A && (!KT_REPACK_B || vector < VECTORS_A)) RepackedA::copy_vector(workspace + REPACKED_A, a, vector);
    else RepackedB::copy_vector(workspace + REPACKED_B, b, vector - VECTORS_A);
}
#endif

#endif
