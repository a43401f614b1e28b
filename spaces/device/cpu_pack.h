/* Packing of one panel: `width` lanes by `depth` steps become dst[step][WIDTH], contiguous.
 *
 * Lanes beyond `width` repeat the last one (their products are never stored), so a panel holds nothing but operand
 * values. A panel may be overwritten by up to one vector past its end: buffers have that much slack.
 */
#ifndef KT_CPU_PACK_H
#define KT_CPU_PACK_H

#include "cpu_isa.h"

#if KT_VEC_BYTES == 16 && KT_DOUBLE
#define KT_ZIP_LOW 0, 2
#define KT_ZIP_HIGH 1, 3
#elif KT_VEC_BYTES == 16 || (KT_VEC_BYTES == 32 && KT_DOUBLE)
#define KT_ZIP_LOW 0, 4, 1, 5
#define KT_ZIP_HIGH 2, 6, 3, 7
#elif KT_VEC_BYTES == 32 || KT_DOUBLE
#define KT_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define KT_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define KT_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define KT_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif

#if defined(__clang__)
#define KT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (kt_ivec){__VA_ARGS__})
#endif

/* One riffle of all rows; log2(KT_LANES) riffles transpose the square block. */
KT_INLINE void kt_riffle(kt_vec *to, const kt_vec *from) {
    KT_UNROLL_ALL
    for (int i = 0; i < KT_LANES / 2; i++) {
        to[2 * i] = KT_SHUFFLE(from[i], from[i + KT_LANES / 2], KT_ZIP_LOW);
        to[2 * i + 1] = KT_SHUFFLE(from[i], from[i + KT_LANES / 2], KT_ZIP_HIGH);
    }
}

/* dst[step * stride + lane] = src[lane * ld + step] for one square block of which `lanes` rows exist. */
KT_NOINLINE void kt_transpose_block(kt_real *dst, long stride, const kt_real *src, long ld, long lanes) {
    kt_vec a[KT_LANES], b[KT_LANES];
    KT_UNROLL_ALL
    for (int i = 0; i < KT_LANES; i++) a[i] = kt_load(src + kt_min(i, lanes - 1) * ld);
    kt_riffle(b, a);
    if (KT_LANES >= 4) kt_riffle(a, b);
    if (KT_LANES >= 8) kt_riffle(b, a);
    if (KT_LANES >= 16) kt_riffle(a, b);
    const kt_vec *result = KT_LANES == 2 || KT_LANES == 8 ? b : a;
    KT_UNROLL_ALL
    for (int i = 0; i < KT_LANES; i++) kt_store(dst + i * stride, result[i]);
}

/* Lanes are rows of src (stride ld), steps are contiguous: a transposition. A block that overhangs the panel spills
 * into the next step, so blocks go from the last lanes to the first and later stores repair it. */
KT_INLINE void kt_pack_transposed(kt_real *dst, int panel, const kt_real *src, long ld, long width, long depth) {
    const int last_block = (panel - 1) / KT_LANES * KT_LANES;
    long step = 0;
    for (; step + KT_LANES <= depth; step += KT_LANES)
        for (int lane = last_block; lane >= 0; lane -= KT_LANES) {
            long first = kt_min(lane, width - 1); /* a block wholly beyond the width repeats the last row */
            kt_transpose_block(dst + step * panel + lane, panel, src + first * ld + step, ld, kt_min(panel, width) - first);
        }
    for (; step < depth; step++)
        for (int lane = 0; lane < panel; lane++) dst[step * panel + lane] = src[kt_min(lane, width - 1) * ld + step];
}

/* Lanes are contiguous in src, steps are its rows: a copy. */
KT_INLINE void kt_pack_copied(kt_real *dst, int panel, const kt_real *src, long ld, long width, long depth) {
    for (long step = 0; step < depth; step++, src += ld, dst += panel) {
        if (width == panel) {
            memcpy(dst, src, (size_t)panel * sizeof(kt_real));
            continue;
        }
        memcpy(dst, src, (size_t)width * sizeof(kt_real));
        for (long lane = width; lane < panel; lane++) dst[lane] = src[width - 1];
    }
}

#endif
