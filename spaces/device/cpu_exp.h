/* Vector functions of a softmax: 2^x of x <= 0, log of x >= 1, tanh. No call into the C library.
 *
 * Accuracy in fp32 and fp64: 2^x within 2 ulp, log and tanh within 4 ulp of max(result, 1).
 */
#ifndef KT_CPU_EXP_H
#define KT_CPU_EXP_H

#include "cpu_isa.h"

/* KT_SHIFTER: adding it leaves x rounded to an integer, plus the exponent's bias, in the low bits. */
#if KT_DOUBLE
#define KT_SHIFTER (0x1.8p52 + 1023)
#define KT_EXPONENT_SHIFT 52
#define KT_EXP2_MIN -1022.0 /* below, the result is zero rather than subnormal */
#define KT_SQRT_HALF_BITS 0x3fe6a09e667f3bcd
#define KT_LOG_TERMS 12
#define KT_TANH_TERMS 9
static const kt_real kt_exp2_coefficients[] = {
    4.44175760551189468e-10, 7.07361840444627708e-09, 1.01781498124300586e-07, 1.32154359175273088e-06,
    1.52527336203281288e-05, 1.54035304568269976e-04, 1.33335581466359336e-03, 9.61812910759295321e-03,
    5.55041086648206672e-02, 2.40226506959101443e-01, 6.93147180559945286e-01, 1.0};
#else
#define KT_SHIFTER (0x1.8p23f + 127)
#define KT_EXPONENT_SHIFT 23
#define KT_EXP2_MIN -126.0f
#define KT_SQRT_HALF_BITS 0x3f3504f3
#define KT_LOG_TERMS 6
#define KT_TANH_TERMS 5
static const kt_real kt_exp2_coefficients[] = {1.32647343e-03f, 9.67151299e-03f, 5.55073358e-02f,
                                               2.40222424e-01f, 6.93147004e-01f, 1.0f};
#endif

#define KT_LOG2_E ((kt_real)1.4426950408889634)
#define KT_LN_2 ((kt_real)0.69314718055994531)

/* 2^x for x <= 0; exactly 1 at 0, exactly 0 below KT_EXP2_MIN and at -infinity; a NaN stays. */
KT_INLINE kt_vec kt_exp2(kt_vec x) {
    const kt_vec shifted = x + KT_SHIFTER;
    const kt_vec r = x - (shifted - KT_SHIFTER);
    kt_vec y = (kt_vec){0} + kt_exp2_coefficients[0];
    KT_UNROLL_ALL
    for (int i = 1; i < (int)(sizeof kt_exp2_coefficients / sizeof(kt_real)); i++) y = y * r + kt_exp2_coefficients[i];
    y *= (kt_vec)((kt_ivec)shifted << KT_EXPONENT_SHIFT);
    return (kt_vec)(~(x < KT_EXP2_MIN) & (kt_ivec)y);
}

/* log(x) for finite x >= 1: x = 2^n f with f around 1, log f = 2 atanh((f - 1) / (f + 1)); a NaN stays. */
KT_INLINE kt_vec kt_log(kt_vec x) {
    const kt_ivec n = ((kt_ivec)x - KT_SQRT_HALF_BITS) >> KT_EXPONENT_SHIFT;
    const kt_vec f = (kt_vec)((kt_ivec)x - (n << KT_EXPONENT_SHIFT));
    const kt_vec t = (f - 1) / (f + 1), square = t * t;
    kt_vec series = {0};
    for (int i = KT_LOG_TERMS; i >= 0; i--) series = series * square + (kt_real)1 / (2 * i + 1);
    return kt_select(x == x, __builtin_convertvector(n, kt_vec) * KT_LN_2 + 2 * t * series, x);
}

/* tanh(x) = t (1 - e) / (1 + e) with e = exp(-2|x|), t = sign; near 0, where that cancels, by a continued fraction. */
KT_INLINE kt_vec kt_tanh(kt_vec x) {
    const kt_vec magnitude = kt_select(x < 0, -x, x), square = x * x;
    const kt_vec e = kt_exp2(magnitude * (-2 * KT_LOG2_E)), far = (1 - e) / (1 + e);
    kt_vec fraction = (kt_vec){0} + (kt_real)(2 * KT_TANH_TERMS + 1);
    for (int i = KT_TANH_TERMS; i > 0; i--) fraction = (kt_real)(2 * i - 1) + square / fraction;
    return kt_select(magnitude < (kt_real)0.5, x / fraction, kt_select(x < 0, -far, far));
}

#endif
