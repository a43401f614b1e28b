/* Matrix product of extents that are known at run time only: what a file of many tuned shapes falls back to.
 *
 * C is cut into tiles; threads take equal runs of them. A tile's columns of B are packed in steps of k, on the stack, and
 * its sums stay in L1. It needs no workspace.
 */
#include "cpu_problem.h"

#ifndef KT_TRANS_A
#define KT_TRANS_A 0
#endif
#ifndef KT_TRANS_B
#define KT_TRANS_B 0
#endif

enum {
    VECTORS = 4,
    ROWS = 32,
    COLUMNS = VECTORS * KT_VEC_BYTES / (int)sizeof(kt_real),
    DEPTH = 128, /* steps of k packed at once */
};

typedef struct {
    long m, n, k, batch;
    const kt_real *a, *b;
    kt_real *c;
    kt_epilogue epilogue;
} kt_product;

/* Steps [k0, k0 + depth) of `columns` columns of B from `column` on, zeros up to COLUMNS. */
static void kt_pack(kt_real *to, const kt_product *p, const kt_real *b, long column, long columns, long k0, long depth) {
    memset(to, 0, (size_t)depth * COLUMNS * sizeof(kt_real));
    for (long k = 0; k < depth; k++)
        for (long j = 0; j < columns; j++)
            to[k * COLUMNS + j] = KT_TRANS_B ? b[(column + j) * p->k + k0 + k] : b[(k0 + k) * p->n + column + j];
}

/* sums[COLUMNS] += `depth` products of one row of A with packed columns; `step`: elements of A from k to k + 1. */
static void kt_add_row(kt_real *sums, const kt_real *a, long step, const kt_real *packed, long depth) {
    kt_vec x[VECTORS];
    for (int v = 0; v < VECTORS; v++) x[v] = kt_load(sums + v * KT_LANES);
    for (long k = 0; k < depth; k++)
        for (int v = 0; v < VECTORS; v++) x[v] += a[k * step] * kt_load(packed + k * COLUMNS + v * KT_LANES);
    for (int v = 0; v < VECTORS; v++) kt_store(sums + v * KT_LANES, x[v]);
}

static void kt_run_tile(const kt_product *p, long matrix, long row0, long column) {
    kt_real packed[DEPTH * COLUMNS], sums[ROWS * COLUMNS] = {0};
    const kt_real *a = p->a + matrix * p->m * p->k, *b = p->b + matrix * p->n * p->k;
    const long rows = kt_min(ROWS, p->m - row0), columns = kt_min(COLUMNS, p->n - column);
    for (long k0 = 0; k0 < p->k; k0 += DEPTH) {
        const long depth = kt_min(DEPTH, p->k - k0);
        kt_pack(packed, p, b, column, columns, k0, depth);
        for (long i = 0; i < rows; i++) {
            const kt_real *from = KT_TRANS_A ? a + k0 * p->m + row0 + i : a + (row0 + i) * p->k + k0;
            kt_add_row(sums + i * COLUMNS, from, KT_TRANS_A ? p->m : 1, packed, depth);
        }
    }
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j += KT_LANES) {
            const long count = kt_min(columns - j, KT_LANES), index = (matrix * p->m + row0 + i) * p->n + column + j;
            const kt_vec x = kt_load(sums + i * COLUMNS + j);
            kt_store_first(p->c + index, kt_apply_epilogue(x, &p->epilogue, index, column + j, count), count);
        }
}

static void kt_run_thread(void *context, int thread, int threads) {
    const kt_product *p = context;
    const long down = KT_CEIL_DIV(p->m, ROWS), across = KT_CEIL_DIV(p->n, COLUMNS), tiles = down * across * p->batch;
    for (long tile = kt_split(tiles, threads, thread); tile < kt_split(tiles, threads, thread + 1); tile++)
        kt_run_tile(p, tile / across / down, tile / across % down * ROWS, tile % across * COLUMNS);
}

/* 0; `a` and `b` are the first two arguments, and the epilogue's operands and C follow. */
int kt_launch_any(int64_t m, int64_t n, int64_t k, int64_t batch, void *const *args) {
    kt_product p = {.m = (long)m, .n = (long)n, .k = (long)k, .batch = (long)batch, .a = args[0], .b = args[1]};
    p.c = kt_epilogue_operands(args + 2, &p.epilogue);
    kt_parallel(kt_run_thread, &p);
    return 0;
}

#include "cpu_isa_end.h"
