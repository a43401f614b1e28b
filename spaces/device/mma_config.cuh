// The knobs of a product on mma.sync and the tiles they make: first of the parts that such kernels share.
//
// One CTA computes a BM x BN tile of C over its share of k, WARPS_M x WARPS_N warps side by side and WARPS_K groups of
// them taking turns along k.
#ifndef KT_MMA_CONFIG_CUH
#define KT_MMA_CONFIG_CUH

#include "problem.cuh"
#include "raster.cuh"
#include "split_k.cuh"

#ifndef KT_ACC_HALF
#define KT_ACC_HALF 0 /* 1: fp16 accumulators; only where the workload asks for them */
#endif

// tile
#ifndef KT_BM
#define KT_BM 128
#endif
#ifndef KT_BN
#define KT_BN 128
#endif
#ifndef KT_BK
#define KT_BK 32
#endif
#ifndef KT_M_BLOCKS
#define KT_M_BLOCKS kt_ceil_div(KT_M, BM) /* tiles along m; more where a tile's rows are no simple range */
#endif
// mem
#ifndef KT_STAGES
#define KT_STAGES 4
#endif
#ifndef KT_SWIZZLE
#define KT_SWIZZLE 1 /* 0: padded rows */
#endif
#ifndef KT_COPY_A
#define KT_COPY_A 16 /* bytes of one cp.async; 0: through registers, from any alignment */
#endif
#ifndef KT_COPY_B
#define KT_COPY_B 16
#endif
#ifndef KT_PREFETCH
#define KT_PREFETCH 128 /* bytes that L2 fetches around each copy: 0, 128 or 256 */
#endif
#define KT_STORE_DIRECT 0 /* pairs of columns, as the accumulators lie */
#define KT_STORE_WIDE 1   /* 16 bytes, put together by shuffles */
#define KT_STORE_STAGED 2 /* whole rows of the warp's tile, through shared memory */
#ifndef KT_STORE
#define KT_STORE KT_STORE_DIRECT
#endif
// unroll
#ifndef KT_FRAGMENT_STAGES
#define KT_FRAGMENT_STAGES 2 /* 2: the next step's fragments are loaded during this step's product */
#endif
#ifndef KT_UNROLL
#define KT_UNROLL 1 /* tiles of k in one round of the loop */
#endif
// map
#ifndef KT_WARPS_M
#define KT_WARPS_M 2
#endif
#ifndef KT_WARPS_N
#define KT_WARPS_N 2
#endif
#ifndef KT_WARPS_K
#define KT_WARPS_K 1
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif
// sync
#ifndef KT_STAGGER
#define KT_STAGGER 0 /* 1: the copies of B start half a tile of k after those of A */
#endif
// ---- shape of the work

constexpr int BM = KT_BM, BN = KT_BN, BK = KT_BK, STAGES = KT_STAGES, UNROLL = KT_UNROLL;
constexpr int WARPS_MN = KT_WARPS_M * KT_WARPS_N, THREADS = 32 * WARPS_MN * KT_WARPS_K, OWNERS = 32 * WARPS_MN;
constexpr int WARP_M = BM / KT_WARPS_M, WARP_N = BN / KT_WARPS_N, M_TILES = WARP_M / 16, N_TILES = WARP_N / 8;
constexpr int STEPS = BK * ELEMENT_BYTES / 32 / KT_WARPS_K; // matrix instructions of a warp along one tile of k
constexpr int ACCS = M_TILES * N_TILES * 4;
static_assert(KT_DTYPE >= KT_TF32 && !IS_FP8, "a type of the tensor cores");
static_assert(WARP_M % 16 == 0 && WARP_N % 8 == 0 && WARP_M * KT_WARPS_M == BM && WARP_N * KT_WARPS_N == BN, "warp tiles");
static_assert(BM % 16 == 0 && BN % 16 == 0 && STEPS >= 1 && STAGES >= 2, "tiles");
static_assert(KT_FRAGMENT_STAGES == 1 || STEPS % 2 == 0, "two fragment buffers take turns");
static_assert(KT_STAGGER == 0 || STEPS >= 2, "staggered copies start in different steps");

constexpr u32 M_BLOCKS = KT_M_BLOCKS, N_BLOCKS = kt_ceil_div(KT_N, BN), K_TILES = kt_ceil_div(KT_K, BK);
constexpr u32 BLOCKS = M_BLOCKS * N_BLOCKS;
static_assert(KT_SPLIT_K <= K_TILES, "every split has a tile of k");
extern __shared__ __align__(128) u8 kt_shared[];

// ---- who does what

// The rows of C in a tile: a range of them.
struct kt_range {
    u32 first;
    KT_DEVICE u32 operator[](u32 i) const { return first + i; }
};

// A thread's place in its CTA.
struct kt_worker {
    u32 lane, warp, group, owner; // group: of warps that take the same turns along k; owner: of accumulators, in the group
};
KT_DEVICE kt_worker kt_this_worker() {
    const u32 warp = threadIdx.x / 32;
    return {threadIdx.x % 32, warp, warp / WARPS_MN, threadIdx.x % OWNERS};
}

// A CTA's tile of C, and its tiles of k.
struct kt_share {
    u32 batch, split, tile, m, n; // tile: among those of a batch; m, n: first row and column
    u32 first, tiles;
};
KT_DEVICE kt_share kt_this_share() {
    const u32 part = blockIdx.x / BLOCKS, tile = blockIdx.x % BLOCKS, split = part % KT_SPLIT_K;
    const kt_place place = kt_place_of(tile, M_BLOCKS, N_BLOCKS);
    const u32 first = kt_split(K_TILES, KT_SPLIT_K, split), end = kt_split(K_TILES, KT_SPLIT_K, split + 1);
    return {part / KT_SPLIT_K, split, tile, place.m * BM, place.n * BN, first, end - first};
}

#endif
