// The convolution y[n, p, q, k] = epilogue(sum over r, s, c of x[n, h, w, c] * filter[k, r, s, c]): its extents, and where
// images, filters and outputs lie. x is NHWC, filters are KRSC, y is NPQK; a group has its own channels of each.
#ifndef KT_CONV_CUH
#define KT_CONV_CUH

#include "types.cuh"

#ifndef KT_IMAGES
#define KT_IMAGES 4
#endif
#ifndef KT_HEIGHT
#define KT_HEIGHT 28
#endif
#ifndef KT_WIDTH
#define KT_WIDTH 28
#endif
#ifndef KT_CHANNELS
#define KT_CHANNELS 64 /* of x */
#endif
#ifndef KT_FILTERS
#define KT_FILTERS 64
#endif
#ifndef KT_GROUPS
#define KT_GROUPS 1
#endif
#ifndef KT_R
#define KT_R 3
#endif
#ifndef KT_S
#define KT_S 3
#endif
#ifndef KT_STRIDE_H
#define KT_STRIDE_H 1
#endif
#ifndef KT_STRIDE_W
#define KT_STRIDE_W 1
#endif
#ifndef KT_PAD_H
#define KT_PAD_H 1
#endif
#ifndef KT_PAD_W
#define KT_PAD_W 1
#endif
#ifndef KT_DILATION_H
#define KT_DILATION_H 1
#endif
#ifndef KT_DILATION_W
#define KT_DILATION_W 1
#endif

// Of one group.
constexpr int GROUP_CHANNELS = KT_CHANNELS / KT_GROUPS, GROUP_FILTERS = KT_FILTERS / KT_GROUPS;

constexpr int kt_outputs_along(int size, int pad, int taps, int dilation, int stride) {
    return (int)(((i64)size + 2 * (i64)pad - (i64)(taps - 1) * dilation - 1) / stride + 1);
}
constexpr int OUT_P = kt_outputs_along(KT_HEIGHT, KT_PAD_H, KT_R, KT_DILATION_H, KT_STRIDE_H);
constexpr int OUT_Q = kt_outputs_along(KT_WIDTH, KT_PAD_W, KT_S, KT_DILATION_W, KT_STRIDE_W);
[[maybe_unused]] constexpr u64 OUT_PIXELS = (u64)KT_IMAGES * OUT_P * OUT_Q;

// Offsets: 32 bits where they suffice.
template <bool WIDE> struct kt_offset_type {
    typedef int type;
};
template <> struct kt_offset_type<true> {
    typedef i64 type;
};

struct kt_pixel {
    u32 n, p, q;
};
KT_DEVICE kt_pixel kt_pixel_of(u32 m) {
    const u32 inside = m % (u32)(OUT_P * OUT_Q);
    return {m / (u32)(OUT_P * OUT_Q), inside / OUT_Q, inside % OUT_Q};
}

// First tap that lies in an axis of `size` when tap 0 is at `start`, and the first that lies behind it.
KT_DEVICE u32 kt_first_tap(int start, int dilation) { return start >= 0 ? 0 : (u32)(-start + dilation - 1) / (u32)dilation; }
KT_DEVICE u32 kt_end_tap(int start, int size, int taps, int dilation) {
    return start >= size ? 0 : kt_min((u32)taps, (u32)(size - start + dilation - 1) / (u32)dilation);
}

#endif
