// Element-wise epilogues: KT_EPILOGUE is a chain of the KT_OP_ macros below, applied in order to `x`.
//
// Also the signature of every kernel: operands A and B, those of the epilogue, C, and the workspace.
#ifndef KT_EPILOGUE_CUH
#define KT_EPILOGUE_CUH

#include "memory.cuh"

#ifndef KT_EPILOGUE
#define KT_EPILOGUE
#endif
#ifndef KT_HAS_EPILOGUE
#define KT_HAS_EPILOGUE 0 /* KT_EPILOGUE is not empty */
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

#if KT_DTYPE == KT_INT8 && KT_HAS_EPILOGUE
typedef double kt_math; // exact on int32
#else
typedef kt_acc kt_math;
#endif

struct kt_epilogue {
    const kt_output *bias;     // [N]
    const kt_output *residual; // laid out as C
    const kt_output *scale;    // [N]
    const kt_output *shift;    // [N]
    const float *tensor_scale; // one
};

#if KT_HAS_BIAS
#define KT_BIAS_PARAMETER const kt_output *__restrict__ bias,
#define KT_BIAS bias
#else
#define KT_BIAS_PARAMETER
#define KT_BIAS nullptr
#endif
#if KT_HAS_RESIDUAL
#define KT_RESIDUAL_PARAMETER const kt_output *__restrict__ residual,
#define KT_RESIDUAL residual
#else
#define KT_RESIDUAL_PARAMETER
#define KT_RESIDUAL nullptr
#endif
#if KT_HAS_SCALE
#define KT_SCALE_PARAMETER const kt_output *__restrict__ scale,
#define KT_SCALE scale
#else
#define KT_SCALE_PARAMETER
#define KT_SCALE nullptr
#endif
#if KT_HAS_SHIFT
#define KT_SHIFT_PARAMETER const kt_output *__restrict__ shift,
#define KT_SHIFT shift
#else
#define KT_SHIFT_PARAMETER
#define KT_SHIFT nullptr
#endif
#if KT_HAS_TENSOR_SCALE
#define KT_TENSOR_SCALE_PARAMETER const float *__restrict__ tensor_scale,
#define KT_TENSOR_SCALE tensor_scale
#else
#define KT_TENSOR_SCALE_PARAMETER
#define KT_TENSOR_SCALE nullptr
#endif

#define KT_PARAMETERS                                                                                                      \
    const kt_element *__restrict__ a, const kt_element *__restrict__ b, KT_BIAS_PARAMETER KT_RESIDUAL_PARAMETER            \
        KT_SCALE_PARAMETER KT_SHIFT_PARAMETER KT_TENSOR_SCALE_PARAMETER kt_output *__restrict__ c, u8 *__restrict__ workspace
#define KT_EPILOGUE_OPERANDS {KT_BIAS, KT_RESIDUAL, KT_SCALE, KT_SHIFT, KT_TENSOR_SCALE}
// The workspace comes after them.
enum : int { KT_ARGUMENTS = 3 + KT_HAS_BIAS + KT_HAS_RESIDUAL + KT_HAS_SCALE + KT_HAS_SHIFT + KT_HAS_TENSOR_SCALE };

// The same for the columns from `first` on.
KT_DEVICE kt_epilogue kt_columns_from(const kt_epilogue &e, u32 first) {
    return {e.bias + first, e.residual, e.scale + first, e.shift + first, e.tensor_scale};
}

// ---- the operations

#define KT_OP_BIAS x += bias;
#define KT_OP_RESIDUAL x += residual;
#define KT_OP_SCALE x *= scale;
#define KT_OP_SHIFT x += shift;
#define KT_OP_TENSOR_SCALE x *= tensor_scale;
#define KT_OP_RELU x = x < 0 ? (kt_math)0 : x; /* a NaN stays */
#define KT_OP_GELU x = kt_gelu(x);
#define KT_OP_SILU x = kt_silu(x);

KT_DEVICE double kt_gelu(double x) { return 0.5 * x * erfc(-0.70710678118654752 * x); }
KT_DEVICE double kt_silu(double x) { return x / (1 + exp(-x)); }

#if OUTPUT_IS_HALF
// The logarithm of the normal distribution's tail is nearly quadratic: this polynomial of degree 7 is near the one to base 2 on
// [0, 6] (minimax of both errors of the result, by linear programming). The result has an absolute error of 2.3e-7, so that
// what cancels it stays exact, a relative one of 1.7e-5 in the tail, and is -5.9e-9 left of -6. One exponential and no division:
// two thirds of the instructions of a rational approximation.
KT_DEVICE float kt_gelu(float x) {
    const float u = fminf(fabsf(x), 6.0f);
    float log2_tail = -1.70376779e-6f;
    log2_tail = fmaf(log2_tail, u, 5.93626501e-5f);
    log2_tail = fmaf(log2_tail, u, -9.16961930e-4f);
    log2_tail = fmaf(log2_tail, u, 8.47534090e-3f);
    log2_tail = fmaf(log2_tail, u, -5.39472736e-2f);
    log2_tail = fmaf(log2_tail, u, -0.458410889f);
    log2_tail = fmaf(log2_tail, u, -1.15130842f);
    log2_tail = fmaf(log2_tail, u, -0.999983132f);
    return fmaf(-u, kt_exp2_fast(log2_tail), x < 0 ? 0 : x); // a NaN stays
}
KT_DEVICE float kt_silu(float x) { return x * kt_reciprocal_fast(1 + kt_exp2_fast(-1.44269504f * x)); }
#else
KT_DEVICE float kt_gelu(float x) { return 0.5f * x * erfcf(-0.70710678f * x); }
KT_DEVICE float kt_silu(float x) { return x / (1 + expf(-x)); }
#endif

KT_DEVICE kt_math kt_apply_epilogue(kt_acc sum, kt_math bias, kt_math scale, kt_math shift, kt_math tensor_scale, kt_math residual) {
    kt_math x = (kt_math)sum;
    (void)bias, (void)scale, (void)shift, (void)tensor_scale, (void)residual;
    KT_EPILOGUE
    return x;
}

// ---- COUNT neighbours of a row in memory: one access of at most 16 bytes

KT_DEVICE kt_math kt_from_output(kt_output x) {
#if KT_DTYPE == KT_FP16
    return kt_from_half(x);
#elif OUTPUT_IS_BFLOAT
    return kt_from_bfloat(x);
#else
    return (kt_math)x;
#endif
}

#if OUTPUT_IS_HALF
KT_DEVICE u32 kt_pack_outputs(float low, float high) {
#if KT_DTYPE == KT_FP16
    return kt_pack_half(low, high);
#else
    return kt_pack_bfloat(low, high);
#endif
}
#endif

// The words of COUNT outputs, rounded; 16-bit outputs come in pairs, a single one in the low half.
template <int COUNT> struct kt_output_words {
    static constexpr int WORDS = kt_max(1, COUNT * OUTPUT_BYTES / 4);
    kt_words<WORDS> words;
};

template <int COUNT> KT_DEVICE kt_output_words<COUNT> kt_round_outputs(const kt_math (&x)[COUNT]) {
    kt_output_words<COUNT> y;
#if OUTPUT_IS_HALF
    if constexpr (COUNT == 1) y.words.w[0] = kt_pack_outputs(x[0], 0);
    else
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) y.words.w[i] = kt_pack_outputs(x[2 * i], x[2 * i + 1]);
#elif KT_DTYPE == KT_FP64
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const u64 bits = (u64)__double_as_longlong(x[i]);
        y.words.w[2 * i] = (u32)bits, y.words.w[2 * i + 1] = (u32)(bits >> 32);
    }
#elif KT_DTYPE == KT_INT8
#pragma unroll
    for (int i = 0; i < COUNT; i++) y.words.w[i] = KT_HAS_EPILOGUE ? (u32)kt_round_int((double)x[i]) : (u32)(int)x[i];
#else
#pragma unroll
    for (int i = 0; i < COUNT; i++) y.words.w[i] = __float_as_uint(x[i]);
#endif
    return y;
}

template <int COUNT> KT_DEVICE void kt_store_outputs(kt_output *p, const kt_output_words<COUNT> &x) {
    if constexpr (COUNT * OUTPUT_BYTES == 2) *(u16 *)p = (u16)x.words.w[0];
    else kt_store_words(p, x.words);
}

template <int COUNT> KT_DEVICE void kt_unpack_outputs(kt_math (&x)[COUNT], const kt_output_words<COUNT> &y) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
#if OUTPUT_IS_HALF
        x[i] = kt_from_output((u16)(y.words.w[i / 2] >> (16 * (i % 2))));
#elif KT_DTYPE == KT_FP64
        x[i] = __longlong_as_double((i64)((u64)y.words.w[2 * i + 1] << 32 | y.words.w[2 * i]));
#elif KT_DTYPE == KT_INT8
        x[i] = (kt_math)(int)y.words.w[i];
#else
        x[i] = __uint_as_float(y.words.w[i]);
#endif
    }
}

template <int COUNT> KT_DEVICE void kt_load_outputs(kt_math (&x)[COUNT], const kt_output *p) {
    kt_output_words<COUNT> y;
    if constexpr (COUNT * OUTPUT_BYTES == 2) y.words.w[0] = *(const u16 *)p;
    else y.words = kt_load_words<kt_output_words<COUNT>::WORDS>(p);
    kt_unpack_outputs<COUNT>(x, y);
}

// bias, scale and shift of COUNT columns, loaded once for all rows of a thread, and the scale of all.
template <int COUNT> struct kt_columns {
    kt_math bias[COUNT], scale[COUNT], shift[COUNT], tensor_scale;
};
template <int COUNT> KT_DEVICE kt_columns<COUNT> kt_load_columns(const kt_epilogue &e, u32 column, bool inside) {
    kt_columns<COUNT> x = {};
    if (KT_HAS_BIAS && inside) kt_load_outputs<COUNT>(x.bias, e.bias + column);
    if (KT_HAS_SCALE && inside) kt_load_outputs<COUNT>(x.scale, e.scale + column);
    if (KT_HAS_SHIFT && inside) kt_load_outputs<COUNT>(x.shift, e.shift + column);
    if (KT_HAS_TENSOR_SCALE) x.tensor_scale = *e.tensor_scale;
    return x;
}

// COUNT finished neighbours; `residual` is read only where the chain has it.
template <int COUNT>
KT_DEVICE kt_output_words<COUNT> kt_finish(const kt_acc (&sum)[COUNT], const kt_columns<COUNT> &columns,
                                           const kt_math (&residual)[COUNT]) {
    kt_math x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        x[i] = kt_apply_epilogue(sum[i], columns.bias[i], columns.scale[i], columns.shift[i], columns.tensor_scale, residual[i]);
    return kt_round_outputs<COUNT>(x);
}

// COUNT neighbours of C at `index`, finished and stored.
template <int COUNT>
KT_DEVICE void kt_finish_and_store(kt_output *c, u64 index, const kt_acc (&sum)[COUNT], const kt_columns<COUNT> &columns,
                                   const kt_epilogue &e) {
    kt_math residual[COUNT] = {};
    if (KT_HAS_RESIDUAL) kt_load_outputs<COUNT>(residual, e.residual + index);
    kt_store_outputs<COUNT>(c + index, kt_finish<COUNT>(sum, columns, residual));
}

#endif
