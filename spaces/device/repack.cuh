// Copies operands whose rows do not start at multiples of 16 bytes into scratch whose rows do; padding becomes zeros.
#ifndef KT_REPACK_CUH
#define KT_REPACK_CUH

#include "memory.cuh"
#include "problem.cuh"

enum : int { REPACK_THREADS = 256, REPACK_GROUP = 16 / ELEMENT_BYTES };

// The copy of one operand stored [batch][ROWS][COLUMNS]. Bytes are transposed on the way where TRANSPOSE asks for it:
// no matrix instruction reads them along rows.
template <i64 ROWS, i64 COLUMNS, bool TRANSPOSE> struct kt_repacked {
    static constexpr i64 OUTER = TRANSPOSE ? COLUMNS : ROWS;
    static constexpr i64 PITCH = kt_round_up<i64>(TRANSPOSE ? ROWS : COLUMNS, REPACK_GROUP); // elements
    static constexpr u32 PER_ROW = PITCH / REPACK_GROUP; // vectors
    static constexpr u64 VECTORS = (u64)KT_BATCH * OUTER * PITCH / REPACK_GROUP, BYTES = kt_round_up<u64>(VECTORS * 16, 256);

    static KT_DEVICE kt_shifted load(const kt_element *from, u32 vector) {
        if constexpr (TRANSPOSE) {
            const u32 column = vector % (u32)OUTER, rest = vector / (u32)OUTER, first = rest % PER_ROW * 16, batch = rest / PER_ROW;
            from += ((i64)batch * ROWS + first) * COLUMNS + column;
            kt_shifted x = {};
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (first + i < ROWS) x.low.w[i / 4] |= (u32)(u8)from[i * COLUMNS] << (8 * (i % 4));
            return x;
        } else {
            const u32 row = vector / PER_ROW, column = vector % PER_ROW * REPACK_GROUP;
            const u8 *start = (const u8 *)(from + row * COLUMNS + column), *end = (const u8 *)(from + KT_BATCH * ROWS * COLUMNS);
            return kt_load_shifted<KT_EVICT_FIRST>(start, end, kt_cache_policy<KT_EVICT_FIRST>());
        }
    }

    static KT_DEVICE void store(u8 *to, const kt_shifted &x, u32 vector) {
        if constexpr (TRANSPOSE) {
            const u32 column = vector % (u32)OUTER, rest = vector / (u32)OUTER, first = rest % PER_ROW * 16, batch = rest / PER_ROW;
            kt_store_words(to + (((i64)batch * OUTER + column) * PITCH + first), x.low);
        } else {
            const i64 valid = (COLUMNS - (i64)(vector % PER_ROW) * REPACK_GROUP) * ELEMENT_BYTES;
            kt_store_words(to + (u64)vector * 16, kt_join_shifted(x, (int)kt_min<i64>(valid, 16)));
        }
    }
};

#endif
