// Matrix product by the tensor cores of sm_80 and later: cp.async into a ring of shared-memory stages, ldmatrix, mma.sync.
//
// Any extents and alignments: tails are zero-filled on the way into shared memory and not stored; an operand whose rows
// start anywhere goes through registers, or is first repacked by the kernel kt_repack.
#include "mma_config.cuh"
#include "tile.cuh"

// ---- operands as the kernel reads them: in place or repacked

constexpr bool MUST_TRANSPOSE = KT_DTYPE == KT_INT8;
constexpr bool A_REPACK_TRANSPOSES = MUST_TRANSPOSE && !A_K_MAJOR, B_REPACK_TRANSPOSES = MUST_TRANSPOSE && !B_K_MAJOR;
using Splits = kt_split_workspace<(u64)BLOCKS * KT_BATCH, (u64)BM * BN>;
#include "repack_kernel.cuh"

constexpr bool A_ALONG_K = A_K_MAJOR || (KT_REPACK_A && MUST_TRANSPOSE), B_ALONG_K = B_K_MAJOR || (KT_REPACK_B && MUST_TRANSPOSE);
constexpr i64 A_PITCH = KT_REPACK_A ? RepackedA::PITCH : A_LD, B_PITCH = KT_REPACK_B ? RepackedB::PITCH : B_LD;
constexpr i64 A_ROWS = A_ALONG_K ? KT_M : KT_K, B_ROWS = B_ALONG_K ? KT_N : KT_K;

// Padding: one chunk makes the chunks of a row odd; words that are read down a column need two.
constexpr int A_INNER = (A_ALONG_K ? BK : BM) * ELEMENT_BYTES, B_INNER = (B_ALONG_K ? BK : BN) * ELEMENT_BYTES;
constexpr bool A_BY_WORDS = !A_ALONG_K && ELEMENT_BYTES == 4, B_BY_WORDS = !B_ALONG_K && ELEMENT_BYTES == 4;
using LayoutA = kt_tile_layout<A_ALONG_K ? BM : BK, A_INNER, KT_SWIZZLE && !A_BY_WORDS, A_BY_WORDS ? 32 : 16>;
using LayoutB = kt_tile_layout<B_ALONG_K ? BN : BK, B_INNER, KT_SWIZZLE && !B_BY_WORDS, B_BY_WORDS ? 32 : 16>;
constexpr bool CHECK_K = KT_K % BK != 0, CHECK_M = KT_M % BM != 0, CHECK_N = KT_N % BN != 0;
using CopyA = kt_tile_copy<LayoutA, A_ALONG_K ? BM : BK, A_INNER, A_PITCH * ELEMENT_BYTES, KT_COPY_A, THREADS,
                           A_ALONG_K ? CHECK_M : CHECK_K, A_ALONG_K ? CHECK_K : CHECK_M, KT_PREFETCH>;
using CopyB = kt_tile_copy<LayoutB, B_ALONG_K ? BN : BK, B_INNER, B_PITCH * ELEMENT_BYTES, KT_COPY_B, THREADS,
                           B_ALONG_K ? CHECK_N : CHECK_K, B_ALONG_K ? CHECK_K : CHECK_N, KT_PREFETCH>;
using FragmentsA = kt_fragments<LayoutA, A_ALONG_K, WARP_M, false>;
using FragmentsB = kt_fragments<LayoutB, B_ALONG_K, WARP_N, true>;

typedef kt_range Rows;
#include "mma_store.cuh"

// What the Python side computed, when it made this text.
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
static_assert(WORKSPACE_BYTES == KT_EXPECT_WORKSPACE_BYTES && Splits::ZEROED == KT_EXPECT_ZEROED_BYTES, "workspace");
#endif

// ---- tiles of k

// One tile of k in shared memory, as seen from its end of k and of the tile's rows.
struct kt_limits {
    int outer, inner;
};
template <bool ALONG_K> KT_DEVICE kt_limits kt_limits_of(i64 rows_left, i64 k_left, int rows) {
    const int r = (int)kt_min<i64>(rows_left, rows), k = (int)kt_min<i64>(k_left, BK);
    return ALONG_K ? kt_limits{r, k * ELEMENT_BYTES} : kt_limits{k, r * ELEMENT_BYTES};
}

// Moves tiles of k into the ring; `tile` counts from the CTA's first.
struct kt_loader {
    CopyA a;
    CopyB b;
    i64 m_left, n_left, k_left; // k_left: from the next tile to be loaded
    kt_limits held_a, held_b;   // of tiles that wait in registers

    KT_DEVICE void begin_a(u32 stage) {
        held_a = kt_limits_of<A_ALONG_K>(m_left, k_left, BM);
        if (CopyA::THROUGH_REGISTERS) a.load(held_a.outer, held_a.inner);
        else a.copy(stage, held_a.outer, held_a.inner);
        a.advance(A_ALONG_K ? BK * ELEMENT_BYTES : BK * A_PITCH * ELEMENT_BYTES);
    }
    KT_DEVICE void begin_b(u32 stage) {
        held_b = kt_limits_of<B_ALONG_K>(n_left, k_left, BN);
        if (CopyB::THROUGH_REGISTERS) b.load(held_b.outer, held_b.inner);
        else b.copy(stage + LayoutA::BYTES, held_b.outer, held_b.inner);
        b.advance(B_ALONG_K ? BK * ELEMENT_BYTES : BK * B_PITCH * ELEMENT_BYTES);
        k_left -= BK;
    }
    // What came through registers goes to its stage.
    KT_DEVICE void end(u32 stage) {
        if (CopyA::THROUGH_REGISTERS) a.template store<A_ALONG_K && CHECK_K>(stage, held_a.inner);
        if (CopyB::THROUGH_REGISTERS) b.template store<B_ALONG_K && CHECK_K>(stage + LayoutA::BYTES, held_b.inner);
    }
};

// ---- kernel

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    kt_release_next();
    const kt_worker me = kt_this_worker();
    const u32 warp_m = me.warp % WARPS_MN / KT_WARPS_N, warp_n = me.warp % KT_WARPS_N;
    const kt_share share = kt_this_share();
    const u32 m = share.m, n = share.n, batch = share.batch;
    const i64 k = (i64)share.first * BK;

    const kt_element *all_a = KT_REPACK_A ? (const kt_element *)(workspace + REPACKED_A) : a;
    const kt_element *all_b = KT_REPACK_B ? (const kt_element *)(workspace + REPACKED_B) : b;
    const kt_element *tile_a = all_a + batch * (A_ROWS * A_PITCH) + (A_ALONG_K ? m * A_PITCH + k : k * A_PITCH + m);
    const kt_element *tile_b = all_b + batch * (B_ROWS * B_PITCH) + (B_ALONG_K ? n * B_PITCH + k : k * B_PITCH + n);
    kt_loader loader = {{tile_a, all_a + KT_BATCH * (A_ROWS * A_PITCH)}, {tile_b, all_b + KT_BATCH * (B_ROWS * B_PITCH)},
                        (i64)KT_M - m, (i64)KT_N - n, (i64)KT_K - k, {}, {}};
    kt_accumulators sums;
    sums.clear();
    FragmentsA at_a = {me.lane, warp_m * WARP_M, me.group * STEPS};
    const FragmentsB at_b = {me.lane, warp_n * WARP_N, me.group * STEPS};
    kt_await_previous();
    kt_multiply(sums, loader, at_a, at_b, kt_shared_address(kt_shared), (int)share.tiles);
    kt_finish_tile<Splits>(sums, c, KT_EPILOGUE_OPERANDS, {share.m}, share, me, workspace);
}

#include "launch.cuh"
