// CUDA's keywords for a C++ compiler; comes before the source of a kernel.
#include <stddef.h>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
