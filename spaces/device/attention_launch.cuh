// The host's side of an emitted attention kernel (nvcc only); comes last in a kernel file.
//
// The file has defined kt_kernel, BLOCKS, THREADS, SHARED_BYTES, WORKSPACE_BYTES and ZEROED_BYTES; kt_combine,
// COMBINE_BLOCKS, COMBINE_THREADS and COMBINE_SHARED_BYTES where KT_HAS_COMBINE is set.
#ifndef KT_ATTENTION_LAUNCH_CUH
#define KT_ATTENTION_LAUNCH_CUH
#ifndef __CUDACC_RTC__

#include "start.cuh"

// Bytes of the workspace, and how many of them from its start must be zero before the first launch (every launch leaves
// them zero). The workspace begins at a multiple of 256, and no two launches may use it at the same time.
extern "C" size_t kt_workspace_bytes(void) { return WORKSPACE_BYTES; }
extern "C" size_t kt_workspace_zeroed_bytes(void) { return ZEROED_BYTES; }

extern "C" const char *kt_describe(void) { return KT_DESCRIBE; }

// 0, or the first error of the runtime. Operands begin at multiples of 16.
extern "C" int kt_launch(void *const *args, void *workspace, void *stream) {
    int error = kt_start((const void *)kt_kernel, BLOCKS, THREADS, SHARED_BYTES, args, workspace, stream);
#if KT_HAS_COMBINE
    if (error) return error;
    error = kt_start((const void *)kt_combine, COMBINE_BLOCKS, COMBINE_THREADS, COMBINE_SHARED_BYTES, args, workspace, stream);
#endif
    return error;
}

#endif
#endif
