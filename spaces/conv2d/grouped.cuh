// Convolution in groups of few channels on the tensor cores of sm_80 and later: what a tile of output pixels sees of x waits
// in shared memory, and every tap reads it there.
//
// The matrix instruction multiplies 16 pixels by 16 values of k. Groups of up to 8 channels are taken together as a cluster
// of 8 channels, and k is two taps of them; the filters of one group have zeros for the others (so that a NaN or an infinity
// of a group reaches the outputs of its cluster). Larger groups are clusters by themselves, k being 16 of their channels.
// A warp keeps the filters of a cluster in registers and takes its pixels a few tiles at a time.
#include "conv.cuh"
#include "epilogue.cuh"
#include "split_k.cuh"

// tile
#ifndef KT_BP
#define KT_BP 8 /* output pixels of a CTA: rows */
#endif
#ifndef KT_BQ
#define KT_BQ 16 /* columns */
#endif
#ifndef KT_CLUSTERS
#define KT_CLUSTERS 4 /* of a CTA */
#endif
// mem
#define KT_STORE_DIRECT 0 /* pairs of channels, as the accumulators lie */
#define KT_STORE_STAGED 1 /* 16 bytes, through shared memory */
#ifndef KT_STORE
#define KT_STORE KT_STORE_STAGED
#endif
// perm
#ifndef KT_CHANNELS_FIRST
#define KT_CHANNELS_FIRST 1 /* 1: neighbouring CTAs have the same pixels; 0: the same channels */
#endif
// unroll
#ifndef KT_TILES
#define KT_TILES 2 /* tiles of pixels that a warp works on at once */
#endif
// map
#ifndef KT_WARPS_M
#define KT_WARPS_M 2 /* along pixels */
#endif
#ifndef KT_WARPS_N
#define KT_WARPS_N 2 /* along clusters */
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif

// ---- shape of the work

constexpr int WARPS = KT_WARPS_M * KT_WARPS_N, THREADS = 32 * WARPS, TAPS = KT_R * KT_S;
constexpr bool PAIRED_TAPS = GROUP_CHANNELS <= 8;
constexpr int DEPTH = PAIRED_TAPS ? 8 : GROUP_CHANNELS, WIDTH = DEPTH / GROUP_CHANNELS * GROUP_FILTERS; // of a cluster
constexpr int STEPS = PAIRED_TAPS ? (TAPS + 1) / 2 : TAPS * DEPTH / 16, N_TILES = WIDTH / 8;
static_assert(KT_DTYPE == KT_FP16 || KT_DTYPE == KT_BF16, "16-bit types");
static_assert(PAIRED_TAPS ? 8 % GROUP_CHANNELS == 0 : GROUP_CHANNELS % 16 == 0, "clusters have 8 channels or whole steps");
static_assert(WIDTH % 8 == 0 && KT_CHANNELS % DEPTH == 0, "whole instructions, whole clusters");

constexpr int CLUSTERS = KT_CHANNELS / DEPTH, PATCH_CHANNELS = KT_CLUSTERS * DEPTH, BLOCK_FILTERS = KT_CLUSTERS * WIDTH;
constexpr int M_TILES = kt_ceil_div(kt_ceil_div(KT_BP * KT_BQ, 16), KT_WARPS_M), TILES = KT_TILES; // of a warp, at once

#include "conv_patch.cuh"
constexpr u32 C_BLOCKS = kt_ceil_div(CLUSTERS, KT_CLUSTERS);
constexpr u64 PIXEL_BLOCKS = (u64)KT_IMAGES * P_BLOCKS * Q_BLOCKS, BLOCKS = PIXEL_BLOCKS * C_BLOCKS;
static_assert(KT_CLUSTERS % KT_WARPS_N == 0 && BLOCKS < 1ull << 31, "clusters of a warp, grid");

constexpr int ZEROS = PATCH_BYTES, SUMS = PATCH_BYTES + 128; // in shared memory, after the patch: a few zeros, staged sums
constexpr int SUM_STRIDE = BLOCK_FILTERS + 8; // of staged sums
constexpr int SHARED_BYTES = SUMS + (KT_STORE == KT_STORE_STAGED ? KT_BP * KT_BQ * SUM_STRIDE * 4 : 0);
[[maybe_unused]] constexpr u64 WORKSPACE_BYTES = 0;
using Splits = kt_split_workspace<0, 0>;
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
#endif

extern __shared__ __align__(128) u8 kt_shared[];

// A CTA's place: first output pixel, first cluster.
struct kt_block {
    kt_pixel pixel;
    u32 cluster;
};
KT_DEVICE kt_block kt_this_block() {
    const u32 tile = KT_CHANNELS_FIRST ? blockIdx.x / C_BLOCKS : blockIdx.x % (u32)PIXEL_BLOCKS;
    const u32 cluster = KT_CHANNELS_FIRST ? blockIdx.x % C_BLOCKS : blockIdx.x / (u32)PIXEL_BLOCKS;
    return {kt_patch_origin(tile), cluster * KT_CLUSTERS};
}

// ---- the product of a cluster

// Filters of a cluster as right operands. Lane l holds of tile j filter l / 4 at k = 2 * (l % 4) + {0, 1} and at k + 8.
struct kt_filters {
    u32 words[STEPS][N_TILES][2];

    KT_DEVICE void load(const kt_element *w, u32 cluster, u32 lane) {
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
            const u32 local = 8 * j + lane / 4;
            const kt_element *filter = w + (i64)(cluster * WIDTH + local) * (TAPS * GROUP_CHANNELS);
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 k = 8 * half + lane % 4 * 2;
                    words[step][j][half] = element(filter, local, step, k) | element(filter, local, step, k + 1) << 16;
                }
        }
    }
    static KT_DEVICE u32 element(const kt_element *filter, u32 local, int step, u32 k) {
        const int tap = PAIRED_TAPS ? 2 * step + (int)(k / 8) : step / (DEPTH / 16);
        const u32 channel = PAIRED_TAPS ? k % 8 : step % (DEPTH / 16) * 16 + k;
        if (tap >= TAPS || channel / GROUP_CHANNELS != local / GROUP_FILTERS) return 0;
        return filter[tap * GROUP_CHANNELS + channel % GROUP_CHANNELS];
    }
};

// Tiles of pixels from `first` on; `channel`: bytes from a pixel's first channel to the cluster's.
KT_DEVICE void kt_multiply_tiles(float (&sum)[TILES][N_TILES][4], u32 first, u32 channel, const kt_filters &filters, u32 lane) {
    const u32 patch = kt_shared_address(kt_shared), zeros = patch + ZEROS;
    const bool second = lane / 16;
    u32 pixel[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const u32 m = kt_min(first + 16 * i + lane % 16, (u32)(KT_BP * KT_BQ - 1));
        pixel[i] = patch + channel + kt_patch_pixel(m);
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        // Where a lane reads: the second half of k is the next tap, or the next 8 channels.
        const int first_tap = PAIRED_TAPS ? 2 * step : step / (DEPTH / 16), next = first_tap + 1;
        const int here = kt_tap_offset(first_tap / KT_S, first_tap % KT_S) + (PAIRED_TAPS ? 0 : step % (DEPTH / 16) * 32);
        const int there = PAIRED_TAPS ? kt_tap_offset(next / KT_S, next % KT_S) : here + 16;
        const u32 offset = second ? there : here;
        const bool none = PAIRED_TAPS && next >= TAPS && second;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            u32 a[4];
            kt_ldmatrix<false>(a, none ? zeros : pixel[i] + offset);
#pragma unroll
            for (int j = 0; j < N_TILES; j++) {
                if (KT_DTYPE == KT_FP16) kt_mma_half(sum[i][j], a, filters.words[step][j][0], filters.words[step][j][1]);
                else kt_mma_bfloat(sum[i][j], a, filters.words[step][j][0], filters.words[step][j][1]);
            }
        }
    }
}

// ---- outputs

constexpr int GROUP = kt_alignment(WIDTH * OUTPUT_BYTES, 16) / OUTPUT_BYTES; // outputs of one store

KT_DEVICE void kt_store_tiles(const float (&sum)[TILES][N_TILES][4], const kt_block &at, u32 local, u32 first, int tiles, u32 lane,
                              kt_output *c, const kt_epilogue &epilogue) {
    float *staged = (float *)(kt_shared + SUMS) + local * WIDTH;
#pragma unroll
    for (int j = 0; j < N_TILES; j++) {
        const u32 column = 8 * j + lane % 4 * 2, k = (at.cluster + local) * WIDTH + column;
        kt_columns<2> columns = {};
        if (KT_STORE == KT_STORE_DIRECT) columns = kt_load_columns<2>(epilogue, k, true);
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 pixel = first + 16 * i + 8 * h + lane / 4, p = pixel / KT_BQ, q = pixel % KT_BQ;
                const float pair[2] = {sum[i][j][2 * h], sum[i][j][2 * h + 1]};
                if (pixel >= KT_BP * KT_BQ || (M_TILES % TILES && i >= tiles)) continue;
                if (KT_STORE == KT_STORE_STAGED) kt_store_words(staged + pixel * SUM_STRIDE + column, kt_acc_words<2>(pair));
                else if (at.pixel.p + p < OUT_P && at.pixel.q + q < OUT_Q) {
                    const u64 index = (((u64)at.pixel.n * OUT_P + at.pixel.p + p) * OUT_Q + at.pixel.q + q) * KT_FILTERS + k;
                    kt_finish_and_store<2>(c, index, pair, columns, epilogue);
                }
            }
    }
}

KT_DEVICE void kt_store_staged(const kt_block &at, kt_output *c, const kt_epilogue &epilogue) {
    const float *staged = (const float *)(kt_shared + SUMS);
    constexpr u32 PER_PIXEL = BLOCK_FILTERS / GROUP;
#pragma unroll 2
    for (u32 i = threadIdx.x; i < KT_BP * KT_BQ * PER_PIXEL; i += THREADS) {
        const u32 local = i % PER_PIXEL * GROUP, pixel = i / PER_PIXEL, p = at.pixel.p + pixel / KT_BQ, q = at.pixel.q + pixel % KT_BQ;
        const u32 k = at.cluster * WIDTH + local;
        if (p >= OUT_P || q >= OUT_Q || k >= KT_FILTERS) continue;
        float sum[GROUP];
#pragma unroll
        for (int e = 0; e < GROUP; e += 4) {
            const kt_words<4> words = kt_load_words<4>(staged + pixel * SUM_STRIDE + local + e);
#pragma unroll
            for (int f = 0; f < 4; f++) sum[e + f] = __uint_as_float(words.w[f]);
        }
        const u64 index = (((u64)at.pixel.n * OUT_P + p) * OUT_Q + q) * KT_FILTERS + k;
        kt_finish_and_store<GROUP>(c, index, sum, kt_load_columns<GROUP>(epilogue, k, true), epilogue);
    }
}

// ---- kernel

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    kt_release_next();
    (void)workspace;
    const kt_block at = kt_this_block();
    kt_await_previous();
    kt_load_patch(kt_shared_address(kt_shared), a, at.pixel, at.cluster * DEPTH);
    if (threadIdx.x < 8) kt_shared_store(kt_shared_address(kt_shared) + ZEROS + threadIdx.x * 16, kt_words<4>{});
    kt_copy_commit();

    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp / KT_WARPS_N * (M_TILES * 16);
    const kt_epilogue epilogue = KT_EPILOGUE_OPERANDS;
#pragma unroll 1
    for (u32 local = warp % KT_WARPS_N; local < KT_CLUSTERS; local += KT_WARPS_N) {
        const bool exists = CLUSTERS % KT_CLUSTERS == 0 || at.cluster + local < CLUSTERS;
        kt_filters filters;
        if (exists) filters.load(b, at.cluster + local, lane);
        if (local < KT_WARPS_N) {
            kt_copy_wait<0>();
            __syncthreads();
        }
        if (!exists) continue;
#pragma unroll 1
        for (int i = 0; i < M_TILES; i += TILES) {
            float sum[TILES][N_TILES][4] = {};
            kt_multiply_tiles(sum, first + 16 * i, local * (DEPTH * 2), filters, lane);
            kt_store_tiles(sum, at, local, first + 16 * i, kt_min(M_TILES - i, TILES), lane, c, epilogue);
        }
    }
    if (KT_STORE == KT_STORE_STAGED) {
        __syncthreads();
        kt_store_staged(at, c, epilogue);
    }
}

#include "launch.cuh"
