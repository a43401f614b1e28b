// Products with one tiny extent: the large operand ("stream") is read once, and the small one ("tokens") waits in shared
// memory. C has TINY values for each of LONG rows of the stream; N is the tiny extent when it is the smaller one.
#ifndef KT_THIN_CUH
#define KT_THIN_CUH

#include "epilogue.cuh"
#include "problem.cuh"
#include "split_k.cuh"

constexpr bool STREAM_IS_A = KT_N < KT_M;
constexpr int LONG = STREAM_IS_A ? KT_M : KT_N, TINY = STREAM_IS_A ? KT_N : KT_M;
constexpr bool STREAM_K_MAJOR = STREAM_IS_A ? A_K_MAJOR : B_K_MAJOR, TOKENS_K_MAJOR = STREAM_IS_A ? B_K_MAJOR : A_K_MAJOR;
constexpr i64 STREAM_LD = STREAM_IS_A ? A_LD : B_LD, TOKENS_LD = STREAM_IS_A ? B_LD : A_LD;
constexpr bool STREAM_ALIGNED = STREAM_LD * ELEMENT_BYTES % 16 == 0;
constexpr int GROUP = 16 / ELEMENT_BYTES; // elements of one access

// Sixteen bytes of the stream on their way: one aligned access, or two whose parts are joined when they are used.
template <bool ALIGNED> struct kt_held;
template <> struct kt_held<true> {
    kt_words<4> words;
    template <int HINT> KT_DEVICE void load(const kt_element *p, const kt_element *, u64 policy) { words = kt_load_stream<HINT>(p, policy); }
    KT_DEVICE kt_words<4> get(int) const { return words; }
};
template <> struct kt_held<false> {
    kt_shifted parts;
    template <int HINT> KT_DEVICE void load(const kt_element *p, const kt_element *end, u64 policy) {
        parts = kt_load_shifted<HINT>((const u8 *)p, (const u8 *)end, policy);
    }
    KT_DEVICE kt_words<4> get(int valid) const { return kt_join_shifted(parts, valid); } // zeros after `valid` bytes
};
using Held = kt_held<STREAM_ALIGNED>;

// `depth` values of k from `k` on of every token, rows of STRIDE bytes, filled with zeros up to `filled`, a multiple of GROUP.
template <int STRIDE, int THREADS> KT_DEVICE void kt_stage_tokens(u8 *to, const kt_element *tokens, i64 k, int depth, int filled) {
    constexpr bool ALIGNED = TOKENS_K_MAJOR && TOKENS_LD % GROUP == 0;
    for (int i = threadIdx.x; i < TINY * (filled / GROUP); i += THREADS) {
        const int token = TOKENS_K_MAJOR ? i / (filled / GROUP) : i % TINY;
        const int at = (TOKENS_K_MAJOR ? i % (filled / GROUP) : i / TINY) * GROUP;
        u8 *place = to + token * STRIDE + at * ELEMENT_BYTES;
        if (ALIGNED) { // all on their way at once
            kt_copy_async<16, 0>(kt_shared_address(place), tokens + token * TOKENS_LD + k + at, at < depth ? 16 : 0);
            continue;
        }
        kt_words<4> x = {};
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
            if (at + j >= depth) continue;
            const kt_element *from = TOKENS_K_MAJOR ? tokens + token * TOKENS_LD + k + at + j : tokens + (k + at + j) * TOKENS_LD + token;
            if constexpr (ELEMENT_BYTES == 2) x.w[j / 2] |= (u32)*(const u16 *)from << (16 * (j % 2));
            else x.w[j] = *(const u32 *)from;
        }
        kt_store_words(place, x);
    }
    kt_copy_commit();
    kt_copy_wait<0>();
    __syncthreads();
}

// How the TINY * BLOCK sums of a CTA are dealt out to its threads: with split-K, to as few as hold 16 bytes each.
template <int BLOCK, int THREADS> struct kt_shares {
    static constexpr int COUNT = TINY * BLOCK, ALIKE = SPLIT_IN_KERNEL ? 16 / ACC_BYTES : 1;
    static constexpr int EACH = kt_round_up(kt_ceil_div(COUNT, THREADS), ALIKE), OWNERS = kt_ceil_div(COUNT, EACH);
};

// The sums of the warps that shared the rows of a block, [WARPS_K][TINY][BLOCK] in shared memory, become values of C.
template <int BLOCK, int WARPS_K, int THREADS, class Splits>
KT_DEVICE void kt_finish_thin(const kt_acc *sums, u32 block, u32 blocks, u32 batch, u32 split, const kt_epilogue &e, kt_output *c, u8 *workspace) {
    using Shares = kt_shares<BLOCK, THREADS>;
    kt_acc acc[Shares::EACH];
    u32 token[Shares::EACH], row[Shares::EACH];
#pragma unroll
    for (int i = 0; i < Shares::EACH; i++) { // neighbouring threads have neighbours in C
        const u32 at = threadIdx.x + i * Shares::OWNERS;
        const bool exists = threadIdx.x < Shares::OWNERS && at < Shares::COUNT;
        token[i] = STREAM_IS_A ? at % TINY : at / BLOCK;
        row[i] = STREAM_IS_A ? at / TINY : at % BLOCK;
        acc[i] = 0;
        if (exists)
#pragma unroll
            for (int w = 0; w < WARPS_K; w++) acc[i] += sums[(w * TINY + token[i]) * BLOCK + row[i]];
        row[i] = exists ? block * BLOCK + row[i] : LONG;
    }
    if constexpr (SPLIT_IN_KERNEL)
        if (!kt_join_splits<Shares::EACH, Shares::OWNERS, Splits>(acc, workspace, batch * blocks + block, split, threadIdx.x)) return;
#pragma unroll
    for (int i = 0; i < Shares::EACH; i++) {
        if (row[i] >= LONG) continue;
        const u32 column = STREAM_IS_A ? token[i] : row[i];
        const u64 index = batch * (u64)C_ELEMENTS + (u64)(STREAM_IS_A ? row[i] : token[i]) * KT_N + column;
        const kt_acc sum[1] = {acc[i]};
        if (SPLIT_BY_KERNEL) kt_store_partial<1>(workspace, split, index, sum);
        else kt_finish_and_store<1>(c, index, sum, kt_load_columns<1>(e, column, true), e);
    }
}

#endif
