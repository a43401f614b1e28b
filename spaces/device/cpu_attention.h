/* What the attention kernels of the CPU share: the problem, its rows and mask, and the units of scores.
 *
 * The query heads that share a key/value head are worked on together: row r is query r / KT_GROUP of head r % KT_GROUP,
 * so that neighbouring rows lie close to each other on the diagonal.
 */
#ifndef KT_CPU_ATTENTION_H
#define KT_CPU_ATTENTION_H

#include "cpu_problem.h"
#include "cpu_exp.h"

/* Workload */
#ifndef KT_B
#define KT_B 1
#define KT_H 8
#define KT_KV_HEADS 8
#define KT_GROUP 1 /* query heads of a key/value head */
#define KT_S 1024
#define KT_KV_LEN 1024
#define KT_D 64
#define KT_VALUE_DIM 64
#define KT_CAUSAL 0
#define KT_WINDOW 0 /* keys a query sees, 0: all */
#define KT_SCALE 0.125
#define KT_SOFTCAP 0.0 /* 0: off */
#define KT_LSE 0       /* 1: the log-sum-exp [B, H, S] is an output too */
#define KT_Q_BATCH_STRIDE 524288
#define KT_Q_HEAD_STRIDE 64
#define KT_Q_ROW_STRIDE 512
#define KT_K_BATCH_STRIDE 524288
#define KT_K_HEAD_STRIDE 64
#define KT_K_ROW_STRIDE 512
#define KT_V_BATCH_STRIDE 524288
#define KT_V_HEAD_STRIDE 64
#define KT_V_ROW_STRIDE 512
#define KT_O_BATCH_STRIDE 524288
#define KT_O_HEAD_STRIDE 64
#define KT_O_ROW_STRIDE 512
#endif

#ifndef KT_SPLITS
#define KT_SPLITS 1 /* parts of the keys that are worked on independently */
#endif

#define KT_MAX(a, b) ((a) > (b) ? (a) : (b))
#define KT_INFINITY ((kt_real)__builtin_inf())

/* Scores are in units in which softmax is 2^(LOG2_SCALE s): the factor joins the subtraction of the maximum, where it
 * costs nothing. Under a softcap they are logits already. */
#define KT_LOGIT_SCALE ((kt_real)(KT_SOFTCAP > 0 ? 1.0 : KT_SCALE))
#define KT_LOG2_SCALE ((kt_real)(KT_SOFTCAP > 0 ? 1.4426950408889634 : 1.4426950408889634 * KT_SCALE))

enum {
    SHIFT = KT_KV_LEN - KT_S, /* the key on the diagonal of query 0 */
    ROWS = KT_S * KT_GROUP,
    HEADS = KT_B * KT_KV_HEADS,
};

typedef struct {
    const kt_real *q, *k, *v;
    kt_real *o;
    float *lse;
    char *workspace;
    kt_real *split_states; /* what the splits of the keys leave, when keys are split */
    unsigned arrived;
    long next_task;
} kt_problem;

/* Keys begin..end - 1. */
typedef struct {
    long begin, end;
} kt_range;

KT_INLINE long kt_clamp(long key) { return key < 0 ? 0 : kt_min(key, KT_KV_LEN); }

/* The keys that the query of row r sees. */
KT_INLINE kt_range kt_visible(long row) {
    const long diagonal = row / KT_GROUP + SHIFT;
    return (kt_range){KT_WINDOW ? kt_clamp(diagonal - KT_WINDOW + 1) : 0, KT_CAUSAL ? kt_clamp(diagonal + 1) : KT_KV_LEN};
}

/* Where row r of a key/value head lies in q, o or the log-sum-exp, by their strides. */
KT_INLINE size_t kt_row_offset(long batch, long head, long row, long batch_stride, long head_stride, long row_stride) {
    return (size_t)batch * batch_stride + (size_t)(head * KT_GROUP + row % KT_GROUP) * head_stride + (size_t)(row / KT_GROUP) * row_stride;
}

KT_INLINE const kt_real *kt_q_row(const kt_problem *p, long batch, long head, long row) {
    return p->q + kt_row_offset(batch, head, row, KT_Q_BATCH_STRIDE, KT_Q_HEAD_STRIDE, KT_Q_ROW_STRIDE);
}

KT_INLINE void kt_store_row(const kt_problem *p, long batch, long head, long row, const kt_real *o, kt_real lse) {
    (void)lse;
    memcpy(p->o + kt_row_offset(batch, head, row, KT_O_BATCH_STRIDE, KT_O_HEAD_STRIDE, KT_O_ROW_STRIDE), o, KT_VALUE_DIM * sizeof(kt_real));
#if KT_LSE
    p->lse[kt_row_offset(batch, head, row, (long)KT_H * KT_S, KT_S, 1)] = (float)lse;
#endif
}

KT_INLINE kt_vec kt_larger(kt_vec a, kt_vec b) { return kt_select(b > a, b, a); }

/* A maximum in units of log2, where a row that has seen no key counts as 0: its scores stay at -infinity. */
KT_INLINE kt_vec kt_base(kt_vec top) { return kt_select(top == -KT_INFINITY, (kt_vec){0}, top * KT_LOG2_SCALE); }

/* The log-sum-exp of rows by their maxima and sums; -infinity where a row saw no key. */
KT_INLINE kt_vec kt_log_sum(kt_vec maximum, kt_vec sum) {
    return kt_select(sum == 0, (kt_vec){0} - KT_INFINITY, maximum * KT_LOGIT_SCALE + kt_log(sum));
}

/* Scores become logits under a softcap. */
KT_NOINLINE void kt_cap(kt_real *scores, long count) {
    for (long i = 0; i < count; i += KT_LANES)
        kt_store(scores + i, kt_tanh(kt_load(scores + i) * (kt_real)(KT_SCALE / KT_SOFTCAP)) * (kt_real)KT_SOFTCAP);
}

#endif
