// The warpgroup's matrix instruction of sm_90a: d[64 x N] (+)= a[64 x 32 bytes] * b[32 bytes x N], operands in shared memory.
#ifndef KT_HOPPER_WGMMA_CUH
#define KT_HOPPER_WGMMA_CUH

#include "ptx.cuh"

// ---- tiles in shared memory

// How a matrix instruction finds its operand: the tile is made of slabs whose rows are SWIZZLE bytes long. A K-major tile of
// ROWS x DEPTH elements has slabs of ROWS rows, side by side along k; the other kind has slabs of DEPTH rows, side by side
// along m (or n). A slab begins at a multiple of eight of its rows.
template <bool K_MAJOR, int SWIZZLE, int ROWS, int DEPTH> struct kt_slabs {
    static_assert(SWIZZLE == 128 || SWIZZLE == 64 || SWIZZLE == 32, "bytes of a row");
    static_assert(K_MAJOR || ELEMENT_BYTES == 2, "other elements are K-major");
    static constexpr int WIDTH = SWIZZLE / ELEMENT_BYTES, OUTER = K_MAJOR ? ROWS : DEPTH, SLAB_BYTES = OUTER * SWIZZLE;
    static constexpr int COUNT = kt_ceil_div(K_MAJOR ? DEPTH : ROWS, WIDTH), BYTES = COUNT * SLAB_BYTES;
    static_assert(OUTER % 8 == 0 && DEPTH * ELEMENT_BYTES % 32 == 0 && (!K_MAJOR || DEPTH % WIDTH == 0), "whole slabs");
    static constexpr int STEPS = DEPTH * ELEMENT_BYTES / 32;
    static constexpr int TRANSPOSED = !K_MAJOR;

    // Address / 16 (18 bits: in a cluster the CTA's rank is above them), distance of slabs (bits 16-29), distance of eight
    // rows (bits 32-45), swizzle (bits 62-63).
    static KT_DEVICE u64 descriptor(u32 address) {
        constexpr u64 SHAPE = (u64)(K_MAJOR ? 0 : SLAB_BYTES >> 4) << 16 | (u64)(8 * SWIZZLE >> 4) << 32 |
                              (u64)(SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3) << 62;
        return SHAPE | (address & 0x3ffff) >> 4;
    }
    // What row `row` (a multiple of 64, or of a slab's width) and step `step` along k add to the descriptor.
    static KT_PURE u32 offset(int row, int step) {
        const int k = step * 32 / ELEMENT_BYTES;
        return (K_MAJOR ? k / WIDTH * SLAB_BYTES + k % WIDTH * ELEMENT_BYTES + row * SWIZZLE
                        : row / WIDTH * SLAB_BYTES + k * SWIZZLE) >> 4;
    }
};

// ---- order

// Before the first instruction that reads registers or tiles written by something else.
KT_DEVICE void kt_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KT_DEVICE void kt_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> KT_DEVICE void kt_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// ---- the instruction, for every N

// Sum 4 * j + 2 * h + e of thread t is at row 16 * (t / 32) + 8 * h + t % 32 / 4, column 8 * j + 2 * (t % 4) + e. With
// `keep` 0 the product replaces the sums. The immediates say whether an operand is not K-major.
template <int N> struct kt_wgmma;

#if KT_DTYPE == KT_FP16
#define KT_WGMMA_TYPES "k16.f32.f16.f16"
#elif KT_DTYPE == KT_BF16
#define KT_WGMMA_TYPES "k16.f32.bf16.bf16"
#elif KT_DTYPE == KT_FP8_E4M3
#define KT_WGMMA_TYPES "k32.f32.e4m3.e4m3"
#elif KT_DTYPE == KT_FP8_E5M2
#define KT_WGMMA_TYPES "k32.f32.e5m2.e5m2"
#else
#define KT_WGMMA_TYPES "k8.f32.tf32.tf32"
#endif
#if KT_DTYPE == KT_FP16 || KT_DTYPE == KT_BF16
#define KT_WGMMA_MAJOR(a, b) ", %" #a ", %" #b
#else
#define KT_WGMMA_MAJOR(a, b)
#endif

// A, B, KEEP, TA, TB: numbers of the operands that follow the sums.
#define KT_WGMMA(N, SUMS, OUT, A, B, KEEP, TA, TB)                                                                         \
    template <> struct kt_wgmma<N> {                                                                                       \
        template <int TRANSPOSED_A, int TRANSPOSED_B>                                                                      \
        static KT_DEVICE void multiply(float (&d)[N / 2], u64 a, u64 b, u32 keep) {                                        \
            asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, %" #KEEP ", 0;\n\t"                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N KT_WGMMA_TYPES " {" SUMS "}, %" #A ", %" #B                \
                         ", keep, 1, 1" KT_WGMMA_MAJOR(TA, TB) ";\n\t}"                                                    \
                         : OUT : "l"(a), "l"(b), "r"(keep), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));                         \
        }                                                                                                                  \
    };

#define KT_OUT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KT_SUMS_8 "%0, %1, %2, %3"
#define KT_SUMS_16 KT_SUMS_8 ", %4, %5, %6, %7"
#define KT_SUMS_24 KT_SUMS_16 ", %8, %9, %10, %11"
#define KT_SUMS_32 KT_SUMS_24 ", %12, %13, %14, %15"
#define KT_SUMS_40 KT_SUMS_32 ", %16, %17, %18, %19"
#define KT_SUMS_48 KT_SUMS_40 ", %20, %21, %22, %23"
#define KT_SUMS_56 KT_SUMS_48 ", %24, %25, %26, %27"
#define KT_SUMS_64 KT_SUMS_56 ", %28, %29, %30, %31"
#define KT_SUMS_72 KT_SUMS_64 ", %32, %33, %34, %35"
#define KT_SUMS_80 KT_SUMS_72 ", %36, %37, %38, %39"
#define KT_SUMS_88 KT_SUMS_80 ", %40, %41, %42, %43"
#define KT_SUMS_96 KT_SUMS_88 ", %44, %45, %46, %47"
#define KT_SUMS_104 KT_SUMS_96 ", %48, %49, %50, %51"
#define KT_SUMS_112 KT_SUMS_104 ", %52, %53, %54, %55"
#define KT_SUMS_120 KT_SUMS_112 ", %56, %57, %58, %59"
#define KT_SUMS_128 KT_SUMS_120 ", %60, %61, %62, %63"
#define KT_SUMS_136 KT_SUMS_128 ", %64, %65, %66, %67"
#define KT_SUMS_144 KT_SUMS_136 ", %68, %69, %70, %71"
#define KT_SUMS_152 KT_SUMS_144 ", %72, %73, %74, %75"
#define KT_SUMS_160 KT_SUMS_152 ", %76, %77, %78, %79"
#define KT_SUMS_168 KT_SUMS_160 ", %80, %81, %82, %83"
#define KT_SUMS_176 KT_SUMS_168 ", %84, %85, %86, %87"
#define KT_SUMS_184 KT_SUMS_176 ", %88, %89, %90, %91"
#define KT_SUMS_192 KT_SUMS_184 ", %92, %93, %94, %95"
#define KT_SUMS_200 KT_SUMS_192 ", %96, %97, %98, %99"
#define KT_SUMS_208 KT_SUMS_200 ", %100, %101, %102, %103"
#define KT_SUMS_216 KT_SUMS_208 ", %104, %105, %106, %107"
#define KT_SUMS_224 KT_SUMS_216 ", %108, %109, %110, %111"
#define KT_SUMS_232 KT_SUMS_224 ", %112, %113, %114, %115"
#define KT_SUMS_240 KT_SUMS_232 ", %116, %117, %118, %119"
#define KT_SUMS_248 KT_SUMS_240 ", %120, %121, %122, %123"
#define KT_SUMS_256 KT_SUMS_248 ", %124, %125, %126, %127"

#define KT_OUT_8 KT_OUT(0)
#define KT_OUT_16 KT_OUT_8, KT_OUT(4)
#define KT_OUT_24 KT_OUT_16, KT_OUT(8)
#define KT_OUT_32 KT_OUT_24, KT_OUT(12)
#define KT_OUT_40 KT_OUT_32, KT_OUT(16)
#define KT_OUT_48 KT_OUT_40, KT_OUT(20)
#define KT_OUT_56 KT_OUT_48, KT_OUT(24)
#define KT_OUT_64 KT_OUT_56, KT_OUT(28)
#define KT_OUT_72 KT_OUT_64, KT_OUT(32)
#define KT_OUT_80 KT_OUT_72, KT_OUT(36)
#define KT_OUT_88 KT_OUT_80, KT_OUT(40)
#define KT_OUT_96 KT_OUT_88, KT_OUT(44)
#define KT_OUT_104 KT_OUT_96, KT_OUT(48)
#define KT_OUT_112 KT_OUT_104, KT_OUT(52)
#define KT_OUT_120 KT_OUT_112, KT_OUT(56)
#define KT_OUT_128 KT_OUT_120, KT_OUT(60)
#define KT_OUT_136 KT_OUT_128, KT_OUT(64)
#define KT_OUT_144 KT_OUT_136, KT_OUT(68)
#define KT_OUT_152 KT_OUT_144, KT_OUT(72)
#define KT_OUT_160 KT_OUT_152, KT_OUT(76)
#define KT_OUT_168 KT_OUT_160, KT_OUT(80)
#define KT_OUT_176 KT_OUT_168, KT_OUT(84)
#define KT_OUT_184 KT_OUT_176, KT_OUT(88)
#define KT_OUT_192 KT_OUT_184, KT_OUT(92)
#define KT_OUT_200 KT_OUT_192, KT_OUT(96)
#define KT_OUT_208 KT_OUT_200, KT_OUT(100)
#define KT_OUT_216 KT_OUT_208, KT_OUT(104)
#define KT_OUT_224 KT_OUT_216, KT_OUT(108)
#define KT_OUT_232 KT_OUT_224, KT_OUT(112)
#define KT_OUT_240 KT_OUT_232, KT_OUT(116)
#define KT_OUT_248 KT_OUT_240, KT_OUT(120)
#define KT_OUT_256 KT_OUT_248, KT_OUT(124)

KT_WGMMA(8, KT_SUMS_8, KT_OUT_8, 4, 5, 6, 7, 8)
KT_WGMMA(16, KT_SUMS_16, KT_OUT_16, 8, 9, 10, 11, 12)
KT_WGMMA(24, KT_SUMS_24, KT_OUT_24, 12, 13, 14, 15, 16)
KT_WGMMA(32, KT_SUMS_32, KT_OUT_32, 16, 17, 18, 19, 20)
KT_WGMMA(40, KT_SUMS_40, KT_OUT_40, 20, 21, 22, 23, 24)
KT_WGMMA(48, KT_SUMS_48, KT_OUT_48, 24, 25, 26, 27, 28)
KT_WGMMA(56, KT_SUMS_56, KT_OUT_56, 28, 29, 30, 31, 32)
KT_WGMMA(64, KT_SUMS_64, KT_OUT_64, 32, 33, 34, 35, 36)
KT_WGMMA(72, KT_SUMS_72, KT_OUT_72, 36, 37, 38, 39, 40)
KT_WGMMA(80, KT_SUMS_80, KT_OUT_80, 40, 41, 42, 43, 44)
KT_WGMMA(88, KT_SUMS_88, KT_OUT_88, 44, 45, 46, 47, 48)
KT_WGMMA(96, KT_SUMS_96, KT_OUT_96, 48, 49, 50, 51, 52)
KT_WGMMA(104, KT_SUMS_104, KT_OUT_104, 52, 53, 54, 55, 56)
KT_WGMMA(112, KT_SUMS_112, KT_OUT_112, 56, 57, 58, 59, 60)
KT_WGMMA(120, KT_SUMS_120, KT_OUT_120, 60, 61, 62, 63, 64)
KT_WGMMA(128, KT_SUMS_128, KT_OUT_128, 64, 65, 66, 67, 68)
KT_WGMMA(136, KT_SUMS_136, KT_OUT_136, 68, 69, 70, 71, 72)
KT_WGMMA(144, KT_SUMS_144, KT_OUT_144, 72, 73, 74, 75, 76)
KT_WGMMA(152, KT_SUMS_152, KT_OUT_152, 76, 77, 78, 79, 80)
KT_WGMMA(160, KT_SUMS_160, KT_OUT_160, 80, 81, 82, 83, 84)
KT_WGMMA(168, KT_SUMS_168, KT_OUT_168, 84, 85, 86, 87, 88)
KT_WGMMA(176, KT_SUMS_176, KT_OUT_176, 88, 89, 90, 91, 92)
KT_WGMMA(184, KT_SUMS_184, KT_OUT_184, 92, 93, 94, 95, 96)
KT_WGMMA(192, KT_SUMS_192, KT_OUT_192, 96, 97, 98, 99, 100)
KT_WGMMA(200, KT_SUMS_200, KT_OUT_200, 100, 101, 102, 103, 104)
KT_WGMMA(208, KT_SUMS_208, KT_OUT_208, 104, 105, 106, 107, 108)
KT_WGMMA(216, KT_SUMS_216, KT_OUT_216, 108, 109, 110, 111, 112)
KT_WGMMA(224, KT_SUMS_224, KT_OUT_224, 112, 113, 114, 115, 116)
KT_WGMMA(232, KT_SUMS_232, KT_OUT_232, 116, 117, 118, 119, 120)
KT_WGMMA(240, KT_SUMS_240, KT_OUT_240, 120, 121, 122, 123, 124)
KT_WGMMA(248, KT_SUMS_248, KT_OUT_248, 124, 125, 126, 127, 128)
KT_WGMMA(256, KT_SUMS_256, KT_OUT_256, 128, 129, 130, 131, 132)

#endif
