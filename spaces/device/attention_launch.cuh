// The host's side of an emitted attention kernel (nvcc only); comes last in a kernel file.
//
// The file has defined kt_kernel, BLOCKS, THREADS, SHARED_BYTES, WORKSPACE_BYTES and ZEROED_BYTES; kt_combine,
// COMBINE_BLOCKS, COMBINE_THREADS and COMBINE_SHARED_BYTES where KT_HAS_COMBINE is set.
#ifndef KT_ATTENTION_LAUNCH_CUH
#define KT_ATTENTION_LAUNCH_CUH
#ifndef __CUDACC_RTC__

#include "start.cuh"

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
