// The knobs of a product on wgmma and the work they make: first of the parts that such kernels share.
//
// A producer warp keeps a ring of stages in shared memory full by TMA; consumer warpgroups multiply. A cluster of
// CLUSTER_M x CLUSTER_N CTAs works on as many neighbouring tiles and loads what they have in common once.
#ifndef KT_HOPPER_CONFIG_CUH
#define KT_HOPPER_CONFIG_CUH

#include "hopper_barrier.cuh"
#include "hopper_tma.cuh"
#include "hopper_wgmma.cuh"
#include "problem.cuh"
#include "raster.cuh"
#include "split_k.cuh"

// tile
#ifndef KT_BM
#define KT_BM 128
#endif
#ifndef KT_BN
#define KT_BN 128
#endif
#ifndef KT_BK
#define KT_BK 64
#endif
// mem
#ifndef KT_STAGES
#define KT_STAGES 4
#endif
#ifndef KT_CLASSES_A
#define KT_CLASSES_A 1 /* residue classes of A's rows, each with a map and tiles of its own: where rows start anywhere */
#endif
#ifndef KT_SWIZZLE_B
#define KT_SWIZZLE_B 128 /* bytes of a row of B's slabs where B is not K-major */
#endif
#define KT_STORE_DIRECT 0 /* neighbouring pairs, as the accumulators lie */
#define KT_STORE_TMA 1    /* boxes, through shared memory */
#define KT_STORE_ROWS 2   /* rows through shared memory, in vectors or, where they start anywhere, in words */
#ifndef KT_STORE
#define KT_STORE KT_STORE_DIRECT
#endif
#ifndef KT_WARM
#define KT_WARM 0 /* tiles of A that a CTA asks L2 for while the kernel before it ends */
#endif
#ifndef KT_STORE_BUFFERS
#define KT_STORE_BUFFERS 1 /* boxes of a warpgroup that may be on their way to C */
#endif
// unroll
#ifndef KT_IN_FLIGHT
#define KT_IN_FLIGHT 1 /* tiles of k whose product may be unfinished when the next one's begins: 0 or 1 */
#endif
#ifndef KT_PROMOTE
#define KT_PROMOTE 0 /* elements of k after which fp32 takes over what the tensor cores added up; 0: only at the end */
#endif
#ifndef KT_PARTS_N
#define KT_PARTS_N 1 /* instructions side by side along n: two where one would not fit the registers at launch */
#endif
// map
#ifndef KT_CONSUMERS
#define KT_CONSUMERS 2 /* warpgroups that multiply */
#endif
#ifndef KT_PRODUCER_WARPS
#define KT_PRODUCER_WARPS 4 /* of which one loads; 4: a whole warpgroup, which can give registers away */
#endif
#ifndef KT_PRODUCER_REGISTERS
#define KT_PRODUCER_REGISTERS 40 /* after the exchange, of a thread */
#endif
#ifndef KT_CONSUMER_REGISTERS
#define KT_CONSUMER_REGISTERS 232
#endif
#ifndef KT_CLUSTER_M
#define KT_CLUSTER_M 1
#endif
#ifndef KT_CLUSTER_N
#define KT_CLUSTER_N 1
#endif
#ifndef KT_CLUSTER_K
#define KT_CLUSTER_K 1 /* CTAs that share one tile of C, each a range of k; their sums meet in shared memory */
#endif
#ifndef KT_PERSISTENT
#define KT_PERSISTENT 1 /* 1: every CTA takes one tile after the other */
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif
// sync
#ifndef KT_PINGPONG
#define KT_PINGPONG 0 /* 1: each of two consumers has tiles of its own, and one multiplies while the other stores */
#endif

// ---- shape of the work

constexpr int BM = KT_BM, BN = KT_BN, BK = KT_BK, STAGES = KT_STAGES;
constexpr int CONSUMERS = KT_CONSUMERS, READERS = KT_PINGPONG ? 1 : CONSUMERS; // warpgroups that read a stage
constexpr int THREADS = WARPGROUP * CONSUMERS + 32 * KT_PRODUCER_WARPS;
constexpr bool EXCHANGE_REGISTERS = KT_PRODUCER_WARPS == 4;
constexpr int GROUP_M = BM / READERS, M_PARTS = GROUP_M / 64, PART_N = BN / KT_PARTS_N; // of a warpgroup; of an instruction
constexpr int ACCS = M_PARTS * BN / 2;
constexpr int CLUSTER_SIZE = KT_CLUSTER_M * KT_CLUSTER_N * KT_CLUSTER_K;
static_assert(KT_DTYPE == KT_FP16 || KT_DTYPE == KT_BF16 || KT_DTYPE == KT_TF32 || IS_FP8, "a type of wgmma");
static_assert(GROUP_M % 64 == 0 && GROUP_M * READERS == BM, "rows of a warpgroup");
static_assert(PART_N % 8 == 0 && PART_N * KT_PARTS_N == BN && PART_N <= 256, "columns of an instruction");
static_assert(!KT_PINGPONG || (CONSUMERS == 2 && KT_PERSISTENT), "two warpgroups take turns");
static_assert(KT_CLASSES_A == 1 || (A_K_MAJOR && !B_K_MAJOR && ELEMENT_BYTES == 2 && KT_CLASSES_A <= KT_M), "classes");
static_assert(KT_CLASSES_A * A_LD * ELEMENT_BYTES % 16 == 0 || KT_CLASSES_A == 1, "rows of a class start alike");
static_assert(KT_PROMOTE % BK == 0, "whole tiles of k");
static_assert(KT_PRODUCER_WARPS == 1 || KT_PRODUCER_WARPS == 4, "registers move between whole warpgroups");
static_assert(STAGES >= 2 && (KT_IN_FLIGHT == 0 || KT_IN_FLIGHT == 1), "pipeline");
static_assert(KT_CLUSTER_K == 1 || (KT_CLUSTER_M * KT_CLUSTER_N * KT_SPLIT_K == 1 && !KT_PERSISTENT), "sums in a cluster");
static_assert(CLUSTER_SIZE <= 8, "clusters that every device of the architecture can hold");
// More would wait for registers that nobody gives.
static_assert(!EXCHANGE_REGISTERS || KT_PRODUCER_REGISTERS + CONSUMERS * KT_CONSUMER_REGISTERS <=
                                         (CONSUMERS + 1) * (65536 / (KT_BLOCKS * THREADS) / 8 * 8), "registers");

constexpr u32 CLASS_CLUSTERS = kt_ceil_div<u32>(kt_ceil_div<u32>(KT_M, KT_CLASSES_A), BM * KT_CLUSTER_M); // along m
constexpr u32 M_CLUSTERS = CLASS_CLUSTERS * KT_CLASSES_A;
constexpr u32 N_CLUSTERS = kt_ceil_div<u32>(kt_ceil_div<u32>(KT_N, BN), KT_CLUSTER_N);
constexpr bool CHECK_M = KT_M % (KT_CLASSES_A * BM * KT_CLUSTER_M) != 0; // tiles end beyond C
constexpr bool CHECK_N = KT_N % (BN * KT_CLUSTER_N) != 0;
constexpr bool CHECK_ROWS = KT_SWAPPED ? CHECK_N : CHECK_M, CHECK_COLUMNS = KT_SWAPPED ? CHECK_M : CHECK_N; // of C
constexpr u32 MOST_SHIFT = (16 - 16 / KT_CLASSES_A) / ELEMENT_BYTES; // of k, in the tiles of a class
constexpr u32 K_TILES = kt_ceil_div<u32>(KT_K + MOST_SHIFT, BK);
constexpr u32 CLUSTERS = M_CLUSTERS * N_CLUSTERS, UNITS = CLUSTERS * KT_BATCH * KT_SPLIT_K; // a cluster works on one unit
static_assert((u64)M_CLUSTERS * N_CLUSTERS * KT_BATCH * KT_SPLIT_K * CLUSTER_SIZE < 1ull << 31, "grid");
constexpr u32 K_PARTS = KT_SPLIT_K * KT_CLUSTER_K;
static_assert(K_PARTS <= K_TILES, "every part has a tile of k");

// ---- who does what

// A CTA's place in its cluster.
struct kt_member {
    u32 m, n, k;

    KT_DEVICE u32 rank() const { return m + n * KT_CLUSTER_M + k; } // along k, or along m and n
    // CTAs that need the same rows of A, and the same columns of B.
    KT_DEVICE u16 sharing_a() const {
        u32 ctas = 0;
#pragma unroll
        for (u32 j = 0; j < KT_CLUSTER_N; j++) ctas |= 1u << (j * KT_CLUSTER_M);
        return (u16)(ctas << m);
    }
    KT_DEVICE u16 sharing_b() const { return (u16)(((1u << KT_CLUSTER_M) - 1) << (n * KT_CLUSTER_M)); }
};
constexpr u32 PARTNERS = KT_CLUSTER_M + KT_CLUSTER_N - 1; // CTAs that write to each other's stages, itself among them
KT_DEVICE kt_member kt_this_member() {
    if (CLUSTER_SIZE == 1) return {0, 0, 0};
    const u32 rank = kt_cluster_rank();
    if (KT_CLUSTER_K > 1) return {0, 0, rank};
    return {rank % KT_CLUSTER_M, rank / KT_CLUSTER_M, 0};
}
KT_DEVICE u32 kt_partner(const kt_member &me, u32 i) { // i < PARTNERS
    if (i < KT_CLUSTER_M) return i + me.n * KT_CLUSTER_M;
    const u32 j = i - KT_CLUSTER_M;
    return me.m + (j + (j >= me.n)) * KT_CLUSTER_M;
}

// One tile of C and a range of its k.
struct kt_unit {
    u32 batch, split, tile; // tile: among those of a batch
    u32 row_class, m, n;    // m, n: first row, of those of the class, and column
    u32 first, tiles;       // along k

    KT_DEVICE u32 row() const { return m * KT_CLASSES_A + row_class; } // the first, of C
    // Elements from where the map of the class begins, a multiple of 16 bytes, to its first row: k of A's tiles is behind.
    KT_DEVICE u32 shift() const { return row_class * (u32)(A_LD * ELEMENT_BYTES % 16) % 16 / ELEMENT_BYTES; }
};
KT_DEVICE kt_unit kt_unit_of(u32 unit, const kt_member &me) {
    const u32 part = unit / CLUSTERS, cluster = unit % CLUSTERS, split = part % KT_SPLIT_K;
    const kt_place place = kt_place_of(cluster, M_CLUSTERS, N_CLUSTERS);
    const u32 row_class = KT_CLASSES_A == 1 ? 0 : place.m / CLASS_CLUSTERS, k_part = split * KT_CLUSTER_K + me.k;
    const u32 first = K_PARTS == 1 ? 0 : kt_split(K_TILES, K_PARTS, k_part);
    const u32 end = K_PARTS == 1 ? K_TILES : kt_split(K_TILES, K_PARTS, k_part + 1);
    return {part / KT_SPLIT_K, split, cluster * CLUSTER_SIZE + me.rank(),
            row_class, ((place.m - row_class * CLASS_CLUSTERS) * KT_CLUSTER_M + me.m) * BM,
            (place.n * KT_CLUSTER_N + me.n) * BN, first, end - first};
}

// Calls `work(unit)` for every unit of this CTA.
template <class Work> KT_DEVICE void kt_for_units(const kt_member &me, Work work) {
    u32 unit = blockIdx.x / CLUSTER_SIZE;
    do {
        work(kt_unit_of(unit, me));
        unit += gridDim.x / CLUSTER_SIZE;
    } while (KT_PERSISTENT && unit < UNITS);
}

// ---- accumulators of a thread

struct kt_sums {
    float part[M_PARTS][KT_PARTS_N][PART_N / 2];

    // The pair at columns 8 * j + 2 * (lane % 4), row 64 * i + 16 * warp + 8 * h + lane / 4 of the warpgroup's tile.
    KT_DEVICE float *pair(int i, int j, int h) { return &part[i][j / (PART_N / 8)][j % (PART_N / 8) * 4 + 2 * h]; }
    KT_DEVICE kt_acc (&all())[ACCS] { return reinterpret_cast<kt_acc(&)[ACCS]>(part); }
    // Four of all: two rows of a pair of columns.
    KT_DEVICE float *four(int v) { return pair(v / (BN / 8), v % (BN / 8), 0); }

    // Swapped, a pair lies along a column of C. Lanes of neighbouring rows of the product trade, and it lies along a row.
    KT_DEVICE void turn_pairs(u32 lane) {
        const bool odd = lane / 4 % 2;
#pragma unroll
        for (int v = 0; v < ACCS / 2; v++) {
            float *p = four(v / 2) + v % 2 * 2;
            const float other = __shfl_xor_sync(0xffffffff, odd ? p[0] : p[1], 4);
            p[0] = odd ? other : p[0], p[1] = odd ? p[1] : other;
        }
    }
};

#endif
