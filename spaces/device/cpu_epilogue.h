/* Element-wise epilogues on vectors: KT_EPILOGUE is a chain of the KT_OP_ macros below, applied in order.
 *
 * Accuracy: exp, gelu and silu are within a few ulp in fp32 and 1e-13 relative in fp64, down to the subnormals.
 */
#ifndef KT_CPU_EPILOGUE_H
#define KT_CPU_EPILOGUE_H

#include "cpu_isa.h"

#ifndef KT_EPILOGUE
#define KT_EPILOGUE
#endif
#ifndef KT_HAS_BIAS
#define KT_HAS_BIAS 0
#endif
#ifndef KT_HAS_RESIDUAL
#define KT_HAS_RESIDUAL 0
#endif
#ifndef KT_HAS_SCALE
#define KT_HAS_SCALE 0
#endif
#ifndef KT_HAS_SHIFT
#define KT_HAS_SHIFT 0
#endif
#ifndef KT_HAS_TENSOR_SCALE
#define KT_HAS_TENSOR_SCALE 0
#endif
#ifndef KT_HAS_EPILOGUE
#define KT_HAS_EPILOGUE 0 /* KT_EPILOGUE is not empty */
#endif

typedef struct {
    const kt_real *bias;     /* [N] */
    const kt_real *residual; /* laid out as C */
    const kt_real *scale;    /* [N] */
    const kt_real *shift;    /* [N] */
    const float *tensor_scale; /* one */
} kt_epilogue;

/* Operands after A and B, in the order bias, residual, scale, shift, tensor_scale, C, each only if present; returns C. */
KT_INLINE kt_real *kt_epilogue_operands(void *const *args, kt_epilogue *e) {
    *e = (kt_epilogue){NULL, NULL, NULL, NULL, NULL};
#if KT_HAS_BIAS
    e->bias = *args++;
#endif
#if KT_HAS_RESIDUAL
    e->residual = *args++;
#endif
#if KT_HAS_SCALE
    e->scale = *args++;
#endif
#if KT_HAS_SHIFT
    e->shift = *args++;
#endif
#if KT_HAS_TENSOR_SCALE
    e->tensor_scale = *args++;
#endif
    return *args;
}

#define KT_OP_BIAS x += kt_load_first(e->bias + column, count);
#define KT_OP_RESIDUAL x += kt_load_first(e->residual + index, count);
#define KT_OP_SCALE x *= kt_load_first(e->scale + column, count);
#define KT_OP_SHIFT x += kt_load_first(e->shift + column, count);
#define KT_OP_TENSOR_SCALE x *= (kt_real)*e->tensor_scale;
#define KT_OP_RELU x = kt_select(x < 0, (kt_vec){0}, x); /* a NaN stays */
#define KT_OP_GELU x = kt_gelu(x);
#define KT_OP_SILU x = x / (1 + kt_exp(-x));

#if KT_DOUBLE
#define KT_ROUNDER 0x1.8p52
#define KT_EXPONENT_BIAS 1023
#define KT_MANTISSA_BITS 52
#define KT_EXP_MIN -746.0 /* below, exp rounds to zero */
#define KT_EXP_MAX 710.0  /* above, exp overflows */
#define KT_LN2_HIGH 0x1.62e42feep-1
#define KT_LN2_LOW 0x1.a39ef35793c76p-33
#define KT_SPLIT_MASK (~(kt_int)0x7ffffff)
#define KT_TAIL_MAX 38.8 /* beyond, the normal tail rounds to zero */
static const kt_real kt_exp_coefficients[] = {
    2.23374430777555226e-08, 2.76155720649377906e-07, 2.75679305591719472e-06, 2.48016095052698892e-05,
    1.98412555881171413e-04, 1.38888887269459759e-03, 8.33333334092946701e-03, 4.16666666680205328e-02,
    1.66666666666540009e-01, 4.99999999999963751e-01, 1.0,                     1.0};
static const kt_real kt_erfcx_coefficients[] = {
    2.24076083737329810e-08, 6.27072968838749848e-08,  -1.22685676484895373e-07, -5.61772831444745111e-07,
    3.49307389588104293e-07, 3.42774954966601722e-06,  -7.32518432135028831e-07, -2.00777754145724471e-05,
    4.95178968004655845e-06, 1.25091875182329303e-04,  -1.05160812550858821e-04, -7.79830708695576093e-04,
    1.88869058152858044e-03, 2.52939161614985052e-03,  -2.37705149447591524e-02, 6.83080273583088066e-02,
    -1.19273663413783856e-01, 1.29645158702278662e-01, -4.75622943534853432e-02, -1.35621106124576396e-01,
    1.25300805826973005e+00};
#else
#define KT_ROUNDER 0x1.8p23f
#define KT_EXPONENT_BIAS 127
#define KT_MANTISSA_BITS 23
#define KT_EXP_MIN -104.0f
#define KT_EXP_MAX 89.0f
#define KT_LN2_HIGH 0x1.62e4p-1f
#define KT_LN2_LOW 0x1.7f7d1cp-20f
#define KT_SPLIT_MASK (~(kt_int)0xfff)
#define KT_TAIL_MAX 14.4f
static const kt_real kt_exp_coefficients[] = {1.39487005e-03f, 8.37521270e-03f, 4.16662164e-02f, 1.66664145e-01f,
                                              5.00000011e-01f, 1.0f,            1.0f};
static const kt_real kt_erfcx_coefficients[] = {
    -2.713589422e-04f, -7.844065491e-04f, 2.000355085e-03f,  2.572200298e-03f,  -2.379536531e-02f, 6.829461354e-02f,
    -1.192715423e-01f, 1.296465253e-01f,  -4.756235601e-02f, -1.356211427e-01f, 1.253008059e+00f};
#endif

KT_INLINE kt_vec kt_polynomial(kt_vec x, const kt_real *coefficients, int count) {
    kt_vec y = (kt_vec){0} + coefficients[0];
    for (int i = 1; i < count; i++) y = y * x + coefficients[i];
    return y;
}
#define KT_POLYNOMIAL(x, table) kt_polynomial(x, table, (int)(sizeof(table) / sizeof(*table)))

/* 2^n as two factors, so that results down to the subnormals come out right. */
KT_INLINE kt_vec kt_scale_exponent(kt_vec x, kt_ivec n) {
    kt_ivec half = n >> 1;
    kt_vec first = (kt_vec)((half + KT_EXPONENT_BIAS) << KT_MANTISSA_BITS);
    kt_vec second = (kt_vec)((n - half + KT_EXPONENT_BIAS) << KT_MANTISSA_BITS);
    return x * first * second;
}

/* exp(x + rest), |rest| <= 0.1. */
KT_INLINE kt_vec kt_exp_sum(kt_vec x, kt_vec rest) {
    x = kt_select(x < KT_EXP_MIN, (kt_vec){0} + KT_EXP_MIN, x);
    x = kt_select(x > KT_EXP_MAX, (kt_vec){0} + KT_EXP_MAX, x);
    kt_vec shifted = x * (kt_real)1.4426950408889634 + KT_ROUNDER; /* the integer part lands in the low bits */
    kt_vec n = shifted - KT_ROUNDER;
    kt_ivec exponent = (kt_ivec)shifted - (kt_ivec)((kt_vec){0} + KT_ROUNDER);
    kt_vec r = ((x - n * KT_LN2_HIGH) - n * KT_LN2_LOW) + rest;
    return kt_scale_exponent(KT_POLYNOMIAL(r, kt_exp_coefficients), exponent);
}

KT_INLINE kt_vec kt_exp(kt_vec x) { return kt_exp_sum(x, (kt_vec){0}); }

/* 1 - Phi(a) for a >= 0, the upper tail of the normal distribution: exp(-a^2 / 2) * p((t - 3) / (t + 3)) / (1 + 2t)
 * with t = a / sqrt(2). a^2 is split into an exact and a small part: its rounding error alone would cost the
 * exponential up to 80 ulp. */
KT_INLINE kt_vec kt_normal_tail(kt_vec a) {
    kt_vec high = (kt_vec)((kt_ivec)a & KT_SPLIT_MASK);
    kt_vec rest = (a - high) * (a + high);
    kt_vec t = a * (kt_real)0.70710678118654752;
    kt_vec p = KT_POLYNOMIAL((t - 3) / (t + 3), kt_erfcx_coefficients);
    return kt_exp_sum(high * high * (kt_real)-0.5, rest * (kt_real)-0.5) * p / (2 + 4 * t);
}

/* x * Phi(x), from the tail's side so that nothing cancels for negative x. */
KT_INLINE kt_vec kt_gelu(kt_vec x) {
    kt_vec a = kt_select(x < 0, -x, x);
    kt_vec tail = kt_normal_tail(kt_select(a < KT_TAIL_MAX, a, (kt_vec){0} + KT_TAIL_MAX));
    return x * kt_select(x < 0, tail, 1 - tail);
}

/* Epilogue of `count` (<= KT_LANES) elements of one row; `index` is their place in C, `column` in a row. */
KT_INLINE kt_vec kt_apply_epilogue(kt_vec x, const kt_epilogue *e, long index, long column, long count) {
    (void)e, (void)index, (void)column, (void)count;
    KT_EPILOGUE
    return x;
}

#endif
