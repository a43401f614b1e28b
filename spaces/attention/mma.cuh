// Attention by the tensor cores of sm_80 and later: cp.async into rings of K and V tiles, ldmatrix, mma.sync.
//
// One CTA takes BM queries of one head, one warp WARP_M of them, and passes over the keys that they see, from the last tile
// to the first, so that the tiles that causal masks and the end of the keys cut come first and most of the loop is free of
// masks. Probabilities stay in registers between the two products.
#include "attention_problem.cuh"

// tile
#ifndef KT_BM
#define KT_BM 128
#endif
#ifndef KT_BN
#define KT_BN 64
#endif
// mem
#ifndef KT_STAGES
#define KT_STAGES 1 /* tiles of K, and of V, in shared memory */
#endif
#ifndef KT_HOLD_Q
#define KT_HOLD_Q 0 /* 1: q in registers; 0: in shared memory */
#endif
// perm
#ifndef KT_HEADS_TOGETHER
#define KT_HEADS_TOGETHER 1 /* heads that take turns in the order of CTAs; within them the longest rows come first */
#endif
// unroll
#ifndef KT_OVERLAP
#define KT_OVERLAP 0 /* 1: exponentials come among the product that makes the next tile's logits */
#endif
// map
#ifndef KT_WARPS
#define KT_WARPS 4
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif
// sync
#ifndef KT_JOINT
#define KT_JOINT 0 /* 1: one barrier a tile, K and V are waited for together; 0: one before each of them */
#endif

// ---- shape of the work

constexpr int BM = KT_BM, BN = KT_BN, STAGES = KT_STAGES, WARPS = KT_WARPS, THREADS = 32 * WARPS;
constexpr int WARP_M = BM / WARPS, M_TILES = WARP_M / 16, KEYS = BN;
constexpr bool HOLD_Q = KT_HOLD_Q, JOINT = KT_JOINT, OVERLAP = KT_OVERLAP;
static_assert(WARP_M % 16 == 0 && WARP_M * WARPS == BM && BN % 16 == 0, "tiles");
static_assert(STAGES >= 1 + JOINT && (!OVERLAP || JOINT), "a joint stage is filled while another one is read");

#include "attention_copy.cuh"
#include "attention_rows.cuh"
#include "attention_store.cuh"

constexpr u32 M_BLOCKS = kt_ceil_div(KT_S, BM), HEADS = KT_B * KT_H;
constexpr u64 BLOCKS = (u64)M_BLOCKS * HEADS;
constexpr bool CHECK_KEYS = KT_KV_LEN % BN != 0, ANY_MASK = KT_CAUSAL || HAS_WINDOW || CHECK_KEYS;

using LayoutQ = kt_dim_layout<BM>;
using LayoutK = kt_dim_layout<BN>;
using LayoutV = kt_out_dim_layout<BN>;
using CopyQ = kt_dim_copy<LayoutQ, BM, KT_Q_ROW_STRIDE, THREADS, KT_S % BM != 0>;
using CopyK = kt_dim_copy<LayoutK, BN, KT_K_ROW_STRIDE, THREADS, CHECK_KEYS>;
using CopyV = kt_out_dim_copy<LayoutV, BN, KT_V_ROW_STRIDE, THREADS, CHECK_KEYS>;
using Rows = kt_rows<LayoutQ, LayoutK, LayoutV, kt_diagonal_mask<M_TILES>, HOLD_Q>;

// ---- memory: stages of K and V, then q; q that moves on to registers lies where the V of the last stage comes later

constexpr int STAGE_BYTES = LayoutK::BYTES + LayoutV::BYTES, RING_BYTES = STAGES * STAGE_BYTES;
constexpr int Q_TILE = RING_BYTES - (HOLD_Q ? LayoutV::BYTES : 0);
constexpr int STAGED_BYTES = KT_STORE == KT_STORE_STAGED ? BM * SLAB_STRIDE : 0;
constexpr int SHARED_BYTES = kt_max(kt_max(RING_BYTES, Q_TILE + LayoutQ::BYTES), STAGED_BYTES);
constexpr u64 WORKSPACE_BYTES = 0, ZEROED_BYTES = 0;
static_assert(BLOCKS < 1ull << 31 && ZEROED_BYTES <= WORKSPACE_BYTES, "grid and workspace");
#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory, as the Python side computed it");
#endif

// ---- the pass over the keys

// Moves tiles of K and V into stages, in descending order down to tile `lowest`. TAIL: it may be the last one.
struct kt_loader {
    CopyK k;
    CopyV v;
    int lowest;

    KT_DEVICE kt_loader(const kt_element *k, const kt_element *v, int lowest, int highest)
        : k(k + (i64)highest * BN * KT_K_ROW_STRIDE, threadIdx.x), v(v + (i64)highest * BN * KT_V_ROW_STRIDE, threadIdx.x),
          lowest(lowest) {}
    template <bool TAIL> KT_DEVICE void load_k(int tile, u32 stage) {
        if (tile >= lowest) k.template copy<TAIL>(stage, KT_KV_LEN - tile * BN);
        k.advance((i64)-BN * KT_K_ROW_STRIDE * ELEMENT_BYTES);
    }
    template <bool TAIL> KT_DEVICE void load_v(int tile, u32 stage) {
        if (tile >= lowest) v.template copy<TAIL>(stage + LayoutK::BYTES, KT_KV_LEN - tile * BN);
        v.advance((i64)-BN * KT_V_ROW_STRIDE * ELEMENT_BYTES);
    }
};

struct kt_pass {
    Rows &rows;
    kt_loader &loader;
    int own_row;     // first query of the warp
    u32 ring, stage; // the first stage, and that of this tile

    KT_DEVICE u32 last() const { return ring + (STAGES - 1) * STAGE_BYTES; }
    KT_DEVICE u32 following() const { return STAGES == 1 || stage == last() ? ring : stage + STAGE_BYTES; }
    // The stage of the tile before, which K and V still to come replace.
    KT_DEVICE u32 previous() const { return STAGES == 1 || stage == ring ? last() : stage - STAGE_BYTES; }

    // Whether any of the warp's rows sees a key of a tile.
    KT_DEVICE bool sees(int tile) const {
        return tile * BN < kt_end_key(own_row + WARP_M - 1) && (!HAS_WINDOW || tile * BN + BN > kt_first_key(own_row));
    }

    // -- two barriers: copies are in flight in the order K, V, K, V ..., each in its own group

    KT_DEVICE void begin_separate(int tile) {
        kt_copy_commit(); // q
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            loader.load_k<true>(tile - s, ring + s * STAGE_BYTES);
            kt_copy_commit();
            if (s == STAGES - 1) break;
            loader.load_v<true>(tile - s, ring + s * STAGE_BYTES);
            kt_copy_commit();
        }
        if (!HOLD_Q) return;
        kt_copy_wait<2 * STAGES - 1>();
        __syncthreads();
        rows.hold_queries();
    }
    template <bool MASKED> KT_DEVICE void step_separate(int tile) {
        kt_copy_wait<2 * (STAGES - 1)>();
        __syncthreads(); // and all are done with the values of the tile before
        loader.load_v<MASKED>(tile - (STAGES - 1), previous());
        kt_copy_commit();
        Logits s;
        rows.logits(s, stage);
        kt_copy_wait<2 * (STAGES - 1)>();
        __syncthreads(); // and all are done with the keys of this tile
        loader.load_k<MASKED>(tile - STAGES, stage);
        kt_copy_commit();
        if (MASKED && !sees(tile)) return;
        rows.template advance<MASKED>(s, tile * BN);
        rows.add_values(s, stage + LayoutK::BYTES);
    }

    // -- one barrier: K and V of a tile are one group; with overlap, V and the K that follows it

    KT_DEVICE void begin_joint(int tile) {
        if (OVERLAP) loader.load_k<true>(tile, ring);
        if (HOLD_Q || OVERLAP) kt_copy_commit();
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            loader.load_k<true>(tile - OVERLAP - s, ring + (s + OVERLAP) * STAGE_BYTES);
            loader.load_v<true>(tile - s, ring + s * STAGE_BYTES);
            kt_copy_commit();
        }
        if (!HOLD_Q && !OVERLAP) return;
        kt_copy_wait<STAGES - 1>();
        __syncthreads();
        rows.hold_queries();
    }
    template <bool TAIL> KT_DEVICE void next_joint(int tile) {
        kt_copy_wait<kt_max(STAGES - 2, 0)>();
        __syncthreads(); // and all are done with the tile before
        loader.load_k<TAIL>(tile - (STAGES - 1) - OVERLAP, OVERLAP ? stage : previous());
        loader.load_v<TAIL>(tile - (STAGES - 1), previous());
        kt_copy_commit();
    }
    template <bool MASKED> KT_DEVICE void step_joint(int tile) {
        next_joint<MASKED>(tile);
        if (MASKED && !sees(tile)) return;
        Logits s;
        rows.logits(s, stage);
        rows.template advance<MASKED>(s, tile * BN);
        rows.add_values(s, stage + LayoutK::BYTES);
    }
    template <bool MASKED> KT_DEVICE void step(int tile) {
        if (JOINT) step_joint<MASKED>(tile);
        else step_separate<MASKED>(tile);
        stage = following();
    }

    // `s` are this tile's logits, `next` becomes those of the tile that follows.
    template <bool MASKED> KT_DEVICE void step_overlapped(Logits &s, Logits &next, int tile) {
        next_joint<MASKED>(tile);
        if (MASKED) {
            rows.logits(next, following());
            if (sees(tile)) {
                rows.template advance<true>(s, tile * BN);
                rows.add_values(s, stage + LayoutK::BYTES);
            }
        } else {
            rows.template advance<false>(s, tile * BN);
            rows.logits(next, following(), [&](int step) {
#pragma unroll
                for (int j = 0; j < KEY_TILES; j++)
                    if (j * DIM_STEPS / KEY_TILES == step) rows.softmax.exponentiate(s, j);
            });
            rows.add_products(s, stage + LayoutK::BYTES);
        }
        stage = following();
    }
    KT_DEVICE void last_overlapped(Logits &s, int tile) {
        kt_copy_wait<kt_max(STAGES - 2, 0)>();
        __syncthreads();
        if (!sees(tile)) return;
        rows.template advance<true>(s, tile * BN);
        rows.add_values(s, stage + LayoutK::BYTES);
    }
};

// Tiles `highest` down to `lowest`; those from `clean_end` on and those below `clean` hold keys that some row does not see.
struct kt_range {
    int lowest, highest, clean, clean_end;

    KT_DEVICE kt_range(int row) {
        const int last = kt_min(row + BM, KT_S) - 1, first_key = kt_first_key(row), end_key = kt_end_key(last);
        lowest = first_key / BN, highest = first_key < end_key ? (end_key - 1) / BN : lowest - 1;
        clean = kt_max(lowest, kt_ceil_div(kt_first_key(last), BN)), clean_end = kt_max(lowest, kt_end_key(row) / BN);
    }
};

KT_DEVICE void kt_pass_over(kt_pass &pass, const kt_range &range) {
    int tile = range.highest, masked_end = range.clean_end;
#pragma unroll 1
    do { // the second time: the tiles that a window cuts
        if (ANY_MASK)
#pragma unroll 1
            for (; tile >= masked_end; tile--) pass.step<true>(tile);
#pragma unroll 1
        for (; tile >= range.clean; tile--) pass.step<false>(tile);
        masked_end = range.lowest;
    } while (HAS_WINDOW && tile >= range.lowest);
}

KT_DEVICE void kt_copy_logits(Logits &to, const Logits &from) {
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int j = 0; j < KEY_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) to[i][j][e] = from[i][j][e];
}

// The same where each step begins the one that follows: the last has none, and two steps take turns with two sets of logits.
KT_DEVICE void kt_pass_over_overlapped(kt_pass &pass, const kt_range &range) {
    int tile = range.highest;
    Logits s, next;
    pass.rows.logits(s, pass.ring);
    if (ANY_MASK)
#pragma unroll 1
        for (; tile > range.lowest && tile >= range.clean_end; tile--) {
            pass.step_overlapped<true>(s, next, tile);
            kt_copy_logits(s, next);
        }
#pragma unroll 1
    for (; tile > range.lowest + 1 && tile > range.clean; tile -= 2) {
        pass.step_overlapped<false>(s, next, tile);
        pass.step_overlapped<false>(next, s, tile - 1);
    }
#pragma unroll 1
    for (; tile > range.lowest; tile--) {
        pass.step_overlapped<true>(s, next, tile);
        kt_copy_logits(s, next);
    }
    pass.last_overlapped(s, tile);
}

// ---- kernel

extern __shared__ __align__(128) u8 kt_shared[];

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    (void)workspace;
    constexpr u32 TOGETHER = kt_min((u32)KT_HEADS_TOGETHER, HEADS);
    const u32 strip = blockIdx.x / (TOGETHER * M_BLOCKS), inside = blockIdx.x % (TOGETHER * M_BLOCKS);
    const u32 width = kt_min(HEADS - strip * TOGETHER, TOGETHER), all = strip * TOGETHER + inside % width;
    const u32 block = KT_CAUSAL ? M_BLOCKS - 1 - inside / width : inside / width;
    const u32 batch = all / KT_H, head = all % KT_H;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, ring = kt_shared_address(kt_shared);
    const int row = block * BM, own_row = row + warp * WARP_M;

    const kt_range range(row);
    CopyQ copy_q(q + batch * (i64)KT_Q_BATCH_STRIDE + head * (i64)KT_Q_HEAD_STRIDE + row * (i64)KT_Q_ROW_STRIDE, threadIdx.x);
    copy_q.copy<true>(ring + Q_TILE, KT_S - row);
    kt_loader loader(k + batch * (i64)KT_K_BATCH_STRIDE + head / KT_GROUP * (i64)KT_K_HEAD_STRIDE,
                     v + batch * (i64)KT_V_BATCH_STRIDE + head / KT_GROUP * (i64)KT_V_HEAD_STRIDE, range.lowest, range.highest);
    Rows rows(lane, warp * WARP_M, ring + Q_TILE, {lane, own_row});
    kt_pass pass = {rows, loader, own_row, ring, ring};
    if (JOINT) pass.begin_joint(range.highest);
    else pass.begin_separate(range.highest);
    if (range.highest >= range.lowest) {
        if (OVERLAP) kt_pass_over_overlapped(pass, range);
        else kt_pass_over(pass, range);
    }

    kt_copy_wait<0>();
    rows.softmax.finish();
    kt_normalize(rows.o, rows.softmax);
    kt_output *to = o + batch * (i64)KT_O_BATCH_STRIDE + head * (i64)KT_O_HEAD_STRIDE + own_row * (i64)KT_O_ROW_STRIDE;
    if (KT_LSE) kt_store_log_sum((float *)KT_LSE_OPERAND + (i64)all * KT_S + own_row, rows.softmax, KT_S - own_row, lane);
    if constexpr (KT_STORE == KT_STORE_STAGED) {
        __syncthreads(); // the last use of the rings
        kt_store_staged(rows.o, to, KT_S - own_row, lane, kt_shared + warp * WARP_M * SLAB_STRIDE);
    } else {
        kt_store_direct(rows.o, to, KT_S - own_row, lane);
    }
}

#define KT_HAS_COMBINE 0
#include "attention_launch.cuh"
