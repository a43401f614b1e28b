/* A static pool of worker threads, started by the first launch and joined when the library is unloaded.
 *
 * kt_parallel(body, context) runs body(context, thread, threads) on every thread; the caller is thread 0. The body must
 * be right for any number of threads: it runs with threads = 1 when another caller holds the pool, after a failed
 * pthread_create, and in a process forked while the pool was busy.
 */
#ifndef KT_CPU_POOL_H
#define KT_CPU_POOL_H

#include <poll.h>
#include <pthread.h>
#include <sched.h>

#ifndef KT_THREADS
#define KT_THREADS 2
#endif
#ifndef KT_SPIN
#define KT_SPIN 10000 /* polls before an idle worker sleeps: waking one costs more than a small product */
#endif
#define KT_SPIN_YIELD 2000 /* polls of a thread that waits for another before it offers its core */

typedef void (*kt_body)(void *context, int thread, int threads);

static inline void kt_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if KT_THREADS > 1

static struct {
    pthread_mutex_t lock;  /* guards sleeping on `wake` */
    pthread_cond_t wake;
    pthread_t workers[KT_THREADS - 1];
    int started; /* workers that exist */
    int busy;    /* a caller holds the pool */
    int ready;   /* started and fork handler registered */
    int closing; /* callers leave the pool alone */
    int stop;    /* workers end */
    int sleepers;
    unsigned job; /* counts jobs: a worker runs when it changes */
    int pending;  /* workers that have not finished the job */
    int core;     /* that the caller runs on, -1: not known */
    kt_body body;
    void *context;
} kt_pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* Spins, then sleeps, until there is a job after `seen`. The sleeper announces itself before it looks again, and the
 * caller publishes the job before it looks for sleepers; both sequentially consistent, so one of them sees the other. */
static unsigned kt_pool_wait(unsigned seen) {
    unsigned job = seen;
    for (long spin = 0; spin < KT_SPIN; spin++) {
        job = __atomic_load_n(&kt_pool.job, __ATOMIC_ACQUIRE);
        if (job != seen) return job;
        kt_relax();
    }
    pthread_mutex_lock(&kt_pool.lock);
    __atomic_fetch_add(&kt_pool.sleepers, 1, __ATOMIC_SEQ_CST);
    while ((job = __atomic_load_n(&kt_pool.job, __ATOMIC_SEQ_CST)) == seen) pthread_cond_wait(&kt_pool.wake, &kt_pool.lock);
    __atomic_fetch_sub(&kt_pool.sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&kt_pool.lock);
    return job;
}

/* A woken worker may land on its caller's core and stay there, while another one idles, until the scheduler balances
 * load, which takes longer than a small product. It then moves off; its set of allowed cores stays what it was. */
static int kt_core(void) {
#if defined(__linux__) && defined(_GNU_SOURCE)
    return sched_getcpu();
#else
    return -1;
#endif
}

static void kt_leave_core(int core) {
#if defined(__linux__) && defined(_GNU_SOURCE)
    cpu_set_t allowed, others;
    if (core < 0 || core >= CPU_SETSIZE || pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed)) return;
    others = allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0) return;
    pthread_setaffinity_np(pthread_self(), sizeof others, &others);
    pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
#else
    (void)core;
#endif
}

static void *kt_pool_worker(void *argument) {
    int thread = (int)(intptr_t)argument;
    unsigned seen = 0;
    for (;;) {
        seen = kt_pool_wait(seen);
        if (__atomic_load_n(&kt_pool.stop, __ATOMIC_RELAXED)) return NULL;
        if (kt_core() == kt_pool.core) kt_leave_core(kt_pool.core);
        kt_pool.body(kt_pool.context, thread, kt_pool.started + 1);
        __atomic_fetch_sub(&kt_pool.pending, 1, __ATOMIC_RELEASE);
    }
}

static void kt_pool_publish(void) {
    __atomic_fetch_add(&kt_pool.job, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&kt_pool.sleepers, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&kt_pool.lock);
    pthread_cond_broadcast(&kt_pool.wake);
    pthread_mutex_unlock(&kt_pool.lock);
    sched_yield(); /* a worker queued behind this thread gets to run, and moves off */
}

/* The child of a fork has no workers, and perhaps a lock that nobody will release. */
static void kt_pool_forget(void) {
    pthread_mutex_init(&kt_pool.lock, NULL);
    pthread_cond_init(&kt_pool.wake, NULL);
    kt_pool.started = kt_pool.sleepers = kt_pool.pending = kt_pool.closing = kt_pool.stop = 0;
    kt_pool.job = 0;
    kt_pool.ready &= 2;
    __atomic_store_n(&kt_pool.busy, 0, __ATOMIC_RELEASE);
}

/* Called by the holder of the pool. Bit 0 of `ready`: workers started; bit 1: fork handler registered. */
static void kt_pool_start(void) {
    if (!(kt_pool.ready & 2)) pthread_atfork(NULL, NULL, kt_pool_forget);
    kt_pool.ready = 3;
    while (kt_pool.started < KT_THREADS - 1) {
        void *thread = (void *)(intptr_t)(kt_pool.started + 1);
        if (pthread_create(&kt_pool.workers[kt_pool.started], NULL, kt_pool_worker, thread)) break;
        kt_pool.started++;
    }
}

/* Takes the pool for good, so that no job is under way: a worker that stops in the middle of one leaves the others at
 * their barrier. When its holder keeps it for a second, or is the one that exits, the workers end with the process. */
static int kt_pool_take(void) {
    __atomic_store_n(&kt_pool.closing, 1, __ATOMIC_RELAXED);
    for (int nap = 0; __atomic_exchange_n(&kt_pool.busy, 1, __ATOMIC_ACQUIRE); nap++) {
        if (nap == 1000) return 0;
        poll(NULL, 0, 1);
    }
    return 1;
}

__attribute__((destructor)) static void kt_pool_stop(void) {
    if (kt_pool.started == 0 || !kt_pool_take()) return;
    __atomic_store_n(&kt_pool.stop, 1, __ATOMIC_RELAXED);
    kt_pool_publish();
    while (kt_pool.started > 0) pthread_join(kt_pool.workers[--kt_pool.started], NULL);
}

static void kt_parallel(kt_body body, void *context) {
    if (__atomic_load_n(&kt_pool.closing, __ATOMIC_RELAXED) || __atomic_exchange_n(&kt_pool.busy, 1, __ATOMIC_ACQUIRE)) {
        body(context, 0, 1);
        return;
    }
    if (!(kt_pool.ready & 1)) kt_pool_start();
    kt_pool.body = body;
    kt_pool.context = context;
    kt_pool.core = kt_core();
    __atomic_store_n(&kt_pool.pending, kt_pool.started, __ATOMIC_RELAXED);
    if (kt_pool.started) kt_pool_publish();
    body(context, 0, kt_pool.started + 1);
    for (long spin = 0; __atomic_load_n(&kt_pool.pending, __ATOMIC_ACQUIRE) > 0; spin++) {
        kt_relax();
        if (spin > KT_SPIN_YIELD) sched_yield(); /* a worker lost its core: give it this one */
    }
    __atomic_store_n(&kt_pool.busy, 0, __ATOMIC_RELEASE);
}

#else

static void kt_parallel(kt_body body, void *context) { body(context, 0, 1); }

#endif

/* A barrier inside one job. `arrived` starts at zero and lives in the job's context, so callers never share one. */
static inline __attribute__((unused)) void kt_barrier(unsigned *arrived, int threads) {
    unsigned round = __atomic_fetch_add(arrived, 1, __ATOMIC_ACQ_REL) / (unsigned)threads;
    for (long spin = 0; __atomic_load_n(arrived, __ATOMIC_ACQUIRE) / (unsigned)threads == round; spin++) {
        kt_relax();
        if (spin > KT_SPIN_YIELD) sched_yield();
    }
}

#endif
