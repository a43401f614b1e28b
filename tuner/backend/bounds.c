/* Measured limits of the processor: fused multiply-adds on all cores, and copying of large buffers. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "cpu_isa.h"

enum { KT_CHAINS = KT_ISA == KT_ISA_AVX512 || KT_ISA == KT_ISA_NEON ? 24 : 12, KT_MOST_THREADS = 1024 };

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Independent chains, enough to hide the latency of every pipe; the values stay near 1. */
KT_NOINLINE double kt_multiply_add(long rounds) {
    kt_vec acc[KT_CHAINS];
    volatile kt_real half = (kt_real)0.5;
    kt_vec a = (kt_vec){0} + half, b = (kt_vec){0} + half;
    for (int i = 0; i < KT_CHAINS; i++) acc[i] = (kt_vec){0} + (kt_real)i;
    for (long round = 0; round < rounds; round++) {
        KT_UNROLL_ALL
        for (int i = 0; i < KT_CHAINS; i++) acc[i] = acc[i] * a + b;
    }
    double sum = 0;
    for (int i = 0; i < KT_CHAINS; i++) sum += (double)acc[i][0];
    return sum;
}

typedef struct {
    void (*body)(void *context, int thread);
    void *context;
    int thread;
} kt_job;

static void *kt_run_job(void *argument) {
    kt_job *job = argument;
    job->body(job->context, job->thread);
    return NULL;
}

/* Seconds that body takes on `threads` threads together, their start included. */
static double kt_on_threads(int threads, void (*body)(void *, int), void *context) {
    pthread_t ids[KT_MOST_THREADS];
    kt_job jobs[KT_MOST_THREADS];
    int started = 0;
    double begin = now_seconds();
    for (int i = 0; i < threads; i++) {
        jobs[i] = (kt_job){body, context, i};
        if (i + 1 == threads || pthread_create(&ids[started], NULL, kt_run_job, &jobs[i])) body(context, i);
        else started++;
    }
    while (started > 0) pthread_join(ids[--started], NULL);
    return now_seconds() - begin;
}

typedef struct {
    long rounds;
    char *to, *from;
    long bytes;
    int threads;
    double sink[KT_MOST_THREADS];
} kt_context;

static void kt_flops_body(void *context, int thread) {
    kt_context *c = context;
    c->sink[thread] = kt_multiply_add(c->rounds);
}

static void kt_copy_body(void *context, int thread) {
    kt_context *c = context;
    long first = c->bytes * thread / c->threads, last = c->bytes * (thread + 1) / c->threads;
    memcpy(c->to + first, c->from + first, (size_t)(last - first));
}

/* The best rate (flop/s) seen in about `seconds`. */
double kt_peak_flops(int threads, double seconds) {
    static kt_context context;
    double best = 0, end = now_seconds() + seconds;
    if (threads > KT_MOST_THREADS) threads = KT_MOST_THREADS;
    context.rounds = 1 << 16;
    do {
        double took = kt_on_threads(threads, kt_flops_body, &context);
        double rate = 2.0 * KT_LANES * KT_CHAINS * (double)context.rounds * threads / took;
        if (rate > best) best = rate;
        if (took < 0.004) context.rounds *= 2;
    } while (now_seconds() < end);
    return best;
}

/* The best rate (B/s, read plus written) of copying `bytes`, seen in about `seconds`. */
double kt_copy_bandwidth(int threads, void *to, void *from, long bytes, double seconds) {
    static kt_context context;
    double best = 0, end = now_seconds() + seconds;
    if (threads > KT_MOST_THREADS) threads = KT_MOST_THREADS;
    context = (kt_context){.to = to, .from = from, .bytes = bytes, .threads = threads};
    do {
        double rate = 2.0 * (double)bytes / kt_on_threads(threads, kt_copy_body, &context);
        if (rate > best) best = rate;
    } while (now_seconds() < end);
    return best;
}
