/* Instruction set, vector type and scalar type of a CPU kernel.
 *
 * The instruction set is chosen here and not on the command line, so that plain `cc -O3` builds the kernel at full
 * speed. System headers belong above this file: what follows the target pragma is compiled for that target.
 */
#ifndef KT_CPU_ISA_H
#define KT_CPU_ISA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KT_ISA_GENERIC 0
#define KT_ISA_SSE2 1
#define KT_ISA_AVX2 2
#define KT_ISA_AVX512 3
#define KT_ISA_NEON 4

#ifndef KT_ISA
#if defined(__aarch64__)
#define KT_ISA KT_ISA_NEON
#elif defined(__AVX512F__)
#define KT_ISA KT_ISA_AVX512
#elif defined(__AVX2__)
#define KT_ISA KT_ISA_AVX2
#elif defined(__SSE2__)
#define KT_ISA KT_ISA_SSE2
#else
#define KT_ISA KT_ISA_GENERIC
#endif
#endif

#if KT_ISA == KT_ISA_AVX512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")
#endif
#elif KT_ISA == KT_ISA_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#endif

#ifndef KT_VEC_BYTES
#define KT_VEC_BYTES (KT_ISA == KT_ISA_AVX512 ? 64 : KT_ISA == KT_ISA_AVX2 ? 32 : 16)
#endif

#ifndef KT_DOUBLE
#define KT_DOUBLE 0
#endif

#if KT_DOUBLE
typedef double kt_real;
typedef int64_t kt_int; /* the integer as wide as kt_real */
#else
typedef float kt_real;
typedef int32_t kt_int;
#endif

#define KT_LANES ((int)(KT_VEC_BYTES / sizeof(kt_real)))

typedef kt_real kt_vec __attribute__((vector_size(KT_VEC_BYTES)));
typedef kt_int kt_ivec __attribute__((vector_size(KT_VEC_BYTES)));
typedef kt_real kt_unaligned_vec __attribute__((vector_size(KT_VEC_BYTES), aligned(sizeof(kt_real)), may_alias));

#define KT_INLINE static inline __attribute__((always_inline, unused))
#define KT_NOINLINE static __attribute__((noinline, unused))

#define KT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define KT_UNROLL_BY(count) KT_PRAGMA(unroll count)
#define KT_UNROLL_ALL KT_PRAGMA(clang loop unroll(full))
#else
#define KT_UNROLL_BY(count) KT_PRAGMA(GCC unroll count)
#define KT_UNROLL_ALL KT_PRAGMA(GCC unroll 32)
#endif

KT_INLINE kt_vec kt_load(const kt_real *p) { return *(const kt_unaligned_vec *)p; }

KT_INLINE void kt_store(kt_real *p, kt_vec v) { *(kt_unaligned_vec *)p = v; }

/* The first `count` elements at p, the other lanes zero; reads nothing beyond them. */
KT_INLINE kt_vec kt_load_first(const kt_real *p, long count) {
    if (count >= KT_LANES) return kt_load(p);
    kt_vec v = {0};
    memcpy(&v, p, (size_t)count * sizeof(kt_real));
    return v;
}

KT_INLINE void kt_store_first(kt_real *p, kt_vec v, long count) {
    if (count >= KT_LANES)
        kt_store(p, v);
    else
        memcpy(p, &v, (size_t)count * sizeof(kt_real));
}

KT_INLINE kt_vec kt_select(kt_ivec mask, kt_vec yes, kt_vec no) {
    return (kt_vec)((mask & (kt_ivec)yes) | (~mask & (kt_ivec)no));
}

KT_INLINE long kt_min(long a, long b) { return a < b ? a : b; }

/* Where part `index` of `parts` nearly equal parts of `total` begins. */
KT_INLINE long kt_split(long total, long parts, long index) { return total * index / parts; }

#endif
