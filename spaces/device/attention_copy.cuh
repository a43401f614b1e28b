// Rows of q, k or v into a swizzled tile of shared memory by cp.async.
#ifndef KT_ATTENTION_COPY_CUH
#define KT_ATTENTION_COPY_CUH

#include "attention_product.cuh"

#ifndef KT_PREFETCH
#define KT_PREFETCH 128 /* bytes that L2 fetches around each copy: 0, 128 or 256 */
#endif

// One thread's share of copying tiles of ROWS rows, PITCH bytes apart in memory, of which VALID bytes exist; the rest of
// their BYTES are zeros. THREADS threads, numbered from 0, cover 8 rows or a multiple at once, so that all of a thread's
// pieces of WIDTH bytes lie at constant distances from its first, in memory and, but for one exclusive or, in the tile.
template <class Layout, int ROWS, int BYTES, int VALID, i64 PITCH, int WIDTH, int THREADS, bool CHECK_ROWS> struct kt_row_copy {
    static constexpr int ACROSS = kt_min(BYTES / WIDTH & -(BYTES / WIDTH), THREADS / 8), DOWN = THREADS / ACROSS;
    static constexpr int SPAN = ACROSS * WIDTH, PERIOD = kt_permuted<Layout> * 16;
    static_assert(DOWN % 8 == 0 && BYTES % SPAN == 0, "rows that a thread copies are swizzled alike");

    const u8 *from; // the thread's first piece
    u32 at;         // its place in a tile
    int row, column;

    KT_DEVICE kt_row_copy(const kt_element *first, u32 thread)
        : row(thread / ACROSS), column(thread % ACROSS * WIDTH) {
        from = (const u8 *)first + (row * PITCH + column), at = Layout::offset(row, column);
    }

    // `rows` of the tile's rows exist; all of them unless CUT.
    template <bool CUT> KT_DEVICE void copy(u32 tile, int rows) const {
#pragma unroll
        for (int i = 0; i < kt_ceil_div(ROWS, DOWN); i++) {
            if (ROWS % DOWN && row + i * DOWN >= ROWS) continue;
            const bool exists = !CHECK_ROWS || !CUT || row + i * DOWN < rows;
#pragma unroll
            for (int c = 0; c < BYTES; c += SPAN) {
                const bool inside = exists && (VALID == BYTES || column + c < VALID);
                const u32 to = ((tile + at) ^ (c % PERIOD)) + c / PERIOD * PERIOD + i * DOWN * Layout::STRIDE;
                kt_copy_async<WIDTH, KT_PREFETCH>(to, from + (i * DOWN * PITCH + c), inside ? WIDTH : 0);
            }
        }
    }
    KT_DEVICE void advance(i64 bytes) { from += bytes; }
};

template <class Layout, int ROWS, i64 STRIDE, int THREADS, bool CHECK_ROWS>
using kt_dim_copy =
    kt_row_copy<Layout, ROWS, DIM * ELEMENT_BYTES, DIM_BYTES, STRIDE * ELEMENT_BYTES, DIM_WIDTH, THREADS, CHECK_ROWS>;
template <class Layout, int ROWS, i64 STRIDE, int THREADS, bool CHECK_ROWS>
using kt_out_dim_copy =
    kt_row_copy<Layout, ROWS, OUT_DIM * ELEMENT_BYTES, OUT_DIM_BYTES, STRIDE * ELEMENT_BYTES, OUT_DIM_WIDTH, THREADS, CHECK_ROWS>;

#endif
