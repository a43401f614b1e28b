// A warp's product of 16-bit stream and tokens by mma.sync: the stream's rows are the 16 rows of the instruction, the
// tokens its 8 columns.
//
// Which k and which row a lane's bytes stand for is free as long as both operands agree, so the stream goes from global
// memory straight into the instruction's registers without a shuffle: in one step of 32 along k, lane l holds
// k = 8 * (l % 4) + 0..7, of single rows (K-major) or of eight neighbouring rows.
#ifndef KT_THIN_MMA_CUH
#define KT_THIN_MMA_CUH
#if OUTPUT_IS_HALF

#include "thin.cuh"

template <int ROWS> struct kt_engine {
    static constexpr int STEP = 32, WARP_ROWS = (STREAM_K_MAJOR ? 16 : 64) * ROWS, VECTORS = (STREAM_K_MAJOR ? 2 : 8) * ROWS;
    static constexpr int TILES = WARP_ROWS / 16, COLUMNS = kt_ceil_div(TINY, 8);

    float acc[TILES][COLUMNS][4];
    const u8 *tokens[COLUMNS];

    // Where the lane's first vector lies in a step, and the others from there.
    static KT_DEVICE u32 lane_k(u32 lane) { return lane % 4 * 8; }
    static KT_DEVICE u32 lane_row(u32 lane) { return lane / 4 * (STREAM_K_MAJOR ? 1 : 8); }
    static KT_PURE int vector_k(int v) { return STREAM_K_MAJOR ? 0 : v % 8; }
    static KT_PURE int vector_row(int v) { return STREAM_K_MAJOR ? v * 8 : v / 8 * 64; }

    KT_DEVICE void begin(const u8 *shared, int stride, u32 lane) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) // columns past the last token repeat it; nobody reads their sums
            tokens[c] = shared + kt_min<u32>(8 * c + lane / 4, TINY - 1) * stride + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i][c][j] = 0;
    }

    KT_DEVICE void multiply(const kt_words<4> (&x)[VECTORS], int step) {
        kt_words<4> b[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) b[c] = kt_load_words<4>(tokens[c] + step * STEP * ELEMENT_BYTES);
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int q = 0; q < 2; q++) {
                u32 a[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (STREAM_K_MAJOR) a[j] = x[2 * i + j % 2].w[2 * q + j / 2];
                    else { // rows 2 * (i % 4) and the next of the lane's eight
                        const int first = i / 4 * 8 + 4 * q + j / 2 * 2;
                        a[j] = kt_permute_bytes(x[first % VECTORS].w[i % 4], x[(first + 1) % VECTORS].w[i % 4], j % 2 ? 0x7632 : 0x5410);
                    }
                }
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
#if KT_DTYPE == KT_FP16
                    kt_mma_half(acc[i][c], a, b[c].w[2 * q], b[c].w[2 * q + 1]);
#else
                    kt_mma_bfloat(acc[i][c], a, b[c].w[2 * q], b[c].w[2 * q + 1]);
#endif
                }
            }
    }

    // Sums of token t and the warp's row r go to `to[t * block + r]`.
    KT_DEVICE void put(float *to, int block, u32 lane) const {
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 token = 8 * c + lane % 4 * 2 + j % 2;
                    const u32 row = STREAM_K_MAJOR ? 16 * i + lane / 4 + j / 2 * 8 : i / 4 * 64 + lane / 4 * 8 + 2 * (i % 4) + j / 2;
                    if (token < TINY) to[token * block + row] = acc[i][c][j];
                }
    }
};

#endif
#endif
