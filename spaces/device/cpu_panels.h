/* Attention by panels of query rows, which are the lanes of vectors: mask and online softmax of a block of scores. */
#ifndef KT_CPU_PANELS_H
#define KT_CPU_PANELS_H

#include "cpu_attention.h"

/* tile */
#ifndef KT_NV
#define KT_NV 2 /* vectors of query rows: the width of a panel and of both register tiles */
#endif
#ifndef KT_KEY_ROWS
#define KT_KEY_ROWS 8 /* keys of a register tile of scores */
#endif
#ifndef KT_VALUE_ROWS
#define KT_VALUE_ROWS 8 /* value columns of a register tile of o */
#endif
#ifndef KT_BLOCK_Q
#define KT_BLOCK_Q 256 /* query rows of a task */
#endif
#ifndef KT_BLOCK_K
#define KT_BLOCK_K 64 /* keys whose scores are held at a time */
#endif
/* perm */
#ifndef KT_LONGEST_FIRST
#define KT_LONGEST_FIRST 0 /* 1: the last queries of all heads come first: under a causal mask they see the most keys */
#endif
/* unroll */
#ifndef KT_UNROLL_D
#define KT_UNROLL_D 2
#endif
#ifndef KT_UNROLL_KEYS
#define KT_UNROLL_KEYS 2
#endif

enum {
    NR = KT_NV * (int)(KT_VEC_BYTES / sizeof(kt_real)),
    PANELS = KT_CEIL_DIV(ROWS, NR),
    BLOCK_PANELS = KT_CEIL_DIV(KT_MIN(KT_BLOCK_Q, ROWS), NR),
    BLOCKS = KT_CEIL_DIV(PANELS, BLOCK_PANELS),
    TASKS = HEADS * BLOCKS * KT_SPLITS,
    MERGES = HEADS * PANELS,
    BLOCK_TILES = KT_CEIL_DIV(KT_MIN(KT_BLOCK_K, KT_KV_LEN), KT_KEY_ROWS),
    BLOCK_KEYS = BLOCK_TILES * KT_KEY_ROWS,
    KEY_ROWS = KT_KEY_ROWS,
    VALUE_ROWS = KT_VALUE_ROWS,
};

_Static_assert(KEY_ROWS <= KT_KV_LEN, "a tile of scores reads so many rows of k");
_Static_assert(VALUE_ROWS <= KT_VALUE_DIM, "a tile of o reads so many columns of v");

KT_INLINE long kt_rows_of(long panel) { return kt_min(ROWS - panel * NR, NR); }

/* The keys that any row of panels first..last - 1 sees. */
KT_INLINE kt_range kt_visible_to(long first, long last) {
    return (kt_range){kt_visible(first * NR).begin, kt_visible((last - 1) * NR + kt_rows_of(last - 1) - 1).end};
}

/* Whether every row of the panel sees all of the keys. */
KT_INLINE int kt_all_visible(long panel, kt_range keys) {
    return kt_visible(panel * NR + kt_rows_of(panel) - 1).begin <= keys.begin && keys.end <= kt_visible(panel * NR).end;
}

KT_NOINLINE void kt_mask(kt_real *scores, long panel, kt_range keys) {
    for (int j = 0; j < NR; j += KT_LANES) {
        kt_ivec begin, end;
        for (int lane = 0; lane < KT_LANES; lane++) {
            const kt_range seen = kt_visible(kt_min(panel * NR + j + lane, ROWS - 1));
            begin[lane] = (kt_int)seen.begin;
            end[lane] = (kt_int)seen.end;
        }
        for (long key = keys.begin; key < keys.end; key++) {
            kt_real *at = scores + (key - keys.begin) * NR + j;
            const kt_ivec index = (kt_ivec){0} + (kt_int)key;
            kt_store(at, kt_select((begin <= index) & (index < end), kt_load(at), (kt_vec){0} - KT_INFINITY));
        }
    }
}

/* The maximum over keys of one vector of rows; four chains, because one would wait for itself. */
KT_INLINE kt_vec kt_maximum(kt_vec top, const kt_real *scores, long keys) {
    kt_vec chain[4] = {top, top, top, top};
    long key = 0;
    for (; key + 4 <= keys; key += 4) {
        KT_UNROLL_ALL
        for (int i = 0; i < 4; i++) chain[i] = kt_larger(chain[i], kt_load(scores + (key + i) * NR));
    }
    for (; key < keys; key++) chain[0] = kt_larger(chain[0], kt_load(scores + key * NR));
    return kt_larger(kt_larger(chain[0], chain[1]), kt_larger(chain[2], chain[3]));
}

/* Scores become 2^(logit - maximum); updates maximum and sum of a panel, and returns what its o is scaled by. */
KT_NOINLINE void kt_softmax(kt_real *scores, long keys, kt_real *maximum, kt_real *sum, kt_vec *alpha) {
    for (int j = 0; j < KT_NV; j++) {
        kt_real *column = scores + j * KT_LANES;
        const kt_vec before = kt_load(maximum + j * KT_LANES), top = kt_maximum(before, column, keys);
        const kt_vec base = kt_base(top);
        kt_vec total = {0};
        for (long key = 0; key < keys; key++) {
            const kt_vec p = kt_exp2(kt_load(column + key * NR) * KT_LOG2_SCALE - base);
            kt_store(column + key * NR, p);
            total += p;
        }
        alpha[j] = kt_exp2(before * KT_LOG2_SCALE - base);
        kt_store(maximum + j * KT_LANES, top);
        kt_store(sum + j * KT_LANES, kt_load(sum + j * KT_LANES) * alpha[j] + total);
    }
}

#endif
