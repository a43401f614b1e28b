/* The sum of the k slices of C, and the epilogue, shared out among threads. */
#ifndef KT_CPU_REDUCE_H
#define KT_CPU_REDUCE_H

#include "cpu_isa.h"
#include "cpu_epilogue.h"

#define KT_REDUCE_CHUNK 1024 /* columns of a row in one unit of work, so that a single row is shared too */

/* C[rows][columns] holds slice 0; slices 1..count - 1 follow each other in `partial`, laid out as C. */
static inline __attribute__((unused)) void kt_reduce_slices(kt_real *c, const kt_real *partial, long count, long rows, long columns,
                                                            const kt_epilogue *epilogue, int thread, int threads) {
    const long chunks = (columns + KT_REDUCE_CHUNK - 1) / KT_REDUCE_CHUNK, units = rows * chunks;
    for (long unit = kt_split(units, threads, thread); unit < kt_split(units, threads, thread + 1); unit++) {
        const long row = unit / chunks, begin = unit % chunks * KT_REDUCE_CHUNK, end = kt_min(begin + KT_REDUCE_CHUNK, columns);
        for (long column = begin; column < end; column += KT_LANES) {
            const long part = kt_min(end - column, KT_LANES), index = row * columns + column;
            kt_vec x = kt_load_first(c + index, part);
            for (long slice = 0; slice < count - 1; slice++) x += kt_load_first(partial + slice * rows * columns + index, part);
            kt_store_first(c + index, kt_apply_epilogue(x, epilogue, index, column, part), part);
        }
    }
}

#endif
