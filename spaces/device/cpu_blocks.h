/* Blocked matrix product, part 2: blocks of a region in the manner of Goto, and the grid of regions.
 *
 * C is cut into a grid of regions (and K into slices); threads take regions and run each as its own product, with
 * private panels and no barrier. A region is blocked for the caches: blocks of mc x kc and kc x nc, then register tiles
 * of mr rows by nv vectors. Panels are packed just before their first use, so packing overlaps with computing and needs
 * no phase of its own. Every size is a compile-time constant, and so is every stride: operands used in place are
 * addressed by displacement.
 *
 * The including file defines, between cpu_tile.h and this file:
 *   kt_fill_a(to, w, row, rows, k0, depth)        packs the panel of rows [row, row + rows), steps [k0, k0 + depth) of A
 *   kt_fill_b(to, w, column, columns, k0, depth)  the same of B
 *   kt_find_matrix(p, batch, w)                   sets a, b and c_offset of one matrix of the batch
 */
#ifndef KT_CPU_BLOCKS_H
#define KT_CPU_BLOCKS_H

#include "cpu_tile.h"

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

/* Points the tile at its panel of A, packing it at the first use; in place, a cut tile moves up over rows that are
 * already done, so as to read inside A. */
KT_INLINE void kt_find_a(kt_work *w, const kt_block *block, const kt_place *at, long slot, int first_use, kt_tile *t) {
    if (KT_PACK_A) {
        kt_real *panel = w->packed_a + (A_SLOTS > 1 ? slot : 0) * PANEL_A;
        if (first_use && block->fresh_a) kt_fill_a(panel, w, at->row, at->rows, block->k0, at->depth);
        t->a = panel;
        return;
    }
    const long excess = at->rows == MR - 1 ? 0 : kt_min(MR - at->rows, at->row);
    t->row -= excess, t->row0 += excess, t->row1 += excess;
    t->a = w->a + t->row * A_ROW + block->k0 * A_STEP;
}

KT_INLINE void kt_find_b(kt_work *w, const kt_block *block, const kt_place *at, long slot, int first_use, kt_tile *t) {
    if (KT_PACK_B) {
        kt_real *panel = w->packed_b + (B_SLOTS > 1 ? slot : 0) * PANEL_B;
        if (first_use && block->fresh_b) kt_fill_b(panel, w, at->column, at->columns, block->k0, at->depth);
        t->b = panel;
#if KT_FETCH_B
        _Static_assert(KT_PACK_B && B_STEP == 1, "B is fetched by columns");
        const int more = first_use && block->fresh_b && at->column + NR < w->region->n1;
        t->next = more ? w->b + (at->column + NR) * B_COL + block->k0 : panel;
        t->next_column = more ? B_COL : 0;
#endif
        return;
    }
    const long excess = NR - at->columns;
    t->column -= excess, t->col0 += excess, t->col1 += excess;
    t->b = w->b + block->k0 * B_STEP + t->column * B_COL;
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
        kt_work w = {.epilogue = &p->epilogue, .region = r, .packed_a = (kt_real *)own, .packed_b = (kt_real *)(own + KT_PACKED_A_BYTES)};
        kt_find_matrix(p, batch, &w);
        w.c = c + w.c_offset;
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
    kt_reduce_slices(p->c, p->partial, KT_GRID_K, KT_C_ELEMENTS / C_ROW, C_ROW, &p->epilogue, thread, threads);
#endif
}

size_t kt_workspace_bytes(void) { return KT_THREADS * KT_THREAD_BYTES + (KT_GRID_K - 1) * KT_C_ELEMENTS * sizeof(kt_real); }

/* `a` and `b` are the first two arguments, and the epilogue's operands and C follow. */
int kt_launch(void *const *args, void *workspace) {
    kt_problem p = {.a = args[0], .b = args[1], .workspace = workspace};
    p.c = kt_epilogue_operands(args + 2, &p.epilogue);
    p.partial = (kt_real *)(p.workspace + KT_THREADS * KT_THREAD_BYTES);
    kt_parallel(kt_run_thread, &p);
    return 0;
}

#endif
