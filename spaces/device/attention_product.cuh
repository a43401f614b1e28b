// The two products of attention in the registers of one warp: logits s = q k^T, and o += p v.
//
// A warp has M_TILES tiles of 16 query rows. Accumulator [i][j][2 * h + e] of a lane is at row 16 * i + 8 * h + lane / 4
// and column 8 * j + 2 * (lane % 4) + e.
#ifndef KT_ATTENTION_PRODUCT_CUH
#define KT_ATTENTION_PRODUCT_CUH

#include "attention_problem.cuh"
#include "tile.cuh"

constexpr int DIM = kt_round_up(KT_D, 16), DIM_STEPS = DIM / 16; // q k^T takes 16 of the head dimension at a time
constexpr int OUT_DIM = kt_round_up(KT_VALUE_DIM, 8), OUT_TILES = OUT_DIM / 8;
constexpr int DIM_BYTES = KT_D * ELEMENT_BYTES, OUT_DIM_BYTES = KT_VALUE_DIM * ELEMENT_BYTES;
// Bytes of one cp.async that the rows' alignment allows.
constexpr int DIM_WIDTH = kt_alignment(DIM_BYTES, 16), OUT_DIM_WIDTH = kt_alignment(OUT_DIM_BYTES, 16);
static_assert(DIM_WIDTH >= 4 && OUT_DIM_WIDTH >= 4, "cp.async copies whole words");

// Eight rows at one chunk lie in different banks when chunks are permuted, or when rows have an odd number of chunks.
#ifndef KT_SWIZZLE
#define KT_SWIZZLE 1 /* 0: padded rows */
#endif
template <int ROWS> using kt_dim_layout = kt_tile_layout<ROWS, DIM * ELEMENT_BYTES, KT_SWIZZLE, 16>;
template <int ROWS> using kt_out_dim_layout = kt_tile_layout<ROWS, OUT_DIM * ELEMENT_BYTES, KT_SWIZZLE, OUT_TILES % 2 ? 0 : 16>;
// Chunks of a row that are permuted among themselves.
template <class Layout> constexpr int kt_permuted = !KT_SWIZZLE ? 1 : kt_min(Layout::CHUNKS & -Layout::CHUNKS, 8);

// A tile in shared memory as operand of the matrix instructions, in blocks of 16 columns (or rows, of a left operand) by 16
// of k. K_MAJOR: rows of the tile are columns of the operand, with k inside; otherwise they are k. Of a right block, x[0] and
// x[1] are the two halves of k of its first 8 columns, x[2] and x[3] those of its last 8, so that the two words of one
// instruction are neighbours, as it wants them; of a left block, x[0] and x[1] are the two halves of its rows. With an odd
// multiple of 8 columns the last block repeats its first ones.
template <class Layout, bool K_MAJOR, int COLUMNS, bool LEFT = false> struct kt_blocks {
    static constexpr int COUNT = kt_ceil_div(COLUMNS, 16);
    static constexpr bool ODD = COLUMNS % 16 != 0;
    static constexpr int PERIOD = kt_max(kt_permuted<Layout> / 2, 1); // pairs of chunks that are permuted

    u32 at, last;

    KT_DEVICE kt_blocks(u32 lane, u32 first_row) {
        const u32 r = lane % 8, half = LEFT ? lane / 16 : lane / 8 % 2, second = LEFT ? lane / 8 % 2 : lane / 16;
        const u32 swizzle = Layout::swizzle(r), last_second = ODD ? 0 : second;
        if (K_MAJOR) {
            at = (first_row + second * 8 + r) * Layout::STRIDE + (half ^ swizzle) * 16;
            last = (first_row + (COUNT - 1) * 16 + last_second * 8 + r) * Layout::STRIDE + (half ^ swizzle) * 16;
        } else {
            at = (first_row + half * 8 + r) * Layout::STRIDE + (second ^ swizzle) * 16;
            last = (first_row + half * 8 + r) * Layout::STRIDE + (last_second ^ swizzle) * 16;
        }
    }

    // The permutation acts on address bits in which tiles and rows are zero, so that one address leads to all pairs of chunks.
    KT_DEVICE void load(u32 (&x)[4], u32 tile, int step, int block) const {
        const bool odd = ODD && block == COUNT - 1;
        const int pair = K_MAJOR ? step : block, rows = K_MAJOR ? (odd ? 0 : block) : step;
        const u32 address = (tile + (odd ? last : at)) ^ (pair % PERIOD * 32);
        kt_ldmatrix<!K_MAJOR>(x, address + pair / PERIOD * PERIOD * 32 + rows * 16 * Layout::STRIDE);
    }
    KT_DEVICE void load(u32 (&x)[COUNT][4], u32 tile, int step) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) load(x[i], tile, step, i);
    }
};

// Columns 16 * block and on of a warp's accumulators += a * b.
template <int M_TILES, int N_TILES>
KT_DEVICE void kt_multiply_block(float (&sum)[M_TILES][N_TILES][4], const u32 (&a)[M_TILES][4], const u32 (&b)[4], int block) {
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int half = i % 2 ? 1 - n : n, j = 2 * block + half; // there and back: the words at the turn are used twice
            if (j >= N_TILES) continue;
#if KT_DTYPE == KT_FP16
            kt_mma_half(sum[i][j], a[i], b[2 * half], b[2 * half + 1]);
#else
            kt_mma_bfloat(sum[i][j], a[i], b[2 * half], b[2 * half + 1]);
#endif
        }
}

// The rows of q of one warp: held in registers, or read from shared memory again for every tile of keys.
template <int M_TILES, bool HELD> struct kt_queries {
    u32 held[HELD ? DIM_STEPS : 1][M_TILES][4];

    template <class Fragments> KT_DEVICE void hold(const Fragments &at, u32 tile) {
        if constexpr (HELD)
#pragma unroll
            for (int step = 0; step < DIM_STEPS; step++) at.load(held[step], tile, step);
    }
    template <class Fragments> KT_DEVICE void get(u32 (&x)[M_TILES][4], const Fragments &at, u32 tile, int step) const {
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < M_TILES; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) x[i][j] = held[step][i][j];
        } else {
            at.load(x, tile, step);
        }
    }
};

// Probabilities of 16 keys as the left operand of p v: accumulators and operands of a lane lie alike.
template <int M_TILES, int N_TILES>
KT_DEVICE void kt_pack_probabilities(u32 (&p)[M_TILES][4], const float (&s)[M_TILES][N_TILES][4], int step) {
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *from = s[i][2 * step + j / 2] + j % 2 * 2;
            p[i][j] = kt_pack(from[0], from[1]);
        }
}

#endif
