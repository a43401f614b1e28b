// The host's side of an emitted kernel (nvcc only); comes last in a kernel file.
//
// The file has defined kt_kernel, BLOCKS (CTAs for one batch and one split; or KT_GRID, all CTAs), THREADS, SHARED_BYTES,
// WORKSPACE_BYTES and Splits; kt_repack and REPACK_BLOCKS where KT_HAS_REPACK is set; KT_TENSOR_MAPS where kt_kernel takes
// maps, and KT_CLUSTER where it runs in clusters.
#ifndef KT_LAUNCH_CUH
#define KT_LAUNCH_CUH
#ifndef __CUDACC_RTC__

#include "split_k.cuh"

constexpr u64 ZEROED_BYTES = Splits::ZEROED;

#include "start.cuh"

#ifndef KT_GRID
#define KT_GRID ((u64)BLOCKS * KT_BATCH * KT_SPLIT_K)
#endif
#ifndef KT_CLUSTER
#define KT_CLUSTER 1 /* CTAs of a cluster */
#endif

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
