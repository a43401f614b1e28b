// What one warp keeps of its query rows while tiles of keys pass: o, the softmax, and where it reads its operands.
//
// A kernel file has defined M_TILES (of 16 rows) and KEYS, a multiple of 16 (of one tile of keys), of the warp.
#ifndef KT_ATTENTION_ROWS_CUH
#define KT_ATTENTION_ROWS_CUH

#include "attention_product.cuh"
#include "attention_softmax.cuh"

constexpr int KEY_TILES = KEYS / 8, KEY_STEPS = KEYS / 16;
using Logits = float[M_TILES][KEY_TILES][4];

template <class LayoutQ, class LayoutK, class LayoutV, class Mask, bool HELD> struct kt_rows {
    float o[M_TILES][OUT_TILES][4];
    kt_softmax<M_TILES> softmax;
    Mask mask;
    kt_queries<M_TILES, HELD> queries;
    kt_blocks<LayoutQ, true, 16 * M_TILES, true> at_q;
    kt_blocks<LayoutK, true, KEYS> at_k;
    kt_blocks<LayoutV, false, OUT_DIM> at_v;
    u32 q_tile;

    // The warp's rows start at `row` of the tile of q.
    KT_DEVICE kt_rows(u32 lane, u32 row, u32 q_tile, Mask mask)
        : mask(mask), at_q(lane, row), at_k(lane, 0), at_v(lane, 0), q_tile(q_tile) {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int j = 0; j < OUT_TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][j][e] = 0;
        softmax.begin();
    }

    KT_DEVICE void hold_queries() { queries.hold(at_q, q_tile); }

    // s = q k^T of one tile of keys, `between(step)` in the middle of it.
    template <class Between> KT_DEVICE void logits(Logits &s, u32 k_tile, Between between) const {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int j = 0; j < KEY_TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[i][j][e] = 0;
#pragma unroll
        for (int step = 0; step < DIM_STEPS; step++) {
            u32 a[M_TILES][4];
            queries.get(a, at_q, q_tile, step);
            between(step);
#pragma unroll
            for (int block = 0; block < KEY_STEPS; block++) {
                u32 b[4];
                at_k.load(b, k_tile, step, block);
                kt_multiply_block<M_TILES, KEY_TILES>(s, a, b, block);
            }
        }
    }
    KT_DEVICE void logits(Logits &s, u32 k_tile) const {
        logits(s, k_tile, [](int) {});
    }

    // The maxima with a tile whose first key is `key`.
    template <bool MASKED> KT_DEVICE void advance(Logits &s, int key) {
        if (SOFTCAP)
#pragma unroll
            for (int i = 0; i < M_TILES; i++)
#pragma unroll
                for (int j = 0; j < KEY_TILES; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) s[i][j][e] = kt_cap(s[i][j][e]);
        if (MASKED) mask.apply(s, key);
        softmax.advance(s);
    }

    // o += p v for logits s; the exponentials of 16 keys come before their share.
    KT_DEVICE void add_values(Logits &s, u32 v_tile) {
        add_products(s, v_tile, [&](int step) { softmax.exponentiate(s, 2 * step), softmax.exponentiate(s, 2 * step + 1); });
    }
    // The same for probabilities s; `before(step)` precedes the share of 16 keys.
    template <class Before> KT_DEVICE void add_products(const Logits &s, u32 v_tile, Before before) {
        softmax.rescale(o);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            u32 p[M_TILES][4];
            before(step);
            kt_pack_probabilities(p, s, step);
#pragma unroll
            for (int block = 0; block < kt_ceil_div(OUT_TILES, 2); block++) {
                u32 b[4];
                at_v.load(b, v_tile, step, block);
                kt_multiply_block<M_TILES, OUT_TILES>(o, p, b, block);
            }
        }
    }
    KT_DEVICE void add_products(const Logits &s, u32 v_tile) {
        add_products(s, v_tile, [](int) {});
    }
};

#endif
