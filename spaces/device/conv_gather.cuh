// The left operand of a convolution as a product: row m is output pixel m, and along k come the taps of the filter with the
// channels of each. Its tiles are gathered from x, or from a copy of x whose channels and columns are padded with zeros.
#ifndef KT_CONV_GATHER_CUH
#define KT_CONV_GATHER_CUH

#include "conv.cuh"
#include "mma_config.cuh"
#include "tile.cuh"

// mem
#ifndef KT_JOIN_TAPS
#define KT_JOIN_TAPS 0 /* 1: the taps of a filter row are one run along k, as their channels are neighbours in memory */
#endif
#ifndef KT_BY_L1
#define KT_BY_L1 0 /* 1: copies of 16 bytes go through L1, where neighbouring taps meet again */
#endif
// perm
#ifndef KT_CHANNELS_FIRST
#define KT_CHANNELS_FIRST 0 /* 1: all taps of BK channels come before the next channels */
#endif
// fusion
#ifndef KT_REPACK_X
#define KT_REPACK_X 0 /* 1: x is first copied, with KT_X_CHANNELS a group */
#endif
#ifndef KT_X_CHANNELS
#define KT_X_CHANNELS GROUP_CHANNELS
#endif

// ---- x as the kernel reads it

constexpr bool JOIN_TAPS = KT_JOIN_TAPS, PAD_COLUMNS = KT_REPACK_X && JOIN_TAPS;
static_assert(!JOIN_TAPS || (KT_GROUPS == 1 && (KT_DILATION_W == 1 || KT_S == 1)), "the taps of a row are neighbours");
static_assert(!JOIN_TAPS || PAD_COLUMNS || KT_PAD_W == 0, "no column lies outside");
constexpr i64 X_PITCH = (i64)KT_X_CHANNELS * KT_GROUPS;         // elements from pixel to pixel
constexpr i64 X_W = PAD_COLUMNS ? KT_WIDTH + 2 * KT_PAD_W : KT_WIDTH;   // pixels of a row
constexpr u64 X_BYTES = (u64)KT_IMAGES * KT_HEIGHT * X_W * X_PITCH * ELEMENT_BYTES;
constexpr int GATHER_PAD_W = JOIN_TAPS ? 0 : KT_PAD_W, ROW_TAPS = JOIN_TAPS ? 1 : KT_S, TAPS = KT_R * ROW_TAPS;

// A run: neighbours along k that are neighbours in memory. Zeros fill it up to whole copies.
constexpr int PIECE_ELEMENTS = KT_COPY_A / ELEMENT_BYTES;
constexpr int RUN = JOIN_TAPS ? KT_S * KT_X_CHANNELS : KT_X_CHANNELS, PADDED_RUN = kt_round_up(RUN, PIECE_ELEMENTS);
static_assert(KT_K == TAPS * PADDED_RUN && KT_M == OUT_PIXELS && KT_BATCH == KT_GROUPS && KT_N == GROUP_FILTERS, "the product");
static_assert(X_PITCH * ELEMENT_BYTES % KT_COPY_A == 0 || JOIN_TAPS, "pixels are aligned");
static_assert(!JOIN_TAPS || KT_STRIDE_W * X_PITCH * ELEMENT_BYTES % KT_COPY_A == 0, "the first taps are aligned");
static_assert(!JOIN_TAPS || X_W * X_PITCH * ELEMENT_BYTES % KT_COPY_A == 0, "rows are aligned");

constexpr bool ONE_TAP = PADDED_RUN % BK == 0; // a tile of k lies in one run
static_assert(!KT_CHANNELS_FIRST || ONE_TAP, "tiles of k are parts of a run");

// A place along k: filter row, tap of the row, and element of the run.
struct kt_walk {
    u32 r, s, c;

    static KT_DEVICE kt_walk from(u32 k) {
        if (KT_CHANNELS_FIRST) {
            const u32 chunk = k / (BK * TAPS), tap = k / BK % TAPS;
            return {tap / ROW_TAPS, tap % ROW_TAPS, chunk * BK};
        }
        const u32 run = k / PADDED_RUN;
        return {run / ROW_TAPS, run % ROW_TAPS, k % PADDED_RUN};
    }
    // To the same element of the next tile of k.
    KT_DEVICE void advance() {
        if (KT_CHANNELS_FIRST) {
            s++;
            if (s == ROW_TAPS) s = 0, r++;
            if (r == KT_R) r = 0, c += BK;
        } else {
            c += BK % PADDED_RUN, s += BK / PADDED_RUN % ROW_TAPS, r += BK / PADDED_RUN / ROW_TAPS;
            if (c >= PADDED_RUN) c -= PADDED_RUN, s++;
            if (s >= ROW_TAPS) s -= ROW_TAPS, r++;
        }
    }
    // Where the tap's first channel comes in the filter's row along k.
    KT_DEVICE i64 filter_offset() const { return (i64)(r * ROW_TAPS + s) * PADDED_RUN + c; }
};

// One thread's share of gathering tiles: pieces of several pixels at the same place along k.
template <class Layout> struct kt_gather {
    static constexpr int PIECE = KT_COPY_A, PER_ROW = BK * ELEMENT_BYTES / PIECE, PIECES = BM * PER_ROW;
    static constexpr int COUNT = kt_ceil_div(PIECES, THREADS), ROW_STEP = THREADS / PER_ROW;
    static constexpr bool BY_L1 = PIECE != 16 || KT_BY_L1, CUT = RUN % PIECE_ELEMENTS != 0;
    static constexpr bool BITS = KT_R + 1 + ROW_TAPS <= 32; // the taps of a pixel that lie inside x fit a word
    static_assert(THREADS % PER_ROW == 0, "the pieces of a thread are in one column of the tile");
    typedef typename kt_offset_type<(X_BYTES >= 1ull << 31)>::type offset;

    const u8 *origin;     // the thread's column of tap (0, 0) of the pixel at (0, 0)
    offset pixel[COUNT];  // bytes from there
    u32 inside[COUNT];    // BITS: 1 << r and 1 << (KT_R + 1 + s) of the taps inside; else the row of tap 0
    int first_w[BITS ? 1 : COUNT]; // the column of tap 0

    KT_DEVICE kt_gather(const kt_element *x, u32 group, u32 m) : origin((const u8 *)(x + group * KT_X_CHANNELS)) {
        if (ONE_TAP) origin += column();
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const u32 row = m + threadIdx.x / PER_ROW + i * ROW_STEP;
            const bool exists = row < KT_M;
            const kt_pixel out = kt_pixel_of(kt_min(row, (u32)KT_M - 1));
            const int h = (int)(out.p * KT_STRIDE_H) - KT_PAD_H, w = (int)(out.q * KT_STRIDE_W) - GATHER_PAD_W;
            pixel[i] = (((offset)out.n * KT_HEIGHT + h) * (offset)X_W + w) * (offset)(X_PITCH * ELEMENT_BYTES);
            if constexpr (BITS) {
                const u32 rows = kt_bits(h, KT_HEIGHT, KT_R, KT_DILATION_H), columns = kt_bits(w, (int)X_W, ROW_TAPS, KT_DILATION_W);
                inside[i] = exists ? rows | (JOIN_TAPS ? 1u : columns) << (KT_R + 1) : 0;
            } else {
                inside[i] = exists ? (u32)h : 0x80000000u;
                first_w[i] = w;
            }
        }
    }
    static KT_DEVICE u32 column() { return threadIdx.x % PER_ROW * PIECE; }
    static KT_DEVICE u32 kt_bits(int start, int size, int taps, int dilation) {
        const u32 first = kt_min(kt_first_tap(start, dilation), (u32)taps), end = kt_end_tap(start, size, taps, dilation);
        return ((1u << end) - 1) & ~((1u << first) - 1);
    }
    KT_DEVICE bool reads(int i, const kt_walk &at) const {
        if constexpr (BITS) {
            // Past the end of k there is no row: bit KT_R is never set.
            const u32 wanted = 1u << kt_min(at.r, (u32)KT_R) | 1u << (KT_R + 1 + at.s);
            return (inside[i] & wanted) == wanted;
        } else {
            const u32 h = inside[i] + at.r * KT_DILATION_H, w = (u32)first_w[i] + at.s * KT_DILATION_W;
            return at.r < KT_R && h < KT_HEIGHT && (JOIN_TAPS || w < (u32)X_W);
        }
    }
    // `at`: place along k of the thread's pieces, of the tile's first with ONE_TAP.
    KT_DEVICE void copy(u32 to, const kt_walk &at) const {
        const offset tap = ((offset)at.r * (KT_DILATION_H * (offset)X_W) + at.s * KT_DILATION_W) * (offset)X_PITCH + at.c;
        const u8 *from = origin + tap * ELEMENT_BYTES;
        const int left = (RUN - (int)at.c) * ELEMENT_BYTES - (ONE_TAP ? (int)column() : 0);
        const u32 valid = CUT ? (u32)kt_max(kt_min(left, PIECE), 0) : PIECE;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const u32 row = threadIdx.x / PER_ROW + i * ROW_STEP;
            if (PIECES % THREADS && i == COUNT - 1 && row >= BM) continue;
            kt_copy_async<PIECE, KT_PREFETCH, BY_L1>(to + Layout::offset(row, column()), from + pixel[i], reads(i, at) ? valid : 0);
        }
    }
};

// ---- the copy of x

enum : int { PADDING_GROUP = 16 / ELEMENT_BYTES };
[[maybe_unused]] constexpr u64 PADDED_X_VECTORS = kt_ceil_div<u64>(X_BYTES, 16), PADDED_X_BYTES = kt_round_up<u64>(X_BYTES, 256);

KT_DEVICE u32 kt_element_bits(const kt_element *p) {
#if KT_DTYPE == KT_TF32
    return __float_as_uint(*p);
#else
    return ELEMENT_BYTES == 1 ? (u32)(u8)*p : (u32)*p;
#endif
}

KT_DEVICE void kt_pad_x(u8 *to, const kt_element *x, u64 vector) {
    const u64 first = vector * PADDING_GROUP;
    u32 channel = (u32)(first % X_PITCH);
    i64 column = (i64)(first / X_PITCH % X_W) - (PAD_COLUMNS ? KT_PAD_W : 0);
    u64 row = first / X_PITCH / X_W;
    kt_words<4> y = {};
#pragma unroll
    for (int i = 0; i < PADDING_GROUP; i++) {
        const u32 group = channel / KT_X_CHANNELS, c = channel % KT_X_CHANNELS;
        if (c < GROUP_CHANNELS && column >= 0 && column < KT_WIDTH && row < (u64)KT_IMAGES * KT_HEIGHT) {
            const kt_element *from = x + (row * KT_WIDTH + column) * (i64)KT_CHANNELS + group * GROUP_CHANNELS + c;
            y.w[i * ELEMENT_BYTES / 4] |= kt_element_bits(from) << (8 * (i * ELEMENT_BYTES % 4));
        }
        if (++channel == X_PITCH) {
            channel = 0;
            if (++column == X_W - (PAD_COLUMNS ? KT_PAD_W : 0)) column = PAD_COLUMNS ? -KT_PAD_W : 0, row++;
        }
    }
    kt_store_words(to + vector * 16, y);
}

#endif
