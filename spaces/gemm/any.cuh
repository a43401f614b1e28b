// Matrix product of extents that are known at run time only: what a file of many tuned shapes falls back to.
//
// A plain tiled kernel: 64 x 64 tiles of C, operands as accumulator type in shared memory, every edge guarded. Sums are
// taken in the accumulator type, as the tuned kernels do; tf32 and fp8 are computed in fp32.
#ifndef KT_TRANS_A
#define KT_TRANS_A 0 /* 1: A is stored [K, M] */
#endif
#ifndef KT_TRANS_B
#define KT_TRANS_B 0 /* 1: B is stored [N, K] */
#endif
#ifndef KT_DESCRIBE
#define KT_DESCRIBE "{}"
#endif
#include "epilogue.cuh"

enum : int { TILE = 64, STEP = 16, SIDE = 16, EACH = TILE / SIDE, THREADS = SIDE * SIDE, ROW = TILE + 1 };
enum : int { SHARED_BYTES = 2 * STEP * ROW * ACC_BYTES };

extern __shared__ __align__(128) u8 kt_shared[];

KT_DEVICE kt_acc kt_from_element(kt_element x) {
#if KT_DTYPE == KT_FP16
    return kt_from_half(x);
#elif KT_DTYPE == KT_BF16
    return kt_from_bfloat(x);
#elif KT_DTYPE == KT_FP8_E4M3 // a half with another bias of the exponent; its only NaN is all ones
    if ((x & 0x7f) == 0x7f) return __uint_as_float(0x7fffffff);
    return 256 * kt_from_half((u16)((x & 0x80) << 8 | (x & 0x7f) << 7));
#elif KT_DTYPE == KT_FP8_E5M2 // the high byte of a half
    return kt_from_half((u16)(x << 8));
#else
    return (kt_acc)x;
#endif
}

// STEP steps of TILE rows (or columns) of an operand, zeros outside; by neighbouring threads what are neighbours in memory.
template <bool K_MAJOR>
KT_DEVICE void kt_copy_tile(kt_acc *to, const kt_element *from, i64 row0, i64 rows, i64 k0, i64 depth) {
    for (int i = (int)threadIdx.x; i < TILE * STEP; i += THREADS) {
        const int row = K_MAJOR ? i / STEP : i % TILE, step = K_MAJOR ? i % STEP : i / TILE;
        const i64 y = row0 + row, k = k0 + step;
        to[step * ROW + row] = y < rows && k < depth ? kt_from_element(from[K_MAJOR ? y * depth + k : k * rows + y]) : (kt_acc)0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) kt_kernel(KT_PARAMETERS, i64 m, i64 n, i64 k, i64 batch) {
    kt_acc *const tile_a = (kt_acc *)kt_shared, *const tile_b = tile_a + STEP * ROW;
    const kt_epilogue epilogue = KT_EPILOGUE_OPERANDS;
    const int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
    const i64 down = kt_ceil_div<i64>(m, TILE), across = kt_ceil_div<i64>(n, TILE);
    (void)workspace;
    for (i64 tile = blockIdx.x; tile < down * across * batch; tile += gridDim.x) {
        const i64 row0 = tile / across % down * TILE, column0 = tile % across * TILE, matrix = tile / across / down;
        kt_acc sums[EACH][EACH] = {};
        for (i64 k0 = 0; k0 < k; k0 += STEP) {
            kt_copy_tile<!KT_TRANS_A>(tile_a, a + matrix * m * k, row0, m, k0, k);
            kt_copy_tile<KT_TRANS_B>(tile_b, b + matrix * n * k, column0, n, k0, k);
            __syncthreads();
#pragma unroll
            for (int s = 0; s < STEP; s++)
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int j = 0; j < EACH; j++) sums[i][j] += tile_a[s * ROW + y + i * SIDE] * tile_b[s * ROW + x + j * SIDE];
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const i64 row = row0 + y + i * SIDE, column = column0 + x + j * SIDE;
                if (row >= m || column >= n) continue;
                const kt_acc sum[1] = {sums[i][j]};
                kt_finish_and_store<1>(c, (u64)((matrix * m + row) * n + column), sum, kt_load_columns<1>(epilogue, (u32)column, true), epilogue);
            }
    }
}

#ifndef __CUDACC_RTC__
// 0, or an error of the runtime.
extern "C" int kt_launch_any(i64 m, i64 n, i64 k, i64 batch, void *const *args, void *stream) {
    const i64 most = 1 << 20; // CTAs; each takes further tiles
    const i64 tiles = kt_ceil_div<i64>(m, TILE) * kt_ceil_div<i64>(n, TILE);
    const i64 blocks = tiles >= most || batch >= most ? most : kt_min<i64>(tiles * batch, most);
    void *workspace = nullptr, *parameters[KT_ARGUMENTS + 5];
    for (int i = 0; i < KT_ARGUMENTS; i++) parameters[i] = (void *)(args + i);
    void *const last[] = {&workspace, &m, &n, &k, &batch};
    for (int i = 0; i < 5; i++) parameters[KT_ARGUMENTS + i] = last[i];
    return (int)cudaLaunchKernel((const void *)kt_kernel, dim3((u32)blocks), dim3(THREADS), parameters, SHARED_BYTES, (cudaStream_t)stream);
}
#endif
