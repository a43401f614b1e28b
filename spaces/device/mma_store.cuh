// Three ways from the accumulators of mma.sync to C, with the epilogue on the way, and the end of a kernel on mma.sync that
// takes one of them. Comes after a kernel file has defined `Rows`: which rows of C a tile has (KT_M or more: none).
#ifndef KT_MMA_STORE_CUH
#define KT_MMA_STORE_CUH

#include "mma_loop.cuh"
#include "split_k.cuh"

constexpr int PAIR = kt_min(C_GROUP, 2); // neighbours that a lane may store at once as they lie

struct kt_out {
    kt_output *c;
    kt_epilogue epilogue;
    u64 index;       // of the batch's C; rows are C_LD apart
    Rows rows;       // of the CTA's tile
    u32 row, column; // of the warp's tile: among those rows, in C
};

// COUNT neighbours of each pair, as the accumulators lie: finished into C, or as they are into the sums of split-K.
template <int COUNT, bool PARTIAL>
KT_DEVICE void kt_store_direct(const kt_acc (&acc)[ACCS], const kt_out &out, u32 lane, u8 *workspace, u32 split) {
#pragma unroll
    for (int j = 0; j < N_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e += COUNT) {
            const u32 column = out.column + 8 * j + lane % 4 * 2 + e;
            if (CHECK_N && column >= KT_N) continue;
            const kt_columns<COUNT> columns = kt_load_columns<COUNT>(out.epilogue, column, !PARTIAL);
#pragma unroll
            for (int i = 0; i < M_TILES; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 row = out.rows[out.row + 16 * i + 8 * h + lane / 4];
                    if (CHECK_M && row >= KT_M) continue;
                    const u64 index = out.index + (u64)row * C_LD + column;
                    kt_acc sum[COUNT];
#pragma unroll
                    for (int g = 0; g < COUNT; g++) sum[g] = acc[4 * (i * N_TILES + j) + 2 * h + e + g];
                    if (PARTIAL) kt_store_partial<COUNT>(workspace, split, index, sum);
                    else kt_finish_and_store<COUNT>(out.c, index, sum, columns, out.epilogue);
                }
        }
}

// Pairs of neighbouring columns of several tiles, spread over the four lanes of a row, become 16 bytes of one tile in each
// lane; the same exchange leads back. 16-bit outputs: word i is the pair of tile i, and the lanes transpose 4 x 4 words.
// 32-bit outputs: words 2 * i, 2 * i + 1 are the pair of tile i, and neighbouring lanes swap.
constexpr int EXCHANGE_TILES = OUTPUT_BYTES == 2 ? 4 : 2;
KT_DEVICE void kt_exchange(u32 (&w)[4], u32 lane) {
    if constexpr (OUTPUT_BYTES == 2) {
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i & bit) continue;
                const bool upper = lane & bit;
                const u32 got = __shfl_xor_sync(0xffffffff, upper ? w[i] : w[i | bit], bit);
                if (upper) w[i] = got;
                else w[i | bit] = got;
            }
    } else {
        const bool upper = lane & 1;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 got = __shfl_xor_sync(0xffffffff, upper ? w[i] : w[2 + i], 1);
            if (upper) w[i] = got;
            else w[2 + i] = got;
        }
    }
}

KT_DEVICE void kt_store_wide(const kt_acc (&acc)[ACCS], const kt_out &out, u32 lane) {
    constexpr int TILES = EXCHANGE_TILES, WORDS = 4 / TILES; // words of a pair
    static_assert(KT_STORE != KT_STORE_WIDE || (N_TILES % TILES == 0 && C_GROUP * OUTPUT_BYTES == 16), "16-byte stores");
    const u32 quad = lane % 4;
    const u32 own_column = OUTPUT_BYTES == 2 ? 8 * quad : 8 * (quad % 2) + 4 * (quad / 2);
#pragma unroll
    for (int j0 = 0; j0 + TILES <= N_TILES; j0 += TILES) {
        kt_columns<2> columns[TILES];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            const u32 column = out.column + 8 * (j0 + j) + 2 * quad;
            columns[j] = kt_load_columns<2>(out.epilogue, column, column < KT_N);
        }
        const u32 column = out.column + 8 * j0 + own_column;
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 row = out.rows[out.row + 16 * i + 8 * h + lane / 4];
                const u64 index = out.index + (u64)row * C_LD + column;
                const bool inside = row < KT_M && column < KT_N;
                kt_words<4> w, residual = {};
                if (KT_HAS_RESIDUAL) {
                    if (inside) residual = kt_load_words<4>(out.epilogue.residual + index);
                    kt_exchange(residual.w, lane);
                }
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    const int at = 4 * (i * N_TILES + j0 + j) + 2 * h;
                    const kt_acc pair[2] = {acc[at], acc[at + 1]};
                    kt_output_words<2> with;
#pragma unroll
                    for (int v = 0; v < WORDS; v++) with.words.w[v] = residual.w[WORDS * j + v];
                    kt_math other[2];
                    kt_unpack_outputs<2>(other, with);
                    const kt_output_words<2> done = kt_finish<2>(pair, columns[j], other);
#pragma unroll
                    for (int v = 0; v < WORDS; v++) w.w[WORDS * j + v] = done.words.w[v];
                }
                kt_exchange(w.w, lane);
                if (inside) kt_store_words(out.c + index, w);
            }
    }
}

// Sixteen rows of the warp's tile at a time, in the warp's own slab of shared memory.
KT_DEVICE void kt_store_staged(const kt_acc (&acc)[ACCS], const kt_out &out, u32 lane, kt_acc *slab) {
    constexpr int PER_ROW = WARP_N / C_GROUP, GROUPS = 16 * PER_ROW;
#pragma unroll
    for (int i = 0; i < M_TILES; i++) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < N_TILES; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                kt_store_words(slab + (8 * h + lane / 4) * SLAB_STRIDE + 8 * j + lane % 4 * 2,
                               kt_acc_words<2>(acc + 4 * (i * N_TILES + j) + 2 * h));
        __syncwarp();
#pragma unroll 4
        for (int first = 0; first < GROUPS; first += 32) {
            const u32 group = first + lane, own_row = group / PER_ROW, row = out.rows[out.row + 16 * i + own_row];
            const u32 local = (32 % PER_ROW == 0 ? lane : group) % PER_ROW * C_GROUP, column = out.column + local;
            if ((GROUPS % 32 && group >= GROUPS) || row >= KT_M || column >= KT_N) continue;
            kt_acc sum[C_GROUP];
#pragma unroll
            for (int e = 0; e < C_GROUP; e++) sum[e] = slab[own_row * SLAB_STRIDE + local + e];
            kt_finish_and_store<C_GROUP>(out.c, out.index + (u64)row * C_LD + column, sum,
                                         kt_load_columns<C_GROUP>(out.epilogue, column, true), out.epilogue);
        }
    }
}

// What comes after the loop: the sums of all warps and splits meet, and their last holder finishes the tile of C.
template <class Splits>
KT_DEVICE void kt_finish_tile(const kt_accumulators &sums, kt_output *c, const kt_epilogue &epilogue, Rows rows, const kt_share &share,
                              const kt_worker &me, u8 *workspace) {
    const u32 warp_m = me.warp % WARPS_MN / KT_WARPS_N, warp_n = me.warp % KT_WARPS_N;
    kt_acc acc[ACCS];
    sums.take(acc);
    if (KT_WARPS_K > 1) kt_join_warps(acc, me.group, me.owner, kt_shared);
    const kt_epilogue columns = C_BATCH_IN_ROWS ? kt_columns_from(epilogue, share.batch * KT_N) : epilogue;
    const kt_out out = {c, columns, share.batch * (u64)C_BATCH, rows, warp_m * WARP_M, share.n + warp_n * WARP_N};
    if (SPLIT_BY_KERNEL) {
        if (me.group == 0) kt_store_direct<PAIR, true>(acc, out, me.lane, workspace, share.split);
        return;
    }
    if constexpr (SPLIT_IN_KERNEL) {
        const u32 tile = share.batch * BLOCKS + share.tile, owner = me.group == 0 ? me.owner : OWNERS;
        if (!kt_join_splits<ACCS, OWNERS, Splits>(acc, workspace, tile, share.split, owner)) return;
    }
    if (KT_STORE == KT_STORE_STAGED) __syncthreads(); // the last use of the ring
    if (me.group != 0) return;
    if (KT_STORE == KT_STORE_DIRECT) kt_store_direct<PAIR, false>(acc, out, me.lane, workspace, share.split);
    if (KT_STORE == KT_STORE_WIDE) kt_store_wide(acc, out, me.lane);
    if (KT_STORE == KT_STORE_STAGED)
        kt_store_staged(acc, out, me.lane, (kt_acc *)kt_shared + me.warp % WARPS_MN * 16 * SLAB_STRIDE);
}

#endif
