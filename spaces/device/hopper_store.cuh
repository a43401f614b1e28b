// From the accumulators of wgmma to C: the sums of split-K meet, and a warpgroup stores its tile with the epilogue on the way.
#ifndef KT_HOPPER_STORE_CUH
#define KT_HOPPER_STORE_CUH

#include "hopper_config.cuh"

// ---- memory for parts of C on their way, a warpgroup's own

constexpr bool STORE_BY_TMA = KT_STORE == KT_STORE_TMA, STORE_BY_ROWS = KT_STORE == KT_STORE_ROWS;
constexpr int BOX_N = KT_SWAPPED ? BN : BN % 64 == 0 ? 64 : BN % 32 == 0 ? 32 : 16; // a box is 64 by so many of the product
constexpr int BOX_ROW = (KT_SWAPPED ? 64 : BOX_N) * OUTPUT_BYTES, BOX_BYTES = 64 * BOX_N * OUTPUT_BYTES;
constexpr int NARROW_N = BN % 128 == 0 ? 128 : BOX_N; // columns of rows that are stored at once
constexpr int STORE_BYTES = STORE_BY_TMA ? KT_STORE_BUFFERS * BOX_BYTES : STORE_BY_ROWS ? 64 * (NARROW_N * OUTPUT_BYTES + 16) : 0;
// A CTA with a single tile has the stages' memory for it when all is multiplied: for all boxes, and for whole rows that begin
// anywhere.
constexpr int WHOLE_BYTES = STORE_BY_TMA ? BM * BN * OUTPUT_BYTES : CONSUMERS * 64 * (BN * OUTPUT_BYTES + 16);
constexpr bool STORE_IN_STAGES = !KT_PERSISTENT && (STORE_BY_TMA || (STORE_BY_ROWS && C_GROUP != 8)) &&
                                 WHOLE_BYTES <= STAGES * (BM + BN) * BK * ELEMENT_BYTES;
constexpr bool HOLDS_LITTLE = !KT_HAS_RESIDUAL && KT_HAS_BIAS + KT_HAS_SCALE + KT_HAS_SHIFT <= 1 && BN < 256; // of a wide strip
constexpr int STRIP_N = STORE_BY_ROWS && STORE_IN_STAGES && HOLDS_LITTLE ? BN : NARROW_N;
constexpr int STRIP_ROW = STRIP_N * OUTPUT_BYTES + 16; // 16 bytes more: no bank conflicts
static_assert(!STORE_BY_TMA || C_GROUP == 8, "rows of C that the TMA can store");
static_assert(KT_STORE == KT_STORE_DIRECT || (BN % (KT_SWAPPED ? 8 : 16) == 0 && OUTPUT_BYTES == 2), "matrices in shared memory");
static_assert(!KT_SWAPPED || !STORE_BY_ROWS, "boxes or pairs");
// The sums of a CTA, where those of a cluster meet.
constexpr int SUMS_BYTES = KT_CLUSTER_K > 1 ? BM * BN * ACC_BYTES : 0;
static_assert(KT_CLUSTER_K == 1 || KT_STORE == KT_STORE_DIRECT, "parts of a tile are stored directly");

constexpr u64 TILES = (u64)CLUSTERS * CLUSTER_SIZE; // of C in a batch, those beyond its edges counted
using Splits = kt_split_workspace<TILES * KT_BATCH * READERS, (u64)GROUP_M * BN>;

// A warpgroup and its tile of C.
struct kt_group_tile {
    kt_output *c;
    kt_epilogue epilogue;
    u64 index;       // of the batch's C
    u32 row, column; // of the CTA's tile in C; the next row is KT_CLASSES_A further
    u32 first;       // where the warpgroup's begins in the tile, along m of the product
    u32 thread, barrier;

    KT_DEVICE u32 lane() const { return thread % 32; }
    // Of row `i` of the CTA's tile.
    KT_DEVICE u32 row_of(u32 i) const { return row + i * KT_CLASSES_A; }
    // Of pair (i, j, h) of the sums, turned where the product is swapped.
    KT_DEVICE u32 row_of(int i, int j, int h) const {
        if (KT_SWAPPED) return row + 8 * j + lane() % 4 * 2 + lane() / 4 % 2;
        return row_of(first + 64 * i + thread / 32 * 16 + 8 * h + lane() / 4);
    }
    KT_DEVICE u32 column_of(int i, int j, int h) const {
        if (KT_SWAPPED) return column + first + 64 * i + thread / 32 * 16 + 8 * h + lane() / 8 * 2;
        return column + 8 * j + lane() % 4 * 2;
    }
};

// COUNT neighbours of each pair: finished into C, or as they are into the sums of split-K.
template <int COUNT, bool PARTIAL>
KT_DEVICE void kt_store_pairs(kt_sums &sums, const kt_group_tile &to, u8 *workspace, u32 split) {
    constexpr int ROWS = KT_SWAPPED ? BN / 8 : 2 * M_PARTS, COLUMNS = M_PARTS * (BN / 4) / ROWS; // of pairs
#pragma unroll
    for (int x = 0; x < COLUMNS; x++)
#pragma unroll
        for (int e = 0; e < 2; e += COUNT) {
            const u32 column = (KT_SWAPPED ? to.column_of(x / 2, 0, x % 2) : to.column_of(0, x, 0)) + e;
            if (CHECK_COLUMNS && column >= C_COLUMNS) continue;
            const kt_columns<COUNT> columns = kt_load_columns<COUNT>(to.epilogue, column, !PARTIAL);
#pragma unroll
            for (int y = 0; y < ROWS; y++) {
                const int i = (KT_SWAPPED ? x : y) / 2, h = (KT_SWAPPED ? x : y) % 2, j = KT_SWAPPED ? y : x;
                const u32 row = to.row_of(i, j, h);
                if (CHECK_ROWS && row >= C_ROWS) continue;
                const u64 index = to.index + (u64)row * C_LD + column;
                kt_acc sum[COUNT];
#pragma unroll
                for (int g = 0; g < COUNT; g++) sum[g] = sums.pair(i, j, h)[e + g];
                if (PARTIAL) kt_store_partial<COUNT>(workspace, split, index, sum);
                else kt_finish_and_store<COUNT>(to.c, index, sum, columns, to.epilogue);
            }
        }
}

// A pair, finished: two outputs in a word. What lies outside C is any number.
KT_DEVICE u32 kt_finished_pair(kt_sums &sums, const kt_group_tile &to, int i, int j, int h) {
    constexpr int COUNT = kt_min(C_GROUP, 2); // neighbours that can be loaded at once
    const u32 row = to.row_of(i, j, h), column = to.column_of(i, j, h);
    u32 word = 0;
#pragma unroll
    for (int e = 0; e < 2; e += COUNT) {
        const bool in_row = !CHECK_COLUMNS || column + e < C_COLUMNS;
        kt_acc sum[COUNT];
#pragma unroll
        for (int g = 0; g < COUNT; g++) sum[g] = sums.pair(i, j, h)[e + g];
        kt_math residual[COUNT] = {};
        if (KT_HAS_RESIDUAL && in_row && (!CHECK_ROWS || row < C_ROWS))
            kt_load_outputs<COUNT>(residual, to.epilogue.residual + to.index + (u64)row * C_LD + column + e);
        const u32 bits = kt_finish<COUNT>(sum, kt_load_columns<COUNT>(to.epilogue, column + e, in_row), residual).words.w[0];
        word |= e ? bits << 16 : COUNT == 1 ? bits & 0xffff : bits;
    }
    return word;
}

// Where byte `offset` of a box is, by the swizzle of C's map.
KT_DEVICE u32 kt_swizzled(u32 offset) { return offset ^ ((offset >> 3) & ((BOX_ROW / 16 - 1) << 4)); }

// A box of the warpgroup's tile, finished, into shared memory.
KT_DEVICE void kt_fill_box(kt_sums &sums, const kt_group_tile &to, u32 at, int box, int i) {
    if constexpr (KT_SWAPPED) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
                const u32 row = to.row_of(i, j, h) - to.row, column = to.column_of(0, j, h) - to.column - to.first;
                kt_shared_store(at + kt_swizzled(row * BOX_ROW + column * OUTPUT_BYTES), kt_finished_pair(sums, to, i, j, h));
            }
    } else {
        const u32 lane = to.lane(), row = to.thread / 32 * 16 + lane % 16;
#pragma unroll
        for (int q = 0; q < BOX_N / 16; q++) {
            u32 words[4];
#pragma unroll
            for (int v = 0; v < 4; v++) words[v] = kt_finished_pair(sums, to, i, (box * BOX_N + q * 16) / 8 + v / 2, v % 2);
            kt_stmatrix(at + kt_swizzled(row * BOX_ROW + (2 * q + lane / 16) * 16), words);
        }
    }
}

// Boxes of C through shared memory, each stored by the TMA while the next is being finished: in a buffer that may have to
// become free, or in memory of its own.
struct kt_box_store {
    u32 memory, next = 0;

    KT_DEVICE void store(kt_sums &sums, const kt_group_tile &to, const kt_tensor_map &map, u32 batch) {
#pragma unroll
        for (int box = 0; box < BN / BOX_N; box++)
#pragma unroll
            for (int i = 0; i < M_PARTS; i++) { // innermost: bias and the like are held for one box's columns only
                const u32 at = memory + next * BOX_BYTES;
                if (!STORE_IN_STAGES) {
                    if (to.thread == 0) kt_store_box_wait<KT_STORE_BUFFERS - 1>();
                    kt_warpgroup_sync(to.barrier);
                }
                kt_fill_box(sums, to, at, box, i);
                kt_fence_async_proxy();
                kt_warpgroup_sync(to.barrier);
                const u32 m = to.first + 64 * i, n = box * BOX_N; // in the CTA's tile of the product
                const u32 row = to.row / KT_CLASSES_A; // in the map of its class
                if (to.thread == 0) kt_store_box(map, at, to.column + (KT_SWAPPED ? m : n), row + (KT_SWAPPED ? n : m), batch);
                if (++next == KT_STORE_BUFFERS && !STORE_IN_STAGES) next = 0;
            }
    }
};

// The next two store a warp's 16 rows of a strip, which begin at row `first` of the CTA's tile in shared memory.

// Rows that begin at multiples of 16 bytes, in pieces of so many.
KT_DEVICE void kt_store_strip_vectors(const kt_group_tile &to, u32 strip, u32 first, u32 column) {
    constexpr int LANES = STRIP_N / C_GROUP; // of a row
    const u32 x = to.lane() % LANES * C_GROUP;
    if (CHECK_N && column + x >= KT_N) return;
#pragma unroll
    for (int r = 0; r < 16; r += 32 / LANES) {
        const u32 mine = r + to.lane() / LANES, row = to.row_of(first + mine);
        if (CHECK_M && row >= KT_M) continue;
        kt_words<4> piece;
        kt_shared_load(piece, strip + mine * STRIP_ROW + x * OUTPUT_BYTES);
        kt_store_words(to.c + to.index + (u64)row * C_LD + column + x, piece);
    }
}

// Rows that begin anywhere, in whole words, single outputs at the ends.
KT_DEVICE void kt_store_strip_words(const kt_group_tile &to, u32 strip, u32 first, u32 column) {
    const u32 lane = to.lane();
    const int count = (int)KT_N - (int)column; // outputs of a row from here on
#pragma unroll 4
    for (u32 r = 0; r < 16; r++) {
        const u32 row = to.row_of(first + r);
        if (CHECK_M && row >= KT_M) continue;
        const u64 index = to.index + (u64)row * C_LD + column;
        const int odd = C_GROUP == 1 ? (int)(index & 1) : 0; // an output before the first whole word
        if (odd && lane == 0 && count > 0) to.c[index] = (u16)kt_shared_load(strip + r * STRIP_ROW);
#pragma unroll
        for (int at = 0; at < STRIP_N; at += 64) {
            const int e = at + 2 * (int)lane + odd, left = kt_min(count, (int)STRIP_N) - e;
            if (STRIP_N % 64 && e >= STRIP_N) continue;
            const u32 word = strip + r * STRIP_ROW + (e - odd) * OUTPUT_BYTES;
            const u32 pair = odd ? __funnelshift_r(kt_shared_load(word), kt_shared_load(word + 4), 16) : kt_shared_load(word);
            if (left >= 2) *(u32 *)(to.c + index + e) = pair;
            else if (left == 1) to.c[index + e] = (u16)pair;
        }
    }
}

KT_DEVICE void kt_store_rows(kt_sums &sums, const kt_group_tile &to, u32 memory) {
    const u32 lane = to.lane(), strip = memory + to.thread / 32 * 16 * STRIP_ROW;
#pragma unroll
    for (int first = 0; first < BN; first += STRIP_N)
#pragma unroll
        for (int i = 0; i < M_PARTS; i++) {
            __syncwarp();
#pragma unroll
            for (int q = 0; q < STRIP_N / 16; q++) {
                u32 words[4];
#pragma unroll
                for (int v = 0; v < 4; v++) words[v] = kt_finished_pair(sums, to, i, (first + q * 16) / 8 + v / 2, v % 2);
                kt_stmatrix(strip + lane % 16 * STRIP_ROW + (2 * q + lane / 16) * 16, words);
            }
            __syncwarp();
            const u32 row = to.first + 64 * i + to.thread / 32 * 16;
            if constexpr (C_GROUP == 8) kt_store_strip_vectors(to, strip, row, to.column + first);
            else kt_store_strip_words(to, strip, row, to.column + first);
        }
}

// ---- split-K

// A warpgroup holds the sums of its rows.
struct kt_group_team {
    static constexpr bool KEEPS = true;
    static constexpr int OTHER_REGISTERS = 64; // addresses, the epilogue's operands and what else the compiler keeps
    static constexpr int WORDS_ON_THE_WAY = kt_max(kt_min(KT_CONSUMER_REGISTERS - ACCS - OTHER_REGISTERS, 128), 0);
    u32 barrier;

    KT_DEVICE void sync() const { kt_warpgroup_sync(barrier); }
    KT_DEVICE bool any(bool mine) const { return kt_warpgroup_any(barrier, mine); }
};

// Sums a warpgroup's accumulators over the CTAs of its cluster, each of which then stores its share. All threads of the
// cluster meet once between `give` and `store`. Of two CTAs each keeps its own half: the sum is the same in either order.
struct kt_cluster_sums {
    static constexpr int CTAS = KT_CLUSTER_K, FOURS = ACCS / 4, MINE = kt_ceil_div(FOURS, CTAS), AT_ONCE = kt_max(16 / CTAS, 1);
    static constexpr bool KEPT = CTAS == 2;
    static constexpr int PARTS = KEPT ? 1 : CTAS; // that are read
    u32 memory; // of the thread, in every CTA

    KT_DEVICE void give(kt_sums &sums, u32 share) const {
#pragma unroll
        for (int v = 0; v < (KEPT ? MINE : FOURS); v++) {
            kt_acc four[4];
#pragma unroll
            for (int e = 0; e < 4; e++) four[e] = KEPT ? of_half(sums, v, share ^ 1, e) : sums.four(v)[e];
            kt_shared_store(memory + v * WARPGROUP * 16, kt_acc_words<4>(four));
        }
    }
    KT_DEVICE void store(kt_sums &sums, const kt_group_tile &to, u32 share) const {
#pragma unroll
        for (int first = 0; first < MINE; first += AT_ONCE) { // reading another's memory takes long: much is on its way
            kt_words<4> parts[AT_ONCE][PARTS];
#pragma unroll
            for (int x = 0; x < AT_ONCE; x++)
#pragma unroll
                for (u32 part = 0; part < PARTS; part++) {
                    const u32 v = KEPT ? first + x : kt_min<u32>(share * MINE + first + x, FOURS - 1);
                    if (first + x < MINE) parts[x][part] = kt_load_of_cta(memory + v * WARPGROUP * 16, KEPT ? share ^ 1 : part);
                }
#pragma unroll
            for (int x = 0; x < AT_ONCE; x++) {
                const u32 v = share * MINE + first + x;
                if (first + x >= MINE || (FOURS % CTAS && v >= FOURS)) continue;
                kt_acc four[4];
#pragma unroll
                for (int e = 0; e < 4; e++) four[e] = KEPT ? of_half(sums, first + x, share, e) : 0;
#pragma unroll
                for (int part = 0; part < PARTS; part++) kt_add_acc_words<4>(four, parts[x][part]);
#pragma unroll
                for (int h = 0; h < 2; h++) store_pair<kt_min(C_GROUP, 2)>(four + 2 * h, to, v / (BN / 8), v % (BN / 8), h);
            }
        }
    }

  private:
    // Accumulator `e` of the `x`-th four of a half; beyond the last any.
    KT_DEVICE static kt_acc of_half(kt_sums &sums, int x, u32 half, int e) {
        return half ? sums.four(kt_min(MINE + x, FOURS - 1))[e] : sums.four(x)[e];
    }
    template <int COUNT> KT_DEVICE static void store_pair(const kt_acc *pair, const kt_group_tile &to, int i, int j, int h) {
        const u32 row = to.row_of(i, j, h);
        if (CHECK_ROWS && row >= C_ROWS) return;
#pragma unroll
        for (int e = 0; e < 2; e += COUNT) {
            const u32 column = to.column_of(i, j, h) + e;
            if (CHECK_COLUMNS && column >= C_COLUMNS) continue;
            kt_acc sum[COUNT];
#pragma unroll
            for (int g = 0; g < COUNT; g++) sum[g] = pair[e + g];
            kt_finish_and_store<COUNT>(to.c, to.index + (u64)row * C_LD + column, sum,
                                       kt_load_columns<COUNT>(to.epilogue, column, true), to.epilogue);
        }
    }
};

#endif
