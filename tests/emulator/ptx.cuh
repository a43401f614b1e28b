// Stands in for spaces/device/ptx.cuh: CUDA threads as fibers of one CPU thread, so that a kernel can be run without a GPU.
//
// It is adversarial where the hardware may be: shared memory starts as NaNs, threads run in random order, and a copy by
// cp.async happens at once or only when it is waited for, at random. Missing barriers and waits become wrong results.
#ifndef KT_PTX_CUH
#define KT_PTX_CUH

#include "types.cuh"

// ---- CUDA

#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct dim3 {
    unsigned x, y = 1, z = 1;
    dim3(unsigned x = 1) : x(x) {}
};

template <class To, class From> static inline To emu_cast(From x) {
    To y;
    static_assert(sizeof(To) == sizeof(From));
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline float __uint_as_float(u32 x) { return emu_cast<float>(x); }
static inline u32 __float_as_uint(float x) { return emu_cast<u32>(x); }
static inline double __longlong_as_double(i64 x) { return emu_cast<double>(x); }
static inline i64 __double_as_longlong(double x) { return emu_cast<i64>(x); }
static inline u32 __funnelshift_r(u32 low, u32 high, u32 by) { return (u32)(((u64)high << 32 | low) >> (by & 31)); }
static inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    u32 y = 0;
    for (int i = 0; i < 4; i++) y |= (u32)(u8)(((u64)high << 32 | low) >> (8 * (selector >> (4 * i) & 7))) << (8 * i);
    return y;
}

// ---- fibers

#ifndef EMU_MOST_THREADS
#define EMU_MOST_THREADS 1024
#endif
enum : int { EMU_STACK = 256 * 1024, EMU_THREADS = EMU_MOST_THREADS, EMU_SHARED = 256 * 1024 };
__attribute__((aligned(1024))) u8 kt_shared[EMU_SHARED];

struct emu_barrier { int expected = 0, arrived = 0; unsigned generation = 0; };
struct emu_copy { u8 *to; const u8 *from; u32 bytes, valid; };
struct emu_fiber {
    jmp_buf state;
    ucontext_t start;
    bool done;
    std::vector<std::vector<emu_copy>> groups; // the last one is open
};
struct emu_warp { emu_barrier barrier; u32 words[32][8]; };

static emu_fiber emu_fibers[EMU_THREADS];
static emu_warp emu_warps[EMU_THREADS / 32];
static emu_barrier emu_block;
static int emu_or, emu_or_result, emu_thread, emu_count;
static jmp_buf emu_scheduler;
static ucontext_t emu_main;
static const std::function<void()> *emu_body;
static u32 emu_seed = 1;
static dim3 threadIdx, blockIdx, blockDim, gridDim;

// Sets a fiber's place before it runs.
static void (*emu_place)() = [] { threadIdx.x = emu_thread; };

static inline u32 emu_random() { return emu_seed = emu_seed * 1664525u + 1013904223u, emu_seed >> 16; }

static inline void emu_yield() {
    const int me = emu_thread;
    if (!_setjmp(emu_fibers[me].state)) _longjmp(emu_scheduler, 1);
}
static inline void emu_wait(emu_barrier &b) {
    const unsigned generation = b.generation;
    if (++b.arrived == b.expected) b.arrived = 0, b.generation++;
    else
        while (b.generation == generation) emu_yield();
}
static void emu_enter() {
    (*emu_body)();
    emu_fibers[emu_thread].done = true;
    emu_block.expected--; // threads that left do not hold up the others
    if (emu_block.expected && emu_block.arrived == emu_block.expected) emu_block.arrived = 0, emu_block.generation++;
    _longjmp(emu_scheduler, 1);
}
static void emu_run_block(int threads, const std::function<void()> &body) {
    // Freed at the end: the libraries of many kernels stay loaded, and a process cannot fork with all their stacks.
    u8 *const stacks = (u8 *)malloc((size_t)EMU_STACK * threads);
    memset(kt_shared, 0xff, sizeof kt_shared);
    emu_body = &body, emu_count = threads, emu_block = {threads, 0, 0};
    for (int i = 0; i < threads / 32; i++) emu_warps[i].barrier = {32, 0, 0};
    std::vector<int> order(threads);
    std::vector<bool> begun(threads);
    for (int i = 0; i < threads; i++) {
        order[i] = i;
        emu_fibers[i].done = false;
        emu_fibers[i].groups.assign(1, {});
    }
    for (volatile int left = threads; left;) {
        for (int i = threads - 1; i > 0; i--) std::swap(order[i], order[emu_random() % (i + 1)]);
        for (volatile int i = 0; i < threads; i++) {
            emu_fiber &f = emu_fibers[emu_thread = order[i]];
            if (f.done) continue;
            emu_place();
            if (!_setjmp(emu_scheduler)) {
                if (begun[emu_thread]) _longjmp(f.state, 1);
                begun[emu_thread] = true;
                getcontext(&f.start);
                f.start.uc_stack.ss_sp = stacks + (size_t)emu_thread * EMU_STACK;
                f.start.uc_stack.ss_size = EMU_STACK;
                f.start.uc_link = &emu_main;
                makecontext(&f.start, emu_enter, 0);
                setcontext(&f.start);
            }
            if (emu_fibers[emu_thread].done) left--;
        }
    }
    free(stacks);
}

static inline void __syncthreads() { emu_wait(emu_block); }
static inline void __syncwarp() { emu_wait(emu_warps[emu_thread / 32].barrier); }
static inline int __syncthreads_or(int x) {
    emu_or |= x;
    emu_wait(emu_block);
    emu_or_result = emu_or;
    emu_wait(emu_block);
    emu_or = 0;
    const int result = emu_or_result;
    emu_wait(emu_block);
    return result;
}
// Every lane shows `count` words to the warp, then `read` looks at all of them.
template <class Read> static inline void emu_exchange(const u32 *words, int count, Read read) {
    emu_warp &w = emu_warps[emu_thread / 32];
    memcpy(w.words[emu_thread % 32], words, 4 * count);
    emu_wait(w.barrier);
    read(w.words, emu_thread % 32);
    emu_wait(w.barrier);
}
template <class T> static inline T __shfl_sync(unsigned, T x, int from) {
    u32 bits = emu_cast<u32>(x), got = 0;
    emu_exchange(&bits, 1, [&](u32(*w)[8], int) { got = w[from][0]; });
    return emu_cast<T>(got);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int mask) {
    u32 bits = emu_cast<u32>(x), got = 0;
    emu_exchange(&bits, 1, [&](u32(*w)[8], int lane) { got = w[lane ^ mask][0]; });
    return emu_cast<T>(got);
}

// ---- conversions

static inline float kt_from_half(u16 x) { return (float)emu_cast<_Float16>(x); }
static inline float kt_from_bfloat(u16 x) { return emu_cast<float>((u32)x << 16); }
static inline u16 emu_half(float x) { return emu_cast<u16>((_Float16)x); }
static inline u16 emu_bfloat(float x) {
    const u32 bits = emu_cast<u32>(x);
    return x != x ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline u32 kt_pack_half(float low, float high) { return emu_half(low) | (u32)emu_half(high) << 16; }
static inline u32 kt_pack_bfloat(float low, float high) { return emu_bfloat(low) | (u32)emu_bfloat(high) << 16; }
static inline u32 kt_round_tf32(u32 x) { return x + 0x1000 & ~0x1fffu; }
static inline float kt_exp2_fast(float x) { return exp2f(x); }
static inline float kt_reciprocal_fast(float x) { return 1 / x; }
static inline int kt_round_int(double x) { return x >= 2147483647.0 ? 2147483647 : x <= -2147483648.0 ? (int)-2147483648ll : (int)nearbyint(x); }
static inline u32 kt_permute_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// ---- memory; misaligned accesses trap as they do on the device

static inline void emu_aligned(const void *p, int bytes) {
    if ((u64)p % bytes) abort();
}
static inline u32 kt_shared_address(const void *p) { return (u32)((const u8 *)p - kt_shared); }
static inline u8 *emu_shared(u32 address, u32 bytes) {
    emu_aligned(kt_shared + address, bytes);
    if (address + bytes > EMU_SHARED) abort();
    return kt_shared + address;
}
static inline void kt_shared_store(u32 address, kt_words<4> x) { memcpy(emu_shared(address, 16), &x, 16); }
static inline void kt_shared_load(kt_words<4> &x, u32 address) { memcpy(&x, emu_shared(address, 16), 16); }
static inline void kt_shared_store(u32 address, u32 x) { memcpy(emu_shared(address, 4), &x, 4); }
static inline u32 kt_shared_load(u32 address) {
    u32 x;
    memcpy(&x, emu_shared(address, 4), 4);
    return x;
}
template <bool TRANSPOSE> static inline void kt_ldmatrix(u32 (&x)[4], u32 address) {
    emu_exchange(&address, 1, [&](u32(*w)[8], int lane) {
        for (int i = 0; i < 4; i++) {
            u16 pair[2];
            for (int e = 0; e < 2; e++) {
                const int row = TRANSPOSE ? lane % 4 * 2 + e : lane / 4, column = TRANSPOSE ? lane / 4 : lane % 4 * 2 + e;
                memcpy(&pair[e], emu_shared(w[8 * i + row][0], 16) + 2 * column, 2);
            }
            x[i] = pair[0] | (u32)pair[1] << 16;
        }
    });
}

enum kt_hint { KT_KEEP_NORMAL, KT_EVICT_FIRST, KT_EVICT_LAST };
template <int HINT> static inline u64 kt_cache_policy() { return 0; }

static inline void emu_do(const emu_copy &c) {
    memset(c.to, 0, c.bytes);
    memcpy(c.to, c.from, c.valid);
}
template <int BYTES, int PREFETCH, bool BY_L1 = false> static inline void kt_copy_async(u32 to, const void *from, u32 valid) {
    if (valid) emu_aligned(from, BYTES);
    const emu_copy c = {emu_shared(to, BYTES), (const u8 *)from, BYTES, valid};
    if (emu_random() & 1) emu_do(c);
    else emu_fibers[emu_thread].groups.back().push_back(c);
}
#ifndef KT_EARLY
#define KT_EARLY 0
#endif
static inline void kt_release_next() {}
static inline void kt_await_previous() {}
static inline void kt_prefetch_l2(const void *) {}
static inline void kt_copy_commit() { emu_fibers[emu_thread].groups.push_back({}); }
template <int PENDING> static inline void kt_copy_wait() {
    auto &groups = emu_fibers[emu_thread].groups;
    while ((int)groups.size() - 1 > PENDING) {
        for (const emu_copy &c : groups.front()) emu_do(c);
        groups.erase(groups.begin());
    }
}
template <int HINT> static inline kt_words<4> kt_load_stream(const void *p, u64) {
    emu_aligned(p, 16);
    return *(const kt_words<4> *)p;
}
static inline kt_words<4> kt_load_shared_by_ctas(const void *p) {
    emu_aligned(p, 16);
    return *(const kt_words<4> *)p;
}

// ---- matrix instructions

// d[16 x 8] += a * b of words that hold PER elements each, read by `element(word, i)`.
template <int PER, class T, class Element>
static inline void emu_mma(T (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Element element) {
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    emu_exchange(mine, 6, [&](u32(*w)[8], int lane) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            T sum = 0;
            for (int k = 0; k < 8; k++)
                for (int e = 0; e < PER; e++)
                    sum += (T)element(w[row % 8 * 4 + k % 4][row / 8 + 2 * (k / 4)], e) * (T)element(w[column * 4 + k % 4][4 + k / 4], e);
            d[i] += sum;
        }
    });
}
static inline float emu_half_at(u32 w, int i) { return kt_from_half((u16)(w >> (16 * i))); }
static inline void kt_mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { emu_mma<2>(d, a, b0, b1, emu_half_at); }
static inline void kt_mma_half_half(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1) {
    float x[4] = {emu_half_at(d[0], 0), emu_half_at(d[0], 1), emu_half_at(d[1], 0), emu_half_at(d[1], 1)};
    kt_mma_half(x, a, b0, b1);
    d[0] = kt_pack_half(x[0], x[1]), d[1] = kt_pack_half(x[2], x[3]);
}
static inline void kt_mma_bfloat(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emu_mma<2>(d, a, b0, b1, [](u32 w, int i) { return kt_from_bfloat((u16)(w >> (16 * i))); });
}
static inline void kt_mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emu_mma<1>(d, a, b0, b1, [](u32 w, int) { return emu_cast<float>(w); });
}
static inline void kt_mma_int8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emu_mma<4>(d, a, b0, b1, [](u32 w, int i) { return (int)(signed char)(w >> (8 * i)); });
}

// ---- between CTAs: they run one after another

static inline u32 kt_arrive(u32 *counter) { return (*counter)++; }
template <class T> static inline void kt_add_global(T *p, T x) { *p += x; }
static inline void kt_add_global(float *p, float x, float y, float z, float w) { p[0] += x, p[1] += y, p[2] += z, p[3] += w; }

// ---- host

typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
static inline cudaError_t cudaFuncSetAttribute(const void *, int, int bytes) { return bytes > 227 * 1024; }
static cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **p, size_t shared, cudaStream_t) {
    if (shared > 227 * 1024 || block.x > EMU_THREADS) return 1;
    void *a[12] = {};
    int count = 0;
    extern const int emu_arguments;
    for (; count < emu_arguments; count++) a[count] = *(void **)p[count];
    gridDim = grid, blockDim = block;
    std::function<void()> body = [&] {
        switch (count) {
            case 4: return ((void (*)(void *, void *, void *, void *))f)(a[0], a[1], a[2], a[3]);
            case 5: return ((void (*)(void *, void *, void *, void *, void *))f)(a[0], a[1], a[2], a[3], a[4]);
            case 6: return ((void (*)(void *, void *, void *, void *, void *, void *))f)(a[0], a[1], a[2], a[3], a[4], a[5]);
            case 7: return ((void (*)(void *, void *, void *, void *, void *, void *, void *))f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
            // Surplus arguments go unread.
            default: return ((void (*)(void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *))f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
        }
    };
    std::vector<unsigned> order(grid.x);
    for (unsigned i = 0; i < grid.x; i++) order[i] = i;
    for (unsigned i = grid.x - 1; i > 0; i--) std::swap(order[i], order[emu_random() % (i + 1)]);
    for (unsigned i : order) {
        blockIdx.x = i;
        emu_run_block((int)block.x, body);
    }
    return cudaSuccess;
}

struct cudaLaunchAttribute { int id; struct { int programmaticStreamSerializationAllowed; dim3 clusterDim; } val; };
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; cudaLaunchAttribute *attrs; unsigned numAttrs; };
enum { cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
static inline cudaError_t cudaOccupancyMaxActiveClusters(int *, const void *, const cudaLaunchConfig_t *) { return cudaSuccess; }
static cudaError_t (*emu_launch)(const cudaLaunchConfig_t *c, const void *f, void **p); // where it is set, of every kernel
static inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **p) {
    if (emu_launch) return emu_launch(c, f, p);
    return cudaLaunchKernel(f, c->gridDim, c->blockDim, p, c->dynamicSmemBytes, c->stream);
}

#endif
