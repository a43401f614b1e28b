// The host's side of an emitted kernel (nvcc only): starts one kernel with the arguments of kt_launch and the workspace.
#ifndef KT_LAUNCH_CUH
#define KT_LAUNCH_CUH
#ifndef __CUDACC_RTC__

#include "epilogue.cuh"

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

extern "C" const char *kt_describe(void) { return KT_DESCRIBE; }

#endif
#endif
