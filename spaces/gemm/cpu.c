/* Blocked matrix product for CPUs with vector units; cpu_blocks.h describes how. */
#include "cpu_problem.h"
#include "cpu_pack.h"
#include "cpu_gemm.h"

/* Strides of the operands in place, and of C. */
enum {
    A_ROW = KT_TRANS_A ? 1 : KT_K,
    A_STEP = KT_TRANS_A ? KT_M : 1,
    B_STEP = KT_TRANS_B ? 1 : KT_N,
    B_COL = KT_TRANS_B ? KT_K : 1,
    C_ROW = KT_N,
};

#include "cpu_tile.h"

KT_NOINLINE void kt_pack_a(kt_real *to, const kt_real *a, long rows, long depth) {
    if (KT_TRANS_A)
        kt_pack_copied(to, MR, a, A_STEP, rows, depth);
    else
        kt_pack_transposed(to, MR, a, A_ROW, rows, depth);
}

KT_NOINLINE void kt_pack_b(kt_real *to, const kt_real *b, long columns, long depth) {
    if (KT_TRANS_B)
        kt_pack_transposed(to, NR, b, B_COL, columns, depth);
    else
        kt_pack_copied(to, NR, b, B_STEP, columns, depth);
}

KT_INLINE void kt_fill_a(kt_real *to, const kt_work *w, long row, long rows, long k0, long depth) {
    kt_pack_a(to, w->a + row * A_ROW + k0 * A_STEP, rows, depth);
}

KT_INLINE void kt_fill_b(kt_real *to, const kt_work *w, long column, long columns, long k0, long depth) {
    kt_pack_b(to, w->b + k0 * B_STEP + column * B_COL, columns, depth);
}

KT_INLINE void kt_find_matrix(const kt_problem *p, long batch, kt_work *w) {
    w->a = p->a + batch * KT_M * KT_K;
    w->b = p->b + batch * KT_K * KT_N;
    w->c_offset = batch * KT_M * KT_N;
}

#include "cpu_blocks.h"

#include "cpu_isa_end.h"
