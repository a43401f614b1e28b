// Convolution by the multiply-add units, for groups of few channels (depthwise above all): no product, no tiles of k.
//
// A thread computes KT_TP x KT_TQ neighbouring pixels of KT_VECTOR neighbouring output channels. It walks over the rows of x
// that those pixels see, loads what they see of a row once, and uses it for every tap. The filters of the CTA's channels wait
// in shared memory as [channel of the group][tap][output channel], in single precision, KT_CHUNK channels at a time.
#include "conv.cuh"
#include "epilogue.cuh"
#include "split_k.cuh"

// tile
#ifndef KT_TP
#define KT_TP 2
#endif
#ifndef KT_TQ
#define KT_TQ 4
#endif
#ifndef KT_VECTOR
#define KT_VECTOR 8 /* output channels of a thread: one store of at most 16 bytes */
#endif
#ifndef KT_CHUNK
#define KT_CHUNK 1 /* channels of the group whose filters are in shared memory at once */
#endif
// perm
#ifndef KT_CHANNELS_FIRST
#define KT_CHANNELS_FIRST 1 /* 1: neighbouring CTAs have the same pixels; 0: the same channels */
#endif
// unroll
#ifndef KT_UNROLL_ROWS
#define KT_UNROLL_ROWS 1 /* 1: the rows of x are unrolled; their taps are then known to the compiler */
#endif
// map
#ifndef KT_THREADS_C
#define KT_THREADS_C 8 /* threads along the channels */
#endif
#ifndef KT_STRIPS
#define KT_STRIPS 16 /* strips of pixels in a CTA */
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif

// ---- shape of the work

constexpr int TP = KT_TP, TQ = KT_TQ, VECTOR = KT_VECTOR, THREADS = KT_THREADS_C * KT_STRIPS;
constexpr int BLOCK_C = KT_THREADS_C * VECTOR; // output channels of a CTA
static_assert(KT_FILTERS % VECTOR == 0 && VECTOR * OUTPUT_BYTES <= 16, "whole stores");
static_assert(GROUP_FILTERS % VECTOR == 0 || VECTOR % GROUP_FILTERS == 0, "a thread's channels are of one group, or of whole groups");

// What a thread reads of one pixel at once: of LANES groups, DEPTH channels each.
constexpr int LANES = GROUP_FILTERS >= VECTOR ? 1 : VECTOR / GROUP_FILTERS, LANE_FILTERS = VECTOR / LANES;
constexpr int DEPTH = kt_alignment(GROUP_CHANNELS, 4), LOADS = GROUP_CHANNELS == 1 ? 1 : LANES, LOADED = LANES * DEPTH / LOADS;

constexpr int SPAN = kt_min(kt_min(KT_S, 8), 31 / KT_DILATION_W + 1); // taps of a row that are unrolled
constexpr int ROWS = (TP - 1) * KT_STRIDE_H + (KT_R - 1) * KT_DILATION_H + 1;
constexpr int COLUMNS = (TQ - 1) * KT_STRIDE_W + (SPAN - 1) * KT_DILATION_W + 1;
constexpr int TAPS = KT_R * KT_S;

constexpr u32 STRIPS_P = kt_ceil_div(OUT_P, TP), STRIPS_Q = kt_ceil_div(OUT_Q, TQ), C_BLOCKS = kt_ceil_div(KT_FILTERS, BLOCK_C);
constexpr u64 STRIPS = (u64)KT_IMAGES * STRIPS_P * STRIPS_Q, BLOCKS = kt_ceil_div<u64>(STRIPS, KT_STRIPS) * C_BLOCKS;
static_assert(BLOCKS < 1ull << 31, "grid");

static_assert(KT_CHUNK % DEPTH == 0 && COLUMNS <= 32, "whole loads, one bit a column");
constexpr int SHARED_BYTES = KT_CHUNK * TAPS * BLOCK_C * (int)sizeof(float);
[[maybe_unused]] constexpr u64 WORKSPACE_BYTES = 0;
using Splits = kt_split_workspace<0, 0>;
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
#endif

extern __shared__ __align__(128) u8 kt_shared[];

// ---- parts

// Filters [k][r][s][c] of the CTA's output channels from `first` on, for a chunk of channels from `channel` on.
KT_DEVICE void kt_stage_filters(const kt_element *w, u32 first, u32 channel) {
    float *to = (float *)kt_shared;
    constexpr u32 EACH = TAPS * KT_CHUNK;
    for (u32 i = threadIdx.x; i < BLOCK_C * EACH; i += THREADS) {
        const u32 k = i / EACH, tap = i % EACH / KT_CHUNK, c = i % KT_CHUNK;
        const bool inside = (KT_FILTERS % BLOCK_C == 0 || first + k < KT_FILTERS) && (GROUP_CHANNELS % KT_CHUNK == 0 || channel + c < GROUP_CHANNELS);
        const u64 from = ((u64)(first + k) * TAPS + tap) * GROUP_CHANNELS + channel + c;
        to[(c * TAPS + tap) * BLOCK_C + k] = inside ? kt_from_output(w[from]) : 0;
    }
}

// Whether pixel q of a strip sees a column of x, by some tap of the span.
KT_PURE bool kt_sees(int column, int q) {
    const int off = column - q * KT_STRIDE_W;
    return off >= 0 && off % KT_DILATION_W == 0 && off / KT_DILATION_W < SPAN;
}
KT_PURE bool kt_is_seen(int column) {
    for (int q = 0; q < TQ; q++)
        if (kt_sees(column, q)) return true;
    return false;
}

struct kt_row {
    float x[COLUMNS][LANES * DEPTH];

    // From `from` on, where column 0 is; bit i of `inside`: column i lies in x.
    KT_DEVICE void load(const kt_element *from, u32 inside) {
        kt_output_words<LOADED> words[COLUMNS][LOADS];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
            for (int l = 0; l < LOADS; l++) {
                words[i][l] = {};
                if (!kt_is_seen(i) || !(inside >> i & 1)) continue;
                const kt_element *p = from + (i64)i * KT_CHANNELS + l * GROUP_CHANNELS;
                if constexpr (LOADED * ELEMENT_BYTES == 2) words[i][l].words.w[0] = *(const u16 *)p;
                else words[i][l].words = kt_load_words<kt_output_words<LOADED>::WORDS>(p);
            }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
            for (int l = 0; l < LOADS; l++) {
                float part[LOADED];
                kt_unpack_outputs<LOADED>(part, words[i][l]);
#pragma unroll
                for (int e = 0; e < LOADED; e++) x[i][l * LOADED + e] = part[e];
            }
    }
};

// Adds the taps of filter row `r` from tap `s` on to one row of pixels.
KT_DEVICE void kt_add_taps(float (&sum)[TQ][VECTOR], const kt_row &row, const float *filters, int r, int s) {
    constexpr int WORDS = kt_min(VECTOR, 4);
#pragma unroll
    for (int t = 0; t < SPAN; t++) {
        if (KT_S % SPAN && s + t >= KT_S) continue;
#pragma unroll
        for (int c = 0; c < DEPTH; c++) {
            const float *at = filters + (c * TAPS + r * KT_S + s + t) * BLOCK_C;
            float w[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; v += WORDS) {
                const kt_words<WORDS> words = kt_load_words<WORDS>(at + v);
#pragma unroll
                for (int e = 0; e < WORDS; e++) w[v + e] = __uint_as_float(words.w[e]);
            }
#pragma unroll
            for (int q = 0; q < TQ; q++)
#pragma unroll
                for (int v = 0; v < VECTOR; v++)
                    sum[q][v] = fmaf(row.x[q * KT_STRIDE_W + t * KT_DILATION_W][v / LANE_FILTERS * DEPTH + c], w[v], sum[q][v]);
        }
    }
}

constexpr int ROWS_AT_ONCE = KT_UNROLL_ROWS ? ROWS : 1;

// All rows of x for `DEPTH` channels: `x` is where pixel (`top`, `left`) of them would be.
KT_DEVICE void kt_add_rows(float (&sum)[TP][TQ][VECTOR], const kt_element *x, int top, int left, const float *filters) {
#pragma unroll 1
    for (int s = 0; s < KT_S; s += SPAN) {
        const int column = left + s * KT_DILATION_W;
        u32 inside = 0;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) inside |= (u32)((u32)(column + i) < KT_WIDTH) << i;
#pragma unroll ROWS_AT_ONCE
        for (int j = 0; j < ROWS; j++) {
            kt_row row;
            row.load(x + ((i64)j * KT_WIDTH + s * KT_DILATION_W) * KT_CHANNELS, (u32)(top + j) < KT_HEIGHT ? inside : 0);
#pragma unroll
            for (int i = 0; i < TP; i++) {
                const int off = j - i * KT_STRIDE_H, r = off / KT_DILATION_H;
                if (off >= 0 && off % KT_DILATION_H == 0 && r < KT_R) kt_add_taps(sum[i], row, filters, r, s);
            }
        }
    }
}

// ---- kernel

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    kt_release_next();
    (void)workspace;
    constexpr u32 PIXEL_BLOCKS = (u32)(BLOCKS / C_BLOCKS);
    const u32 c_block = KT_CHANNELS_FIRST ? blockIdx.x % C_BLOCKS : blockIdx.x / PIXEL_BLOCKS;
    const u32 pixel_block = KT_CHANNELS_FIRST ? blockIdx.x / C_BLOCKS : blockIdx.x % PIXEL_BLOCKS;
    const u32 local = threadIdx.x % KT_THREADS_C * VECTOR, first = c_block * BLOCK_C, k = first + local;
    typedef kt_offset_type<(STRIPS + KT_STRIPS >= 1ull << 31)>::type index;
    const index strip = (index)pixel_block * KT_STRIPS + threadIdx.x / KT_THREADS_C;
    const bool works = strip < (index)STRIPS && k < KT_FILTERS;
    const u32 n = (u32)(strip / (index)(STRIPS_P * STRIPS_Q)), place = (u32)(strip % (index)(STRIPS_P * STRIPS_Q));
    const u32 p = place / STRIPS_Q * TP, q = place % STRIPS_Q * TQ;
    const int top = (int)(p * KT_STRIDE_H) - KT_PAD_H, left = (int)(q * KT_STRIDE_W) - KT_PAD_W;
    const i64 pixel = ((i64)n * KT_HEIGHT + top) * KT_WIDTH + left;
    const kt_element *x = a + pixel * KT_CHANNELS + k / GROUP_FILTERS * GROUP_CHANNELS;

    float sum[TP][TQ][VECTOR] = {};
    kt_await_previous();
#pragma unroll 1
    for (u32 chunk = 0; chunk < GROUP_CHANNELS; chunk += KT_CHUNK) {
        if (chunk) __syncthreads();
        kt_stage_filters(b, first, chunk);
        __syncthreads();
        const u32 depth = kt_min<u32>(KT_CHUNK, GROUP_CHANNELS - chunk);
        if (works)
#pragma unroll 1
            for (u32 d = 0; d < depth; d += DEPTH)
                kt_add_rows(sum, x + chunk + d, top, left, (const float *)kt_shared + d * (TAPS * BLOCK_C) + local);
    }
    if (!works) return;

    const kt_epilogue epilogue = KT_EPILOGUE_OPERANDS;
    const kt_columns<VECTOR> columns = kt_load_columns<VECTOR>(epilogue, k, true);
#pragma unroll
    for (int i = 0; i < TP; i++)
#pragma unroll
        for (int j = 0; j < TQ; j++) {
            if (p + i >= OUT_P || q + j >= OUT_Q) continue;
            const u64 at = (((u64)n * OUT_P + p + i) * OUT_Q + q + j) * KT_FILTERS + k;
            kt_finish_and_store<VECTOR>(c, at, sum[i][j], columns, epilogue);
        }
}

#include "launch.cuh"
