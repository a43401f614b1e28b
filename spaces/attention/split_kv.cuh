// Attention of few queries by sm_80 and later: the keys are dealt out, and K and V pass through once at memory's speed.
//
// The query heads that share a key/value head are rows of one tile. Every warp has its own keys: chunks of KEYS come by
// cp.async into the warp's own ring, so that no warp waits for another until their sums are combined, first those of a CTA's
// warps, then those of its splits.
#include "attention_problem.cuh"

// tile
#ifndef KT_M_TILES
#define KT_M_TILES 1 /* tiles of 16 rows */
#endif
#ifndef KT_KEYS
#define KT_KEYS 16 /* in one chunk */
#endif
// mem
#ifndef KT_STAGES
#define KT_STAGES 4 /* chunks of a warp in shared memory */
#endif
#ifndef KT_HOLD_Q
#define KT_HOLD_Q 1 /* 1: q in registers; 0: in shared memory */
#endif
#ifndef KT_WARM
#define KT_WARM 0 /* 1: the first chunks are brought into L2 before the kernel may read them */
#endif
// perm
#ifndef KT_SPLITS_TOGETHER
#define KT_SPLITS_TOGETHER 1 /* 1: splits of one head run side by side; 0: the same split of all heads does */
#endif
// fusion
#ifndef KT_SPLITS
#define KT_SPLITS 1 /* CTAs that share the keys of one tile of rows */
#endif
// map
#ifndef KT_WARPS
#define KT_WARPS 4
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif

// ---- shape of the work

constexpr int M_TILES = KT_M_TILES, BM = 16 * M_TILES, KEYS = KT_KEYS, STAGES = KT_STAGES, SPLITS = KT_SPLITS;
constexpr int WARPS = KT_WARPS, THREADS = 32 * WARPS;
constexpr int PACKED = KT_S * KT_GROUP, ROWS = kt_min(BM, PACKED); // row r is query r / GROUP of head r % GROUP of the group
constexpr u32 ROW_TILES = kt_ceil_div(PACKED, BM), TILES = ROW_TILES * KT_KV_HEADS * KT_B;
constexpr u64 BLOCKS = (u64)TILES * SPLITS;
constexpr bool CUT = KT_KV_LEN % KEYS != 0 || KT_WINDOW % KEYS != 0; // the last chunk
constexpr bool ANY_MASK = CUT || ((KT_CAUSAL || KT_WINDOW > 0) && KT_S > 1), CHECK_KEYS = CUT || KT_S > 1;
static_assert(KEYS % 16 == 0 && STAGES >= 2, "chunks");

struct kt_tile_place {
    u32 rows, kv_head, batch; // first packed row
    KT_DEVICE kt_tile_place(u32 tile)
        : rows(tile % ROW_TILES * BM), kv_head(tile / ROW_TILES % KT_KV_HEADS), batch(tile / (ROW_TILES * KT_KV_HEADS)) {}
};
struct kt_place_of_row {
    bool exists;
    i64 q, o, lse;
    KT_DEVICE kt_place_of_row(u32 tile, int row) {
        const kt_tile_place at(tile);
        const u32 packed = at.rows + row, query = packed / KT_GROUP, head = at.kv_head * KT_GROUP + packed % KT_GROUP;
        exists = packed < PACKED;
        q = at.batch * (i64)KT_Q_BATCH_STRIDE + head * (i64)KT_Q_HEAD_STRIDE + query * (i64)KT_Q_ROW_STRIDE;
        o = at.batch * (i64)KT_O_BATCH_STRIDE + head * (i64)KT_O_HEAD_STRIDE + query * (i64)KT_O_ROW_STRIDE;
        lse = ((i64)at.batch * KT_H + head) * KT_S + query;
    }
};

#include "attention_combine.cuh"
#include "attention_copy.cuh"
#include "attention_rows.cuh"

using LayoutQ = kt_dim_layout<BM>;
using LayoutK = kt_dim_layout<KEYS>;
using LayoutV = kt_out_dim_layout<KEYS>;
using Rows = kt_rows<LayoutQ, LayoutK, LayoutV, kt_row_mask<M_TILES>, KT_HOLD_Q>;

// ---- memory: q, then a ring for each warp, which the sums of the warps replace

constexpr int CHUNK_BYTES = LayoutK::BYTES + LayoutV::BYTES, WARP_BYTES = STAGES * CHUNK_BYTES;
constexpr int SUMS_BYTES = WARPS * ROWS * SUM_STRIDE * 4, WARP_ROWS_BYTES = WARPS * ROWS * 8;
constexpr int SHARES_BYTES = COMBINE_LAST ? SPLITS * ROWS * 4 : 0;
static_assert(BLOCKS < 1ull << 31, "grid");
constexpr int SHARED_BYTES = kt_max(LayoutQ::BYTES + WARPS * WARP_BYTES, kt_max(SUMS_BYTES + WARP_ROWS_BYTES, SHARES_BYTES));
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory, as the Python side computed it");
static_assert(WORKSPACE_BYTES == KT_EXPECT_WORKSPACE_BYTES && ZEROED_BYTES == KT_EXPECT_ZEROED_BYTES, "workspace");
#endif

// ---- copies

KT_DEVICE void kt_copy_queries(u32 to, const kt_element *q, u32 tile) {
    constexpr int PER_ROW = DIM * ELEMENT_BYTES / DIM_WIDTH;
    for (int piece = threadIdx.x; piece < BM * PER_ROW; piece += THREADS) {
        const int row = piece / PER_ROW, column = piece % PER_ROW * DIM_WIDTH;
        const kt_place_of_row place(tile, row);
        const bool inside = place.exists && column < DIM_BYTES;
        const u8 *from = (const u8 *)(q + (inside ? place.q : 0)) + (inside ? column : 0);
        kt_copy_async<DIM_WIDTH, 0>(to + LayoutQ::offset(row, column), from, inside ? DIM_WIDTH : 0);
    }
}

using CopyK = kt_dim_copy<LayoutK, KEYS, KT_K_ROW_STRIDE, 32, CHECK_KEYS>;
using CopyV = kt_out_dim_copy<LayoutV, KEYS, KT_V_ROW_STRIDE, 32, CHECK_KEYS>;

// The chunks of one warp; chunk 0 begins at `first_key`.
struct kt_chunks {
    const kt_element *k, *v; // of key 0
    int first_key, end;      // end: of this CTA's chunks
    u32 ring;

    KT_DEVICE int key(int chunk) const { return first_key + chunk * KEYS; }
    KT_DEVICE void load(int chunk, u32 slot, u32 lane) const {
        if (chunk < end) {
            CopyK(k + key(chunk) * (i64)KT_K_ROW_STRIDE, lane).copy<true>(ring + slot, KT_KV_LEN - key(chunk));
            CopyV(v + key(chunk) * (i64)KT_V_ROW_STRIDE, lane).copy<true>(ring + slot + LayoutK::BYTES, KT_KV_LEN - key(chunk));
        }
        kt_copy_commit();
    }
    // Brings a chunk into L2, which is coherent with whatever still writes it.
    KT_DEVICE void warm(int chunk, u32 lane) const {
        constexpr int LINE = 128 / ELEMENT_BYTES, K_LINES = kt_ceil_div(KT_D, LINE), V_LINES = kt_ceil_div(KT_VALUE_DIM, LINE);
        if (chunk >= end) return;
        for (int i = lane; i < KEYS * (K_LINES + V_LINES); i += 32) {
            const int row = key(chunk) + i % KEYS, line = i / KEYS;
            if (row >= KT_KV_LEN) continue;
            if (line < K_LINES) kt_prefetch_l2(k + row * (i64)KT_K_ROW_STRIDE + line * LINE);
            else kt_prefetch_l2(v + row * (i64)KT_V_ROW_STRIDE + (line - K_LINES) * LINE);
        }
    }
};

// ---- kernel

extern __shared__ __align__(128) u8 kt_shared[];

template <bool MASKED> KT_DEVICE void kt_step(Rows &rows, u32 stage, int key) {
    Logits s;
    rows.logits(s, stage);
    rows.template advance<MASKED>(s, key);
    rows.add_values(s, stage + LayoutK::BYTES);
}

// The warp's sums and rows, where the other warps find them.
KT_DEVICE void kt_put_sums(const Rows &rows, float *sums, kt_row_sum *row_sums, u32 lane) {
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * i + 8 * h + lane / 4;
            if (row >= ROWS) continue;
            if (lane % 4 == 0) row_sums[row] = {rows.softmax.top[i][h], rows.softmax.sum[i][h]};
#pragma unroll
            for (int j = 0; j < OUT_TILES; j++)
                kt_store_words(sums + row * SUM_STRIDE + 8 * j + lane % 4 * 2,
                               kt_words<2>{{__float_as_uint(rows.o[i][j][2 * h]), __float_as_uint(rows.o[i][j][2 * h + 1])}});
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, shared = kt_shared_address(kt_shared);
    const u32 tile = KT_SPLITS_TOGETHER ? blockIdx.x / SPLITS : blockIdx.x % TILES;
    const u32 split = KT_SPLITS_TOGETHER ? blockIdx.x % SPLITS : blockIdx.x / TILES;
    const kt_tile_place at(tile);
    const int first_query = at.rows / KT_GROUP, last_query = (kt_min(at.rows + BM, (u32)PACKED) - 1) / KT_GROUP;
    const int first_key = kt_first_key(first_query), end_key = kt_end_key(last_query);
    const int all = kt_max(0, kt_ceil_div(end_key - first_key, KEYS));
    const int begin = kt_split(all, SPLITS, split), end = kt_split(all, SPLITS, split + 1);
    const kt_chunks chunks = {k + at.batch * (i64)KT_K_BATCH_STRIDE + at.kv_head * (i64)KT_K_HEAD_STRIDE,
                              v + at.batch * (i64)KT_V_BATCH_STRIDE + at.kv_head * (i64)KT_V_HEAD_STRIDE, first_key, end,
                              shared + LayoutQ::BYTES + warp * WARP_BYTES};
    if (KT_WARM)
        for (int s = 0; s < STAGES - 1; s++) chunks.warm(begin + warp + s * WARPS, lane);
    kt_await_previous();
    kt_release_next();

    kt_copy_queries(shared, q, tile);
    kt_copy_commit();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) chunks.load(begin + warp + s * WARPS, s * CHUNK_BYTES, lane);
    Rows rows(lane, 0, shared, {lane, [&](int r) { return (int)(at.rows + r) / KT_GROUP; }});
    const int clean = kt_first_key(last_query), clean_end = kt_end_key(first_query);
    kt_copy_wait<STAGES - 1>();
    __syncthreads(); // q
    rows.hold_queries();

    u32 read = 0, write = (STAGES - 1) * CHUNK_BYTES;
#pragma unroll 1
    for (int chunk = begin + warp; chunk < end; chunk += WARPS) {
        kt_copy_wait<STAGES - 2>();
        __syncwarp(); // and all lanes are done with the chunk before
        chunks.load(chunk + (STAGES - 1) * WARPS, write, lane);
        const int key = chunks.key(chunk);
        if (ANY_MASK && (key + KEYS > clean_end || key < clean)) kt_step<true>(rows, chunks.ring + read, key);
        else kt_step<false>(rows, chunks.ring + read, key);
        read = read == (STAGES - 1) * CHUNK_BYTES ? 0 : read + CHUNK_BYTES;
        write = write == (STAGES - 1) * CHUNK_BYTES ? 0 : write + CHUNK_BYTES;
    }

    kt_copy_wait<0>();
    rows.softmax.finish();
    __syncthreads(); // the rings make room for the sums
    float *sums = (float *)kt_shared;
    kt_row_sum *row_sums = (kt_row_sum *)(kt_shared + SUMS_BYTES);
    kt_put_sums(rows, sums + warp * ROWS * SUM_STRIDE, row_sums + warp * ROWS, lane);
    __syncthreads();
    kt_combine_warps<WARPS, THREADS>(sums, row_sums, tile, split, o, KT_LSE_OPERAND, workspace);
    if constexpr (COMBINE_LAST) {
        if (!kt_is_last(tile, workspace)) return;
        kt_combine_splits<THREADS>((float *)kt_shared, tile, o, KT_LSE_OPERAND, workspace);
    }
}

#define KT_HAS_COMBINE (KT_SPLITS > 1 && KT_COMBINE == KT_COMBINE_KERNEL)
#if KT_HAS_COMBINE
constexpr u32 COMBINE_BLOCKS = TILES, COMBINE_THREADS = 128, COMBINE_SHARED_BYTES = SPLITS * ROWS * 4;
static_assert(COMBINE_BLOCKS < 1u << 31 && COMBINE_SHARED_BYTES <= 48 * 1024, "grid and shared memory of kt_combine");

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) kt_combine(KT_PARAMETERS) {
    (void)q, (void)k, (void)v;
    kt_await_previous();
    kt_release_next();
    kt_combine_splits<COMBINE_THREADS>((float *)kt_shared, blockIdx.x, o, KT_LSE_OPERAND, workspace);
}
#endif

#include "attention_launch.cuh"
