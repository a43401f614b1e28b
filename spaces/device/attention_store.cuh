// From the accumulators of one warp to o and the log-sum-exp.
#ifndef KT_ATTENTION_STORE_CUH
#define KT_ATTENTION_STORE_CUH

#include "attention_product.cuh"
#include "attention_softmax.cuh"

#define KT_STORE_DIRECT 0 /* pairs of columns, as the accumulators lie */
#define KT_STORE_STAGED 1 /* 16 bytes, through shared memory */
#ifndef KT_STORE
#define KT_STORE KT_STORE_STAGED
#endif
static_assert(KT_STORE == KT_STORE_DIRECT || OUT_DIM_WIDTH == 16, "16-byte stores");

// One chunk more than the row makes rows begin in different banks.
constexpr int SLAB_STRIDE = OUT_DIM * OUTPUT_BYTES + 16;

// Divides by the rows' sums, which are complete.
template <int M_TILES> KT_DEVICE void kt_normalize(float (&o)[M_TILES][OUT_TILES][4], const kt_softmax<M_TILES> &softmax) {
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float inverse = kt_inverse(softmax.sum[i][h]);
#pragma unroll
            for (int j = 0; j < OUT_TILES; j++) o[i][j][2 * h] *= inverse, o[i][j][2 * h + 1] *= inverse;
        }
}

// `rows` of the warp's rows exist; `to` is the first one's place.
template <int M_TILES>
KT_DEVICE void kt_store_direct(const float (&o)[M_TILES][OUT_TILES][4], kt_output *to, int rows, u32 lane) {
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * i + 8 * h + lane / 4;
            if (row >= rows) continue;
#pragma unroll
            for (int j = 0; j < OUT_TILES; j++) {
                const int column = 8 * j + lane % 4 * 2;
                if (OUT_DIM != KT_VALUE_DIM && column >= KT_VALUE_DIM) continue;
                *(u32 *)(to + row * (i64)KT_O_ROW_STRIDE + column) = kt_pack(o[i][j][2 * h], o[i][j][2 * h + 1]);
            }
        }
}

// `slab`: shared memory of the warp, 16 * M_TILES rows.
template <int M_TILES>
KT_DEVICE void kt_store_staged(const float (&o)[M_TILES][OUT_TILES][4], kt_output *to, int rows, u32 lane, u8 *slab) {
    constexpr int PER_ROW = OUT_DIM * OUTPUT_BYTES / 16, CHUNKS = 16 * M_TILES * PER_ROW;
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < OUT_TILES; j++)
                *(u32 *)(slab + (16 * i + 8 * h + lane / 4) * SLAB_STRIDE + j * 16 + lane % 4 * 4) =
                    kt_pack(o[i][j][2 * h], o[i][j][2 * h + 1]);
    __syncwarp();
#pragma unroll 4
    for (int first = 0; first < CHUNKS; first += 32) {
        const int chunk = first + lane, row = chunk / PER_ROW, column = chunk % PER_ROW * 16;
        if ((CHUNKS % 32 && chunk >= CHUNKS) || row >= rows) continue;
        kt_store_words((u8 *)(to + row * (i64)KT_O_ROW_STRIDE) + column, kt_load_words<4>(slab + row * SLAB_STRIDE + column));
    }
}

// The log-sum-exp of the warp's rows; their sums are complete.
template <int M_TILES> KT_DEVICE void kt_store_log_sum(float *to, const kt_softmax<M_TILES> &softmax, int rows, u32 lane) {
    if (lane % 4) return;
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * i + 8 * h + lane / 4;
            if (row < rows) to[row] = kt_log_sum(softmax.top[i][h], softmax.sum[i][h]);
        }
}

#endif
