/* Grouped convolution with few filters a group (depthwise, mostly): lanes of a vector are output channels.
 *
 * Output channels are cut into blocks of NV vectors, output rows into strips; threads take equal runs of (block, strip).
 * A register tile is PIXELS neighbouring outputs of one row: each tap multiplies a vector of x with one of the filters,
 * element by element. Lane k wants channel k / (filters of a group) * (channels of a group) + c: with one of each that is
 * x as it lies, which is used in place; otherwise a thread spreads the strip's rows of x, a lane for each output channel. The padding is never stored: rows of taps outside x are left out, and pixels at the left and right edge are
 * computed one by one with the taps they have.
 */
#include "cpu_problem.h"

#ifndef KT_GROUPS
#define KT_GROUPS 64
#endif
#include "cpu_conv2d.h"

/* tile */
#ifndef KT_PIXELS
#define KT_PIXELS 4 /* outputs of a register tile, along a row */
#endif
#ifndef KT_NV
#define KT_NV 2 /* vectors of channels in it */
#endif
#ifndef KT_STRIP
#define KT_STRIP 8 /* output rows of a unit of work */
#endif
/* perm */
#ifndef KT_ROWS_OUTER
#define KT_ROWS_OUTER 0 /* the outer loop runs over strips (x is read as it lies), 0: over blocks of channels */
#endif
/* unroll */
#ifndef KT_UNROLL_S
#define KT_UNROLL_S 1 /* 1: all taps of a filter's row, so that neighbours share loads of x */
#endif

#if KT_UNROLL_S
#define KT_UNROLL_TAPS KT_UNROLL_BY(KT_S)
#else
#define KT_UNROLL_TAPS KT_UNROLL_BY(1)
#endif

/* 1: strips of x are copied, a lane for each output channel; 0: x in place. */
#define KT_SPREAD (KT_GROUP_CHANNELS > 1 || KT_CHANNELS != KT_FILTERS || KT_FILTERS < KT_LANES)

enum {
    BLOCK = KT_NV * (int)(KT_VEC_BYTES / sizeof(kt_real)), /* channels */
    BLOCKS = KT_CEIL_DIV(KT_FILTERS, BLOCK),
    STRIPS = KT_CEIL_DIV(KT_P, KT_STRIP), /* of an image */
    DEPTH = KT_GROUP_CHANNELS,
    /* Rows of x that a strip reads. */
    REACH = KT_MIN(KT_HEIGHT, (KT_STRIP - 1) * KT_STRIDE_H + (KT_R - 1) * KT_DILATION_H + 1),
    X_PIXEL = KT_SPREAD ? DEPTH * BLOCK : KT_CHANNELS,
    TAP = DEPTH * BLOCK, /* elements of packed filters */
    /* Outputs [Q_FIRST, Q_LAST) of a row have all taps of a filter's row inside x. */
    Q_FIRST = KT_MIN(KT_CEIL_DIV(KT_PAD_W, KT_STRIDE_W), KT_Q),
    Q_SPAN = KT_WIDTH + KT_PAD_W - (KT_S - 1) * KT_DILATION_W,
    Q_END = Q_SPAN < 1 ? 0 : KT_MIN((Q_SPAN - 1) / KT_STRIDE_W + 1, KT_Q),
    Q_LAST = Q_END < Q_FIRST ? Q_FIRST : Q_END,
};

_Static_assert(KT_SPREAD || KT_FILTERS >= BLOCK, "a block of x in place exceeds its channels");

/* 1: lanes of a vector belong to whole groups with as many channels as filters (Clang has no shuffle by a variable). */
#if defined(__clang__)
#define KT_SHUFFLES 0
#else
#define KT_SHUFFLES (KT_GROUP_CHANNELS > 1 && KT_GROUP_CHANNELS == KT_GROUP_FILTERS && KT_VEC_BYTES / (KT_DOUBLE ? 8 : 4) % KT_GROUP_CHANNELS == 0)
#endif

#define KT_FILTER_BYTES KT_ROUND_UP((size_t)BLOCKS * KT_R * KT_S * TAP * sizeof(kt_real))
#define KT_STRIP_BYTES (KT_SPREAD ? KT_ROUND_UP((size_t)REACH * KT_WIDTH * X_PIXEL * sizeof(kt_real)) : 0)
#define KT_FLAG_BYTES KT_ROUND_UP(BLOCKS)
#define KT_THREAD_BYTES (KT_FILTER_BYTES + KT_STRIP_BYTES + KT_FLAG_BYTES)

typedef struct {
    const kt_real *x, *filters;
    kt_real *y;
    kt_epilogue epilogue;
    char *workspace;
} kt_problem;

/* One unit of work: channels [channel, channel + BLOCK) of some rows of an image. */
typedef struct {
    const kt_real *x;       /* row `first_row`, in place or copied */
    const kt_real *filters; /* [R][S][DEPTH][BLOCK] */
    kt_real *y;             /* of the whole batch */
    const kt_epilogue *epilogue;
    long first_row, image, channel;
    long valid0, valid1; /* lanes of the block that belong to this unit */
} kt_unit;

/* The first tap from `start` in steps of `dilation` that is not below zero, and the first that is not below `extent`. */
KT_INLINE long kt_tap_at(long start, long dilation, long taps, long extent) {
    const long distance = extent - start;
    return distance <= 0 ? 0 : kt_min((distance + dilation - 1) / dilation, taps);
}

/* Epilogues, and blocks that other units share. */
KT_NOINLINE void kt_write_slow(const kt_unit *u, const kt_real *sums, long pixel, long pixels) {
    for (long i = 0; i < pixels; i++)
        for (long j = u->valid0; j < u->valid1; j += KT_LANES) {
            const long count = kt_min(u->valid1 - j, KT_LANES), column = u->channel + j, index = (pixel + i) * KT_FILTERS + column;
            const kt_vec x = kt_apply_epilogue(kt_load_first(sums + i * BLOCK + j, count), u->epilogue, index, column, count);
            kt_store_first(u->y + index, x, count);
        }
}

/* Outputs q .. q + pixels of row p from the taps [s0, s1) of each filter's row. */
KT_INLINE void kt_pixels(const kt_unit *u, long p, long q, const int pixels, const long s0, const long s1) {
    kt_vec acc[KT_PIXELS][KT_NV];
    KT_UNROLL_ALL
    for (int i = 0; i < pixels; i++) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) acc[i][j] = (kt_vec){0};
    }
    const long h = p * KT_STRIDE_H - KT_PAD_H, w = q * KT_STRIDE_W - KT_PAD_W;
    const long r1 = kt_tap_at(h, KT_DILATION_H, KT_R, KT_HEIGHT);
    for (long r = kt_tap_at(h, KT_DILATION_H, KT_R, 0); r < r1; r++) {
        const kt_real *row = u->x + (h + r * KT_DILATION_H - u->first_row) * ((long)KT_WIDTH * X_PIXEL);
        const kt_real *filters = u->filters + r * (KT_S * TAP);
        KT_UNROLL_TAPS
        for (long s = s0; s < s1; s++) {
            for (int c = 0; c < DEPTH; c++) {
                const kt_real *x = row + (w + s * KT_DILATION_W) * X_PIXEL + c * BLOCK;
                KT_UNROLL_ALL
                for (int j = 0; j < KT_NV; j++) {
                    const kt_vec f = kt_load(filters + s * TAP + c * BLOCK + j * KT_LANES);
                    KT_UNROLL_ALL
                    for (int i = 0; i < pixels; i++)
                        acc[i][j] += kt_load(x + (long)i * KT_STRIDE_W * X_PIXEL + j * KT_LANES) * f;
                }
            }
        }
    }
    const long pixel = (u->image * KT_P + p) * KT_Q + q;
    if (KT_HAS_EPILOGUE || u->valid1 - u->valid0 < BLOCK) {
        kt_real sums[KT_PIXELS * BLOCK];
        for (int i = 0; i < pixels; i++)
            for (int j = 0; j < KT_NV; j++) kt_store(sums + i * BLOCK + j * KT_LANES, acc[i][j]);
        kt_write_slow(u, sums, pixel, pixels);
        return;
    }
    KT_UNROLL_ALL
    for (int i = 0; i < pixels; i++) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) kt_store(u->y + (pixel + i) * KT_FILTERS + u->channel + j * KT_LANES, acc[i][j]);
    }
}

KT_NOINLINE void kt_inner_pixels(const kt_unit *u, long p, long q) { kt_pixels(u, p, q, KT_PIXELS, 0, KT_S); }

/* One output of row p, with the taps that lie inside x. */
KT_NOINLINE void kt_edge_pixel(const kt_unit *u, long p, long q) {
    const long w = q * KT_STRIDE_W - KT_PAD_W;
    kt_pixels(u, p, q, 1, kt_tap_at(w, KT_DILATION_W, KT_S, 0), kt_tap_at(w, KT_DILATION_W, KT_S, KT_WIDTH));
}

/* A last tile that would overhang moves back over outputs that are already done. */
static void kt_run_row(const kt_unit *u, long p) {
    for (long q = 0; q < Q_FIRST; q++) kt_edge_pixel(u, p, q);
    long q = Q_FIRST;
    if (Q_LAST - Q_FIRST >= KT_PIXELS)
        for (; q < Q_LAST; q += KT_PIXELS) kt_inner_pixels(u, p, kt_min(q, Q_LAST - KT_PIXELS));
    for (q = kt_min(q, Q_LAST); q < KT_Q; q++) kt_edge_pixel(u, p, q);
}

/* to[R][S][DEPTH][BLOCK]; lanes without a filter repeat the last one. */
KT_NOINLINE void kt_pack_filters(kt_real *to, const kt_real *filters, long channel) {
    for (long lane = 0; lane < BLOCK; lane++) {
        const kt_real *from = filters + kt_min(channel + lane, KT_FILTERS - 1) * (KT_R * KT_S * DEPTH);
        for (long i = 0; i < KT_R * KT_S * DEPTH; i++) to[i * BLOCK + lane] = from[i];
    }
}

/* Rows of x, a lane for each output channel: to[row][W][DEPTH][BLOCK]. */
KT_NOINLINE void kt_spread_strip(kt_real *to, const kt_real *x, long channel, long rows) {
    kt_int source[BLOCK]; /* of each lane, within a pixel */
    for (long lane = 0; lane < BLOCK; lane++)
        source[lane] = (kt_int)(kt_min(channel + lane, KT_FILTERS - 1) / KT_GROUP_FILTERS * DEPTH);
    for (long pixel = 0; pixel < rows * KT_WIDTH; pixel++, x += KT_CHANNELS)
        for (long c = 0; c < DEPTH; c++, to += BLOCK)
            for (long lane = 0; lane < BLOCK; lane++) to[lane] = x[source[lane] + c];
}

#if KT_SHUFFLES
/* The same for a whole block: a vector of outputs needs the same vector of inputs, its lanes in another order. */
KT_NOINLINE void kt_shuffle_strip(kt_real *to, const kt_real *x, long channel, long rows) {
    kt_ivec first; /* lane of the group's first channel */
    for (int lane = 0; lane < KT_LANES; lane++) first[lane] = lane / DEPTH * DEPTH;
    x += channel;
    for (long pixel = 0; pixel < rows * KT_WIDTH; pixel++, x += KT_CHANNELS, to += DEPTH * BLOCK) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) {
            const kt_vec v = kt_load(x + j * KT_LANES);
            KT_UNROLL_ALL
            for (int c = 0; c < DEPTH; c++) kt_store(to + c * BLOCK + j * KT_LANES, __builtin_shuffle(v, first + c));
        }
    }
}
#endif

/* Fills `to` with spread rows of x and returns it. */
static const kt_real *kt_spread(kt_real *to, const kt_real *x, long channel, long rows) {
#if KT_SHUFFLES
    if (channel + BLOCK <= KT_FILTERS) {
        kt_shuffle_strip(to, x, channel, rows);
        return to;
    }
#endif
    kt_spread_strip(to, x, channel, rows);
    return to;
}

static void kt_run_unit(const kt_problem *p, long block, long strip, char *own) {
    kt_real *filters = (kt_real *)own + block * (KT_R * KT_S * TAP), *copy = (kt_real *)(own + KT_FILTER_BYTES);
    char *packed = own + KT_FILTER_BYTES + KT_STRIP_BYTES + block;
    const long image = strip / STRIPS, p0 = kt_split(KT_P, STRIPS, strip % STRIPS), p1 = kt_split(KT_P, STRIPS, strip % STRIPS + 1);
    const long first = block * BLOCK, channel = KT_SPREAD ? first : kt_min(first, KT_FILTERS - BLOCK);
    kt_unit u = {.filters = filters, .y = p->y, .epilogue = &p->epilogue, .image = image, .channel = channel,
                 .valid0 = first - channel, .valid1 = kt_min(KT_FILTERS - channel, BLOCK)};
    if (!*packed) kt_pack_filters(filters, p->filters, channel);
    *packed = 1;
    u.x = p->x + image * KT_X_IMAGE + channel;
    if (KT_SPREAD) {
        const long last = (p1 - 1) * KT_STRIDE_H - KT_PAD_H + (KT_R - 1) * KT_DILATION_H + 1;
        u.first_row = kt_min(p0 * KT_STRIDE_H > KT_PAD_H ? p0 * KT_STRIDE_H - KT_PAD_H : 0, KT_HEIGHT);
        u.x = kt_spread(copy, p->x + image * KT_X_IMAGE + u.first_row * KT_X_ROW, channel, kt_min(last, KT_HEIGHT) - u.first_row);
    }
    for (long row = p0; row < p1; row++) kt_run_row(&u, row);
}

static void kt_run_thread(void *context, int thread, int threads) {
    const kt_problem *p = context;
    const long strips = (long)KT_IMAGES * STRIPS, units = strips * BLOCKS;
    char *own = p->workspace + (size_t)thread * KT_THREAD_BYTES;
    memset(own + KT_FILTER_BYTES + KT_STRIP_BYTES, 0, KT_FLAG_BYTES);
    for (long unit = kt_split(units, threads, thread); unit < kt_split(units, threads, thread + 1); unit++) {
        if (KT_ROWS_OUTER)
            kt_run_unit(p, unit % BLOCKS, unit / BLOCKS, own);
        else
            kt_run_unit(p, unit / strips, unit % strips, own);
    }
}

size_t kt_workspace_bytes(void) { return KT_THREADS * KT_THREAD_BYTES; }

int kt_launch(void *const *args, void *workspace) {
    kt_problem p = {.x = args[0], .filters = args[1], .workspace = workspace};
    p.y = kt_epilogue_operands(args + 2, &p.epilogue);
    kt_parallel(kt_run_thread, &p);
    return 0;
}

#include "cpu_isa_end.h"
