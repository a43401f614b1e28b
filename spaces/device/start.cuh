// How the host starts one kernel of an emitted file (nvcc only). The file has defined KT_ARGUMENTS.
#ifndef KT_START_CUH
#define KT_START_CUH
#ifndef __CUDACC_RTC__

#include "ptx.cuh"

// Starts one kernel with the arguments of kt_launch and the workspace.
static int kt_start(const void *kernel, u64 blocks, u32 threads, u32 shared_bytes, void *const *args, void *workspace,
                    void *stream) {
    void *parameters[KT_ARGUMENTS + 1];
    for (int i = 0; i < KT_ARGUMENTS; i++) parameters[i] = (void *)(args + i);
    parameters[KT_ARGUMENTS] = &workspace;
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 * 1024)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (error != cudaSuccess) return (int)error;
#if KT_EARLY
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((u32)blocks), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes, config.stream = (cudaStream_t)stream;
    config.attrs = &early, config.numAttrs = 1;
    return (int)cudaLaunchKernelExC(&config, kernel, parameters);
#else
    return (int)cudaLaunchKernel(kernel, dim3((u32)blocks), dim3(threads), parameters, shared_bytes, (cudaStream_t)stream);
#endif
}

#endif
#endif
