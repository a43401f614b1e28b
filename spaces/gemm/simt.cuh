// Matrix product in fp32 or fp64 by the ordinary multiply-add units: cp.async into a ring of stages, register tiles.
//
// Both operands lie in shared memory with k outside, so that a thread reads its TM x TN tile's rows and columns in
// 16-byte vectors; an operand that is K-major in memory is transposed on the way. Any extents and alignments.
#include "problem.cuh"
#include "tile.cuh"
#include "transpose.cuh"
#include "epilogue.cuh"
#include "raster.cuh"
#include "split_k.cuh"

// tile
#ifndef KT_TM
#define KT_TM 8 /* of a thread */
#endif
#ifndef KT_TN
#define KT_TN 8
#endif
#ifndef KT_BK
#define KT_BK 8
#endif
// mem
#ifndef KT_STAGES
#define KT_STAGES 3
#endif
// unroll
#ifndef KT_FRAGMENT_STAGES
#define KT_FRAGMENT_STAGES 2 /* 2: the next step's vectors are loaded during this step's product */
#endif
// map
#ifndef KT_LANES_M
#define KT_LANES_M 4 /* lanes of a warp along m; 32 / KT_LANES_M along n */
#endif
#ifndef KT_WARPS_M
#define KT_WARPS_M 4
#endif
#ifndef KT_WARPS_N
#define KT_WARPS_N 2
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif
// sync
#ifndef KT_SPREAD
#define KT_SPREAD 1 /* groups of a tile's copies, started in different steps of the product */
#endif

// ---- shape of the work

constexpr int TM = KT_TM, TN = KT_TN, BK = KT_BK, STAGES = KT_STAGES, LANES_M = KT_LANES_M, LANES_N = 32 / LANES_M;
constexpr int VECTOR = 16 / ELEMENT_BYTES, ACCS = TM * TN;
constexpr int WARP_M = LANES_M * TM, WARP_N = LANES_N * TN, BM = KT_WARPS_M * WARP_M, BN = KT_WARPS_N * WARP_N;
constexpr int THREADS = 32 * KT_WARPS_M * KT_WARPS_N;
static_assert(KT_DTYPE == KT_FP32 || KT_DTYPE == KT_FP64, "a type of the multiply-add units");
static_assert(TM % VECTOR == 0 && TN % VECTOR == 0 && BK % 8 == 0 && STAGES >= 2, "tiles");
static_assert(KT_SPREAD == 1 || KT_SPREAD == 2 || KT_SPREAD == 4, "groups of copies");

constexpr u32 M_BLOCKS = kt_ceil_div(KT_M, BM), N_BLOCKS = kt_ceil_div(KT_N, BN), K_TILES = kt_ceil_div(KT_K, BK);
constexpr u32 BLOCKS = M_BLOCKS * N_BLOCKS;
constexpr int FIRST_DEPTH = KT_K - (K_TILES - 1) * BK; // what BK leaves of K is the first tile of k
static_assert(KT_SPLIT_K <= K_TILES, "every split has a tile of k");

// ---- memory

template <int ROWS, bool K_MAJOR> using Layout = kt_tile_layout<BK, ROWS * ELEMENT_BYTES, false, K_MAJOR ? 16 : 0>;
using LayoutA = Layout<BM, A_K_MAJOR>;
using LayoutB = Layout<BN, B_K_MAJOR>;
constexpr int STAGE_BYTES = LayoutA::BYTES + LayoutB::BYTES, SHARED_BYTES = STAGES * STAGE_BYTES;

using Splits = kt_split_workspace<(u64)BLOCKS * KT_BATCH, (u64)BM * BN>;
constexpr u64 WORKSPACE_BYTES = Splits::BYTES;

#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
static_assert(WORKSPACE_BYTES == KT_EXPECT_WORKSPACE_BYTES && Splits::ZEROED == KT_EXPECT_ZEROED_BYTES, "workspace");
#endif

// One operand's tiles, with the same calls whether k is inside or outside in memory. The tiles of a CTA lie inside the
// operand along its rows, unless the operand is smaller than a tile, and along k except for the first (`FIRST_DEPTH`), so
// that the main loop copies without checks.
template <int ROWS, int EXTENT, i64 LD, bool K_MAJOR> struct kt_operand_copy {
    static constexpr bool CHECK_ROWS = EXTENT < ROWS, CHECK_K = FIRST_DEPTH < BK;
    static constexpr int WIDTH = kt_alignment(LD * ELEMENT_BYTES, 16);
    using Straight = kt_tile_copy<Layout<ROWS, K_MAJOR>, BK, ROWS * ELEMENT_BYTES, LD * ELEMENT_BYTES, WIDTH, THREADS, CHECK_K, CHECK_ROWS, 128>;
    using Transposing = kt_transposing_copy<ROWS, BK, Layout<ROWS, K_MAJOR>::STRIDE, LD * ELEMENT_BYTES, THREADS, CHECK_ROWS, CHECK_K, 128>;
    template <bool, class T, class> struct choose { using type = T; };
    template <class T, class F> struct choose<false, T, F> { using type = F; };

    using Copier = typename choose<K_MAJOR, Transposing, Straight>::type;
    static constexpr int COUNT = Copier::COUNT; // pieces that a thread copies

    Copier copier;
    int rows_left;

    KT_DEVICE kt_operand_copy(const kt_element *matrix, u32 row, i64 k)
        : copier(make(matrix + (K_MAJOR ? row * LD + k : k * LD + row))), rows_left(kt_min(EXTENT - (int)row, ROWS)) {}
    static KT_DEVICE auto make(const kt_element *tile) {
        if constexpr (K_MAJOR) return Transposing(tile);
        else return Straight(tile, nullptr);
    }
    // One piece of the next tile, of which `depth` elements along k are read, none unless `wanted`.
    KT_DEVICE void copy_piece(int i, u32 to, int depth, bool wanted) const {
        const int k_left = depth == BK ? 1 << 30 : depth; // BK as a constant: no checks along k
        if constexpr (K_MAJOR) copier.copy_piece(i, to, rows_left, k_left, wanted);
        else copier.copy_piece(i, to, k_left, rows_left * ELEMENT_BYTES, wanted);
    }
    KT_DEVICE void advance(int depth) {
        if constexpr (K_MAJOR) copier.advance(depth * ELEMENT_BYTES);
        else copier.advance(depth * (LD * ELEMENT_BYTES));
    }
};
using CopyA = kt_operand_copy<BM, KT_M, A_LD, A_K_MAJOR>;
using CopyB = kt_operand_copy<BN, KT_N, B_LD, B_K_MAJOR>;

// A tile of both operands, copied in `groups`; the last group moves on to the next tile.
KT_DEVICE void kt_copy_group(CopyA &a, CopyB &b, u32 to, int group, int groups, int depth, bool wanted) {
    constexpr int COUNT = CopyA::COUNT + CopyB::COUNT;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (i * groups / COUNT != group) continue;
        if (i < CopyA::COUNT) a.copy_piece(i, to, depth, wanted);
        else b.copy_piece(i - CopyA::COUNT, to + LayoutA::BYTES, depth, wanted);
    }
    if (group < groups - 1) return;
    a.advance(depth);
    b.advance(depth);
    kt_copy_commit();
}

// ---- the product

// A thread's COUNT values at one k: vectors that lie LANES vectors apart.
template <int COUNT, int LANES> KT_DEVICE void kt_load_fragment(kt_element (&x)[COUNT], const u8 *from) {
#pragma unroll
    for (int i = 0; i < COUNT / VECTOR; i++) {
        const kt_words<4> w = kt_load_words<4>(from + i * LANES * 16);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
#if KT_DTYPE == KT_FP64
            x[i * VECTOR + j] = __longlong_as_double((i64)((u64)w.w[2 * j + 1] << 32 | w.w[2 * j]));
#else
            x[i * VECTOR + j] = __uint_as_float(w.w[j]);
#endif
        }
    }
}

KT_DEVICE void kt_multiply_fragments(kt_acc (&acc)[ACCS], const kt_element (&a)[TM], const kt_element (&b)[TN]) {
    // Columns of the thread's tile, there and back: values at the turn are used twice, which keeps more operands in the
    // reuse caches than the compiler finds by itself.
#pragma unroll
    for (int j = 0; j < TN; j++)
#pragma unroll
        for (int n = 0; n < TM; n++) {
            const int i = j % 2 ? TM - 1 - n : n;
            acc[i * TN + j] += a[i] * b[j];
        }
}

KT_DEVICE u32 kt_next_stage(u32 offset) { return offset == (STAGES - 1) * STAGE_BYTES ? 0 : offset + STAGE_BYTES; }

// All tiles of k of a CTA. A stage is refilled only after the barrier that follows its last use.
KT_DEVICE void kt_multiply(kt_acc (&acc)[ACCS], CopyA &copy_a, CopyB &copy_b, const u8 *shared_a, const u8 *shared_b, u32 ring,
                           int tiles, int first_depth) {
    constexpr bool DOUBLE = KT_FRAGMENT_STAGES == 2;
    constexpr int GROUP_STEPS = BK / KT_SPREAD;
    kt_element a[KT_FRAGMENT_STAGES][TM], b[KT_FRAGMENT_STAGES][TN];
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
        kt_copy_group(copy_a, copy_b, ring + s * STAGE_BYTES, 0, 1, s == 0 ? first_depth : BK, s < tiles);
    }
    u32 read = 0, write = (STAGES - 1) * STAGE_BYTES;
    if (DOUBLE) {
        kt_copy_wait<STAGES - 2>();
        __syncthreads();
        kt_load_fragment<TM, LANES_M>(a[0], shared_a);
        kt_load_fragment<TN, LANES_N>(b[0], shared_b);
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        if (!DOUBLE) {
            kt_copy_wait<STAGES - 2>();
            __syncthreads();
        }
        const bool more = tile + STAGES - 1 < tiles;
#pragma unroll
        for (int k = 0; k < BK; k++) {
            if (k % GROUP_STEPS == 0) kt_copy_group(copy_a, copy_b, ring + write, k / GROUP_STEPS, KT_SPREAD, BK, more);
            if (DOUBLE) {
                if (k == BK - 1) {
                    read = kt_next_stage(read);
                    kt_copy_wait<STAGES - 2>();
                    __syncthreads();
                }
                const int next = (k + 1) % BK;
                kt_load_fragment<TM, LANES_M>(a[(k + 1) % 2], shared_a + read + next * LayoutA::STRIDE);
                kt_load_fragment<TN, LANES_N>(b[(k + 1) % 2], shared_b + read + next * LayoutB::STRIDE);
                kt_multiply_fragments(acc, a[k % 2], b[k % 2]);
            } else {
                kt_load_fragment<TM, LANES_M>(a[0], shared_a + read + k * LayoutA::STRIDE);
                kt_load_fragment<TN, LANES_N>(b[0], shared_b + read + k * LayoutB::STRIDE);
                kt_multiply_fragments(acc, a[0], b[0]);
            }
        }
        if (!DOUBLE) read = kt_next_stage(read);
        write = kt_next_stage(write);
    }
    kt_copy_wait<0>();
}

// ---- kernels

extern __shared__ __align__(128) u8 kt_shared[];

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    kt_release_next();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp / KT_WARPS_N, warp_n = warp % KT_WARPS_N;
    const u32 part = blockIdx.x / BLOCKS, batch = part / KT_SPLIT_K, split = part % KT_SPLIT_K;
    const kt_place place = kt_place_of(blockIdx.x % BLOCKS, M_BLOCKS, N_BLOCKS);
    // The last tile of a row or column of tiles is moved back inside C; it stores only what no other tile does.
    const u32 own_m = place.m * BM, own_n = place.n * BN;
    const u32 m = kt_min<u32>(own_m, KT_M < BM ? 0 : KT_M - BM), n = kt_min<u32>(own_n, KT_N < BN ? 0 : KT_N - BN);
    const u32 first = kt_split(K_TILES, KT_SPLIT_K, split), tiles = kt_split(K_TILES, KT_SPLIT_K, split + 1) - first;
    const i64 k = first == 0 ? 0 : (i64)first * BK - (BK - FIRST_DEPTH);

    // The thread's first row and column in the tile; its vectors lie LANES_M (LANES_N) vectors apart. Lanes l and l ^ 1
    // read the same rows, l and l ^ 2 the same columns: vectors so shared take half the cycles of shared memory.
    const u32 lane_m = lane / 4 / (LANES_N / 2) * 2 + lane / 2 % 2, lane_n = lane / 4 % (LANES_N / 2) * 2 + lane % 2;
    const u32 row = warp_m * WARP_M + lane_m * VECTOR, column = warp_n * WARP_N + lane_n * VECTOR;
    CopyA copy_a(a + batch * ((i64)KT_M * KT_K), m, k);
    CopyB copy_b(b + batch * ((i64)KT_K * KT_N), n, k);
    kt_acc acc[ACCS];
#pragma unroll
    for (int i = 0; i < ACCS; i++) acc[i] = 0;
    kt_await_previous();
    kt_multiply(acc, copy_a, copy_b, kt_shared + row * ELEMENT_BYTES, kt_shared + LayoutA::BYTES + column * ELEMENT_BYTES,
                kt_shared_address(kt_shared), (int)tiles, first == 0 ? FIRST_DEPTH : BK);

    const kt_epilogue e = KT_EPILOGUE_OPERANDS;
    if constexpr (SPLIT_IN_KERNEL)
        if (!kt_join_splits<ACCS, THREADS, Splits>(acc, workspace, batch * BLOCKS + blockIdx.x % BLOCKS, split, threadIdx.x)) return;
#pragma unroll
    for (int j = 0; j < TN; j += C_GROUP) {
        const u32 at_column = n + column + j / VECTOR * LANES_N * VECTOR + j % VECTOR;
        if (KT_N % BN && (at_column >= KT_N || at_column < own_n)) continue;
        const kt_columns<C_GROUP> columns = kt_load_columns<C_GROUP>(e, at_column, true);
#pragma unroll
        for (int i = 0; i < TM; i++) {
            const u32 at_row = m + row + i / VECTOR * LANES_M * VECTOR + i % VECTOR;
            if (KT_M % BM && (at_row >= KT_M || at_row < own_m)) continue;
            const u64 index = batch * (u64)C_ELEMENTS + (u64)at_row * KT_N + at_column;
            kt_acc sum[C_GROUP];
#pragma unroll
            for (int g = 0; g < C_GROUP; g++) sum[g] = acc[i * TN + j + g];
            if (SPLIT_BY_KERNEL) kt_store_partial<C_GROUP>(workspace, split, index, sum);
            else kt_finish_and_store<C_GROUP>(c, index, sum, columns, e);
        }
    }
}

#include "launch.cuh"
