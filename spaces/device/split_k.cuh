// Split-K: KT_SPLIT_K CTAs share one tile of C, each a range of k, and their sums meet in the workspace.
//
//   KT_SPLIT_ATOMIC  every CTA adds to one zeroed tile of sums; the last to arrive finishes C and zeroes them again
//   KT_SPLIT_LAST    every CTA leaves its sums; the last to arrive adds them in order, of two in either (bitwise repeatable)
//   KT_SPLIT_KERNEL  every CTA leaves its sums in the order of C; the kernel kt_reduce adds them in order
//
// The counters and the atomic sums must be zero before the first launch; every launch leaves them zero.
#ifndef KT_SPLIT_K_CUH
#define KT_SPLIT_K_CUH

#include "epilogue.cuh"
#include "problem.cuh"

#define KT_SPLIT_ATOMIC 0
#define KT_SPLIT_LAST 1
#define KT_SPLIT_KERNEL 2

#ifndef KT_SPLIT_K
#define KT_SPLIT_K 1
#endif
#ifndef KT_SPLIT_MODE
#define KT_SPLIT_MODE KT_SPLIT_LAST
#endif

constexpr bool SPLIT_IN_KERNEL = KT_SPLIT_K > 1 && KT_SPLIT_MODE != KT_SPLIT_KERNEL;
constexpr bool SPLIT_BY_KERNEL = KT_SPLIT_K > 1 && KT_SPLIT_MODE == KT_SPLIT_KERNEL;

// The workspace of split-K for `TILES` tiles (over all batches) of `TILE_SUMS` accumulators.
template <u64 TILES, u64 TILE_SUMS> struct kt_split_workspace {
    static constexpr u64 COUNTERS = SPLIT_IN_KERNEL ? kt_round_up<u64>(TILES * 4, 256) : 0;
    static constexpr u64 SUMS = kt_round_up<u64>(
        !SPLIT_IN_KERNEL && !SPLIT_BY_KERNEL ? 0
        : SPLIT_BY_KERNEL                    ? (u64)KT_SPLIT_K * KT_BATCH * C_ELEMENTS * ACC_BYTES
                                             : TILES * TILE_SUMS * ACC_BYTES * (KT_SPLIT_MODE == KT_SPLIT_LAST ? KT_SPLIT_K : 1),
        256);
    static constexpr u64 ZEROED = COUNTERS + (KT_SPLIT_MODE == KT_SPLIT_ATOMIC ? SUMS : 0);
    static constexpr u64 BYTES = COUNTERS + SUMS;
};

// ---- inside the kernel

// COUNT accumulators as words, and their sum with such words.
template <int COUNT> KT_DEVICE kt_words<COUNT * ACC_BYTES / 4> kt_acc_words(const kt_acc *x) {
    kt_words<COUNT * ACC_BYTES / 4> y;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
#if KT_DTYPE == KT_FP64
        const u64 bits = (u64)__double_as_longlong(x[i]);
        y.w[2 * i] = (u32)bits, y.w[2 * i + 1] = (u32)(bits >> 32);
#elif KT_DTYPE == KT_INT8
        y.w[i] = (u32)x[i];
#else
        y.w[i] = __float_as_uint(x[i]);
#endif
    }
    return y;
}
template <int COUNT> KT_DEVICE void kt_add_acc_words(kt_acc *x, const kt_words<COUNT * ACC_BYTES / 4> &y) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
#if KT_DTYPE == KT_FP64
        x[i] += __longlong_as_double((i64)((u64)y.w[2 * i + 1] << 32 | y.w[2 * i]));
#elif KT_DTYPE == KT_INT8
        x[i] += (int)y.w[i];
#else
        x[i] += __uint_as_float(y.w[i]);
#endif
    }
}
KT_DEVICE void kt_add_global_16(kt_acc *to, const kt_acc *x) {
#if KT_DTYPE == KT_FP64 || KT_DTYPE == KT_INT8
#pragma unroll
    for (int i = 0; i < 16 / ACC_BYTES; i++) kt_add_global(to + i, x[i]);
#else
    kt_add_global(to, x[0], x[1], x[2], x[3]);
#endif
}

// The threads that hold a tile's sums together: all of a CTA.
struct kt_cta_team {
    static constexpr bool KEEPS = false; // its accumulators while it waits: they take registers from what comes between
    // What a thread asks of other CTAs' sums at once, a part at least. (Where CTAs share an SM, KT_BLOCKS bounds the registers.)
    static constexpr int WORDS_ON_THE_WAY = 64;
    KT_DEVICE void sync() const { __syncthreads(); }
    KT_DEVICE bool any(bool mine) const { return __syncthreads_or(mine); }
};

// Sums `acc` over the CTAs of a tile. OWNERS threads hold COUNT accumulators each; the others call with any `owner` past
// them; owner 0 speaks for the team. True in every thread of the one team that then holds the sums; the workspace may be
// used again at once.
template <int COUNT, int OWNERS, class Workspace, class Team = kt_cta_team>
KT_DEVICE bool kt_join_splits(kt_acc (&acc)[COUNT], u8 *workspace, u64 tile, u32 split, u32 owner, Team team = {}) {
    constexpr int LANES = 16 / ACC_BYTES, VECTORS = COUNT / LANES;
    static_assert(COUNT % LANES == 0, "accumulators move in 16 bytes");
    constexpr u64 PART = (u64)VECTORS * OWNERS * 16;
    constexpr bool ATOMIC = KT_SPLIT_MODE == KT_SPLIT_ATOMIC;
    u32 *counter = (u32 *)workspace + tile;
    u8 *sums = workspace + Workspace::COUNTERS + tile * (ATOMIC ? 1 : KT_SPLIT_K) * PART + owner * 16;
    if (owner < OWNERS) {
        u8 *mine = sums + (ATOMIC ? 0 : split * PART);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (ATOMIC) kt_add_global_16((kt_acc *)(mine + v * OWNERS * 16), acc + v * LANES);
            else kt_store_words(mine + v * OWNERS * 16, kt_acc_words<LANES>(acc + v * LANES));
        }
    }
    team.sync();
    if (!team.any(owner == 0 && kt_arrive(counter) == KT_SPLIT_K - 1)) return false;
    if (owner == 0) *counter = 0;
    if (owner < OWNERS) {
        constexpr bool KEPT = Team::KEEPS && !ATOMIC && KT_SPLIT_K == 2; // the sum of two is the same in either order
        constexpr int PARTS = ATOMIC || KEPT ? 1 : KT_SPLIT_K;
        // Reading what another CTA left takes long: several parts are on their way where they fit.
        constexpr int AT_ONCE = kt_min(PARTS, kt_max(Team::WORDS_ON_THE_WAY / (COUNT * ACC_BYTES / 4), 1));
        if (!KEPT)
#pragma unroll
            for (int i = 0; i < COUNT; i++) acc[i] = 0;
#pragma unroll 1
        for (int first = 0; first < PARTS; first += AT_ONCE) {
            kt_words<4> parts[AT_ONCE][VECTORS];
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++)
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    u8 *from = sums + (KEPT ? split ^ 1 : kt_min(first + p, PARTS - 1)) * PART + v * OWNERS * 16;
                    parts[p][v] = kt_load_shared_by_ctas(from);
                    if (ATOMIC) kt_store_words(from, kt_words<4>{});
                }
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++)
                if (PARTS % AT_ONCE == 0 || first + p < PARTS)
#pragma unroll
                    for (int v = 0; v < VECTORS; v++) kt_add_acc_words<LANES>(acc + v * LANES, parts[p][v]);
        }
    }
    return true;
}

// ---- by a second kernel

// COUNT neighbours of one CTA's sums, to their place in the order of C.
template <int COUNT>
KT_DEVICE void kt_store_partial(u8 *workspace, u32 split, u64 index, const kt_acc (&sum)[COUNT]) {
    constexpr int STEP = kt_min(COUNT, 16 / ACC_BYTES);
    kt_acc *to = (kt_acc *)workspace + (u64)split * KT_BATCH * C_ELEMENTS + index;
#pragma unroll
    for (int i = 0; i < COUNT; i += STEP) kt_store_words(to + i, kt_acc_words<STEP>(sum + i));
}

enum : int { REDUCE_THREADS = 128 };

// One thread finishes C_GROUP neighbours of C.
KT_DEVICE void kt_reduce_partials(const kt_epilogue &e, kt_output *c, const u8 *workspace) {
    const u64 index = ((u64)blockIdx.x * REDUCE_THREADS + threadIdx.x) * C_GROUP;
    constexpr u64 PART = (u64)KT_BATCH * C_ELEMENTS;
    constexpr int STEP = kt_min(C_GROUP, 16 / ACC_BYTES);
    if (index >= PART) return;
    const kt_acc *from = (const kt_acc *)workspace + index;
    kt_acc sum[C_GROUP] = {};
#pragma unroll 8
    for (int s = 0; s < KT_SPLIT_K; s++) {
#pragma unroll
        for (int i = 0; i < C_GROUP; i += STEP)
            kt_add_acc_words<STEP>(sum + i, kt_load_words<STEP * ACC_BYTES / 4>(from + s * PART + i));
    }
    kt_finish_and_store<C_GROUP>(c, index, sum, kt_load_columns<C_GROUP>(e, (u32)(index % C_LD), true), e);
}

#if KT_SPLIT_K > 1 && KT_SPLIT_MODE == KT_SPLIT_KERNEL
constexpr u64 REDUCE_BLOCKS = kt_ceil_div<u64>((u64)KT_BATCH * C_ELEMENTS, C_GROUP * REDUCE_THREADS);
static_assert(REDUCE_BLOCKS < 1ull << 31, "grid");

extern "C" __global__ void __launch_bounds__(REDUCE_THREADS) kt_reduce(KT_PARAMETERS) {
    (void)a, (void)b;
    kt_release_next();
    kt_await_previous();
    kt_reduce_partials(KT_EPILOGUE_OPERANDS, c, workspace);
}
#endif

#endif
