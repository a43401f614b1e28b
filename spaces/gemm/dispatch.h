/* The entry points of a file of many tuned matrix products: the kernel that was tuned for the extents, or the one for any.
 * C, and C++ for nvcc (its host's side only).
 *
 * The file has defined KT_SHAPES, rows of kt_shapes; KT_ANY, the function for any extents; KT_ARGUMENTS, pointers of a
 * launch, and KT_ALIGNMENT, bytes that their addresses are multiples of; KT_ZEROED_BYTES; KT_DESCRIBE; and KT_CUDA.
 */
#ifndef __CUDACC_RTC__

#include <stddef.h>
#include <stdint.h>

#if KT_CUDA
#define KT_EXPORT extern "C"
#define KT_STREAM_PARAMETER , void *stream
#define KT_STREAM , stream
#else
#define KT_EXPORT
#define KT_STREAM_PARAMETER
#define KT_STREAM
#endif

/* What a launch returns besides 0 and, on CUDA, the positive errors of the runtime. */
enum {
    KT_BAD_EXTENT = -1,    /* below 1 or above 2^31 - 1 */
    KT_BAD_ARGUMENT = -2,  /* a pointer that is null or not aligned */
    KT_BAD_WORKSPACE = -3, /* null or not aligned to 256, where one is needed */
};

typedef struct {
    int64_t m, n, k, batch;
    size_t workspace_offset; /* where its own part of the workspace begins */
    size_t (*workspace_bytes)(void);
    int (*launch)(void *const *args, void *workspace KT_STREAM_PARAMETER);
    const char *(*describe)(void);
} kt_shape;

static const kt_shape kt_shapes[] = KT_SHAPES;

/* The shape that was tuned for these extents; NULL: none. */
static const kt_shape *kt_find(int64_t m, int64_t n, int64_t k, int64_t batch) {
    for (size_t i = 0; i < sizeof kt_shapes / sizeof *kt_shapes; i++) {
        const kt_shape *s = &kt_shapes[i];
        if (s->m == m && s->n == n && s->k == k && s->batch == batch) return s;
    }
    return NULL;
}

KT_EXPORT size_t kt_workspace_bytes_gemm(int64_t m, int64_t n, int64_t k, int64_t batch) {
    const kt_shape *s = kt_find(m, n, k, batch);
    return s && s->workspace_bytes() ? s->workspace_offset + s->workspace_bytes() : 0;
}

/* Leading bytes of a workspace, where one is needed, that must be zero before its first launch; launches leave them zero. */
KT_EXPORT size_t kt_workspace_zeroed_bytes_gemm(void) { return KT_ZEROED_BYTES; }

/* The record of the kernel for these extents; "{}" where none was tuned. */
KT_EXPORT const char *kt_describe_gemm(int64_t m, int64_t n, int64_t k, int64_t batch) {
    const kt_shape *s = kt_find(m, n, k, batch);
    return s ? s->describe() : "{}";
}

KT_EXPORT const char *kt_describe(void) { return KT_DESCRIBE; }

KT_EXPORT int kt_launch_gemm(int64_t m, int64_t n, int64_t k, int64_t batch, void *const *args, void *workspace KT_STREAM_PARAMETER) {
    const int64_t extents[] = {m, n, k, batch};
    for (int i = 0; i < 4; i++)
        if (extents[i] < 1 || extents[i] > INT32_MAX) return KT_BAD_EXTENT;
    if (!args) return KT_BAD_ARGUMENT;
    for (int i = 0; i < KT_ARGUMENTS; i++)
        if (!args[i] || (uintptr_t)args[i] % KT_ALIGNMENT) return KT_BAD_ARGUMENT;
    const kt_shape *s = kt_find(m, n, k, batch);
    if (!s) return KT_ANY(m, n, k, batch, args KT_STREAM);
    if (!s->workspace_bytes()) return s->launch(args, workspace KT_STREAM);
    if (!workspace || (uintptr_t)workspace % 256) return KT_BAD_WORKSPACE;
    return s->launch(args, (char *)workspace + s->workspace_offset KT_STREAM);
}

#endif
