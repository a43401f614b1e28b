// What a tile of KT_BP x KT_BQ output pixels sees of x, in shared memory: a patch of pixels, PATCH_CHANNELS of each. Every tap
// of the filter reads it there. Comes after a kernel file has defined KT_BP, KT_BQ, PATCH_CHANNELS and THREADS.
//
// Columns that output pixels of one tap see, KT_STRIDE_W apart, lie side by side; an odd number of 16-byte chunks from pixel
// to pixel keeps ldmatrix free of conflicts.
#ifndef KT_CONV_PATCH_CUH
#define KT_CONV_PATCH_CUH

#include "conv.cuh"
#include "memory.cuh"

constexpr int PATCH_H = (KT_BP - 1) * KT_STRIDE_H + (KT_R - 1) * KT_DILATION_H + 1;
constexpr int PATCH_W = (KT_BQ - 1) * KT_STRIDE_W + (KT_S - 1) * KT_DILATION_W + 1;
constexpr int PHASE_W = kt_ceil_div(PATCH_W, KT_STRIDE_W), PATCH_ROW = PHASE_W * KT_STRIDE_W; // pixels from row to row
constexpr int CHUNK_ELEMENTS = 16 / ELEMENT_BYTES, CHUNKS = PATCH_CHANNELS / CHUNK_ELEMENTS, PIXEL_BYTES = (CHUNKS | 1) * 16;
constexpr int PATCH_BYTES = kt_round_up(PATCH_H * PATCH_ROW * PIXEL_BYTES, 128);
constexpr u32 P_BLOCKS = kt_ceil_div(OUT_P, KT_BP), Q_BLOCKS = kt_ceil_div(OUT_Q, KT_BQ);
static_assert(PATCH_CHANNELS % CHUNK_ELEMENTS == 0 && KT_CHANNELS % CHUNK_ELEMENTS == 0, "whole chunks");

// The tile's image and first output pixel.
KT_DEVICE kt_pixel kt_patch_origin(u32 tile) {
    return {tile / (P_BLOCKS * Q_BLOCKS), tile / Q_BLOCKS % P_BLOCKS * KT_BP, tile % Q_BLOCKS * KT_BQ};
}

// Bytes from what tap (0, 0) of output pixel `m` of the tile sees, to what another tap does; and of that in the patch.
KT_PURE int kt_tap_offset(int r, int s) {
    const int column = s * KT_DILATION_W;
    return (r * KT_DILATION_H * PATCH_ROW + column % KT_STRIDE_W * PHASE_W + column / KT_STRIDE_W) * PIXEL_BYTES;
}
KT_DEVICE u32 kt_patch_pixel(u32 m) { return (m / KT_BQ * (KT_STRIDE_H * PATCH_ROW) + m % KT_BQ) * PIXEL_BYTES; }

// Starts the copies of a patch; channels from `channel` on, those past the last of x being zeros.
KT_DEVICE void kt_load_patch(u32 to, const kt_element *x, const kt_pixel &at, u32 first_channel) {
    const int top = (int)(at.p * KT_STRIDE_H) - KT_PAD_H, left = (int)(at.q * KT_STRIDE_W) - KT_PAD_W;
    const kt_element *image = x + (i64)at.n * KT_HEIGHT * KT_WIDTH * KT_CHANNELS + first_channel;
    typedef typename kt_offset_type<((u64)KT_HEIGHT * KT_WIDTH * KT_CHANNELS >= 1ull << 31)>::type offset;
    u32 chunk = threadIdx.x % CHUNKS, column = threadIdx.x / CHUNKS % PATCH_W, row = threadIdx.x / (CHUNKS * PATCH_W);
    for (u32 i = threadIdx.x; i < PATCH_H * PATCH_W * CHUNKS; i += THREADS) {
        const int h = top + (int)row, w = left + (int)column;
        const u32 channel = chunk * CHUNK_ELEMENTS;
        const bool inside = (u32)h < KT_HEIGHT && (u32)w < KT_WIDTH && first_channel + channel < KT_CHANNELS;
        const kt_element *from = image + (((offset)h * KT_WIDTH + w) * KT_CHANNELS + channel);
        const u32 pixel = row * PATCH_ROW + column % KT_STRIDE_W * PHASE_W + column / KT_STRIDE_W;
        kt_copy_async<16, 128>(to + pixel * PIXEL_BYTES + chunk * 16, from, inside ? 16 : 0);
        // To the piece that comes THREADS later.
        chunk += THREADS % CHUNKS, column += THREADS / CHUNKS % PATCH_W, row += THREADS / CHUNKS / PATCH_W;
        if (chunk >= CHUNKS) chunk -= CHUNKS, column++;
        if (column >= PATCH_W) column -= PATCH_W, row++;
    }
}

#endif
