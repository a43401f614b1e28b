/* Blocked matrix product for CPUs with vector units.
 *
 * C is cut into a grid of regions (and K into slices); threads take regions and run each as its own product, with
 * private panels and no barrier. A region is blocked for the caches in the manner of Goto: blocks of mc x kc and
 * kc x nc, then register tiles of mr rows by nv vectors. Panels are packed just before their first use, so packing
 * overlaps with computing and needs no phase of its own. Every size is a compile-time constant, and so is every stride:
 * operands used in place are addressed by displacement.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getcpu and thread affinity */
#endif
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_pool.h"
#include "cpu_isa.h"
#include "cpu_pack.h"
#include "cpu_epilogue.h"
#include "cpu_reduce.h"

/* Workload */
#ifndef KT_M
#define KT_M 512
#endif
#ifndef KT_N
#define KT_N 512
#endif
#ifndef KT_K
#define KT_K 512
#endif
#ifndef KT_BATCH
#define KT_BATCH 1
#endif
#ifndef KT_TRANS_A
#define KT_TRANS_A 0
#endif
#ifndef KT_TRANS_B
#define KT_TRANS_B 0
#endif

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
#define KT_PACK_A 1 /* 0: in place, 1: panels [k][mr] */
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

#ifndef KT_DESCRIBE
#define KT_DESCRIBE "{}"
#endif

#define KT_CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
#define KT_MIN(a, b) ((a) < (b) ? (a) : (b))

enum {
    MR = KT_MR,
    NR = KT_NV * (int)(KT_VEC_BYTES / sizeof(kt_real)),
    REGIONS = KT_GRID_BATCH * KT_GRID_M * KT_GRID_N * KT_GRID_K,
    /* Strides of the operands in place. */
    A_ROW = KT_TRANS_A ? 1 : KT_K,
    A_STEP = KT_TRANS_A ? KT_M : 1,
    B_STEP = KT_TRANS_B ? 1 : KT_N,
    B_COL = KT_TRANS_B ? KT_K : 1,
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
    PANEL_A = KC * MR,
    PANEL_B = KC * NR,
    /* A panel that is used up before the next one is packed needs one place only, which stays in L1. */
    A_SLOTS = (!KT_INNER_M && N_BLOCKS == 1) || KT_PACK_A == 0 ? 1 : MC_TILES,
    B_SLOTS = (KT_INNER_M && M_BLOCKS == 1) || KT_PACK_B == 0 ? 1 : NC_PANELS,
};

#define KT_ROUND_UP(bytes) (((bytes) + 255) / 256 * 256)
#define KT_PACKED_A_BYTES KT_ROUND_UP((size_t)PANEL_A * A_SLOTS * sizeof(kt_real) + KT_VEC_BYTES)
#define KT_PACKED_B_BYTES KT_ROUND_UP((size_t)PANEL_B * B_SLOTS * sizeof(kt_real) + KT_VEC_BYTES)
#define KT_THREAD_BYTES (KT_PACKED_A_BYTES + KT_PACKED_B_BYTES)
#define KT_C_ELEMENTS ((size_t)KT_BATCH * KT_M * KT_N)

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
} kt_tile;

/* Parts of tiles, and epilogues: one vector at a time, for small code rather than fast code. */
KT_NOINLINE void kt_write_slow(const kt_work *w, const kt_tile *t, const kt_real *product) {
    for (long i = t->row0; i < t->row1; i++)
        for (long j = t->col0; j < t->col1; j += KT_LANES) {
            long count = kt_min(t->col1 - j, KT_LANES);
            long column = t->column + j, index = (t->row + i) * KT_N + column;
            kt_vec x = kt_load_first(product + i * NR + j, count);
            if (!t->first) x += kt_load_first(w->c + index, count);
            if (t->last) x = kt_apply_epilogue(x, w->epilogue, w->c_offset + index, column, count);
            kt_store_first(w->c + index, x, count);
        }
}

enum { A_ROW_USED = KT_PACK_A ? 1 : A_ROW, A_STEP_USED = KT_PACK_A ? MR : A_STEP };
enum { B_STEP_USED = KT_PACK_B ? NR : B_STEP };

/* The register tile; `rows` is MR or MR - 1. */
KT_INLINE void kt_tile_product(const kt_work *w, const kt_tile *t, const int rows) {
    kt_vec acc[MR][KT_NV];
    kt_real *c = w->c + t->row * KT_N + t->column;
    KT_UNROLL_ALL
    for (int i = 0; i < rows; i++) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) {
            acc[i][j] = (kt_vec){0};
            if (KT_PREFETCH_C) __builtin_prefetch(c + i * KT_N + j * KT_LANES, 1, 3);
        }
    }
    const kt_real *a = t->a, *b = t->b;
    KT_UNROLL_BY(KT_UNROLL)
    for (long k = t->depth; k > 0; k--) {
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
            kt_real *to = c + i * KT_N + j * KT_LANES;
            if (!t->first) acc[i][j] += kt_load(to);
            kt_store(to, acc[i][j]);
        }
    }
}

KT_NOINLINE void kt_full_tile(const kt_work *w, const kt_tile *t) { kt_tile_product(w, t, MR); }
#if KT_MR > 1
KT_NOINLINE void kt_short_tile(const kt_work *w, const kt_tile *t) { kt_tile_product(w, t, MR - 1); }
#endif

KT_NOINLINE void kt_pack_a(kt_real *to, const kt_real *a, long rows, long depth) {
    if (KT_TRANS_A)
        kt_pack_copied(to, MR, a, A_STEP, rows, depth);
    else
        kt_pack_transposed(to, MR, a, A_ROW, rows, depth);
}

KT_NOINLINE void kt_pack_b(kt_real *to, const kt_real *b, long columns, long depth) {
    if (KT_TRANS_B)
        kt_pack_transposed(to, NR, b, B_COL, columns, depth);
    else
        kt_pack_copied(to, NR, b, B_STEP, columns, depth);
}

/* A block of C by a block of k: tiles i0..i1, panels j0..j1. */
typedef struct {
    long tiles, i0, i1, j0, j1, k0, k1;
    int fresh_a, fresh_b; /* the block's panels are not packed yet */
    int first, last;
} kt_block;

/* Rows of tile i: of mr and mr - 1 rows where that is possible, otherwise of mr with the last one cut. */
KT_INLINE long kt_tile_row(const kt_region *r, long tiles, long i) {
    long rows = r->m1 - r->m0;
    if (rows >= tiles * (MR - 1)) return r->m0 + kt_split(rows, tiles, i);
    return r->m0 + kt_min(i * MR, rows);
}

/* Where tile i and panel j of a block lie in the region. */
typedef struct {
    long row, rows, column, columns, depth;
} kt_place;

KT_INLINE kt_place kt_place_of(const kt_region *r, const kt_block *block, long i, long j) {
    const long row = kt_tile_row(r, block->tiles, i), column = r->n0 + j * NR;
    return (kt_place){row, kt_tile_row(r, block->tiles, i + 1) - row, column, kt_min(r->n1 - column, NR), block->k1 - block->k0};
}

KT_INLINE const kt_real *kt_a_at(const kt_work *w, const kt_block *block, long row) {
    return w->a + row * A_ROW + block->k0 * A_STEP;
}

KT_INLINE const kt_real *kt_b_at(const kt_work *w, const kt_block *block, long column) {
    return w->b + block->k0 * B_STEP + column * B_COL;
}

/* Points the tile at its panel of A, packing it at the first use; in place, a cut tile moves up over rows that are
 * already done, so as to read inside A. */
KT_INLINE void kt_find_a(kt_work *w, const kt_block *block, const kt_place *at, long slot, int first_use, kt_tile *t) {
    if (KT_PACK_A) {
        kt_real *panel = w->packed_a + (A_SLOTS > 1 ? slot : 0) * PANEL_A;
        if (first_use && block->fresh_a) kt_pack_a(panel, kt_a_at(w, block, at->row), at->rows, at->depth);
        t->a = panel;
        return;
    }
    const long excess = at->rows == MR - 1 ? 0 : kt_min(MR - at->rows, at->row);
    t->row -= excess, t->row0 += excess, t->row1 += excess;
    t->a = kt_a_at(w, block, t->row);
}

KT_INLINE void kt_find_b(kt_work *w, const kt_block *block, const kt_place *at, long slot, int first_use, kt_tile *t) {
    if (KT_PACK_B) {
        kt_real *panel = w->packed_b + (B_SLOTS > 1 ? slot : 0) * PANEL_B;
        if (first_use && block->fresh_b) kt_pack_b(panel, kt_b_at(w, block, at->column), at->columns, at->depth);
        t->b = panel;
        return;
    }
    const long excess = NR - at->columns;
    t->column -= excess, t->col0 += excess, t->col1 += excess;
    t->b = kt_b_at(w, block, t->column);
}

KT_INLINE void kt_run_tile(kt_work *w, const kt_block *block, long i, long j) {
    const kt_place at = kt_place_of(w->region, block, i, j);
    kt_tile t = {.depth = at.depth, .first = block->first, .last = block->last,
                 .row = at.row, .row1 = at.rows, .column = at.column, .col1 = at.columns};
    kt_find_a(w, block, &at, i - block->i0, j == block->j0, &t);
    kt_find_b(w, block, &at, j - block->j0, i == block->i0, &t);
#if KT_MR > 1
    if (at.rows == MR - 1) {
        kt_short_tile(w, &t);
        return;
    }
#endif
    kt_full_tile(w, &t);
}

static void kt_run_block(kt_work *w, const kt_block *block) {
    if (KT_INNER_M)
        for (long j = block->j0; j < block->j1; j++)
            for (long i = block->i0; i < block->i1; i++) kt_run_tile(w, block, i, j);
    else
        for (long i = block->i0; i < block->i1; i++)
            for (long j = block->j0; j < block->j1; j++) kt_run_tile(w, block, i, j);
}

static void kt_run_matrix(kt_work *w) {
    const kt_region *r = w->region;
    const long tiles = KT_CEIL_DIV(r->m1 - r->m0, MR), panels = KT_CEIL_DIV(r->n1 - r->n0, NR), depth = r->k1 - r->k0;
    const long m_blocks = KT_CEIL_DIV(tiles, MC_TILES), n_blocks = KT_CEIL_DIV(panels, NC_PANELS), k_blocks = KT_CEIL_DIV(depth, KC);
    w->held_a = w->held_b = -1;
    for (long n = 0; n < n_blocks; n++)
        for (long k = 0; k < k_blocks; k++)
            for (long m = 0; m < m_blocks; m++) {
                const long id_a = m * k_blocks + k, id_b = n * k_blocks + k;
                const kt_block block = {
                    .tiles = tiles, .i0 = kt_split(tiles, m_blocks, m), .i1 = kt_split(tiles, m_blocks, m + 1),
                    .j0 = kt_split(panels, n_blocks, n), .j1 = kt_split(panels, n_blocks, n + 1),
                    .k0 = r->k0 + kt_split(depth, k_blocks, k), .k1 = r->k0 + kt_split(depth, k_blocks, k + 1),
                    .fresh_a = id_a != w->held_a, .fresh_b = id_b != w->held_b,
                    .first = k == 0, .last = KT_GRID_K == 1 && k == k_blocks - 1};
                kt_run_block(w, &block);
                w->held_a = id_a;
                w->held_b = id_b;
            }
}

static kt_region kt_region_of(long index) {
    const long k = index % KT_GRID_K, m = index / KT_GRID_K % KT_GRID_M;
    const long n = index / (KT_GRID_K * KT_GRID_M) % KT_GRID_N, batch = index / (KT_GRID_K * KT_GRID_M * KT_GRID_N);
    const long panels = KT_CEIL_DIV(KT_N, NR);
    return (kt_region){
        .m0 = kt_split(KT_M, KT_GRID_M, m), .m1 = kt_split(KT_M, KT_GRID_M, m + 1),
        .n0 = kt_split(panels, KT_GRID_N, n) * NR, .n1 = kt_min(kt_split(panels, KT_GRID_N, n + 1) * NR, KT_N),
        .k0 = kt_split(KT_K, KT_GRID_K, k), .k1 = kt_split(KT_K, KT_GRID_K, k + 1),
        .batch0 = kt_split(KT_BATCH, KT_GRID_BATCH, batch), .batch1 = kt_split(KT_BATCH, KT_GRID_BATCH, batch + 1),
        .slice = k};
}

static void kt_run_region(const kt_problem *p, const kt_region *r, int thread) {
    char *own = p->workspace + (size_t)thread * KT_THREAD_BYTES;
    kt_real *c = r->slice == 0 ? p->c : p->partial + (size_t)(r->slice - 1) * KT_C_ELEMENTS;
    for (long batch = r->batch0; batch < r->batch1; batch++) {
        kt_work w = {.a = p->a + batch * KT_M * KT_K, .b = p->b + batch * KT_K * KT_N, .c = c + batch * KT_M * KT_N,
                     .epilogue = &p->epilogue, .c_offset = batch * KT_M * KT_N, .region = r,
                     .packed_a = (kt_real *)own, .packed_b = (kt_real *)(own + KT_PACKED_A_BYTES)};
        kt_run_matrix(&w);
    }
}

static void kt_run_thread(void *context, int thread, int threads) {
    kt_problem *p = context;
    long index = KT_DYNAMIC ? __atomic_fetch_add(&p->next_region, 1, __ATOMIC_RELAXED) : thread;
    while (index < REGIONS) {
        const kt_region region = kt_region_of(index);
        kt_run_region(p, &region, thread);
        index = KT_DYNAMIC ? __atomic_fetch_add(&p->next_region, 1, __ATOMIC_RELAXED) : index + threads;
    }
#if KT_GRID_K > 1
    kt_barrier(&p->arrived, threads);
    kt_reduce_slices(p->c, p->partial, KT_GRID_K, (long)KT_BATCH * KT_M, KT_N, &p->epilogue, thread, threads);
#endif
}

size_t kt_workspace_bytes(void) { return KT_THREADS * KT_THREAD_BYTES + (KT_GRID_K - 1) * KT_C_ELEMENTS * sizeof(kt_real); }

const char *kt_describe(void) { return KT_DESCRIBE; }

int kt_launch(void *const *args, void *workspace) {
    kt_problem p = {.a = args[0], .b = args[1], .workspace = workspace};
    p.c = kt_epilogue_operands(args + 2, &p.epilogue);
    p.partial = (kt_real *)(p.workspace + KT_THREADS * KT_THREAD_BYTES);
    kt_parallel(kt_run_thread, &p);
    return 0;
}

#include "cpu_isa_end.h"
