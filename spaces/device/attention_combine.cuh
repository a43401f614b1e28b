// Attention over parts of the keys: every part's sums, relative to its own maximum, become one.
//
//   KT_COMBINE_LAST    the last CTA of a tile to arrive combines its splits
//   KT_COMBINE_KERNEL  the kernel kt_combine does, one CTA a tile
//
// A kernel file has defined ROWS (of one tile), TILES (over all heads and batch entries), SPLITS, and `kt_place_of_row`.
#ifndef KT_ATTENTION_COMBINE_CUH
#define KT_ATTENTION_COMBINE_CUH

#include "attention_product.cuh"
#include "attention_softmax.cuh"

#define KT_COMBINE_LAST 0
#define KT_COMBINE_KERNEL 1
#ifndef KT_COMBINE
#define KT_COMBINE KT_COMBINE_LAST
#endif

constexpr bool SPLIT = SPLITS > 1, COMBINE_LAST = SPLIT && KT_COMBINE == KT_COMBINE_LAST;
constexpr int GROUPS = ROWS * (OUT_DIM / 4); // of four neighbours of o, which one thread makes
constexpr int SUM_STRIDE = OUT_DIM + 4;      // floats; rows begin in different banks

// ---- workspace: counters of arrived splits, then sums [TILES][SPLITS][ROWS][OUT_DIM], then (maximum, sum, -, -) of rows

constexpr u64 COUNTER_BYTES = COMBINE_LAST ? kt_round_up<u64>((u64)TILES * 4, 256) : 0;
constexpr u64 PART_ROWS = SPLIT ? (u64)TILES * SPLITS * ROWS : 0, ROWS_AT = COUNTER_BYTES + PART_ROWS * OUT_DIM * 4;
constexpr u64 WORKSPACE_BYTES = kt_round_up<u64>(ROWS_AT + PART_ROWS * 16, 256), ZEROED_BYTES = COUNTER_BYTES;

// What is known of one row over some of the keys: exponentials are relative to `top`, and `sum` is theirs.
struct kt_row_sum {
    float top, sum;
};

KT_DEVICE kt_words<4> kt_float_words(const float (&x)[4]) {
    kt_words<4> y;
#pragma unroll
    for (int i = 0; i < 4; i++) y.w[i] = __float_as_uint(x[i]);
    return y;
}

// What sums relative to one maximum are multiplied by to be relative to a larger one.
KT_DEVICE float kt_share(float top, float whole) { return kt_exp2_fast(top - whole); }

// Four neighbours of o, and with the first of a row its log-sum-exp.
KT_DEVICE void kt_store_group(kt_output *o, float *lse, u32 tile, int row, int column, const float (&x)[4], kt_row_sum all) {
    const kt_place_of_row place(tile, row);
    if (!place.exists) return;
    const float inverse = kt_inverse(all.sum);
    kt_output *to = o + place.o + column;
    const kt_words<2> y = {{kt_pack(x[0] * inverse, x[1] * inverse), kt_pack(x[2] * inverse, x[3] * inverse)}};
    if (KT_VALUE_DIM % 4 == 0) {
        if (OUT_DIM == KT_VALUE_DIM || column < KT_VALUE_DIM) kt_store_words(to, y);
    } else {
        if (column < KT_VALUE_DIM) *(u32 *)to = y.w[0];
        if (column + 2 < KT_VALUE_DIM) *(u32 *)(to + 2) = y.w[1];
    }
    if (KT_LSE && column == 0) lse[place.lse] = kt_log_sum(all.top, all.sum);
}

// The WARPS parts of a CTA, each [ROWS][SUM_STRIDE] sums and their rows, become the tile's o or the split's part.
template <int WARPS, int THREADS>
KT_DEVICE void kt_combine_warps(const float *sums, const kt_row_sum *rows, u32 tile, u32 split, kt_output *o, float *lse,
                                u8 *workspace) {
    const u64 part = ((u64)tile * SPLITS + split) * ROWS;
    for (int group = threadIdx.x; group < GROUPS; group += THREADS) {
        const int row = group / (OUT_DIM / 4), column = group % (OUT_DIM / 4) * 4;
        kt_row_sum all = {NOTHING, 0};
        float x[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++) all.top = fmaxf(all.top, rows[w * ROWS + row].top);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const kt_row_sum own = rows[w * ROWS + row];
            const float share = kt_share(own.top, all.top);
            const kt_words<4> y = kt_load_words<4>(sums + (w * ROWS + row) * SUM_STRIDE + column);
            all.sum += share * own.sum;
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] += share * __uint_as_float(y.w[e]);
        }
        if (SPLIT) {
            kt_store_words((float *)(workspace + COUNTER_BYTES) + (part + row) * OUT_DIM + column, kt_float_words(x));
            if (column == 0) kt_store_words(workspace + ROWS_AT + (part + row) * 16, kt_float_words({all.top, all.sum, 0, 0}));
        } else {
            kt_store_group(o, lse, tile, row, column, x, all);
        }
    }
}

// True in the CTA that arrives last at a tile, which may then read all its parts; the counter is zero again.
KT_DEVICE bool kt_is_last(u32 tile, u8 *workspace) {
    u32 *counter = (u32 *)workspace + tile;
    __syncthreads();
    if (!__syncthreads_or(threadIdx.x == 0 && kt_arrive(counter) == SPLITS - 1)) return false;
    if (threadIdx.x == 0) *counter = 0;
    return true;
}

// The splits of a tile become its o. `shares`: shared memory of SPLITS * ROWS floats.
template <int THREADS> KT_DEVICE void kt_combine_splits(float *shares, u32 tile, kt_output *o, float *lse, const u8 *workspace) {
    const u64 part = (u64)tile * SPLITS * ROWS;
    const u8 *rows = workspace + ROWS_AT + part * 16;
    const float *sums = (const float *)(workspace + COUNTER_BYTES) + part * OUT_DIM;
    for (int i = threadIdx.x; i < SPLITS * ROWS; i += THREADS)
        shares[i] = __uint_as_float(kt_load_shared_by_ctas(rows + i * 16).w[0]);
    __syncthreads();
    for (int group = threadIdx.x; group < GROUPS; group += THREADS) {
        const int row = group / (OUT_DIM / 4), column = group % (OUT_DIM / 4) * 4;
        kt_row_sum all = {NOTHING, 0};
        float x[4] = {};
#pragma unroll 8
        for (int s = 0; s < SPLITS; s++) all.top = fmaxf(all.top, shares[s * ROWS + row]);
#pragma unroll 8
        for (int s = 0; s < SPLITS; s++) {
            const float share = kt_share(shares[s * ROWS + row], all.top);
            const kt_words<4> y = kt_load_shared_by_ctas(sums + (u64)(s * ROWS + row) * OUT_DIM + column);
            all.sum += share * __uint_as_float(kt_load_shared_by_ctas(rows + (s * ROWS + row) * 16).w[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] += share * __uint_as_float(y.w[e]);
        }
        kt_store_group(o, lse, tile, row, column, x, all);
    }
}

#endif
