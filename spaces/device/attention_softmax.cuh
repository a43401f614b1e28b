// Softmax over keys that arrive tile by tile, for the rows that a lane shares with the three other lanes of its quad.
//
// Probabilities are powers of two: 2^(c * (s - m)) with c = log2(e) * scale, one multiply-add and one ex2 each.
#ifndef KT_ATTENTION_SOFTMAX_CUH
#define KT_ATTENTION_SOFTMAX_CUH

#include "attention_problem.cuh"

#ifndef KT_LAZY_RESCALE
#define KT_LAZY_RESCALE 0 /* 1: sums keep an older maximum until the new one exceeds it by HEADROOM */
#endif

constexpr bool SOFTCAP = KT_SOFTCAP > 0;
constexpr double LOG2_E = 1.4426950408889634;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float LOG2_SCALE = SOFTCAP ? 1.0f : (float)(KT_SCALE * LOG2_E); // c; capped logits are made in these units
constexpr float HEADROOM = 8; // in powers of two: probabilities up to 2^8 are far from overflow, and lose no digit
constexpr float NOTHING = -1e30f; // the maximum of no keys: finite, so that differences are numbers, and below any other

KT_DEVICE float kt_minus_infinity() { return __uint_as_float(0xff800000); }
KT_DEVICE float kt_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
KT_DEVICE float kt_quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// tanh(x) = 1 - 2 / (1 + e^2x), off by less than 1e-6. Where that, times a large cap, would show in the logits, small x
// take the series: its next term is below 4e-7 of the result.
KT_DEVICE float kt_cap(float s) {
    constexpr float INNER = (float)(SOFTCAP ? 2 * LOG2_E * KT_SCALE / KT_SOFTCAP : 0), OUTER = (float)(KT_SOFTCAP * LOG2_E);
    const float whole = OUTER - 2 * OUTER * kt_reciprocal_fast(1 + kt_exp2_fast(s * INNER));
    if (KT_SOFTCAP <= 128) return whole;
    const float x = s * (float)(SOFTCAP ? KT_SCALE / KT_SOFTCAP : 0), y = x * x;
    const float close = OUTER * x * (1 + y * (-1.0f / 3 + y * (2.0f / 15 - y * (17.0f / 315))));
    return y < 0.0625f ? close : whole;
}

// Which keys the rows of a warp see. Rows that are neighbouring queries: one number is enough for all of a lane's rows.
// (Rows past the last query may see keys past the last one, which are zeros; nobody stores them.)
template <int M_TILES> struct kt_diagonal_mask {
    int end; // of the lane's first row, relative to its first column: the key after the diagonal, or after the last

    KT_DEVICE kt_diagonal_mask(u32 lane, int query)
        : end((KT_CAUSAL || HAS_WINDOW ? query + (int)lane / 4 + DIAGONAL + 1 : KT_KV_LEN) - (int)lane % 4 * 2) {}

    template <int N_TILES> KT_DEVICE void apply(float (&s)[M_TILES][N_TILES][4], int key) const {
        const int left = end - key, all_left = KT_KV_LEN - key - (int)(threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < N_TILES; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int at = 8 * j + e - (KT_CAUSAL || HAS_WINDOW ? 16 * i + 8 * h : 0);
                        bool seen = !HAS_WINDOW || at >= left - KT_WINDOW;
                        if (KT_CAUSAL || !HAS_WINDOW) seen = seen && at < left;
                        else seen = seen && 8 * j + e < all_left;
                        if (!seen) s[i][j][2 * h + e] = kt_minus_infinity();
                    }
    }
};

// The same for rows of any queries: `query(r)` is that of the warp's row r.
template <int M_TILES> struct kt_row_mask {
    int first[M_TILES][2], end[M_TILES][2]; // of each of a lane's rows, relative to its first column

    template <class Query> KT_DEVICE kt_row_mask(u32 lane, Query query) {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = query(16 * i + 8 * h + lane / 4), column = lane % 4 * 2;
                first[i][h] = kt_first_key(at) - column, end[i][h] = kt_end_key(at) - column;
            }
    }

    template <int N_TILES> KT_DEVICE void apply(float (&s)[M_TILES][N_TILES][4], int key) const {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < N_TILES; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const bool seen = 8 * j + e < end[i][h] - key && (!HAS_WINDOW || 8 * j + e >= first[i][h] - key);
                        if (!seen) s[i][j][2 * h + e] = kt_minus_infinity();
                    }
    }
};

template <int M_TILES> struct kt_softmax {
    float top[M_TILES][2];   // c * what exponents are relative to: the maximum, or with lazy rescaling an older one
    float sum[M_TILES][2];   // of the lane's own columns
    float decay[M_TILES][2]; // of sums over the tiles before

    KT_DEVICE void begin() {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) top[i][h] = NOTHING, sum[i][h] = 0;
    }

    // Takes the maxima of a new tile.
    template <int N_TILES> KT_DEVICE void advance(const float (&s)[M_TILES][N_TILES][4]) {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float most[2] = {s[i][0][2 * h], s[i][0][2 * h + 1]};
#pragma unroll
                for (int j = 1; j < N_TILES; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) most[e] = fmaxf(most[e], s[i][j][2 * h + e]);
                const float before = top[i][h], now = fmaxf(before, kt_quad_max(fmaxf(most[0], most[1])) * LOG2_SCALE);
                top[i][h] = KT_LAZY_RESCALE && now - before <= HEADROOM ? before : now;
                decay[i][h] = kt_exp2_fast(before - top[i][h]);
                sum[i][h] *= decay[i][h];
            }
    }

    // Logits of eight keys become probabilities.
    template <int N_TILES> KT_DEVICE void exponentiate(float (&s)[M_TILES][N_TILES][4], int j) {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[i][j][e] = kt_exp2_fast(s[i][j][e] * LOG2_SCALE - top[i][e / 2]);
                sum[i][e / 2] += s[i][j][e];
            }
    }

    template <int TILES> KT_DEVICE void rescale(float (&o)[M_TILES][TILES][4]) const {
        if (KT_LAZY_RESCALE) {
            bool same = true;
#pragma unroll
            for (int i = 0; i < M_TILES; i++) same = same && decay[i][0] == 1 && decay[i][1] == 1;
            if (same) return;
        }
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][j][e] *= decay[i][e / 2];
    }

    // The whole row's sum, in every lane of its quad.
    KT_DEVICE void finish() {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) sum[i][h] = kt_quad_sum(sum[i][h]);
    }
};

// The natural logarithm of a row's sum of exponentials; -inf for a row that saw no key.
KT_DEVICE float kt_log_sum(float top, float sum) { return sum > 0 ? (top + log2f(sum)) * LN_2 : kt_minus_infinity(); }
KT_DEVICE float kt_inverse(float sum) { return sum > 0 ? 1 / sum : 0; }

#endif
