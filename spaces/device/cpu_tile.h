/* Blocked matrix product, part 1: its parameters, the sizes that follow, and the register tile.
 *
 * The including file says, before, what the product is:
 *   macros KT_M, KT_N, KT_K, KT_BATCH and KT_C_ELEMENTS (of the whole output, all matrices),
 *   enum constants A_ROW, A_STEP, B_STEP, B_COL (strides of operands in place) and C_ROW (of the output).
 * Part 2 is cpu_blocks.h.
 */
#ifndef KT_CPU_TILE_H
#define KT_CPU_TILE_H

#include "cpu_problem.h"

/* tile */
#ifndef KT_MR
#define KT_MR 6 /* rows of a register tile */
#endif
#ifndef KT_NV
#define KT_NV 2 /* vectors in a row of it */
#endif
#ifndef KT_MC
#define KT_MC 240
#endif
#ifndef KT_NC
#define KT_NC 512
#endif
#ifndef KT_KC
#define KT_KC 256
#endif
/* mem */
#ifndef KT_PACK_A
#define KT_PACK_A 1 /* 0: in place, 1: panels [k][mr], 2: panels [mr][k] */
#endif
#ifndef KT_PACK_B
#define KT_PACK_B 1 /* 0: in place, 1: panels [k][nr] */
#endif
#ifndef KT_PREFETCH_C
#define KT_PREFETCH_C 1 /* 1: a tile's part of C is fetched before the tile is computed */
#endif
/* perm */
#ifndef KT_INNER_M
#define KT_INNER_M 1 /* the innermost tile loop runs over m (one panel of B stays in L1), 0: over n */
#endif
/* unroll */
#ifndef KT_UNROLL
#define KT_UNROLL 4
#endif
/* map */
#ifndef KT_GRID_BATCH
#define KT_GRID_BATCH 1
#endif
#ifndef KT_GRID_M
#define KT_GRID_M 1
#endif
#ifndef KT_GRID_N
#define KT_GRID_N 2
#endif
#ifndef KT_GRID_K
#define KT_GRID_K 1
#endif
/* sync */
#ifndef KT_DYNAMIC
#define KT_DYNAMIC 0 /* 1: threads draw regions from a counter, 0: in turn */
#endif
/* 1: while a new panel of B is first used, the rows that the next one will be packed from are fetched, a cache line of
 * each in turn: packing would wait for memory. B is stored by columns. */
#ifndef KT_FETCH_B
#define KT_FETCH_B 0
#endif
/* The first column of a work's matrix, as the epilogue counts columns. */
#ifndef KT_FIRST_COLUMN
#define KT_FIRST_COLUMN(w) 0
#endif

enum {
    MR = KT_MR,
    NR = KT_NV * (int)(KT_VEC_BYTES / sizeof(kt_real)),
    LINE = 64 / (int)sizeof(kt_real), /* elements of a cache line */
    REGIONS = KT_GRID_BATCH * KT_GRID_M * KT_GRID_N * KT_GRID_K,
    /* The largest region and the largest block of it. */
    REGION_M = KT_CEIL_DIV(KT_M, KT_GRID_M),
    REGION_N = KT_MIN(KT_N, KT_CEIL_DIV(KT_CEIL_DIV(KT_N, NR), KT_GRID_N) * NR),
    REGION_K = KT_CEIL_DIV(KT_K, KT_GRID_K),
    MC_TILES = KT_CEIL_DIV(KT_MIN(KT_MC, REGION_M), MR),
    NC_PANELS = KT_CEIL_DIV(KT_MIN(KT_NC, REGION_N), NR),
    KC = KT_MIN(KT_KC, REGION_K),
    M_BLOCKS = KT_CEIL_DIV(KT_CEIL_DIV(REGION_M, MR), MC_TILES),
    N_BLOCKS = KT_CEIL_DIV(KT_CEIL_DIV(REGION_N, NR), NC_PANELS),
    K_BLOCKS = KT_CEIL_DIV(REGION_K, KC),
    /* A row of a panel [mr][k]: an odd number of cache lines, so that rows spread over the sets of a cache. */
    PACKED_ROW = (KT_CEIL_DIV(KC, LINE) | 1) * LINE,
    PANEL_A = (KT_PACK_A == 2 ? PACKED_ROW : KC) * MR,
    PANEL_B = KC * NR,
    /* A panel that is used up before the next one is packed needs one place only, which stays in L1. */
    A_SLOTS = (!KT_INNER_M && N_BLOCKS == 1) || KT_PACK_A == 0 ? 1 : MC_TILES,
    B_SLOTS = (KT_INNER_M && M_BLOCKS == 1) || KT_PACK_B == 0 ? 1 : NC_PANELS,
    /* Strides of the operands as the register tile reads them. */
    A_ROW_USED = KT_PACK_A == 2 ? PACKED_ROW : KT_PACK_A ? 1 : A_ROW,
    A_STEP_USED = KT_PACK_A == 2 ? 1 : KT_PACK_A ? MR : A_STEP,
    B_STEP_USED = KT_PACK_B ? NR : B_STEP,
};

#define KT_PACKED_A_BYTES KT_ROUND_UP((size_t)PANEL_A * A_SLOTS * sizeof(kt_real) + KT_VEC_BYTES)
#define KT_PACKED_B_BYTES KT_ROUND_UP((size_t)PANEL_B * B_SLOTS * sizeof(kt_real) + KT_VEC_BYTES)
#define KT_THREAD_BYTES (KT_PACKED_A_BYTES + KT_PACKED_B_BYTES)

typedef struct {
    const kt_real *a, *b;
    kt_real *c;
    kt_epilogue epilogue;
    char *workspace;
    kt_real *partial; /* K slices of C, when K is split */
    unsigned arrived;
    long next_region;
} kt_problem;

typedef struct {
    long m0, m1, n0, n1, k0, k1, batch0, batch1, slice;
} kt_region;

/* What a thread works on: one matrix of the batch, and its packed panels. */
typedef struct {
    const kt_real *a, *b;
    kt_real *c;
    const kt_epilogue *epilogue;
    long c_offset; /* of this matrix in C */
    kt_real *packed_a, *packed_b;
    long held_a, held_b; /* which block is packed, -1: none */
    const kt_region *region;
} kt_work;

/* One register tile; `a` and `b` point at its first row and column, C gets the valid part only. */
typedef struct {
    const kt_real *a, *b;
    long depth;
    long row, column;           /* of the tile in C */
    long row0, row1, col0, col1; /* the valid part, relative to the tile */
    int first, last;            /* block of k: C is overwritten, the epilogue applies */
#if KT_FETCH_B
    const kt_real *next; /* what the next panel will be packed from, its columns `next_column` apart */
    long next_column;
#endif
} kt_tile;

/* Parts of tiles, and epilogues: one vector at a time, for small code rather than fast code. */
KT_NOINLINE void kt_write_slow(const kt_work *w, const kt_tile *t, const kt_real *product) {
    for (long i = t->row0; i < t->row1; i++)
        for (long j = t->col0; j < t->col1; j += KT_LANES) {
            long count = kt_min(t->col1 - j, KT_LANES);
            long column = t->column + j, index = (t->row + i) * C_ROW + column;
            kt_vec x = kt_load_first(product + i * NR + j, count);
            if (!t->first) x += kt_load_first(w->c + index, count);
            if (t->last) x = kt_apply_epilogue(x, w->epilogue, w->c_offset + index, KT_FIRST_COLUMN(w) + column, count);
            kt_store_first(w->c + index, x, count);
        }
}

/* The register tile; `rows` is MR or MR - 1. */
KT_INLINE void kt_tile_product(const kt_work *w, const kt_tile *t, const int rows) {
    kt_vec acc[MR][KT_NV];
    kt_real *c = w->c + t->row * C_ROW + t->column;
    KT_UNROLL_ALL
    for (int i = 0; i < rows; i++) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) {
            acc[i][j] = (kt_vec){0};
            if (KT_PREFETCH_C) __builtin_prefetch(c + i * C_ROW + j * KT_LANES, 1, 3);
        }
    }
    const kt_real *a = t->a, *b = t->b;
    KT_UNROLL_BY(KT_UNROLL)
    for (long k = t->depth; k > 0; k--) {
#if KT_FETCH_B
        KT_UNROLL_ALL
        for (int g = 0; g < NR; g += LINE) __builtin_prefetch(t->next + (g + k % LINE) * t->next_column + k / LINE * LINE, 0, 2);
#endif
        kt_vec bv[KT_NV];
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) bv[j] = kt_load(b + j * KT_LANES);
        KT_UNROLL_ALL
        for (int i = 0; i < rows; i++) {
            kt_real ai = a[i * A_ROW_USED];
            KT_UNROLL_ALL
            for (int j = 0; j < KT_NV; j++) acc[i][j] += ai * bv[j];
        }
        a += A_STEP_USED;
        b += B_STEP_USED;
    }
    if (t->row0 > 0 || t->row1 < rows || t->col0 > 0 || t->col1 < NR || (t->last && KT_HAS_EPILOGUE)) {
        kt_real product[MR * NR];
        KT_UNROLL_ALL
        for (int i = 0; i < rows; i++) {
            KT_UNROLL_ALL
            for (int j = 0; j < KT_NV; j++) kt_store(product + i * NR + j * KT_LANES, acc[i][j]);
        }
        kt_write_slow(w, t, product);
        return;
    }
    KT_UNROLL_ALL
    for (int i = 0; i < rows; i++) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) {
            kt_real *to = c + i * C_ROW + j * KT_LANES;
            if (!t->first) acc[i][j] += kt_load(to);
            kt_store(to, acc[i][j]);
        }
    }
}

KT_NOINLINE void kt_full_tile(const kt_work *w, const kt_tile *t) { kt_tile_product(w, t, MR); }
#if KT_MR > 1
KT_NOINLINE void kt_short_tile(const kt_work *w, const kt_tile *t) { kt_tile_product(w, t, MR - 1); }
#endif

#endif
