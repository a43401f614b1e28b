// A warp's product of an fp32 stream and tokens by multiply-adds. K-major: lanes share rows, four values of k each, and add
// up at the end. Otherwise lanes have four neighbouring rows each, and all read the same token values.
#ifndef KT_THIN_FMA_CUH
#define KT_THIN_FMA_CUH
#if !OUTPUT_IS_HALF

#include "thin.cuh"

template <int ROWS> struct kt_engine {
    static constexpr int STEP = STREAM_K_MAJOR ? 128 : 4, WARP_ROWS = (STREAM_K_MAJOR ? 1 : 128) * ROWS, VECTORS = (STREAM_K_MAJOR ? 1 : 4) * ROWS;
    static constexpr int OWN_ROWS = STREAM_K_MAJOR ? ROWS : 4 * ROWS;

    float acc[OWN_ROWS][TINY];
    const u8 *tokens;
    int stride;

    // Where the lane's first vector lies in a step, and the others from there.
    static KT_DEVICE u32 lane_k(u32 lane) { return STREAM_K_MAJOR ? lane * 4 : 0; }
    static KT_DEVICE u32 lane_row(u32 lane) { return STREAM_K_MAJOR ? 0 : lane * 4; }
    static KT_PURE int vector_k(int v) { return STREAM_K_MAJOR ? 0 : v % 4; }
    static KT_PURE int vector_row(int v) { return STREAM_K_MAJOR ? v : v / 4 * 128; }

    KT_DEVICE void begin(const u8 *shared, int token_stride, u32 lane) {
        tokens = shared + lane_k(lane) * 4, stride = token_stride;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; i++)
#pragma unroll
            for (int t = 0; t < TINY; t++) acc[i][t] = 0;
    }

    KT_DEVICE void multiply(const kt_words<4> (&x)[VECTORS], int step) {
#pragma unroll
        for (int t = 0; t < TINY; t++) {
            const kt_words<4> y = kt_load_words<4>(tokens + t * stride + step * STEP * 4);
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (STREAM_K_MAJOR) acc[v][t] += __uint_as_float(x[v].w[j]) * __uint_as_float(y.w[j]);
                    else acc[v / 4 * 4 + j][t] += __uint_as_float(x[v].w[j]) * __uint_as_float(y.w[v % 4]);
                }
        }
    }

    // Sums of token t and the warp's row r go to `to[t * block + r]`.
    KT_DEVICE void put(float *to, int block, u32 lane) const {
#pragma unroll
        for (int i = 0; i < OWN_ROWS; i++)
#pragma unroll
            for (int t = 0; t < TINY; t++) {
                float sum = acc[i][t];
                if (STREAM_K_MAJOR)
#pragma unroll
                    for (int other = 16; other >= 1; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
                const u32 row = STREAM_K_MAJOR ? i : i / 4 * 128 + lane * 4 + i % 4;
                if (!STREAM_K_MAJOR || lane == 0) to[t * block + row] = sum;
            }
    }
};

#endif
#endif
