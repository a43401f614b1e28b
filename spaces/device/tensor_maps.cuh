// How the host encodes the tensor maps that a kernel takes by value (nvcc only). Where it takes any, the file has defined
// KT_TENSOR_MAPS, an initialiser of kt_map_plans, and included hopper_tma.cuh.
#ifndef KT_TENSOR_MAPS_CUH
#define KT_TENSOR_MAPS_CUH
#ifndef __CUDACC_RTC__

#include "ptx.cuh"

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

#endif
#endif
