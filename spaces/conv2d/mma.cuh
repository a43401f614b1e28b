// Convolution as a product on the tensor cores of sm_80 and later (implicit GEMM): output pixels times filters, the taps and
// channels along k. Pixels are gathered into the ring of stages by cp.async; taps outside x are filled with zeros there.
// A group of channels is a batch of the product. Channels that no copy can reach are padded first by the kernel kt_repack.
#include "conv.cuh"
#include "mma_config.cuh"
#include "conv_gather.cuh"

#ifndef KT_REPACK_W
#define KT_REPACK_W 0 /* 1: filters are first copied, laid out along k as x is walked */
#endif

// ---- tiles

constexpr i64 W_PITCH = KT_REPACK_W ? kt_round_up<i64>(KT_K, 16 / ELEMENT_BYTES) : KT_K; // elements from filter to filter
static_assert(KT_REPACK_W || (KT_X_CHANNELS == GROUP_CHANNELS && RUN == PADDED_RUN), "filters lie along k as x is walked");
constexpr bool CHECK_M = KT_M % BM != 0, CHECK_N = KT_N % BN != 0, CHECK_K = KT_K % BK != 0;
using LayoutA = kt_tile_layout<BM, BK * ELEMENT_BYTES, KT_SWIZZLE, 16>;
using LayoutB = kt_tile_layout<BN, BK * ELEMENT_BYTES, KT_SWIZZLE, 16>;
using CopyA = kt_gather<LayoutA>;
using CopyB = kt_tile_copy<LayoutB, BN, BK * ELEMENT_BYTES, W_PITCH * ELEMENT_BYTES, KT_COPY_B, THREADS, CHECK_N, CHECK_K, KT_PREFETCH>;
using FragmentsA = kt_fragments<LayoutA, true, WARP_M, false>;
using FragmentsB = kt_fragments<LayoutB, true, WARP_N, true>;

typedef kt_range Rows;
#include "mma_store.cuh"

// ---- memory

using Splits = kt_split_workspace<(u64)BLOCKS * KT_BATCH, (u64)BM * BN>;
constexpr u64 W_VECTORS = (u64)KT_FILTERS * W_PITCH * ELEMENT_BYTES / 16;
constexpr u64 PADDED_X = Splits::BYTES, PADDED_W = PADDED_X + (KT_REPACK_X ? PADDED_X_BYTES : 0);
constexpr u64 WORKSPACE_BYTES = PADDED_W + (KT_REPACK_W ? kt_round_up<u64>(W_VECTORS * 16, 256) : 0);

// What the Python side computed, when it made this text.
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
static_assert(WORKSPACE_BYTES == KT_EXPECT_WORKSPACE_BYTES && Splits::ZEROED == KT_EXPECT_ZEROED_BYTES, "workspace");
#endif

// ---- tiles of k

struct kt_loader {
    CopyA x;
    CopyB w;
    int n_left, k_left; // filters from the tile's first; k from the next tile to be loaded
    kt_walk at;

    KT_DEVICE void begin_a(u32 stage) { x.copy(stage, at); }
    KT_DEVICE void begin_b(u32 stage) {
        const int inner = kt_min(k_left, BK) * ELEMENT_BYTES;
        w.copy(stage + LayoutA::BYTES, kt_min(n_left, BN), inner);
        if (KT_CHANNELS_FIRST) {
            const i64 before = at.filter_offset();
            at.advance();
            w.advance((at.filter_offset() - before) * ELEMENT_BYTES);
        } else {
            at.advance();
            w.advance(BK * ELEMENT_BYTES);
        }
        k_left -= BK;
    }
    KT_DEVICE void end(u32) {}
};

// ---- kernels

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    kt_release_next();
    const kt_worker me = kt_this_worker();
    const u32 warp_m = me.warp % WARPS_MN / KT_WARPS_N, warp_n = me.warp % KT_WARPS_N;
    const kt_share share = kt_this_share();
    const u32 k = share.first * BK;

    const kt_element *x = KT_REPACK_X ? (const kt_element *)(workspace + PADDED_X) : a;
    const kt_element *filters = KT_REPACK_W ? (const kt_element *)(workspace + PADDED_W) : b;
    const kt_walk tile = kt_walk::from(k);
    const i64 filter = ((i64)share.batch * KT_N + share.n) * W_PITCH + (KT_CHANNELS_FIRST ? tile.filter_offset() : k);
    kt_loader loader = {{x, share.batch, share.m}, {filters + filter, nullptr}, (int)(KT_N - share.n), (int)(KT_K - k),
                        ONE_TAP ? tile : kt_walk::from(k + CopyA::column() / ELEMENT_BYTES)};
    kt_accumulators sums;
    sums.clear();
    FragmentsA at_a = {me.lane, warp_m * WARP_M, me.group * STEPS};
    const FragmentsB at_b = {me.lane, warp_n * WARP_N, me.group * STEPS};
    kt_await_previous();
    kt_multiply(sums, loader, at_a, at_b, kt_shared_address(kt_shared), (int)share.tiles);
    kt_finish_tile<Splits>(sums, c, KT_EPILOGUE_OPERANDS, {share.m}, share, me, workspace);
}

#define KT_HAS_REPACK (KT_REPACK_X || KT_REPACK_W)
#if KT_HAS_REPACK
enum : int { REPACK_THREADS = 256 };
constexpr u64 X_VECTORS = KT_REPACK_X ? PADDED_X_VECTORS : 0;
constexpr u64 REPACK_BLOCKS = kt_ceil_div<u64>(X_VECTORS + (KT_REPACK_W ? W_VECTORS : 0), REPACK_THREADS);
static_assert(REPACK_BLOCKS < 1ull << 31, "grid");

// 16 bytes of the filters as they lie along k: zeros where a run is filled up.
KT_DEVICE void kt_pad_filters(u8 *to, const kt_element *w, u64 vector) {
    const u64 first = vector * PADDING_GROUP, filter = first / W_PITCH;
    kt_words<4> y = {};
#pragma unroll
    for (int i = 0; i < PADDING_GROUP; i++) {
        const u32 k = (u32)(first % W_PITCH) + i, run = k / PADDED_RUN, j = k % PADDED_RUN;
        const u32 tap = JOIN_TAPS ? run * KT_S + j / KT_X_CHANNELS : run, c = JOIN_TAPS ? j % KT_X_CHANNELS : j;
        if (k >= KT_K || j >= RUN || c >= GROUP_CHANNELS) continue;
        const kt_element *from = w + (filter * (KT_R * KT_S) + tap) * GROUP_CHANNELS + c;
        y.w[i * ELEMENT_BYTES / 4] |= kt_element_bits(from) << (8 * (i * ELEMENT_BYTES % 4));
    }
    kt_store_words(to + vector * 16, y);
}

extern "C" __global__ void __launch_bounds__(REPACK_THREADS) kt_repack(KT_PARAMETERS) {
    (void)c;
    kt_release_next();
    kt_await_previous();
    const u64 vector = (u64)blockIdx.x * REPACK_THREADS + threadIdx.x;
    if (vector < X_VECTORS) kt_pad_x(workspace + PADDED_X, a, vector);
    else if (KT_REPACK_W && vector - X_VECTORS < W_VECTORS) kt_pad_filters(workspace + PADDED_W, b, vector - X_VECTORS);
}
#endif

#include "launch.cuh"
