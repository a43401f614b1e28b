// Matrix product by the tensor cores of sm_80 and later: cp.async into a ring of shared-memory stages, ldmatrix, mma.sync.
//
// One CTA computes a BM x BN tile of C over its share of k, WARPS_M x WARPS_N warps side by side and WARPS_K groups of
// them taking turns along k. Any extents and alignments: tails are zero-filled on the way into shared memory and not
// stored; an operand whose rows start anywhere goes through registers, or is first repacked by the kernel kt_repack.
#include "problem.cuh"
#include "tile.cuh"
#include "epilogue.cuh"
#include "raster.cuh"
#include "split_k.cuh"
#include "repack.cuh"

#ifndef KT_ACC_HALF
#define KT_ACC_HALF 0 /* 1: fp16 accumulators; only where the workload asks for them */
#endif

// tile
#ifndef KT_BM
#define KT_BM 128
#endif
#ifndef KT_BN
#define KT_BN 128
#endif
#ifndef KT_BK
#define KT_BK 32
#endif
// mem
#ifndef KT_STAGES
#define KT_STAGES 4
#endif
#ifndef KT_SWIZZLE
#define KT_SWIZZLE 1 /* 0: padded rows */
#endif
#ifndef KT_COPY_A
#define KT_COPY_A 16 /* bytes of one cp.async; 0: through registers, from any alignment */
#endif
#ifndef KT_COPY_B
#define KT_COPY_B 16
#endif
#ifndef KT_PREFETCH
#define KT_PREFETCH 128 /* bytes that L2 fetches around each copy: 0, 128 or 256 */
#endif
#define KT_STORE_DIRECT 0 /* pairs of columns, as the accumulators lie */
#define KT_STORE_WIDE 1   /* 16 bytes, put together by shuffles */
#define KT_STORE_STAGED 2 /* whole rows of the warp's tile, through shared memory */
#ifndef KT_STORE
#define KT_STORE KT_STORE_DIRECT
#endif
// fusion
#ifndef KT_REPACK_A
#define KT_REPACK_A 0
#endif
#ifndef KT_REPACK_B
#define KT_REPACK_B 0
#endif
// unroll
#ifndef KT_FRAGMENT_STAGES
#define KT_FRAGMENT_STAGES 2 /* 2: the next step's fragments are loaded during this step's product */
#endif
#ifndef KT_UNROLL
#define KT_UNROLL 1 /* tiles of k in one round of the loop */
#endif
// map
#ifndef KT_WARPS_M
#define KT_WARPS_M 2
#endif
#ifndef KT_WARPS_N
#define KT_WARPS_N 2
#endif
#ifndef KT_WARPS_K
#define KT_WARPS_K 1
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif
// sync
#ifndef KT_STAGGER
#define KT_STAGGER 0 /* 1: the copies of B start half a tile of k after those of A */
#endif

// ---- shape of the work

constexpr int BM = KT_BM, BN = KT_BN, BK = KT_BK, STAGES = KT_STAGES, UNROLL = KT_UNROLL;
constexpr int WARPS_MN = KT_WARPS_M * KT_WARPS_N, THREADS = 32 * WARPS_MN * KT_WARPS_K, OWNERS = 32 * WARPS_MN;
constexpr int WARP_M = BM / KT_WARPS_M, WARP_N = BN / KT_WARPS_N, M_TILES = WARP_M / 16, N_TILES = WARP_N / 8;
constexpr int STEPS = BK * ELEMENT_BYTES / 32 / KT_WARPS_K; // matrix instructions of a warp along one tile of k
constexpr int ACCS = M_TILES * N_TILES * 4;
static_assert(KT_DTYPE >= KT_TF32, "a type of the tensor cores");
static_assert(WARP_M % 16 == 0 && WARP_N % 8 == 0 && WARP_M * KT_WARPS_M == BM && WARP_N * KT_WARPS_N == BN, "warp tiles");
static_assert(BM % 16 == 0 && BN % 16 == 0 && STEPS >= 1 && STAGES >= 2, "tiles");
static_assert(KT_FRAGMENT_STAGES == 1 || STEPS % 2 == 0, "two fragment buffers take turns");
static_assert(KT_STAGGER == 0 || STEPS >= 2, "staggered copies start in different steps");

constexpr u32 M_BLOCKS = kt_ceil_div(KT_M, BM), N_BLOCKS = kt_ceil_div(KT_N, BN), K_TILES = kt_ceil_div(KT_K, BK);
constexpr u32 BLOCKS = M_BLOCKS * N_BLOCKS;
static_assert(KT_SPLIT_K <= K_TILES, "every split has a tile of k");

// ---- operands as the kernel reads them: in place or repacked

constexpr bool MUST_TRANSPOSE = KT_DTYPE == KT_INT8;
using RepackedA = kt_repacked<A_K_MAJOR ? KT_M : KT_K, A_LD, MUST_TRANSPOSE && !A_K_MAJOR>;
using RepackedB = kt_repacked<B_K_MAJOR ? KT_N : KT_K, B_LD, MUST_TRANSPOSE && !B_K_MAJOR>;
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
using FragmentsA = kt_fragments<LayoutA, A_ALONG_K, WARP_M>;
using FragmentsB = kt_fragments<LayoutB, B_ALONG_K, WARP_N>;

// ---- memory

constexpr int STAGE_BYTES = LayoutA::BYTES + LayoutB::BYTES;
constexpr int SLAB_STRIDE = WARP_N + 8; // accumulators; 16 rows of a warp's tile wait in shared memory for staged stores
constexpr int STAGED_BYTES = KT_STORE == KT_STORE_STAGED ? WARPS_MN * 16 * SLAB_STRIDE * ACC_BYTES : 0;
constexpr int WARPS_K_BYTES = KT_WARPS_K / 2 * BM * BN * ACC_BYTES;
constexpr int SHARED_BYTES = kt_max(STAGES * STAGE_BYTES, kt_max(STAGED_BYTES, WARPS_K_BYTES));

using Splits = kt_split_workspace<(u64)BLOCKS * KT_BATCH, (u64)BM * BN>;
constexpr u64 REPACKED_A = Splits::BYTES, REPACKED_B = REPACKED_A + (KT_REPACK_A ? RepackedA::BYTES : 0);
constexpr u64 WORKSPACE_BYTES = REPACKED_B + (KT_REPACK_B ? RepackedB::BYTES : 0);

// What the Python side computed, when it made this text.
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
static_assert(WORKSPACE_BYTES == KT_EXPECT_WORKSPACE_BYTES && Splits::ZEROED == KT_EXPECT_ZEROED_BYTES, "workspace");
#endif

// ---- the product

// One tile of k in shared memory, as seen from its end of k and of the tile's rows.
struct kt_limits {
    int outer, inner;
};
template <bool ALONG_K> KT_DEVICE kt_limits kt_limits_of(i64 rows_left, i64 k_left, int rows) {
    const int r = (int)kt_min<i64>(rows_left, rows), k = (int)kt_min<i64>(k_left, BK);
    return ALONG_K ? kt_limits{r, k * ELEMENT_BYTES} : kt_limits{k, r * ELEMENT_BYTES};
}

struct kt_accumulators {
#if KT_ACC_HALF
    u32 half[M_TILES * N_TILES][2];
#else
    kt_acc sum[M_TILES * N_TILES][4];
#endif

    KT_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
#if KT_ACC_HALF
                half[i][j / 2] = 0;
#else
                sum[i][j] = 0;
#endif
            }
    }

    KT_DEVICE void multiply(const u32 (&a)[FragmentsA::BLOCKS][4], const u32 (&b)[FragmentsB::BLOCKS][4]) {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                const int j = i % 2 ? N_TILES - 1 - n : n; // there and back: the fragments at the turn are used twice
                const u32 b0 = b[j / 2][j % 2], b1 = b[j / 2][j % 2 + 2];
#if KT_ACC_HALF
                kt_mma_half_half(half[i * N_TILES + j], a[i], b0, b1);
#elif KT_DTYPE == KT_FP16
                kt_mma_half(sum[i * N_TILES + j], a[i], b0, b1);
#elif KT_DTYPE == KT_BF16
                kt_mma_bfloat(sum[i * N_TILES + j], a[i], b0, b1);
#elif KT_DTYPE == KT_TF32
                kt_mma_tf32(sum[i * N_TILES + j], a[i], b0, b1);
#else
                kt_mma_int8(sum[i * N_TILES + j], a[i], b0, b1);
#endif
            }
    }

    // Accumulator 4 * (i * N_TILES + j) + 2 * h + e of a lane is at row 16 * i + 8 * h + lane / 4, column
    // 8 * j + 2 * (lane % 4) + e of the warp's tile.
    KT_DEVICE void take(kt_acc (&out)[ACCS]) const {
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
#if KT_ACC_HALF
                out[4 * i + j] = kt_from_half((u16)(half[i][j / 2] >> (16 * (j % 2))));
#else
                out[4 * i + j] = sum[i][j];
#endif
            }
    }
};

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

KT_DEVICE u32 kt_next_stage(u32 offset) { return offset == (STAGES - 1) * STAGE_BYTES ? 0 : offset + STAGE_BYTES; }

// All tiles of k of a CTA. A stage is refilled only after the barrier that follows its last use.
KT_DEVICE void kt_multiply(kt_accumulators &acc, kt_loader &loader, const FragmentsA &at_a, const FragmentsB &at_b, u32 ring, int tiles) {
    constexpr bool DOUBLE = KT_FRAGMENT_STAGES == 2;
    constexpr int B_STEP = KT_STAGGER ? STEPS / 2 : 0;
    u32 a[KT_FRAGMENT_STAGES][FragmentsA::BLOCKS][4], b[KT_FRAGMENT_STAGES][FragmentsB::BLOCKS][4];
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < tiles) {
            loader.begin_a(ring + s * STAGE_BYTES);
            loader.begin_b(ring + s * STAGE_BYTES);
            loader.end(ring + s * STAGE_BYTES);
        }
        kt_copy_commit();
    }
    u32 read = 0, write = (STAGES - 1) * STAGE_BYTES;
    if (DOUBLE) {
        kt_copy_wait<STAGES - 2>();
        __syncthreads();
        at_a.load(a[0], ring, 0);
        at_b.load(b[0], ring + LayoutA::BYTES, 0);
    }
#pragma unroll UNROLL
    for (int tile = 0; tile < tiles; tile++) {
        const bool more = tile + STAGES - 1 < tiles;
        if (!DOUBLE) {
            kt_copy_wait<STAGES - 2>();
            __syncthreads();
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (step == 0 && more) loader.begin_a(ring + write);
            if (step == B_STEP) {
                if (more) loader.begin_b(ring + write);
                kt_copy_commit();
            }
            if (DOUBLE) {
                if (step == STEPS - 1) {
                    if (more) loader.end(ring + write);
                    read = kt_next_stage(read);
                    kt_copy_wait<STAGES - 2>();
                    __syncthreads();
                }
                at_a.load(a[(step + 1) % 2], ring + read, (step + 1) % STEPS);
                at_b.load(b[(step + 1) % 2], ring + read + LayoutA::BYTES, (step + 1) % STEPS);
                acc.multiply(a[step % 2], b[step % 2]);
            } else {
                at_a.load(a[0], ring + read, step);
                at_b.load(b[0], ring + read + LayoutA::BYTES, step);
                acc.multiply(a[0], b[0]);
            }
        }
        if (!DOUBLE) {
            if (more) loader.end(ring + write);
            read = kt_next_stage(read);
        }
        write = kt_next_stage(write);
    }
    kt_copy_wait<0>();
}

// Groups of warps that took turns along k add up, each half giving its sums to the other.
KT_DEVICE void kt_join_warps(kt_acc (&acc)[ACCS], u32 group, u32 owner, u8 *shared) {
#pragma unroll
    for (u32 half = KT_WARPS_K / 2; half >= 1; half /= 2) {
        __syncthreads();
        if (group >= half && group < 2 * half)
#pragma unroll
            for (int v = 0; v < ACCS / 4; v++)
                kt_store_words(shared + (((group - half) * (ACCS / 4) + v) * OWNERS + owner) * 16, kt_acc_words<4>(acc + 4 * v));
        __syncthreads();
        if (group < half)
#pragma unroll
            for (int v = 0; v < ACCS / 4; v++)
                kt_add_acc_words<4>(acc + 4 * v, kt_load_words<4>(shared + ((group * (ACCS / 4) + v) * OWNERS + owner) * 16));
    }
}

#include "mma_store.cuh"

// ---- kernels

extern __shared__ __align__(128) u8 kt_shared[];

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / WARPS_MN, owner = threadIdx.x % OWNERS;
    const u32 warp_m = warp % WARPS_MN / KT_WARPS_N, warp_n = warp % KT_WARPS_N;
    const u32 part = blockIdx.x / BLOCKS, batch = part / KT_SPLIT_K, split = part % KT_SPLIT_K;
    const kt_place place = kt_place_of(blockIdx.x % BLOCKS, M_BLOCKS, N_BLOCKS);
    const u32 m = place.m * BM, n = place.n * BN;
    const u32 first = kt_split(K_TILES, KT_SPLIT_K, split), tiles = kt_split(K_TILES, KT_SPLIT_K, split + 1) - first;
    const i64 k = (i64)first * BK;

    const kt_element *all_a = KT_REPACK_A ? (const kt_element *)(workspace + REPACKED_A) : a;
    const kt_element *all_b = KT_REPACK_B ? (const kt_element *)(workspace + REPACKED_B) : b;
    const kt_element *tile_a = all_a + batch * (A_ROWS * A_PITCH) + (A_ALONG_K ? m * A_PITCH + k : k * A_PITCH + m);
    const kt_element *tile_b = all_b + batch * (B_ROWS * B_PITCH) + (B_ALONG_K ? n * B_PITCH + k : k * B_PITCH + n);
    kt_loader loader = {{tile_a, all_a + KT_BATCH * (A_ROWS * A_PITCH)}, {tile_b, all_b + KT_BATCH * (B_ROWS * B_PITCH)},
                        (i64)KT_M - m, (i64)KT_N - n, (i64)KT_K - k, {}, {}};
    kt_accumulators sums;
    sums.clear();
    kt_multiply(sums, loader, {lane, warp_m * WARP_M, group * STEPS}, {lane, warp_n * WARP_N, group * STEPS},
                kt_shared_address(kt_shared), (int)tiles);

    kt_acc acc[ACCS];
    sums.take(acc);
    if (KT_WARPS_K > 1) kt_join_warps(acc, group, owner, kt_shared);
    const kt_out out = {c, KT_EPILOGUE_OPERANDS, batch * (u64)C_ELEMENTS, m + warp_m * WARP_M, n + warp_n * WARP_N};
    if (SPLIT_BY_KERNEL) {
        if (group == 0) kt_store_direct<PAIR, true>(acc, out, lane, workspace, split);
        return;
    }
    if constexpr (SPLIT_IN_KERNEL) {
        const u32 tile = batch * BLOCKS + blockIdx.x % BLOCKS;
        if (!kt_join_splits<ACCS, OWNERS, Splits>(acc, workspace, tile, split, group == 0 ? owner : OWNERS)) return;
    }
    if (KT_STORE == KT_STORE_STAGED) __syncthreads(); // the last use of the ring
    if (group != 0) return;
    if (KT_STORE == KT_STORE_DIRECT) kt_store_direct<PAIR, false>(acc, out, lane, workspace, split);
    if (KT_STORE == KT_STORE_WIDE) kt_store_wide(acc, out, lane);
    if (KT_STORE == KT_STORE_STAGED) kt_store_staged(acc, out, lane, (kt_acc *)kt_shared + warp % WARPS_MN * 16 * SLAB_STRIDE);
}

#define KT_HAS_REPACK (KT_REPACK_A || KT_REPACK_B)
#if KT_HAS_REPACK
constexpr u64 VECTORS_A = KT_REPACK_A ? RepackedA::VECTORS : 0, VECTORS = VECTORS_A + (KT_REPACK_B ? RepackedB::VECTORS : 0);
constexpr u64 REPACK_BLOCKS = kt_ceil_div<u64>(VECTORS, REPACK_THREADS);
static_assert(REPACK_BLOCKS < 1ull << 31, "grid");

extern "C" __global__ void __launch_bounds__(REPACK_THREADS) kt_repack(KT_PARAMETERS) {
    (void)c;
    const u64 vector = (u64)blockIdx.x * REPACK_THREADS + threadIdx.x;
    if (vector >= VECTORS) return;
    if (KT_REPACK_A && (!KT_REPACK_B || vector < VECTORS_A)) RepackedA::copy_vector(workspace + REPACKED_A, a, vector);
    else RepackedB::copy_vector(workspace + REPACKED_B, b, vector - VECTORS_A);
}
#endif

#include "launch.cuh"
