/* The parts of a measurement that must not run in an interpreter: timing, comparing, touching memory. */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef int (*kt_launch)(void *const *args, void *workspace);

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

typedef struct {
    void *const *sets; /* [set_count][arg_count], used in turn so that each launch finds cold caches */
    long set_count, arg_count;
    long next;  /* the set that the next launch uses */
    long group; /* launches in one sample */
    long least, most; /* samples */
    double budget_us; /* no sample begins after this, once there are `least` */
    double cut_us;    /* no sample begins once the best of two or more exceeds this; 0: never */
} kt_plan;

/* Writes samples (microseconds a launch) and returns how many; *status is the first launch's code that is not 0. */
long kt_time(kt_launch launch, void *workspace, kt_plan *plan, double *us, int *status) {
    double begin = now_us(), best = DBL_MAX;
    long count = 0;
    *status = 0;
    while (count < plan->most) {
        double start = now_us();
        for (long i = 0; i < plan->group; i++) {
            *status = launch(plan->sets + plan->next * plan->arg_count, workspace);
            if (*status) return count;
            if (++plan->next == plan->set_count) plan->next = 0;
        }
        double end = now_us();
        us[count] = (end - start) / (double)plan->group;
        if (us[count] < best) best = us[count];
        count++;
        if (plan->cut_us > 0 && count >= 2 && best > plan->cut_us) break;
        if (count >= plan->least && end - begin > plan->budget_us) break;
    }
    return count;
}

typedef struct {
    double error_squares, reference_squares, gain_squares;
    long bad;          /* elements outside their bound, NaN included */
    long worst;        /* index of the one furthest outside, -1: none */
    double worst_value, worst_reference;
} kt_comparison;

/* |out - reference| <= absolute * gain[column] + relative * |reference| for each element; written so that NaN fails.
 * An infinite reference wants just that. */
#define KT_COMPARE(name, real)                                                                                      \
    void name(const real *out, const double *reference, const double *gain, long rows, long columns,                \
              double absolute, double relative, kt_comparison *result) {                                            \
        double errors = 0, references = 0, gains = 0, furthest = 0;                                                            \
        long bad = 0, worst = -1;                                                                                   \
        for (long row = 0; row < rows; row++)                                                                       \
            for (long column = 0; column < columns; column++) {                                                     \
                long i = row * columns + column;                                                                    \
                double r = reference[i], d = (double)out[i] == r ? 0 : fabs((double)out[i] - r);                    \
                double bound = absolute * gain[column] + relative * fabs(r);                                        \
                errors += d * d;                                                                                    \
                if (isfinite(r)) references += r * r, gains += gain[column] * gain[column];                         \
                if (!(d <= bound)) {                                                                                \
                    bad++;                                                                                          \
                    double excess = isnan(d / bound) ? INFINITY : d / bound;                                        \
                    if (worst < 0 || excess > furthest) worst = i, furthest = excess;                               \
                }                                                                                                   \
            }                                                                                                       \
        *result = (kt_comparison){errors, references, gains, bad, worst, worst < 0 ? 0 : (double)out[worst],               \
                                  worst < 0 ? 0 : reference[worst]};                                                \
    }

KT_COMPARE(kt_compare_fp32, float)
KT_COMPARE(kt_compare_fp64, double)

/* Microseconds to read `bytes` once, a cache line at a time in 8 streams. */
double kt_read_us(const void *memory, long bytes, uint64_t *sink) {
    const uint64_t *p = memory;
    uint64_t sum[8] = {0};
    double begin = now_us();
    for (long i = 0; i + 8 <= bytes / 8; i += 8)
        for (int j = 0; j < 8; j++) sum[j] += p[i + j];
    double end = now_us();
    for (int j = 0; j < 8; j++) *sink += sum[j];
    return end - begin;
}

/* Puts `bytes` out of every cache; returns 0 where the processor offers no such instruction to programs. */
int kt_flush(const void *memory, long bytes) {
#if defined(__x86_64__)
    for (long i = 0; i < bytes; i += 64) __builtin_ia32_clflush((const char *)memory + i);
    __builtin_ia32_mfence();
    return 1;
#elif defined(__aarch64__)
    for (long i = 0; i < bytes; i += 64) __asm__ volatile("dc civac, %0" ::"r"((const char *)memory + i) : "memory");
    __asm__ volatile("dsb sy" ::: "memory");
    return 1;
#else
    (void)memory, (void)bytes;
    return 0;
#endif
}
