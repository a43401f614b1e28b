/* Attention of a few query rows on the CPU: each key and value is read once and used little, so bandwidth decides.
 *
 * Vectors lie along the head dimension, as k and v are stored: a score is a dot product, and o gathers rows of v. A task
 * is some key/value heads of a batch entry by one split of the keys; it goes through the keys block by block and through
 * its heads within a block, so that it reads what lies next to each other in memory where heads are stored together.
 * Splits are merged after a barrier.
 */
#include "cpu_attention.h"
#include "cpu_pack.h"

/* tile */
#ifndef KT_BLOCK_K
#define KT_BLOCK_K 64 /* keys that all heads of a task go through before the next ones */
#endif
/* mem */
#ifndef KT_PREFETCH
#define KT_PREFETCH 0 /* keys that the rows asked for are ahead of those in use, 0: none are asked for */
#endif
/* unroll */
#ifndef KT_UNROLL_KEYS
#define KT_UNROLL_KEYS 2
#endif
/* map */
#ifndef KT_HEAD_PARTS
#define KT_HEAD_PARTS 1 /* parts of the heads that different tasks work on */
#endif

enum {
    LANES = (int)(KT_VEC_BYTES / sizeof(kt_real)),
    D_VECTORS = KT_CEIL_DIV(KT_D, LANES),
    VALUE_VECTORS = KT_CEIL_DIV(KT_VALUE_DIM, LANES),
    VALUE_TILE = KT_MIN(VALUE_VECTORS, 8), /* vectors of o in registers */
    STATE = (VALUE_VECTORS + 2) * LANES,   /* o, maximum and sum of a row, the sum still by lanes */
    PART_HEADS = KT_CEIL_DIV(KT_KV_HEADS, KT_HEAD_PARTS),
    TASKS = KT_B * KT_HEAD_PARTS * KT_SPLITS,
    MERGES = HEADS * ROWS,
};

/* Scratch of a thread, in elements: q and the states of all rows of a task, the scores of a row, a row of o. */
#define KT_PART_Q ((size_t)PART_HEADS * ROWS * D_VECTORS * LANES)
#define KT_PART_STATES ((size_t)PART_HEADS * ROWS * STATE)
#define KT_SCORES ((size_t)KT_CEIL_DIV(KT_BLOCK_K, LANES) * LANES)
#define KT_THREAD_BYTES KT_ROUND_UP((KT_PART_Q + KT_PART_STATES + KT_SCORES + VALUE_VECTORS * LANES) * sizeof(kt_real))
#define KT_SPLIT_STATES (KT_SPLITS == 1 ? 0 : (size_t)KT_SPLITS * HEADS * ROWS * STATE)

typedef struct {
    const kt_problem *problem;
    kt_real *q, *states, *scores, *stage;
} kt_work;

/* ---- vectors along a row ---- */

/* Where vector i of a row lies: the last one moves up so as to end with the row. */
KT_INLINE long kt_offset(int i, const int width) { return width < LANES ? 0 : kt_min((long)i * LANES, width - LANES); }

KT_INLINE kt_vec kt_load_part(const kt_real *row, int i, const int width) {
    return width < LANES ? kt_load_first(row, width) : kt_load(row + kt_offset(i, width));
}

KT_INLINE kt_real kt_sum_lanes(kt_vec v) {
    kt_real sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

KT_INLINE kt_real kt_largest_lane(kt_vec v) {
    kt_real top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
}

/* q by vectors; where the last one moves up, what it shares with the one before is zero and counts once. */
static void kt_load_q(kt_real *to, const kt_real *q) {
    for (int i = 0; i < D_VECTORS; i++) {
        kt_store(to + i * LANES, kt_load_part(q, i, KT_D));
        for (long lane = 0; lane < i * LANES - kt_offset(i, KT_D); lane++) to[i * LANES + lane] = 0;
    }
}

/* ---- one row by one block of keys ---- */

/* scores[key] = k[key] . q for `keys` keys; a last incomplete vector repeats the last score. */
KT_NOINLINE void kt_score_keys(kt_real *scores, const kt_real *k, const kt_real *q, long keys) {
    kt_real sums[LANES * LANES], turned[LANES * LANES];
    for (long first = 0; first < keys; first += LANES) {
        const long count = kt_min(keys - first, LANES);
        KT_UNROLL_BY(KT_UNROLL_KEYS)
        for (long key = 0; key < count; key++) {
            const kt_real *row = k + (first + key) * KT_K_ROW_STRIDE;
            kt_vec acc = {0};
            KT_UNROLL_BY(16)
            for (int i = 0; i < D_VECTORS; i++) {
                if (KT_PREFETCH) __builtin_prefetch(row + (long)KT_PREFETCH * KT_K_ROW_STRIDE + i * LANES);
                acc += kt_load_part(row, i, KT_D) * kt_load(q + i * LANES);
            }
            kt_store(sums + key * LANES, acc);
        }
        kt_transpose_block(turned, LANES, sums, LANES, count);
        kt_vec total = kt_load(turned);
        KT_UNROLL_ALL
        for (int i = 1; i < LANES; i++) total += kt_load(turned + i * LANES);
        kt_store(scores + first, total);
    }
}

/* Scores that the row does not see, and those after the block, become -infinity. */
KT_INLINE void kt_mask_row(kt_real *scores, kt_range keys, kt_range seen) {
    for (long first = keys.begin; first < keys.end; first += LANES) {
        kt_ivec index;
        for (int lane = 0; lane < LANES; lane++) index[lane] = (kt_int)(first + lane);
        const kt_ivec inside = (index >= (kt_int)seen.begin) & (index < (kt_int)kt_min(seen.end, keys.end));
        kt_real *at = scores + (first - keys.begin);
        kt_store(at, kt_select(inside, kt_load(at), (kt_vec){0} - KT_INFINITY));
    }
}

/* Scores become 2^(logit - maximum); updates maximum and sum, and returns what o is scaled by. */
KT_INLINE kt_vec kt_softmax_row(kt_real *scores, long keys, kt_real *maximum, kt_real *sum) {
    const kt_vec before = kt_load(maximum);
    kt_vec top = before;
    for (long i = 0; i < keys; i += LANES) top = kt_larger(top, kt_load(scores + i));
    top = (kt_vec){0} + kt_largest_lane(top);
    const kt_vec base = kt_base(top), alpha = kt_exp2(before * KT_LOG2_SCALE - base);
    kt_vec total = kt_load(sum) * alpha;
    for (long i = 0; i < keys; i += LANES) {
        const kt_vec p = kt_exp2(kt_load(scores + i) * KT_LOG2_SCALE - base);
        kt_store(scores + i, p);
        total += p;
    }
    kt_store(maximum, top);
    kt_store(sum, total);
    return alpha;
}

/* o = o alpha + sum over keys of p[key] v[key], for vectors first.. of o. */
KT_INLINE void kt_add_values(kt_real *o, const kt_real *p, const kt_real *v, long keys, kt_vec alpha, int first, const int count) {
    kt_vec acc[VALUE_TILE];
    KT_UNROLL_ALL
    for (int i = 0; i < count; i++) acc[i] = kt_load(o + (first + i) * LANES) * alpha;
    KT_UNROLL_BY(KT_UNROLL_KEYS)
    for (long key = 0; key < keys; key++) {
        KT_UNROLL_ALL
        for (int i = 0; i < count; i++) {
            const kt_real *row = v + key * KT_V_ROW_STRIDE;
            if (KT_PREFETCH) __builtin_prefetch(row + (long)KT_PREFETCH * KT_V_ROW_STRIDE + (first + i) * LANES);
            acc[i] += p[key] * kt_load_part(row, first + i, KT_VALUE_DIM);
        }
    }
    KT_UNROLL_ALL
    for (int i = 0; i < count; i++) kt_store(o + (first + i) * LANES, acc[i]);
}

KT_NOINLINE void kt_run_row(const kt_work *w, const kt_real *k, const kt_real *v, long row, kt_range keys, const kt_real *q, kt_real *state) {
    const kt_range seen = kt_visible(row);
    const long count = keys.end - keys.begin;
    if (seen.begin >= keys.end || seen.end <= keys.begin) return;
    kt_score_keys(w->scores, k, q, count);
    if (KT_SOFTCAP > 0) kt_cap(w->scores, count);
    if (count % LANES || seen.begin > keys.begin || seen.end < keys.end) kt_mask_row(w->scores, keys, seen);
    kt_real *maximum = state + VALUE_VECTORS * LANES;
    const kt_vec alpha = kt_softmax_row(w->scores, count, maximum, maximum + LANES);
    int first = 0;
    for (; first + VALUE_TILE <= VALUE_VECTORS; first += VALUE_TILE) kt_add_values(state, w->scores, v, count, alpha, first, VALUE_TILE);
    if (VALUE_VECTORS % VALUE_TILE) kt_add_values(state, w->scores, v, count, alpha, first, VALUE_VECTORS % VALUE_TILE);
}

/* ---- tasks ---- */

/* Divides o by the sum and stores it; a row that saw no key gets 0 and a log-sum-exp of -infinity. */
static void kt_finish_row(const kt_work *w, long head, long row, const kt_real *state) {
    const kt_real *maximum = state + VALUE_VECTORS * LANES;
    const kt_vec sum = (kt_vec){0} + kt_sum_lanes(kt_load(maximum + LANES));
    const kt_vec inverse = kt_select(sum == 0, (kt_vec){0}, 1 / sum);
    for (int i = 0; i < VALUE_VECTORS; i++) kt_store(w->stage + kt_offset(i, KT_VALUE_DIM), kt_load(state + i * LANES) * inverse);
    const kt_real lse = KT_LSE ? kt_log_sum(kt_load(maximum), sum)[0] : 0;
    kt_store_row(w->problem, head / KT_KV_HEADS, head % KT_KV_HEADS, row, w->stage, lse);
}

static kt_work kt_work_of(const kt_problem *p, int thread) {
    kt_real *own = (kt_real *)(p->workspace + (size_t)thread * KT_THREAD_BYTES);
    kt_work w = {.problem = p, .q = own};
    w.states = own += KT_PART_Q;
    w.scores = own += KT_PART_STATES;
    w.stage = own + KT_SCORES;
    return w;
}

static void kt_run_task(const kt_problem *p, long task, int thread) {
    const long split = task % KT_SPLITS, part = task / KT_SPLITS % KT_HEAD_PARTS, batch = task / KT_SPLITS / KT_HEAD_PARTS;
    const long head0 = kt_split(KT_KV_HEADS, KT_HEAD_PARTS, part), head1 = kt_split(KT_KV_HEADS, KT_HEAD_PARTS, part + 1);
    kt_work w = kt_work_of(p, thread);
    if (KT_SPLITS > 1) w.states = p->split_states + ((size_t)split * HEADS + batch * KT_KV_HEADS + head0) * ROWS * STATE;
    const long rows = (head1 - head0) * ROWS;
    for (long i = 0; i < rows; i++) {
        kt_load_q(w.q + i * D_VECTORS * LANES, kt_q_row(p, batch, head0 + i / ROWS, i % ROWS));
        memset(w.states + i * STATE, 0, STATE * sizeof(kt_real));
        kt_store(w.states + i * STATE + VALUE_VECTORS * LANES, (kt_vec){0} - KT_INFINITY);
    }
    const long begin = kt_visible(0).begin, length = kt_visible(ROWS - 1).end - begin;
    const kt_range all = {begin + kt_split(length, KT_SPLITS, split), begin + kt_split(length, KT_SPLITS, split + 1)};
    for (long key = all.begin; key < all.end; key += KT_BLOCK_K) {
        const kt_range keys = {key, kt_min(key + KT_BLOCK_K, all.end)};
        for (long i = 0; i < rows; i++) {
            const long head = head0 + i / ROWS;
            const kt_real *k = p->k + batch * KT_K_BATCH_STRIDE + head * KT_K_HEAD_STRIDE + key * KT_K_ROW_STRIDE;
            const kt_real *v = p->v + batch * KT_V_BATCH_STRIDE + head * KT_V_HEAD_STRIDE + key * KT_V_ROW_STRIDE;
            kt_run_row(&w, k, v, i % ROWS, keys, w.q + i * D_VECTORS * LANES, w.states + i * STATE);
        }
    }
    if (KT_SPLITS == 1)
        for (long i = 0; i < rows; i++) kt_finish_row(&w, batch * KT_KV_HEADS + head0 + i / ROWS, i % ROWS, w.states + i * STATE);
}

/* Brings the states of all splits of one row together in the first, and stores it. */
KT_NOINLINE void kt_merge_splits(const kt_problem *p, long index, int thread) {
    const size_t apart = (size_t)HEADS * ROWS * STATE;
    const kt_work w = kt_work_of(p, thread);
    kt_real *state = p->split_states + (size_t)index * STATE;
    const int last = VALUE_VECTORS * LANES; /* where the maximum is, and after it the sum */
    kt_vec top = kt_load(state + last), total = {0};
    for (int split = 1; split < KT_SPLITS; split++) top = kt_larger(top, kt_load(state + split * apart + last));
    const kt_vec base = kt_base(top);
    for (int split = 0; split < KT_SPLITS; split++) {
        const kt_real *from = state + split * apart;
        const kt_vec alpha = kt_exp2(kt_load(from + last) * KT_LOG2_SCALE - base);
        total += kt_load(from + last + LANES) * alpha;
        for (int i = 0; i < last; i += LANES) {
            const kt_vec add = kt_load(from + i) * alpha;
            kt_store(state + i, split ? kt_load(state + i) + add : add);
        }
    }
    kt_store(state + last, top);
    kt_store(state + last + LANES, total);
    kt_finish_row(&w, index / ROWS, index % ROWS, state);
}

#include "cpu_attention_tasks.h"

#include "cpu_isa_end.h"
