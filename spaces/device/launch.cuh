// The host's side of an emitted kernel (nvcc only); comes last in a kernel file.
//
// The file has defined kt_kernel, BLOCKS (CTAs for one batch and one split; or KT_GRID, all CTAs), THREADS, SHARED_BYTES,
// WORKSPACE_BYTES and Splits; kt_repack and REPACK_BLOCKS where KT_HAS_REPACK is set; KT_TENSOR_MAPS where kt_kernel takes
// maps, and KT_CLUSTER where it runs in clusters.
#ifndef KT_LAUNCH_CUH
#define KT_LAUNCH_CUH
#ifndef __CUDACC_RTC__

#include "split_k.cuh"

#ifndef KT_GRID
#define KT_GRID ((u64)BLOCKS * KT_BATCH * KT_SPLIT_K)
#endif
#ifndef KT_CLUSTER
#define KT_CLUSTER 1 /* CTAs of a cluster */
#endif
#ifndef KT_RESIDENT
#define KT_RESIDENT 0 /* 1: the grid may be cut to the clusters that the device holds at once */
#endif

#ifdef KT_TENSOR_MAPS
// A tensor that the TMA takes in boxes; innermost dimension first, strides in bytes without it.
struct kt_map_plan {
    int argument; // of kt_launch; -1: the workspace
    u64 offset;
    int type, rank;
    u64 extents[5], strides[4];
    u32 box[5], steps[5];
    int swizzle;
};
static const kt_map_plan kt_map_plans[] = KT_TENSOR_MAPS;
enum : int { MAPS = sizeof(kt_map_plans) / sizeof(kt_map_plan) };

typedef int (*kt_encode_function)(void *map, int type, u32 rank, void *address, const u64 *extents, const u64 *strides, const u32 *box,
                                  const u32 *steps, int interleave, int swizzle, int promotion, int fill);

// cuTensorMapEncodeTiled, found through the runtime: nothing needs to be linked with the driver.
static kt_encode_function kt_find_encode() {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) != cudaSuccess) return nullptr;
#else
    if (cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result) != cudaSuccess) return nullptr;
#endif
    return (kt_encode_function)found;
}

static int kt_encode_maps(kt_tensor_map (&maps)[MAPS], void *const *args, void *workspace) {
    const kt_encode_function encode = kt_find_encode();
    if (!encode) return (int)cudaErrorNotSupported;
    for (int i = 0; i < MAPS; i++) {
        const kt_map_plan &plan = kt_map_plans[i];
        u8 *address = (u8 *)(plan.argument < 0 ? workspace : args[plan.argument]) + plan.offset;
        const int promotion = 3; // L2 fetches 256 bytes
        const int error = encode(&maps[i], plan.type, plan.rank, address, plan.extents, plan.strides, plan.box, plan.steps, 0,
                                 plan.swizzle, promotion, 0);
        if (error) return error;
    }
    return 0;
}
#else
enum : int { MAPS = 0 };
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
extern "C" size_t kt_workspace_zeroed_bytes(void) { return Splits::ZEROED; }

extern "C" const char *kt_describe(void) { return KT_DESCRIBE; }

// 0, or the first error of the runtime. Operands begin at multiples of 16.
extern "C" int kt_launch(void *const *args, void *workspace, void *stream) {
    int error = 0;
#if KT_HAS_REPACK
    error = kt_start((const void *)kt_repack, REPACK_BLOCKS, REPACK_THREADS, 0, args, workspace, stream);
    if (error) return error;
#endif
#ifdef KT_TENSOR_MAPS
    kt_tensor_map encoded[MAPS];
    void *maps[MAPS];
    for (int i = 0; i < MAPS; i++) maps[i] = &encoded[i];
    error = kt_encode_maps(encoded, args, workspace);
    if (error) return error;
#else
    void *const *maps = nullptr;
#endif
    error = kt_start((const void *)kt_kernel, KT_GRID, THREADS, SHARED_BYTES, args, workspace, stream, KT_CLUSTER, maps);
#if KT_SPLIT_K > 1 && KT_SPLIT_MODE == KT_SPLIT_KERNEL
    if (error) return error;
    error = kt_start((const void *)kt_reduce, REDUCE_BLOCKS, REDUCE_THREADS, 0, args, workspace, stream);
#endif
    return error;
}

#endif
#endif
