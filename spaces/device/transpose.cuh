// Copies a tile whose rows are contiguous along k into shared memory with m (or n) inside: one cp.async an element.
#ifndef KT_TRANSPOSE_CUH
#define KT_TRANSPOSE_CUH

#include "ptx.cuh"

// One thread's share of a tile of ROWS x DEPTH elements. Eight lanes take neighbours along k, one 32-byte sector or two;
// with rows of shared memory one chunk longer than a multiple of 128 bytes, the 32 lanes then write to different banks.
template <int ROWS, int DEPTH, int STRIDE, i64 LD_BYTES, int THREADS, bool CHECK_ROWS, bool CHECK_K, int PREFETCH>
struct kt_transposing_copy {
    static constexpr int ALONG = 8, ACROSS = THREADS / ALONG, PIECES = ROWS * DEPTH, COUNT = kt_ceil_div(PIECES, THREADS);
    static constexpr bool REGULAR = ROWS % ACROSS == 0;
    static constexpr int TURNS = REGULAR ? ROWS / ACROSS : 1; // to cover all rows
    static_assert(ELEMENT_BYTES >= 4 && DEPTH % ALONG == 0, "cp.async moves at least 4 bytes");

    const u8 *origin;

    KT_DEVICE kt_transposing_copy(const void *tile) : origin((const u8 *)tile) {
        if (REGULAR) origin += row(0) * LD_BYTES + k(0) * ELEMENT_BYTES;
    }
    KT_DEVICE u32 row(int i) const {
        return REGULAR ? threadIdx.x / ALONG + i % TURNS * ACROSS : (threadIdx.x + i * THREADS) / ALONG % ROWS;
    }
    KT_DEVICE u32 k(int i) const {
        return threadIdx.x % ALONG + (REGULAR ? (u32)(i / TURNS) : (threadIdx.x + i * THREADS) / (ALONG * ROWS)) * ALONG;
    }
    KT_DEVICE const u8 *from(int i) const {
        if (REGULAR) return origin + (i % TURNS * ACROSS * LD_BYTES + i / TURNS * ALONG * ELEMENT_BYTES);
        return origin + (row(i) * LD_BYTES + k(i) * ELEMENT_BYTES);
    }
    KT_DEVICE void advance(int bytes) { origin += bytes; }

    // Elements of piece i outside `rows_left` and `k_left` of the tile become zeros, all of them unless `wanted`.
    KT_DEVICE void copy_piece(int i, u32 to, int rows_left, int k_left, bool wanted) const {
        if (PIECES % THREADS && i == COUNT - 1 && threadIdx.x + i * THREADS >= PIECES) return;
        const bool inside = (!CHECK_ROWS || (int)row(i) < rows_left) && (!CHECK_K || (int)k(i) < k_left);
        const u32 valid = wanted && inside ? ELEMENT_BYTES : 0;
        kt_copy_async<ELEMENT_BYTES, PREFETCH>(to + k(i) * STRIDE + row(i) * ELEMENT_BYTES, from(i), valid);
    }
};

#endif
