// Convolution on the tensor cores of sm_80 and later, each pixel of x brought to an SM about once: what a tile of output
// pixels sees of BK channels waits in shared memory while all taps of the filter read it there, instead of one copy for each
// tap. Only the filters run through the ring of stages, a tap of BK channels at a time.
#include "conv.cuh"

// tile
#ifndef KT_BP
#define KT_BP 8 /* rows of output pixels; KT_BM is KT_BP * KT_BQ, rounded up to 16 */
#endif
#ifndef KT_BQ
#define KT_BQ 16 /* columns */
#endif
#include "mma_config.cuh"
#include "tile.cuh"

// ---- tiles

constexpr int PATCH_CHANNELS = BK, TAPS = KT_R * KT_S;
#include "conv_patch.cuh"
static_assert(BM == kt_round_up(KT_BP * KT_BQ, 16) && M_BLOCKS == KT_IMAGES * P_BLOCKS * Q_BLOCKS, "tiles of pixels");
static_assert(KT_K == TAPS * GROUP_CHANNELS && KT_M == OUT_PIXELS && KT_BATCH == KT_GROUPS && KT_N == GROUP_FILTERS, "the product");
static_assert(GROUP_CHANNELS % BK == 0, "a tile of k is a tap of BK channels");

// Patches take turns; with one chunk of channels there is only one.
constexpr int PATCHES = GROUP_CHANNELS > BK ? 2 : 1;
static_assert(PATCHES == 1 || STAGES <= TAPS + 1, "a patch is refilled after its last use");
struct LayoutA {
    static constexpr int BYTES = 0, RESIDENT_BYTES = PATCHES * PATCH_BYTES;
};
constexpr bool CHECK_M = true, CHECK_N = KT_N % BN != 0;
using LayoutB = kt_tile_layout<BN, BK * ELEMENT_BYTES, KT_SWIZZLE, 16>;
using CopyB = kt_tile_copy<LayoutB, BN, BK * ELEMENT_BYTES, (i64)KT_K * ELEMENT_BYTES, KT_COPY_B, THREADS, CHECK_N, false, KT_PREFETCH>;
using FragmentsB = kt_fragments<LayoutB, true, WARP_N, true>;

// A place along k: chunk of channels, and in it filter row and tap of the row.
struct kt_place_in_k {
    u32 chunk, r, s;
    static KT_DEVICE kt_place_in_k from(u32 tile) { return {tile / TAPS, tile % TAPS / KT_S, tile % KT_S}; }
    KT_DEVICE void advance() {
        if (++s == KT_S) s = 0, r++;
        if (r == KT_R) r = 0, chunk++;
    }
};
KT_DEVICE u32 kt_patch_address(u32 chunk) { return kt_shared_address(kt_shared) + (PATCHES == 2 ? chunk % 2 * PATCH_BYTES : 0); }

// A warp's pixels as left operands, as in kt_fragments; which patch and tap comes next is counted here.
struct FragmentsA {
    static constexpr int BLOCKS = WARP_M / 16;

    u32 at[BLOCKS]; // in a patch
    kt_place_in_k place;
    u32 base;

    KT_DEVICE FragmentsA(u32 lane, u32 first_row, u32 first_step, u32 first_tile) : place(kt_place_in_k::from(first_tile)) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const u32 m = kt_min(first_row + 16 * i + lane % 16, (u32)(KT_BP * KT_BQ - 1));
            at[i] = kt_patch_pixel(m) + lane / 16 * 16 + first_step * 32;
        }
        find();
    }
    KT_DEVICE void find() { base = kt_patch_address(place.chunk) + kt_tap_offset(place.r, place.s); }
    KT_DEVICE void next() {
        place.advance();
        find();
    }
    KT_DEVICE void load(u32 (&x)[BLOCKS][4], u32, int step) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) kt_ldmatrix<false>(x[i], at[i] + base + step * 32);
    }
};

// The output pixels of a tile.
struct Rows {
    kt_pixel first;
    KT_DEVICE u32 operator[](u32 i) const {
        const u32 p = first.p + i / KT_BQ, q = first.q + i % KT_BQ;
        const bool exists = i < KT_BP * KT_BQ && p < OUT_P && q < OUT_Q;
        return exists ? (first.n * OUT_P + p) * OUT_Q + q : KT_M;
    }
};
#include "mma_store.cuh"

// ---- memory

using Splits = kt_split_workspace<(u64)BLOCKS * KT_BATCH, (u64)BM * BN>;
constexpr u64 WORKSPACE_BYTES = Splits::BYTES;
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
static_assert(WORKSPACE_BYTES == KT_EXPECT_WORKSPACE_BYTES && Splits::ZEROED == KT_EXPECT_ZEROED_BYTES, "workspace");
#endif

// ---- tiles of k

struct kt_loader {
    const kt_element *x;
    kt_pixel pixel;
    u32 channel; // first of the group
    CopyB w;
    int n_left; // filters from the tile's first
    kt_place_in_k at;
    bool fresh; // no patch was loaded yet

    KT_DEVICE void begin_a(u32) {
        if (fresh || at.r + at.s == 0) kt_load_patch(kt_patch_address(at.chunk), x, pixel, channel + at.chunk * BK);
        fresh = false;
    }
    KT_DEVICE void begin_b(u32 stage) {
        w.copy(stage, kt_min(n_left, BN), BK * ELEMENT_BYTES);
        const u32 chunk = at.chunk;
        at.advance();
        w.advance((i64)(at.chunk == chunk ? GROUP_CHANNELS : BK - (TAPS - 1) * GROUP_CHANNELS) * ELEMENT_BYTES);
    }
    KT_DEVICE void end(u32) {}
};

// ---- kernel

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    kt_release_next();
    const kt_worker me = kt_this_worker();
    const u32 warp_m = me.warp % WARPS_MN / KT_WARPS_N, warp_n = me.warp % KT_WARPS_N;
    const kt_share share = kt_this_share();
    const kt_pixel pixel = kt_patch_origin(share.m / BM);
    const kt_place_in_k at = kt_place_in_k::from(share.first);

    const kt_element *w = b + ((i64)share.batch * KT_N + share.n) * KT_K + (at.r * KT_S + at.s) * GROUP_CHANNELS + at.chunk * BK;
    kt_loader loader = {a, pixel, share.batch * GROUP_CHANNELS, {w, nullptr}, (int)(KT_N - share.n), at, true};
    kt_accumulators sums;
    sums.clear();
    FragmentsA at_a = {me.lane, warp_m * WARP_M, me.group * STEPS, share.first};
    const FragmentsB at_b = {me.lane, warp_n * WARP_N, me.group * STEPS};
    kt_await_previous();
    kt_multiply(sums, loader, at_a, at_b, kt_shared_address(kt_shared) + RING, (int)share.tiles);
    kt_finish_tile<Splits>(sums, c, KT_EPILOGUE_OPERANDS, {pixel}, share, me, workspace);
}

#include "launch.cuh"
