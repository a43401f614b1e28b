/* Matrix product with one tiny extent (M or N), where streaming the large operand once decides the time.
 *
 * Names: the large operand ("stream") has LONG rows or columns, one per output along the long extent; the small operand
 * has TINY of them. Two forms, by how the stream is stored:
 *   stream[K][LONG]  sums += small * rows of the stream, several rows of k at once, the sums staying in L1;
 *   stream[LONG][K]  dot products of several rows of the stream at once with the small operand.
 * Nothing is packed, except a small operand that the dot products need contiguous. Work is cut into blocks of the long
 * extent and slices of k; threads take equal runs of them.
 */
#include "cpu_problem.h"

#ifndef KT_M
#define KT_M 1
#endif
#ifndef KT_N
#define KT_N 4096
#endif
#include "cpu_gemm.h"

/* tile */
#ifndef KT_BLOCK
#define KT_BLOCK 2048 /* outputs along the long extent in one unit of work */
#endif
/* unroll */
#ifndef KT_STREAMS
#define KT_STREAMS 4 /* rows of the stream read at once */
#endif
#ifndef KT_VECTORS
#define KT_VECTORS 1 /* vectors of each stream in one step */
#endif
/* map */
#ifndef KT_SLICES
#define KT_SLICES 1 /* parts of k, summed after a barrier */
#endif

/* 1: N is the tiny extent, and A streams. */
#define KT_SWAP (KT_N < KT_M)
#if KT_SWAP
#define KT_LONG KT_M
#define KT_TINY KT_N
#else
#define KT_LONG KT_N
#define KT_TINY KT_M
#endif
/* 1: the stream is stored [LONG][K]. */
#define KT_DOT (KT_SWAP ? !KT_TRANS_A : KT_TRANS_B)

enum {
    LANES = KT_VEC_BYTES / (int)sizeof(kt_real),
    STEP = LANES * KT_VECTORS,
    BLOCKS = KT_CEIL_DIV(KT_LONG, KT_BLOCK),
    UNITS = KT_BATCH * BLOCKS,
    /* small[t][k] */
    SMALL_ROW = KT_SWAP ? (KT_TRANS_B ? KT_K : 1) : (KT_TRANS_A ? 1 : KT_K),
    SMALL_COL = KT_SWAP ? (KT_TRANS_B ? 1 : KT_N) : (KT_TRANS_A ? KT_M : 1),
    PACK_SMALL = KT_DOT && SMALL_COL != 1,
    STREAM_ROW = KT_DOT ? KT_K : KT_LONG,
};

#define KT_SMALL_BYTES KT_ROUND_UP(PACK_SMALL ? (size_t)KT_TINY * KT_K * sizeof(kt_real) : 0)
#define KT_SUMS_BYTES KT_ROUND_UP((size_t)KT_TINY * KT_BLOCK * sizeof(kt_real))
#define KT_THREAD_BYTES (KT_SMALL_BYTES + KT_SUMS_BYTES)

typedef struct {
    const kt_real *stream, *small;
    kt_real *c;
    kt_epilogue epilogue;
    char *workspace;
    kt_real *partial; /* slices of C but the first */
    unsigned arrived;
} kt_problem;

/* sums[t][0..count) += small[t][k] * stream[k][0..count) for `rows` rows of k; count <= LANES * vectors. */
KT_INLINE void kt_add_rows(kt_real *sums, const kt_real *small, const kt_real *stream, const int rows, const int vectors, long count, int first) {
    kt_vec x[KT_VECTORS][KT_STREAMS];
    KT_UNROLL_ALL
    for (int u = 0; u < rows; u++) {
        KT_UNROLL_ALL
        for (int v = 0; v < vectors; v++) x[v][u] = kt_load_first(stream + (long)u * STREAM_ROW + v * LANES, count - v * LANES);
    }
    KT_UNROLL_ALL
    for (int t = 0; t < KT_TINY; t++) {
        kt_vec sum[KT_VECTORS];
        KT_UNROLL_ALL
        for (int v = 0; v < vectors; v++) sum[v] = first ? (kt_vec){0} : kt_load_first(sums + t * KT_BLOCK + v * LANES, count - v * LANES);
        KT_UNROLL_ALL
        for (int u = 0; u < rows; u++) {
            const kt_real factor = small[t * SMALL_ROW + u * SMALL_COL];
            KT_UNROLL_ALL
            for (int v = 0; v < vectors; v++) sum[v] += factor * x[v][u];
        }
        KT_UNROLL_ALL
        for (int v = 0; v < vectors; v++) kt_store_first(sums + t * KT_BLOCK + v * LANES, sum[v], count - v * LANES);
    }
}

KT_INLINE void kt_sweep(kt_real *sums, const kt_real *small, const kt_real *stream, const int rows, long width, int first) {
    long l = 0;
    for (; l + STEP <= width; l += STEP) kt_add_rows(sums + l, small, stream + l, rows, KT_VECTORS, STEP, first);
    for (; l < width; l += LANES) kt_add_rows(sums + l, small, stream + l, rows, 1, width - l, first);
}

/* One block in the form stream[K][LONG]. */
KT_NOINLINE void kt_block_by_rows(kt_real *sums, const kt_real *small, const kt_real *stream, long width, long depth) {
    long k = 0;
    for (; k + KT_STREAMS <= depth; k += KT_STREAMS)
        kt_sweep(sums, small + k * SMALL_COL, stream + k * STREAM_ROW, KT_STREAMS, width, k == 0);
    for (long rest = depth % KT_STREAMS; rest > 0; rest--, k++) kt_sweep(sums, small + k * SMALL_COL, stream + k * STREAM_ROW, 1, width, k == 0);
}

/* One block in the form stream[LONG][K]; `small` is contiguous in k. */
KT_NOINLINE void kt_block_by_dots(kt_real *sums, const kt_real *small, const kt_real *stream, long width, long depth) {
    for (long l = 0; l < width; l += KT_STREAMS) {
        kt_vec sum[KT_STREAMS][KT_TINY] = {{{0}}};
        const kt_real *row[KT_STREAMS];
        for (int u = 0; u < KT_STREAMS; u++) row[u] = stream + kt_min(l + u, width - 1) * STREAM_ROW;
        long k = 0;
        KT_UNROLL_BY(KT_VECTORS)
        for (; k + LANES <= depth; k += LANES) {
            KT_UNROLL_ALL
            for (int u = 0; u < KT_STREAMS; u++) {
                kt_vec x = kt_load(row[u] + k);
                KT_UNROLL_ALL
                for (int t = 0; t < KT_TINY; t++) sum[u][t] += x * kt_load(small + t * KT_K + k);
            }
        }
        const long rest = depth - k;
        for (int u = 0; u < KT_STREAMS && l + u < width; u++)
            for (int t = 0; t < KT_TINY; t++) {
                if (rest > 0) sum[u][t] += kt_load_first(row[u] + k, rest) * kt_load_first(small + t * KT_K + k, rest);
                kt_real total = 0;
                for (int i = 0; i < LANES; i++) total += sum[u][t][i];
                sums[t * KT_BLOCK + l + u] = total;
            }
    }
}

/* The sums of a block go to C: rows of it along the tiny extent, or columns of it when swapped. */
KT_NOINLINE void kt_write_block(kt_real *c, long offset, const kt_real *sums, long l0, long width, const kt_epilogue *e) {
    if (KT_SWAP) {
        for (long l = 0; l < width; l++) {
            kt_real row[KT_TINY];
            for (int t = 0; t < KT_TINY; t++) row[t] = sums[t * KT_BLOCK + l];
            for (long t = 0; t < KT_TINY; t += LANES) {
                const long count = kt_min(KT_TINY - t, LANES), index = (l0 + l) * KT_N + t;
                kt_vec x = kt_load_first(row + t, count);
                if (KT_SLICES == 1) x = kt_apply_epilogue(x, e, offset + index, t, count);
                kt_store_first(c + offset + index, x, count);
            }
        }
        return;
    }
    for (long t = 0; t < KT_TINY; t++)
        for (long l = 0; l < width; l += LANES) {
            const long count = kt_min(width - l, LANES), index = t * KT_N + l0 + l;
            kt_vec x = kt_load_first(sums + t * KT_BLOCK + l, count);
            if (KT_SLICES == 1) x = kt_apply_epilogue(x, e, offset + index, l0 + l, count);
            kt_store_first(c + offset + index, x, count);
        }
}

KT_NOINLINE void kt_pack_small(kt_real *to, const kt_real *small) {
    for (long k = 0; k < KT_K; k++)
        for (long t = 0; t < KT_TINY; t++) to[t * KT_K + k] = small[t * SMALL_ROW + k * SMALL_COL];
}

static void kt_run_thread(void *context, int thread, int threads) {
    kt_problem *p = context;
    char *own = p->workspace + (size_t)thread * KT_THREAD_BYTES;
    kt_real *packed = (kt_real *)own, *sums = (kt_real *)(own + KT_SMALL_BYTES);
    const long items = (long)UNITS * KT_SLICES;
    long packed_batch = -1;
    for (long item = kt_split(items, threads, thread); item < kt_split(items, threads, thread + 1); item++) {
        const long slice = item / UNITS, batch = item % UNITS / BLOCKS, block = item % BLOCKS;
        const long l0 = kt_split(KT_LONG, BLOCKS, block), width = kt_split(KT_LONG, BLOCKS, block + 1) - l0;
        const long k0 = kt_split(KT_K, KT_SLICES, slice), depth = kt_split(KT_K, KT_SLICES, slice + 1) - k0;
        const kt_real *small = p->small + batch * KT_TINY * KT_K, *stream = p->stream + batch * KT_LONG * KT_K;
        if (PACK_SMALL && batch != packed_batch) kt_pack_small(packed, small);
        packed_batch = batch;
        if (KT_DOT)
            kt_block_by_dots(sums, (PACK_SMALL ? packed : small) + k0, stream + l0 * KT_K + k0, width, depth);
        else
            kt_block_by_rows(sums, small + k0 * SMALL_COL, stream + k0 * KT_LONG + l0, width, depth);
        kt_real *c = slice == 0 ? p->c : p->partial + (size_t)(slice - 1) * KT_C_ELEMENTS;
        kt_write_block(c, batch * KT_M * KT_N, sums, l0, width, &p->epilogue);
    }
#if KT_SLICES > 1
    kt_barrier(&p->arrived, threads);
    kt_reduce_slices(p->c, p->partial, KT_SLICES, (long)KT_BATCH * KT_M, KT_N, &p->epilogue, thread, threads);
#endif
}

size_t kt_workspace_bytes(void) { return KT_THREADS * KT_THREAD_BYTES + (KT_SLICES - 1) * KT_C_ELEMENTS * sizeof(kt_real); }

int kt_launch(void *const *args, void *workspace) {
    kt_problem p = {.stream = args[KT_SWAP ? 0 : 1], .small = args[KT_SWAP ? 1 : 0], .workspace = workspace};
    p.c = kt_epilogue_operands(args + 2, &p.epilogue);
    p.partial = (kt_real *)(p.workspace + KT_THREADS * KT_THREAD_BYTES);
    kt_parallel(kt_run_thread, &p);
    return 0;
}

#include "cpu_isa_end.h"
