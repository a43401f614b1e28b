/* Convolution as an implicit matrix product; cpu_blocks.h describes the blocking.
 *
 * C[M,N] = A[M,K] B[K,N] with M = output pixels, N = filters of a group, K = taps x channels of a group, channels
 * fastest, and one matrix for each group. A exists one panel at a time: the pixels of a register tile are gathered as
 * the panel is first used, with zeros for the padding, and serve all filters of the block from L1. A 1x1 filter at
 * stride 1 without padding makes x itself A, which may then be used in place. Filters are packed by transposition, and the
 * next ones fetched meanwhile: layers with few pixels are bound by reading their filters.
 */
#include "cpu_problem.h"
#include "cpu_pack.h"
#include "cpu_conv2d.h"

#define KT_BATCH KT_GROUPS
#define KT_M (KT_IMAGES * KT_P * KT_Q)
#define KT_N KT_GROUP_FILTERS
#define KT_K (KT_R * KT_S * KT_GROUP_CHANNELS)
#define KT_C_ELEMENTS ((size_t)KT_M * KT_FILTERS)
#define KT_FIRST_COLUMN(w) (w)->c_offset

enum {
    A_ROW = KT_CHANNELS,
    A_STEP = 1,
    B_STEP = 1,
    B_COL = KT_K,
    C_ROW = KT_FILTERS,
    /* Channels of all taps of a filter's row are one run of x, unless dilation or other groups' channels part them. */
    JOINED = KT_GROUPS == 1 && (KT_DILATION_W == 1 || KT_S == 1),
    RUN = (JOINED ? KT_S : 1) * KT_GROUP_CHANNELS,
    RUNS_IN_ROW = JOINED ? 1 : KT_S,
};

#ifndef KT_PACK_A
#define KT_PACK_A 2 /* 0: x in place, 2: panels [mr][k] */
#endif

#define KT_FETCH_B 1
#include "cpu_tile.h"

_Static_assert(KT_PACK_A == 2 || (KT_PACK_A == 0 && KT_R == 1 && KT_S == 1 && KT_STRIDE_H == 1 && KT_STRIDE_W == 1 && KT_PAD_H == 0 && KT_PAD_W == 0),
               "x in place needs a 1x1 filter, stride 1 and no padding");
_Static_assert(KT_PACK_B, "filters are packed");

KT_INLINE void kt_copy(kt_real *to, const kt_real *from, long count) {
    long i = 0;
    if (count < KT_LANES) {
        for (; i < count; i++) to[i] = from[i];
        return;
    }
    for (; i + KT_LANES <= count; i += KT_LANES) kt_store(to + i, kt_load(from + i));
    if (i < count) kt_store(to + count - KT_LANES, kt_load(from + count - KT_LANES));
}

KT_INLINE void kt_zero(kt_real *to, long count) { memset(to, 0, (size_t)count * sizeof(kt_real)); }

/* Elements [first, first + count) of the run whose first tap is at (h, w) of x, which may lie in the padding. */
KT_INLINE void kt_gather_run(kt_real *to, const kt_real *x, long h, long w, long first, long count) {
    if (KT_PAD_H > 0 && (h < 0 || h >= KT_HEIGHT)) {
        kt_zero(to, count);
        return;
    }
    const long begin = w * KT_CHANNELS + first; /* in the row */
    long before = 0, after = 0;
    if (KT_PAD_W > 0 && JOINED) {
        before = begin < 0 ? kt_min(-begin, count) : 0;
        after = begin + count > KT_X_ROW ? kt_min(begin + count - KT_X_ROW, count - before) : 0;
    } else if (KT_PAD_W > 0 && (w < 0 || w >= KT_WIDTH)) {
        before = count;
    }
    if (before + after == 0) {
        kt_copy(to, x + h * KT_X_ROW + begin, count);
        return;
    }
    kt_zero(to, before);
    if (before + after < count) kt_copy(to + before, x + h * KT_X_ROW + begin + before, count - before - after);
    kt_zero(to + count - after, after);
}

/* Steps [k0, k0 + depth) of the pixel whose filter begins at (h, w) of x. */
KT_INLINE void kt_gather_pixel(kt_real *to, const kt_real *x, long h, long w, long k0, long depth) {
    if (depth == KT_K) { /* constant lengths */
        for (long r = 0; r < KT_R; r++)
            for (long s = 0; s < RUNS_IN_ROW; s++, to += RUN) kt_gather_run(to, x, h + r * KT_DILATION_H, w + s * KT_DILATION_W, 0, RUN);
        return;
    }
    for (long k = k0; k < k0 + depth;) {
        const long run = k / RUN, first = k % RUN, count = kt_min(RUN - first, k0 + depth - k);
        const long r = run / RUNS_IN_ROW, s = run % RUNS_IN_ROW;
        kt_gather_run(to, x, h + r * KT_DILATION_H, w + s * KT_DILATION_W, first, count);
        to += count, k += count;
    }
}

/* Pixels [row, row + rows) as `filled` rows, which repeat the last one. */
KT_NOINLINE void kt_gather(kt_real *to, const kt_real *x, long row, long rows, long filled, long k0, long depth) {
    long q = row % KT_Q, p = row / KT_Q % KT_P;
    x += row / (KT_P * KT_Q) * KT_X_IMAGE;
    for (long i = 0; i < filled; i++, to += PACKED_ROW) {
        kt_gather_pixel(to, x, p * KT_STRIDE_H - KT_PAD_H, q * KT_STRIDE_W - KT_PAD_W, k0, depth);
        if (i + 1 >= rows) continue;
        if (++q == KT_Q) q = 0, p++;
        if (p == KT_P) p = 0, x += KT_X_IMAGE;
    }
}

KT_NOINLINE void kt_pack_filters(kt_real *to, const kt_real *filters, long columns, long depth) {
    kt_pack_transposed(to, NR, filters, B_COL, columns, depth);
}

KT_INLINE void kt_fill_a(kt_real *to, const kt_work *w, long row, long rows, long k0, long depth) {
    kt_gather(to, w->a, row, rows, rows == MR - 1 ? rows : MR, k0, depth);
}

KT_INLINE void kt_fill_b(kt_real *to, const kt_work *w, long column, long columns, long k0, long depth) {
    kt_pack_filters(to, w->b + column * B_COL + k0, columns, depth);
}

KT_INLINE void kt_find_matrix(const kt_problem *p, long group, kt_work *w) {
    w->a = p->a + group * KT_GROUP_CHANNELS;
    w->b = p->b + group * KT_N * KT_K;
    w->c_offset = group * KT_N;
}

#include "cpu_blocks.h"

#include "cpu_isa_end.h"
