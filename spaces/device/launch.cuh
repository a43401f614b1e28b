// The host's side of an emitted kernel (nvcc only); comes last in a kernel file.
//
// The file has defined kt_kernel, BLOCKS (CTAs for one batch and one split), THREADS, SHARED_BYTES, WORKSPACE_BYTES and
// Splits; kt_repack and REPACK_BLOCKS where KT_HAS_REPACK is set.
#ifndef KT_LAUNCH_CUH
#define KT_LAUNCH_CUH
#ifndef __CUDACC_RTC__

#include "split_k.cuh"

// Starts one kernel with the arguments of kt_launch and the workspace.
static int kt_start(const void *kernel, u64 blocks, u32 threads, u32 shared_bytes, void *const *args, void *workspace,
                    void *stream) {
    void *parameters[KT_ARGUMENTS + 1];
    for (int i = 0; i < KT_ARGUMENTS; i++) parameters[i] = (void *)(args + i);
    parameters[KT_ARGUMENTS] = &workspace;
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 * 1024)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (error == cudaSuccess)
        error = cudaLaunchKernel(kernel, dim3((u32)blocks), dim3(threads), parameters, shared_bytes, (cudaStream_t)stream);
    return (int)error;
}

// Bytes of the workspace, and how many of them from its start must be zero before the first launch (every launch leaves
// them zero). The workspace begins at a multiple of 256, and no two launches may use it at the same time.
extern "C" size_t kt_workspace_bytes(void) { return WORKSPACE_BYTES; }
extern "C" size_t kt_workspace_zeroed_bytes(void) { return Splits::ZEROED; }

extern "C" const char *kt_describe(void) { return KT_DESCRIBE; }

// 0, or the first error of the runtime. Operands begin at multiples of 16.
extern "C" int kt_launch(void *const *args, void *workspace, void *stream) {
    int error = 0;
#if KT_HAS_REPACK
    error = kt_start((const void *)kt_repack, REPACK_BLOCKS, REPACK_THREADS, 0, args, workspace, stream);
    if (error) return error;
#endif
    error = kt_start((const void *)kt_kernel, (u64)BLOCKS * KT_BATCH * KT_SPLIT_K, THREADS, SHARED_BYTES, args, workspace, stream);
#if KT_SPLIT_K > 1 && KT_SPLIT_MODE == KT_SPLIT_KERNEL
    if (error) return error;
    error = kt_start((const void *)kt_reduce, REDUCE_BLOCKS, REDUCE_THREADS, 0, args, workspace, stream);
#endif
    return error;
}

#endif
#endif
