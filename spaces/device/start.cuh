// How the host starts one kernel of an emitted file, and what every emitted file says of itself (nvcc only).
//
// The file has defined KT_ARGUMENTS, WORKSPACE_BYTES and ZEROED_BYTES; KT_EARLY where its kernels may start early, and
// KT_RESIDENT where their grid may be cut.
#ifndef KT_START_CUH
#define KT_START_CUH
#ifndef __CUDACC_RTC__

#include "tensor_maps.cuh"

#ifndef KT_RESIDENT
#define KT_RESIDENT 0 /* 1: the grid may be cut to the clusters that the device holds at once */
#endif

// Starts one kernel with the arguments of kt_launch, the workspace, and `maps`, if any.
static int kt_start(const void *kernel, u64 blocks, u32 threads, u32 shared_bytes, void *const *args, void *workspace, void *stream,
                    u32 cluster = 1, void *const *maps = nullptr) {
    void *parameters[KT_ARGUMENTS + 1 + MAPS];
    for (int i = 0; i < KT_ARGUMENTS; i++) parameters[i] = (void *)(args + i);
    parameters[KT_ARGUMENTS] = &workspace;
    for (int i = 0; maps && i < MAPS; i++) parameters[KT_ARGUMENTS + 1 + i] = maps[i];
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 * 1024)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (error != cudaSuccess) return (int)error;

    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((u32)blocks), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes, config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    if (cluster > 1) {
        cudaLaunchAttribute &grouped = attributes[config.numAttrs++];
        grouped.id = cudaLaunchAttributeClusterDimension;
        grouped.val.clusterDim.x = cluster, grouped.val.clusterDim.y = grouped.val.clusterDim.z = 1;
        int most = 0;
        if (KT_RESIDENT) error = cudaOccupancyMaxActiveClusters(&most, kernel, &config);
        if (error != cudaSuccess) return (int)error;
        if (most > 0 && blocks > (u64)most * cluster) config.gridDim.x = (u32)most * cluster;
    }
    if (KT_EARLY) {
        cudaLaunchAttribute &early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    return (int)cudaLaunchKernelExC(&config, kernel, parameters);
}

// Bytes of the workspace, and how many of them from its start must be zero before the first launch (every launch leaves
// them zero). The workspace begins at a multiple of 256, and no two launches may use it at the same time.
extern "C" size_t kt_workspace_bytes(void) { return WORKSPACE_BYTES; }
extern "C" size_t kt_workspace_zeroed_bytes(void) { return ZEROED_BYTES; }

extern "C" const char *kt_describe(void) { return KT_DESCRIBE; }

#endif
#endif
