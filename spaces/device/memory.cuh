// Vector accesses to memory: aligned words, and 16 bytes at any address through two aligned loads.
#ifndef KT_MEMORY_CUH
#define KT_MEMORY_CUH

#include "ptx.cuh"

template <int COUNT> KT_DEVICE kt_words<COUNT> kt_load_words(const void *p) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "one access");
    kt_words<COUNT> x;
    if constexpr (COUNT == 1) x.w[0] = *(const u32 *)p;
    if constexpr (COUNT == 2) {
        const uint2 v = *(const uint2 *)p;
        x.w[0] = v.x, x.w[1] = v.y;
    }
    if constexpr (COUNT == 4) {
        const uint4 v = *(const uint4 *)p;
        x.w[0] = v.x, x.w[1] = v.y, x.w[2] = v.z, x.w[3] = v.w;
    }
    return x;
}

template <int COUNT> KT_DEVICE void kt_store_words(void *p, kt_words<COUNT> x) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "one access");
    if constexpr (COUNT == 1) *(u32 *)p = x.w[0];
    if constexpr (COUNT == 2) *(uint2 *)p = make_uint2(x.w[0], x.w[1]);
    if constexpr (COUNT == 4) *(uint4 *)p = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
}

// 16 bytes at an address that is a multiple of ELEMENT_BYTES only, still as the two aligned pieces they lie in, so that
// the loads of many such vectors are in flight before the first is put together.
struct kt_shifted {
    kt_words<4> low, high;
    u32 shift; // bytes of `low` that come before
};

// Nothing at or after `end` is read. The start of the buffer must be a multiple of 16.
template <int HINT> KT_DEVICE kt_shifted kt_load_shifted(const u8 *p, const u8 *end, u64 policy) {
    kt_shifted x;
    x.shift = (u32)(u64)p & 15;
    const u8 *aligned = p - x.shift;
    x.high = {};
    if (aligned + 32 <= end) {
        x.low = kt_load_stream<HINT>(aligned, policy);
        if (x.shift) x.high = kt_load_stream<HINT>(aligned + 16, policy);
        return x;
    }
    // The last bytes of the buffer: element by element.
    x.shift = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x.low.w[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; j += ELEMENT_BYTES) {
            if (p + 4 * i + j >= end) continue;
            const u8 *from = p + 4 * i + j;
            const u32 bits = ELEMENT_BYTES == 1 ? *from : ELEMENT_BYTES == 2 ? *(const u16 *)from : *(const u32 *)from;
            x.low.w[i] |= bits << (8 * j);
        }
    }
    return x;
}

// The first `valid` bytes of the 16; zeros after them.
KT_DEVICE kt_words<4> kt_join_shifted(const kt_shifted &x, int valid) {
    u32 w[8];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = x.low.w[i], w[i + 4] = x.high.w[i];
    // Selected by bits: a choice between array elements may become an indexed access to local memory.
    const u32 by_two = x.shift & 8 ? ~0u : 0, by_one = x.shift & 4 ? ~0u : 0;
#pragma unroll
    for (int i = 0; i < 6; i++) w[i] = (w[i + 2] & by_two) | (w[i] & ~by_two);
#pragma unroll
    for (int i = 0; i < 5; i++) w[i] = (w[i + 1] & by_one) | (w[i] & ~by_one);
    kt_words<4> y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y.w[i] = __funnelshift_r(w[i], w[i + 1], 8 * (x.shift & 3));
        const int left = valid - 4 * i;
        if (left < 4) y.w[i] &= left <= 0 ? 0u : (1u << (8 * left)) - 1;
    }
    return y;
}

#endif
