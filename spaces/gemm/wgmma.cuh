// Matrix product by the warpgroup instructions of sm_90a: one warp loads tiles by TMA into a ring of shared-memory stages,
// warpgroups multiply them with wgmma.
//
// Swapped operands (KT_SWAPPED): what is computed is the transpose of C, so that the many columns of a C with few rows take
// the side of 64 of the instruction.
//
// Any extents: the TMA fills tails with zeros and does not store beyond C. It reads rows at multiples of 16 bytes: where A's
// start elsewhere, every q-th of them starts alike, and the product is one of q products, each with such a class of rows, a map
// of them that begins up to 15 bytes before the first, and tiles of B whose k is behind by as much. What cannot be read so is
// first repacked by the kernel kt_repack. Bytes (fp8) are multiplied along k only: the repack turns them.
#include "hopper_store.cuh"

constexpr bool A_REPACK_TRANSPOSES = ELEMENT_BYTES == 1 && !A_K_MAJOR, B_REPACK_TRANSPOSES = ELEMENT_BYTES == 1 && !B_K_MAJOR;
constexpr bool A_ALONG_K = A_K_MAJOR || A_REPACK_TRANSPOSES, B_ALONG_K = B_K_MAJOR || B_REPACK_TRANSPOSES; // in shared memory
#include "repack_kernel.cuh"
static_assert(!KT_WARM || KT_CLASSES_A == 1, "A has one map");
static_assert(!KT_SWAPPED || !KT_HAS_REPACK, "the parameters a and b are the operands of C, not of its transpose");

// ---- memory

constexpr int K_ROW = kt_min(BK * ELEMENT_BYTES, 128); // bytes of a row of K-major slabs
using TileA = kt_slabs<A_ALONG_K, A_ALONG_K ? K_ROW : 128, BM, BK>;
using TileB = kt_slabs<B_ALONG_K, B_ALONG_K ? K_ROW : KT_SWIZZLE_B, BN, BK>;
static_assert(B_ALONG_K || KT_PARTS_N == 1 || PART_N % TileB::WIDTH == 0, "an instruction begins at a slab");
static_assert(TileA::OUTER % (8 * KT_CLUSTER_N) == 0 && TileB::OUTER % (8 * KT_CLUSTER_M) == 0, "shares of a cluster's CTAs");

constexpr int LOADED_BYTES = TileA::BYTES + TileB::BYTES, STAGE_BYTES = kt_round_up(LOADED_BYTES, 1024);
constexpr int STORE_AT = STAGES * STAGE_BYTES, SUMS_AT = STORE_AT + CONSUMERS * STORE_BYTES, BARRIERS_AT = SUMS_AT + SUMS_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + 8 * (2 * STAGES + 2);

// What the Python side computed, when it made this text.
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
static_assert(WORKSPACE_BYTES == KT_EXPECT_WORKSPACE_BYTES && Splits::ZEROED == KT_EXPECT_ZEROED_BYTES, "workspace");
static_assert(UNITS == KT_EXPECT_UNITS && THREADS == KT_EXPECT_THREADS, "launch");
#endif

extern __shared__ __align__(1024) u8 kt_shared[];

struct kt_barriers {
    u32 full, empty, turn; // first of STAGES, STAGES and two

    KT_DEVICE void init() const {
        for (u32 s = 0; s < STAGES; s++) {
            kt_barrier_init(full + 8 * s, 1);
            kt_barrier_init(empty + 8 * s, PARTNERS * READERS * 4); // every warp
        }
        for (u32 w = 0; w < 2; w++) kt_barrier_init(turn + 8 * w, 4);
        kt_barrier_init_done();
    }
};

// ---- the producer: one thread

// The maps of a tensor: of A and C one for each class of rows.
template <int CLASSES> struct kt_tensor_maps {
    const kt_tensor_map *of[CLASSES];

    KT_DEVICE const kt_tensor_map &at(u32 row_class) const {
        const kt_tensor_map *found = of[0];
#pragma unroll
        for (int i = 1; i < CLASSES; i++)
            if (row_class == i) found = of[i];
        return *found;
    }
    KT_DEVICE void prefetch() const {
#pragma unroll
        for (int i = 0; i < CLASSES; i++) kt_prefetch_map(*of[i]);
    }
};

// This CTA's share of a tile, to all that need it.
template <class Tile, int SHARES>
KT_DEVICE void kt_load_tile(u32 to, const kt_tensor_map &map, u32 barrier, u32 row, u32 k, u32 batch, u32 share, u16 ctas) {
    constexpr u32 OUTER = Tile::OUTER / SHARES;
    const u32 x = Tile::TRANSPOSED ? row : k, y = (Tile::TRANSPOSED ? k : row) + share * OUTER;
    to += share * (Tile::SLAB_BYTES / SHARES);
#pragma unroll
    for (u32 i = 0; i < Tile::COUNT; i++) {
        if (SHARES == 1) kt_load_box(to + i * Tile::SLAB_BYTES, map, barrier, x + i * Tile::WIDTH, y, batch);
        else kt_load_box_to(to + i * Tile::SLAB_BYTES, map, barrier, x + i * Tile::WIDTH, y, batch, ctas);
    }
}

// Asks L2 for this CTA's share of the first tiles of A.
KT_DEVICE void kt_warm(const kt_tensor_map &map_a, const kt_member &me) {
    constexpr u32 OUTER = TileA::OUTER / KT_CLUSTER_N;
    const kt_unit unit = kt_unit_of(blockIdx.x / CLUSTER_SIZE, me);
#pragma unroll 1
    for (u32 tile = 0; tile < kt_min<u32>(KT_WARM, unit.tiles); tile++) {
        const u32 k = (unit.first + tile) * BK;
        const u32 x = TileA::TRANSPOSED ? unit.m : k, y = (TileA::TRANSPOSED ? k : unit.m) + me.n * OUTER;
#pragma unroll
        for (u32 i = 0; i < TileA::COUNT; i++) kt_prefetch_box(map_a, x + i * TileA::WIDTH, y, unit.batch);
    }
}

KT_DEVICE void kt_produce(const kt_tensor_maps<KT_CLASSES_A> &maps_a, const kt_tensor_map &map_b, const kt_barriers &barriers,
                          const kt_member &me, u32 memory) {
    kt_ring<STAGES> ring;
    kt_for_units(me, [&](const kt_unit &unit) {
        const kt_tensor_map &map_a = maps_a.at(unit.row_class);
#pragma unroll 1
        for (u32 tile = 0; tile < unit.tiles; tile++) {
            const u32 full = barriers.full + 8 * ring.stage, to = memory + ring.stage * STAGE_BYTES, k = (unit.first + tile) * BK;
            kt_barrier_wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
            kt_barrier_expect(full, LOADED_BYTES); // the shares of all CTAs
            kt_load_tile<TileA, KT_CLUSTER_N>(to, map_a, full, unit.m, k, unit.batch, me.n, me.sharing_a());
            kt_load_tile<TileB, KT_CLUSTER_M>(to + TileA::BYTES, map_b, full, unit.n, k - unit.shift(), unit.batch, me.m, me.sharing_b());
            ring.next();
        }
    });
    if (PARTNERS > 1) // others arrive at this CTA's barriers until they have read all stages
        for (int stage = 0; stage < STAGES; stage++, ring.next()) kt_barrier_wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
}

// ---- consumers

// Tells every CTA that writes to this stage that the warp has read it. A warpgroup's warps need not end together.
KT_DEVICE void kt_release_stage(u32 empty, const kt_member &me, u32 lane) {
    if (lane >= PARTNERS) return;
    if (PARTNERS == 1) kt_barrier_arrive(empty);
    else kt_barrier_arrive_at(empty, kt_partner(me, lane));
}

// A class's first tile of k begins with `shift` elements of other rows. B's are zeros there, which is not enough where those
// are infinite: makes them zeros too, in the warpgroup's rows, which are at `rows`.
KT_DEVICE void kt_clear_head(u32 rows, u32 shift, u32 thread, u32 barrier) {
#pragma unroll
    for (u32 row = thread; row < GROUP_M; row += WARPGROUP) {
        const u32 start = rows + row * K_ROW, at = start ^ ((start >> 7 & (K_ROW / 16 - 1)) << 4); // swizzled
        kt_words<4> x;
        kt_shared_load(x, at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int bytes = (int)shift * ELEMENT_BYTES - 4 * i;
            x.w[i] = bytes >= 4 ? 0 : bytes <= 0 ? x.w[i] : x.w[i] & ~0u << 8 * bytes;
        }
        kt_shared_store(at, x);
    }
    kt_fence_async_proxy();
    kt_warpgroup_sync(barrier);
}

// The product of `tiles` tiles of k; `reader` is the warpgroup's place among those that share the stages, `next_turn` the
// barrier to which it says that another's product may begin, when these tiles are the `last`.
KT_DEVICE void kt_multiply_tiles(kt_sums &sums, u32 tiles, kt_ring<STAGES> &ring, const kt_barriers &barriers, const kt_member &me,
                                 u32 memory, u32 reader, u32 lane, u32 next_turn, bool last = true) {
    u32 before = 0; // the stage whose product may be unfinished
#pragma unroll 1
    for (u32 tile = 0; tile < tiles; tile++) {
        const u32 at = memory + ring.stage * STAGE_BYTES;
        const u64 a = TileA::descriptor(at) + reader * TileA::offset(GROUP_M, 0), b = TileB::descriptor(at + TileA::BYTES);
        kt_barrier_wait(barriers.full + 8 * ring.stage, ring.parity);
        kt_wgmma_fence();
#pragma unroll
        for (int step = 0; step < TileA::STEPS; step++)
#pragma unroll
            for (int i = 0; i < M_PARTS; i++)
#pragma unroll
                for (int j = 0; j < KT_PARTS_N; j++)
                    kt_wgmma<PART_N>::multiply<TileA::TRANSPOSED, TileB::TRANSPOSED>(
                        sums.part[i][j], a + TileA::offset(64 * i, step), b + TileB::offset(PART_N * j, step), tile | step);
        kt_wgmma_commit();
        kt_wgmma_wait<KT_IN_FLIGHT>();
        if (!KT_IN_FLIGHT) kt_release_stage(barriers.empty + 8 * ring.stage, me, lane);
        else if (tile) kt_release_stage(barriers.empty + 8 * before, me, lane);
        before = ring.stage;
        ring.next();
    }
    if (KT_PINGPONG && last && lane == 0) kt_barrier_arrive(next_turn); // every wait for a stage is behind
    if (KT_IN_FLIGHT) {
        kt_wgmma_wait<0>();
        kt_release_stage(barriers.empty + 8 * before, me, lane);
    }
}

// The same in fp32 for types whose products the tensor cores add less exactly: they add up KT_PROMOTE elements of k at a time.
KT_DEVICE void kt_multiply_promoted(kt_sums &sums, u32 tiles, kt_ring<STAGES> &ring, const kt_barriers &barriers, const kt_member &me,
                                    u32 memory, u32 reader, u32 lane, u32 next_turn) {
    constexpr u32 AT_ONCE = kt_max(KT_PROMOTE / BK, 1);
#pragma unroll
    for (int v = 0; v < ACCS; v++) sums.all()[v] = 0;
#pragma unroll 1
    for (u32 tile = 0; tile < tiles; tile += AT_ONCE) {
        kt_sums some;
        kt_multiply_tiles(some, kt_min(AT_ONCE, tiles - tile), ring, barriers, me, memory, reader, lane, next_turn,
                          tile + AT_ONCE >= tiles);
#pragma unroll
        for (int v = 0; v < ACCS; v++) sums.all()[v] += some.all()[v];
    }
}

// ---- kernels

// f(0), f(1) ... for the classes of rows.
#define KT_CLASSES_1(f) f(0)
#define KT_CLASSES_2(f) KT_CLASSES_1(f), f(1)
#define KT_CLASSES_4(f) KT_CLASSES_2(f), f(2), f(3)
#define KT_CLASSES_8(f) KT_CLASSES_4(f), f(4), f(5), f(6), f(7)
#define KT_CLASSES_OF(count, f) KT_CLASSES_##count(f)
#define KT_FOR_CLASSES(count, f) KT_CLASSES_OF(count, f)
#define KT_MAP_A_PARAMETER(c) const __grid_constant__ kt_tensor_map map_a##c
#define KT_MAP_A_ADDRESS(c) &map_a##c
#if KT_STORE == KT_STORE_TMA
#define KT_MAP_C_PARAMETER(c) const __grid_constant__ kt_tensor_map map_c##c
#define KT_MAP_C_ADDRESS(c) &map_c##c
#define KT_MAPS_C_PARAMETERS , KT_FOR_CLASSES(KT_CLASSES_A, KT_MAP_C_PARAMETER)
#else
#define KT_MAP_C_ADDRESS(c) &map_b /* not used */
#define KT_MAPS_C_PARAMETERS
#endif

// An SM gives registers to four warps at a time: the bound that lets KT_BLOCKS CTAs fit counts whole warpgroups. Swapped, where
// an epilogue may otherwise take many more registers than the sums need.
constexpr int BOUND_THREADS = KT_SWAPPED ? kt_round_up<int>(THREADS, WARPGROUP) : THREADS;

extern "C" __global__ void __launch_bounds__(BOUND_THREADS, KT_BLOCKS)
kt_kernel(KT_PARAMETERS, KT_FOR_CLASSES(KT_CLASSES_A, KT_MAP_A_PARAMETER), const __grid_constant__ kt_tensor_map map_b KT_MAPS_C_PARAMETERS) {
    const u32 memory = kt_shared_address(kt_shared), group = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);
    const kt_barriers barriers = {memory + BARRIERS_AT, memory + BARRIERS_AT + 8 * STAGES, memory + BARRIERS_AT + 16 * STAGES};
    const kt_member me = kt_this_member();
    const kt_tensor_maps<KT_CLASSES_A> maps_a = {{KT_FOR_CLASSES(KT_CLASSES_A, KT_MAP_A_ADDRESS)}};
    const kt_tensor_maps<KT_CLASSES_A> maps_c = {{KT_FOR_CLASSES(KT_CLASSES_A, KT_MAP_C_ADDRESS)}};
    (void)a, (void)b;
    if (threadIdx.x == 0) {
        maps_a.prefetch(), kt_prefetch_map(map_b);
        barriers.init();
    }
    if (KT_WARM && threadIdx.x == CONSUMERS * WARPGROUP) kt_warm(map_a0, me);
    if (CLUSTER_SIZE > 1) kt_cluster_start();
    else __syncthreads();
    kt_release_next();
    kt_await_previous();

    if (group == CONSUMERS) {
        if (EXCHANGE_REGISTERS) kt_give_registers<KT_PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS * WARPGROUP) kt_produce(maps_a, map_b, barriers, me, memory);
        if (KT_CLUSTER_K > 1) kt_cluster_sync();
    } else {
        if (EXCHANGE_REGISTERS) kt_take_registers<KT_CONSUMER_REGISTERS>();
        const u32 thread = threadIdx.x % WARPGROUP, reader = KT_PINGPONG ? 0 : group;
        const kt_epilogue epilogue = KT_EPILOGUE_OPERANDS;
        kt_ring<STAGES> ring;
        const u32 stored = memory + (STORE_IN_STAGES ? group * (WHOLE_BYTES / CONSUMERS) : STORE_AT + group * STORE_BYTES);
        kt_box_store boxes = {stored};
        u32 turn = 0;
        kt_for_units(me, [&](const kt_unit &unit) {
            if (KT_PINGPONG && turn++ % 2 != group) return ring.skip(unit.tiles);
            kt_sums sums;
            // The other's stages must have come round, or the parity of this one's would be taken for an older one.
            if (KT_PINGPONG) kt_barrier_wait(barriers.turn + 8 * group, (turn - 1) / 2 % 2 ^ (group == 0));
            if (KT_CLASSES_A > 1 && unit.row_class && unit.first == 0) {
                kt_barrier_wait(barriers.full + 8 * ring.stage, ring.parity);
                kt_clear_head(memory + ring.stage * STAGE_BYTES + reader * (GROUP_M * K_ROW), unit.shift(), thread, 1 + group);
            }
            const u32 next_turn = barriers.turn + 8 * (group ^ 1);
            if (KT_PROMOTE) kt_multiply_promoted(sums, unit.tiles, ring, barriers, me, memory, reader, thread % 32, next_turn);
            else kt_multiply_tiles(sums, unit.tiles, ring, barriers, me, memory, reader, thread % 32, next_turn);
            if (STORE_IN_STAGES) kt_consumers_sync<CONSUMERS>(); // all have read the stages
            if constexpr (KT_SWAPPED) sums.turn_pairs(thread % 32);
            const kt_group_tile to = {c, epilogue, unit.batch * (u64)C_BATCH, KT_SWAPPED ? unit.n : unit.row(), KT_SWAPPED ? unit.m : unit.n,
                                      reader * GROUP_M, thread, 1 + group};
            if (SPLIT_BY_KERNEL) return kt_store_pairs<kt_min(C_GROUP, 2), true>(sums, to, workspace, unit.split);
            if constexpr (SPLIT_IN_KERNEL) {
                const u64 part = (unit.batch * TILES + unit.tile) * READERS + reader;
                if (!kt_join_splits<ACCS, WARPGROUP, Splits>(sums.all(), workspace, part, unit.split, thread, kt_group_team{to.barrier})) return;
            }
            if constexpr (KT_CLUSTER_K > 1) {
                const kt_cluster_sums joined = {memory + SUMS_AT + (reader * ACCS / 4 * WARPGROUP + thread) * 16};
                joined.give(sums, me.k);
                kt_cluster_sync();
                return joined.store(sums, to, me.k);
            }
            if constexpr (STORE_BY_TMA) boxes.store(sums, to, maps_c.at(unit.row_class), unit.batch);
            else if constexpr (STORE_BY_ROWS) kt_store_rows(sums, to, stored);
            else kt_store_pairs<kt_min(C_GROUP, 2), false>(sums, to, workspace, unit.split);
        });
        if (STORE_BY_TMA && thread == 0) kt_store_box_wait<0>();
    }
    if (KT_CLUSTER_K > 1) kt_cluster_sync(); // others may still read this CTA's sums
}

#define KT_CLUSTER CLUSTER_SIZE
#define KT_RESIDENT (KT_PERSISTENT && CLUSTER_SIZE > 2)
#include "launch.cuh"
