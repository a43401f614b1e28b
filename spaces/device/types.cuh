// Element types of a workload and the few integer helpers that every kernel needs. No system header.
#ifndef KT_TYPES_CUH
#define KT_TYPES_CUH

#define KT_FP64 0
#define KT_FP32 1
#define KT_TF32 2 /* fp32 in memory, tf32 in the tensor cores */
#define KT_FP16 3
#define KT_BF16 4
#define KT_INT8 5 /* int32 accumulators and output */
#define KT_FP8_E4M3 6 /* bf16 output */
#define KT_FP8_E5M2 7

#ifndef KT_DTYPE
#define KT_DTYPE KT_BF16
#endif

#define IS_FP8 (KT_DTYPE == KT_FP8_E4M3 || KT_DTYPE == KT_FP8_E5M2)
#define OUTPUT_IS_BFLOAT (KT_DTYPE == KT_BF16 || IS_FP8)
#define OUTPUT_IS_HALF (KT_DTYPE == KT_FP16 || OUTPUT_IS_BFLOAT)

#define KT_DEVICE __device__ __forceinline__
#define KT_PURE __host__ __device__ constexpr

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if KT_DTYPE == KT_FP64
typedef double kt_element, kt_output, kt_acc;
#elif KT_DTYPE == KT_FP32 || KT_DTYPE == KT_TF32
typedef float kt_element, kt_output, kt_acc;
#elif KT_DTYPE == KT_FP16 || KT_DTYPE == KT_BF16
typedef u16 kt_element, kt_output; /* bits */
typedef float kt_acc;
#elif KT_DTYPE == KT_INT8
typedef signed char kt_element;
typedef int kt_output, kt_acc;
#elif IS_FP8
typedef u8 kt_element; /* bits */
typedef u16 kt_output;
typedef float kt_acc;
#else
#error "KT_DTYPE is none of the types above"
#endif

enum : int { ELEMENT_BYTES = sizeof(kt_element), OUTPUT_BYTES = sizeof(kt_output), ACC_BYTES = sizeof(kt_acc) };

// 32-bit words that move together: 1, 2 or 4 of them are one memory access.
template <int COUNT> struct alignas(4 * COUNT) kt_words {
    u32 w[COUNT];
};

template <class T> KT_PURE T kt_min(T a, T b) { return a < b ? a : b; }
template <class T> KT_PURE T kt_max(T a, T b) { return a < b ? b : a; }
template <class T> KT_PURE T kt_ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T> KT_PURE T kt_round_up(T a, T b) { return (a + b - 1) / b * b; }

// First of `total` units that belong to part `part` of `parts` (equal to within one).
KT_PURE u32 kt_split(u32 total, u32 parts, u32 part) { return (u32)((u64)total * part / parts); }

// The largest power of two, at most `most`, that divides `value`.
KT_PURE int kt_alignment(i64 value, int most) {
    while (value % most) most /= 2;
    return most;
}

#endif
