// Operand tiles in shared memory for the tensor cores: their layout, the copy from global memory, and the fragments.
//
// A tile is `OUTER` rows of `INNER_BYTES` that are contiguous in global memory: rows of m (or n) with k inside when the
// operand is K-major, rows of k with m (or n) inside otherwise. Rows are made of 16-byte chunks.
#ifndef KT_TILE_CUH
#define KT_TILE_CUH

#include "memory.cuh"

// Eight rows that ldmatrix reads at one chunk must lie in different banks: either the chunks of a row are permuted by an
// exclusive or with the row, or rows are padded to an odd number of chunks.
template <int OUTER, int INNER_BYTES, bool SWIZZLED, int PAD> struct kt_tile_layout {
    static constexpr int CHUNKS = INNER_BYTES / 16;
    static constexpr int STRIDE = INNER_BYTES + (SWIZZLED ? 0 : PAD);
    static constexpr int BYTES = kt_round_up(OUTER * STRIDE, 128), RESIDENT_BYTES = 0;
    static_assert(INNER_BYTES % 16 == 0, "rows are made of chunks");

    // The same for rows 8 apart.
    static KT_DEVICE u32 swizzle(u32 row) {
        if (!SWIZZLED) return 0;
        return CHUNKS % 8 == 0 ? row & 7 : CHUNKS % 4 == 0 ? row >> 1 & 3 : CHUNKS % 2 == 0 ? row >> 2 & 1 : 0;
    }
    static KT_DEVICE u32 offset(u32 row, u32 byte) { return row * STRIDE + ((byte / 16 ^ swizzle(row)) * 16 | byte % 16); }
};

// One thread's share of copying a tile, again and again along k. WIDTH is that of cp.async (16, 8, 4), or 0: through
// registers from any address, in two halves (`load`, `store`) so that the product runs between them.
template <class Layout, int OUTER, int INNER_BYTES, i64 LD_BYTES, int WIDTH, int THREADS, bool CHECK_OUTER, bool CHECK_INNER, int PREFETCH>
struct kt_tile_copy {
    static constexpr int PIECE = WIDTH ? WIDTH : 16, PER_ROW = INNER_BYTES / PIECE, PIECES = OUTER * PER_ROW;
    static constexpr int COUNT = kt_ceil_div(PIECES, THREADS), ROW_STEP = THREADS / PER_ROW;
    static constexpr bool REGULAR = THREADS % PER_ROW == 0; // all pieces of a thread are in one column
    static constexpr bool THROUGH_REGISTERS = WIDTH == 0;

    const u8 *origin; // of the tile; REGULAR: of the thread's first piece
    const u8 *end;    // of the whole operand
    kt_shifted held[THROUGH_REGISTERS ? COUNT : 1];

    KT_DEVICE kt_tile_copy(const void *tile, const void *end) : origin((const u8 *)tile), end((const u8 *)end) {
        if (REGULAR) origin += row(0) * LD_BYTES + column(0);
    }
    KT_DEVICE u32 row(int i) const { return REGULAR ? threadIdx.x / PER_ROW + i * ROW_STEP : (threadIdx.x + i * THREADS) / PER_ROW; }
    KT_DEVICE u32 column(int i) const { return (REGULAR ? threadIdx.x : threadIdx.x + i * THREADS) % PER_ROW * PIECE; }
    KT_DEVICE bool exists(int i) const { return PIECES % THREADS == 0 || i < COUNT - 1 || threadIdx.x + i * THREADS < PIECES; }
    KT_DEVICE const u8 *from(int i) const {
        if (REGULAR) return origin + i * ROW_STEP * LD_BYTES;
        if (OUTER * LD_BYTES < 1ll << 31) return origin + (row(i) * (u32)LD_BYTES + column(i));
        return origin + (row(i) * LD_BYTES + column(i));
    }
    // Rows and bytes of the tile that lie inside the operand.
    KT_DEVICE bool inside(int i, int outer, int inner) const {
        return (!CHECK_OUTER || (int)row(i) < outer) && (!CHECK_INNER || (int)column(i) < inner);
    }
    KT_DEVICE void advance(i64 bytes) { origin += bytes; }

    // `wanted`: else zeros are written instead of piece i.
    KT_DEVICE void copy_piece(int i, u32 to, int outer, int inner, bool wanted) const {
        const u32 valid = wanted && inside(i, outer, inner) ? PIECE : 0;
        if (exists(i)) kt_copy_async<PIECE, PREFETCH>(to + Layout::offset(row(i), column(i)), from(i), valid);
    }
    KT_DEVICE void copy(u32 to, int outer, int inner) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) copy_piece(i, to, outer, inner, true);
    }

    KT_DEVICE void load(int outer, int inner) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            held[i] = {};
            if (exists(i) && inside(i, outer, inner)) held[i] = kt_load_shifted<KT_KEEP_NORMAL>(from(i), end, 0);
        }
    }
    // `inner` as it was at the load; CUT_INNER: bytes from there on must be zeros.
    template <bool CUT_INNER> KT_DEVICE void store(u32 to, int inner) const {
        const bool cut = CUT_INNER && inner < INNER_BYTES; // only in the last tile
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (exists(i))
                kt_shared_store(to + Layout::offset(row(i), column(i)), kt_join_shifted(held[i], cut ? inner - (int)column(i) : 16));
    }
};

// One warp's WARP_ROWS rows (of m or n) of a tile as operands of the matrix instructions: blocks of 16 rows by 32 bytes
// of k. Of block i, x[i][j] are its first or last 8 rows in the first or second half of k: the left operand (a) wants them
// by halves of k, j = rows + 2 * k, the right one (b) by rows, j = k + 2 * rows, so that what one instruction takes lies in
// neighbouring registers. When WARP_ROWS is an odd multiple of 8, the last block repeats its first rows.
template <class Layout, bool K_MAJOR, int WARP_ROWS, bool RIGHT> struct kt_fragments {
    static constexpr int BLOCKS = kt_ceil_div(WARP_ROWS, 16), STEP_ROWS = 32 / ELEMENT_BYTES;
    static constexpr bool ODD = WARP_ROWS % 16 != 0, BY_WORDS = !K_MAJOR && ELEMENT_BYTES == 4;
    static_assert(K_MAJOR || ELEMENT_BYTES != 1, "no instruction transposes bytes");
    static constexpr int ADDRESSES = K_MAJOR ? 3 : BY_WORDS ? 1 : BLOCKS;

    u32 at[ADDRESSES]; // K-major: first block, last block, chunk

    KT_DEVICE kt_fragments(u32 lane, u32 first_row, u32 first_step) {
        const u32 r = lane % 8, low = lane / 8 % 2, top = lane / 16; // bits of j
        const u32 high = RIGHT ? top : low, second = RIGHT ? low : top;
        if constexpr (K_MAJOR) {
            const u32 last_high = ODD ? 0 : high;
            at[0] = (first_row + high * 8 + r) * Layout::STRIDE;
            at[1] = (first_row + (BLOCKS - 1) * 16 + last_high * 8 + r) * Layout::STRIDE;
            at[2] = ((second + 2 * first_step) ^ Layout::swizzle(first_row + r)) * 16;
        } else if constexpr (BY_WORDS) {
            at[0] = (first_step * STEP_ROWS + lane % 4) * Layout::STRIDE + (first_row + lane / 4) * 4;
        } else {
            const u32 k = first_step * STEP_ROWS + second * 8 + r;
#pragma unroll
            for (int i = 0; i < BLOCKS; i++)
                at[i] = Layout::offset(k, (first_row + i * 16 + (ODD && i == BLOCKS - 1 ? 0 : high) * 8) * 2);
        }
    }

    KT_DEVICE void next() {} // the next tile comes; it lies where `load` is told
    KT_DEVICE void load(u32 (&x)[BLOCKS][4], u32 tile, int step) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            if constexpr (K_MAJOR) {
                const u32 block = i == BLOCKS - 1 ? at[1] : at[0] + i * 16 * Layout::STRIDE;
                kt_ldmatrix<false>(x[i], tile + block + (at[2] ^ step * 32));
            } else if constexpr (BY_WORDS) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int high = RIGHT ? j / 2 : j % 2, second = RIGHT ? j % 2 : j / 2;
                    const bool repeat = ODD && i == BLOCKS - 1 && high;
                    const int k = step * STEP_ROWS + second * 4, row = i * 16 + high * 8;
                    x[i][j] = repeat ? x[i][RIGHT ? j - 2 : j - 1] : kt_shared_load(tile + at[0] + k * Layout::STRIDE + row * 4);
                }
            } else {
                kt_ldmatrix<true>(x[i], tile + at[i] + step * STEP_ROWS * Layout::STRIDE);
            }
#if KT_DTYPE == KT_TF32
#pragma unroll
            for (int j = 0; j < 4; j++) x[i][j] = kt_round_tf32(x[i][j]);
#endif
        }
    }
};

#endif
