/* Attention forward on the CPU: softmax(scale q k^T) v with an online softmax, one block of scores at a time.
 *
 * Query rows are the lanes of a vector. A panel of q is transposed once, [d][row], and then both products broadcast
 * their other operand as it is stored: scores[key][row] = k[key][d] q[d][row] and o[value][row] = v[key][value]
 * p[key][row]. So the softmax of a row is element-wise work on vectors, without a sum across lanes, and neither k nor v
 * has to be rearranged.
 *
 * A task is a block of panels of one key/value head by one split of its keys. Where keys are split, each split leaves
 * an unnormalised o, a maximum and a sum, which are merged after a barrier.
 */
#include "cpu_panels.h"
#include "cpu_pack.h"

/* Scratch of a thread, in elements: rows of q or o before or after transposition, panels of q, their state, and the
 * scores of a block (a tile may begin before the block or end after it). */
#define KT_SCRATCH(elements) (((size_t)(elements) + 2 * KT_LANES - 1) / KT_LANES * KT_LANES)
#define KT_STAGE KT_SCRATCH((size_t)NR *KT_MAX(KT_D, KT_VALUE_DIM))
#define KT_PANEL_Q ((size_t)NR * KT_CEIL_DIV(KT_D, KT_LANES) * KT_LANES)
#define KT_STATE ((size_t)NR * (KT_VALUE_DIM + 2)) /* o, maximum and sum of a panel */
#define KT_SCORES ((size_t)NR * (BLOCK_KEYS + 2 * KEY_ROWS))
#define KT_OWN_STATES (KT_SPLITS == 1 ? BLOCK_PANELS * KT_STATE : 0)
#define KT_THREAD_ELEMENTS (KT_STAGE + BLOCK_PANELS * KT_PANEL_Q + KT_OWN_STATES + KT_SCORES)
#define KT_THREAD_BYTES KT_ROUND_UP(KT_THREAD_ELEMENTS * sizeof(kt_real))
#define KT_SPLIT_STATES (KT_SPLITS == 1 ? 0 : (size_t)KT_SPLITS * HEADS * PANELS * KT_STATE)

/* What a thread works on: one key/value head, and its scratch. */
typedef struct {
    const kt_problem *problem;
    const kt_real *k, *v; /* of this head */
    long batch, head;
    kt_real *stage, *panels_q, *states, *scores;
} kt_work;

/* Keys begin..end - 1 of a block; `k` and `v` point at the first. */
typedef struct {
    kt_range keys;
    const kt_real *k, *v;
} kt_block;

/* ---- register tiles ---- */

/* scores[i][row] = sum over d of k[i][d] q[d][row] for KEY_ROWS keys. */
KT_NOINLINE void kt_score_tile(kt_real *scores, const kt_real *k, const kt_real *q) {
    kt_vec acc[KEY_ROWS][KT_NV];
    KT_UNROLL_ALL
    for (int i = 0; i < KEY_ROWS; i++) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) acc[i][j] = (kt_vec){0};
    }
    KT_UNROLL_BY(KT_UNROLL_D)
    for (long d = KT_D; d > 0; d--) {
        kt_vec qv[KT_NV];
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) qv[j] = kt_load(q + j * KT_LANES);
        KT_UNROLL_ALL
        for (int i = 0; i < KEY_ROWS; i++) {
            const kt_real ki = k[(long)i * KT_K_ROW_STRIDE];
            KT_UNROLL_ALL
            for (int j = 0; j < KT_NV; j++) acc[i][j] += ki * qv[j];
        }
        k++;
        q += NR;
    }
    KT_UNROLL_ALL
    for (int i = 0; i < KEY_ROWS; i++) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) kt_store(scores + i * NR + j * KT_LANES, acc[i][j]);
    }
}

/* o[i][row] = o[i][row] alpha[row] + sum over keys of v[key][i] p[key][row] for value columns first..VALUE_ROWS - 1;
 * those before `first` belong to the tile before. */
KT_NOINLINE void kt_value_tile(kt_real *o, const kt_real *v, const kt_real *p, long keys, const kt_vec *alpha, int first) {
    kt_vec acc[VALUE_ROWS][KT_NV];
    KT_UNROLL_ALL
    for (int i = 0; i < VALUE_ROWS; i++) {
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) acc[i][j] = (kt_vec){0};
    }
    KT_UNROLL_BY(KT_UNROLL_KEYS)
    for (long key = keys; key > 0; key--) {
        kt_vec pv[KT_NV];
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) pv[j] = kt_load(p + j * KT_LANES);
        KT_UNROLL_ALL
        for (int i = 0; i < VALUE_ROWS; i++) {
            const kt_real vi = v[i];
            KT_UNROLL_ALL
            for (int j = 0; j < KT_NV; j++) acc[i][j] += vi * pv[j];
        }
        v += KT_V_ROW_STRIDE;
        p += NR;
    }
    KT_UNROLL_ALL
    for (int i = 0; i < VALUE_ROWS; i++) {
        if (i < first) continue;
        KT_UNROLL_ALL
        for (int j = 0; j < KT_NV; j++) {
            kt_real *to = o + i * NR + j * KT_LANES;
            kt_store(to, kt_load(to) * alpha[j] + acc[i][j]);
        }
    }
}

/* ---- one panel of queries by one block of keys ---- */

static void kt_scores_of(const kt_work *w, const kt_block *block, const kt_real *q, long keys) {
    for (long i = 0; i < keys; i += KEY_ROWS) {
        /* The last tile of k moves up so as to read inside it: some scores are computed twice, the same. */
        const long excess = block->keys.begin + i + KEY_ROWS - KT_KV_LEN, from = excess > 0 ? i - excess : i;
        kt_score_tile(w->scores + from * NR, block->k + from * KT_K_ROW_STRIDE, q);
    }
}

static void kt_run_panel(const kt_work *w, const kt_block *block, long panel, const kt_real *q, kt_real *state) {
    const kt_range seen = kt_visible_to(panel, panel + 1);
    const kt_range keys = {block->keys.begin, kt_min(block->keys.end, seen.end)};
    const long count = keys.end - keys.begin;
    if (count <= 0 || keys.end <= seen.begin) return;
    kt_scores_of(w, block, q, count);
    if (KT_SOFTCAP > 0) kt_cap(w->scores, count * NR);
    if ((KT_CAUSAL || KT_WINDOW) && !kt_all_visible(panel, keys)) kt_mask(w->scores, panel, keys);
    kt_vec alpha[KT_NV];
    kt_softmax(w->scores, count, state + (size_t)NR * KT_VALUE_DIM, state + (size_t)NR * (KT_VALUE_DIM + 1), alpha);
    for (long value = 0; value < KT_VALUE_DIM; value += VALUE_ROWS) {
        const long from = kt_min(value, KT_VALUE_DIM - VALUE_ROWS);
        kt_value_tile(state + from * NR, block->v + from, w->scores, count, alpha, (int)(value - from));
    }
}

/* ---- a task ---- */

/* to[step][lane] = from[lane][step], rows of `to` being `width` apart and of `from` `stride`, by whole square blocks: steps
 * are rounded up, and lanes beyond the last repeat it. Blocks go from the last lanes to the first, because one that
 * overhangs the width spills into the next step. */
KT_NOINLINE void kt_transpose(kt_real *to, long width, const kt_real *from, long stride, long lanes, long steps) {
    for (long step = 0; step < steps; step += KT_LANES)
        for (long lane = (width - 1) / KT_LANES * KT_LANES; lane >= 0; lane -= KT_LANES) {
            const long first = kt_min(lane, lanes - 1);
            kt_transpose_block(to + step * width + lane, width, from + first * stride + step, stride, kt_min(width, lanes) - first);
        }
}

static void kt_load_panel(const kt_work *w, long panel, kt_real *q, kt_real *state) {
    const long rows = kt_rows_of(panel);
    for (long i = 0; i < rows; i++) memcpy(w->stage + i * KT_D, kt_q_row(w->problem, w->batch, w->head, panel * NR + i), KT_D * sizeof(kt_real));
    kt_transpose(q, NR, w->stage, KT_D, rows, KT_D);
    memset(state, 0, KT_STATE * sizeof(kt_real));
    for (int i = 0; i < NR; i++) state[(size_t)NR * KT_VALUE_DIM + i] = -KT_INFINITY;
}

/* Divides o by the sums, transposes it back and stores its rows; a row that saw no key gets 0 and a log-sum-exp of
 * -infinity. */
static void kt_store_panel(const kt_work *w, long panel, kt_real *state) {
    const long rows = kt_rows_of(panel);
    const kt_real *maximum = state + (size_t)NR * KT_VALUE_DIM, *sum = maximum + NR;
    for (int j = 0; j < NR; j += KT_LANES) {
        const kt_vec total = kt_load(sum + j), inverse = kt_select(total == 0, (kt_vec){0}, 1 / total);
        for (long value = 0; value < KT_VALUE_DIM; value++) kt_store(state + value * NR + j, kt_load(state + value * NR + j) * inverse);
        if (KT_LSE) kt_store(w->scores + j, kt_log_sum(kt_load(maximum + j), total));
    }
    kt_transpose(w->stage, KT_VALUE_DIM, state, NR, KT_VALUE_DIM, NR);
    for (long i = 0; i < rows; i++) kt_store_row(w->problem, w->batch, w->head, panel * NR + i, w->stage + i * KT_VALUE_DIM, KT_LSE ? w->scores[i] : 0);
}

/* The states of panels first.. of a head: shared memory where keys are split, the thread's own otherwise. */
KT_INLINE kt_real *kt_states_of(const kt_work *w, long split, long first) {
    if (KT_SPLITS == 1) return w->states;
    return w->problem->split_states + (((size_t)split * HEADS + w->batch * KT_KV_HEADS + w->head) * PANELS + first) * KT_STATE;
}

/* Panels first..last - 1 of a head by one split of the keys that they see. */
static void kt_run_block(const kt_work *w, long first, long last, long split) {
    kt_real *states = kt_states_of(w, split, first);
    for (long i = 0; i < last - first; i++) kt_load_panel(w, first + i, w->panels_q + i * KT_PANEL_Q, states + i * KT_STATE);
    const kt_range seen = kt_visible_to(first, last);
    const long tiles = seen.end > seen.begin ? KT_CEIL_DIV(seen.end - seen.begin, KEY_ROWS) : 0;
    const long tile0 = kt_split(tiles, KT_SPLITS, split), tile1 = kt_split(tiles, KT_SPLITS, split + 1);
    const long blocks = KT_CEIL_DIV(tile1 - tile0, BLOCK_TILES);
    for (long b = 0; b < blocks; b++) {
        const long t0 = tile0 + kt_split(tile1 - tile0, blocks, b), t1 = tile0 + kt_split(tile1 - tile0, blocks, b + 1);
        const kt_range keys = {seen.begin + t0 * KEY_ROWS, kt_min(seen.begin + t1 * KEY_ROWS, seen.end)};
        const kt_block block = {keys, w->k + keys.begin * KT_K_ROW_STRIDE, w->v + keys.begin * KT_V_ROW_STRIDE};
        for (long i = 0; i < last - first; i++) kt_run_panel(w, &block, first + i, w->panels_q + i * KT_PANEL_Q, states + i * KT_STATE);
    }
    if (KT_SPLITS == 1)
        for (long i = 0; i < last - first; i++) kt_store_panel(w, first + i, states + i * KT_STATE);
}

static kt_work kt_work_of(const kt_problem *p, long head, int thread) {
    kt_real *own = (kt_real *)(p->workspace + (size_t)thread * KT_THREAD_BYTES);
    kt_work w = {.problem = p, .batch = head / KT_KV_HEADS, .head = head % KT_KV_HEADS, .stage = own};
    w.k = p->k + w.batch * KT_K_BATCH_STRIDE + w.head * KT_K_HEAD_STRIDE;
    w.v = p->v + w.batch * KT_V_BATCH_STRIDE + w.head * KT_V_HEAD_STRIDE;
    w.panels_q = own += KT_STAGE;
    w.states = own += BLOCK_PANELS * KT_PANEL_Q;
    w.scores = own + KT_OWN_STATES + KEY_ROWS * NR;
    return w;
}

static void kt_run_task(const kt_problem *p, long task, int thread) {
    const long split = task % KT_SPLITS, rest = task / KT_SPLITS;
    const long head = KT_LONGEST_FIRST ? rest % HEADS : rest / BLOCKS;
    const long block = KT_LONGEST_FIRST ? BLOCKS - 1 - rest / HEADS : rest % BLOCKS;
    const kt_work w = kt_work_of(p, head, thread);
    kt_run_block(&w, kt_split(PANELS, BLOCKS, block), kt_split(PANELS, BLOCKS, block + 1), split);
}

/* Brings the states of all splits of one panel together in the first, and stores it. */
KT_NOINLINE void kt_merge_splits(const kt_problem *p, long index, int thread) {
    const size_t apart = (size_t)HEADS * PANELS * KT_STATE;
    const kt_work w = kt_work_of(p, index / PANELS, thread);
    kt_real *state = p->split_states + (size_t)index * KT_STATE;
    for (int j = 0; j < NR; j += KT_LANES) {
        kt_real *at = state + j;
        kt_vec top = {0}, total = {0};
        top -= KT_INFINITY;
        for (int split = 0; split < KT_SPLITS; split++) top = kt_larger(top, kt_load(at + split * apart + (size_t)NR * KT_VALUE_DIM));
        const kt_vec base = kt_base(top);
        for (int split = 0; split < KT_SPLITS; split++) {
            const kt_real *from = at + split * apart;
            const kt_vec alpha = kt_exp2(kt_load(from + (size_t)NR * KT_VALUE_DIM) * KT_LOG2_SCALE - base);
            total += kt_load(from + (size_t)NR * (KT_VALUE_DIM + 1)) * alpha;
            for (long value = 0; value < KT_VALUE_DIM; value++) {
                const kt_vec add = kt_load(from + value * NR) * alpha;
                kt_store(at + value * NR, split ? kt_load(at + value * NR) + add : add);
            }
        }
        kt_store(at + (size_t)NR * KT_VALUE_DIM, top);
        kt_store(at + (size_t)NR * (KT_VALUE_DIM + 1), total);
    }
    kt_store_panel(&w, index % PANELS, state);
}

#include "cpu_attention_tasks.h"

#include "cpu_isa_end.h"
