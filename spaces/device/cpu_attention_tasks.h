/* Attention on the CPU, from tasks to the launch.
 *
 * The including file defines:
 *   TASKS, MERGES                      tasks of a launch; results to merge where keys are split
 *   KT_THREAD_BYTES, KT_SPLIT_STATES   scratch of a thread; elements that all splits leave
 *   kt_run_task(p, task, thread), kt_merge_splits(p, index, thread)
 */
#ifndef KT_CPU_ATTENTION_TASKS_H
#define KT_CPU_ATTENTION_TASKS_H

#include "cpu_attention.h"

#ifndef KT_DYNAMIC
#define KT_DYNAMIC 1 /* 1: threads draw tasks from a counter, 0: in turn */
#endif

static void kt_run_thread(void *context, int thread, int threads) {
    kt_problem *p = context;
    long task = KT_DYNAMIC ? __atomic_fetch_add(&p->next_task, 1, __ATOMIC_RELAXED) : thread;
    while (task < TASKS) {
        kt_run_task(p, task, thread);
        task = KT_DYNAMIC ? __atomic_fetch_add(&p->next_task, 1, __ATOMIC_RELAXED) : task + threads;
    }
#if KT_SPLITS > 1
    kt_barrier(&p->arrived, threads);
    for (long i = thread; i < MERGES; i += threads) kt_merge_splits(p, i, thread);
#endif
}

size_t kt_workspace_bytes(void) { return KT_THREADS * KT_THREAD_BYTES + KT_SPLIT_STATES * sizeof(kt_real); }

int kt_launch(void *const *args, void *workspace) {
    kt_problem p = {.q = args[0], .k = args[1], .v = args[2], .o = args[3], .lse = KT_LSE ? args[4] : NULL, .workspace = workspace};
    p.split_states = (kt_real *)(p.workspace + KT_THREADS * KT_THREAD_BYTES);
    kt_parallel(kt_run_thread, &p);
    return 0;
}

#endif
