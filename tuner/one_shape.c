/* One shape of a library of many, as a kernel of that shape alone: for `kt apply --dispatch --verify`. C, and C++ for nvcc.
 *
 * The file has defined KT_FILE, the library, and KT_EXTENTS, the four extents of the shape.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define KT_EXPORT extern "C"
#define KT_STREAM_PARAMETER , void *stream
#define KT_STREAM , stream
#else
#define KT_EXPORT
#define KT_STREAM_PARAMETER
#define KT_STREAM
#endif

typedef size_t (*kt_bytes)(int64_t m, int64_t n, int64_t k, int64_t batch);
typedef size_t (*kt_zeroed)(void);
typedef int (*kt_launcher)(int64_t m, int64_t n, int64_t k, int64_t batch, void *const *args, void *workspace KT_STREAM_PARAMETER);

/* The process ends where there is no such function. */
static void *kt_find(const char *name) { return dlsym(dlopen(KT_FILE, RTLD_NOW), name); }

KT_EXPORT size_t kt_workspace_bytes(void) { return ((kt_bytes)kt_find("kt_workspace_bytes_gemm"))(KT_EXTENTS); }

KT_EXPORT size_t kt_workspace_zeroed_bytes(void) {
    return kt_workspace_bytes() ? ((kt_zeroed)kt_find("kt_workspace_zeroed_bytes_gemm"))() : 0;
}

KT_EXPORT int kt_launch(void *const *args, void *workspace KT_STREAM_PARAMETER) {
    static kt_launcher launch;
    if (!launch) launch = (kt_launcher)kt_find("kt_launch_gemm");
    return launch(KT_EXTENTS, args, workspace KT_STREAM);
}
