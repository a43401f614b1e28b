// Every PTX instruction of the sm_80 kernels behind a small function: conversions, shared and global memory,
// asynchronous copies, matrix instructions, and the atomics of split-K.
#ifndef KT_PTX_CUH
#define KT_PTX_CUH

#include "types.cuh"

// ---- conversions and approximations

KT_DEVICE float kt_from_half(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
KT_DEVICE float kt_from_bfloat(u16 bits) { return __uint_as_float((u32)bits << 16); }
KT_DEVICE u32 kt_pack_half(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
KT_DEVICE u32 kt_pack_bfloat(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
KT_DEVICE u32 kt_round_tf32(u32 single) {
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(__uint_as_float(single)));
    return bits;
}
KT_DEVICE float kt_exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
KT_DEVICE float kt_reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
KT_DEVICE int kt_round_int(double x) { // to nearest, saturating
    int y;
    asm("cvt.rni.s32.f64 %0, %1;" : "=r"(y) : "d"(x));
    return y;
}
KT_DEVICE u32 kt_permute_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// ---- shared memory by 32-bit address

KT_DEVICE u32 kt_shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

KT_DEVICE void kt_shared_store(u32 address, kt_words<4> x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3])
                 : "memory");
}
KT_DEVICE void kt_shared_store(u32 address, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
KT_DEVICE u32 kt_shared_load(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}
KT_DEVICE void kt_shared_load(kt_words<4> &x, u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "r"(address) : "memory");
}
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Lane l receives of each
// matrix the elements (l / 4, 2 * (l % 4) + {0, 1}), of the transposed matrix with TRANSPOSE.
template <bool TRANSPOSE> KT_DEVICE void kt_ldmatrix(u32 (&x)[4], u32 address) {
    if (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address));
}

// ---- global memory

enum kt_hint { KT_KEEP_NORMAL, KT_EVICT_FIRST, KT_EVICT_LAST };

// The L2 policy that goes with a hint; a constant of the kernel.
template <int HINT> KT_DEVICE u64 kt_cache_policy() {
    u64 policy = 0;
    if (HINT == KT_EVICT_FIRST) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    if (HINT == KT_EVICT_LAST) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// BYTES (4, 8 or 16) from global to shared memory without registers; the first `valid` are read, the rest are zeros.
// L2 fetches PREFETCH bytes (0, 128 or 256) around them; only copies of 16 bytes can go past L1. There is no variant with a cache policy: ptxas 13.0 makes illegal
// instructions of it where a uniform register is part of the shared address (seen on sm_90a; fixed in ptxas 13.4).
template <int BYTES, int PREFETCH, bool BY_L1 = BYTES != 16> KT_DEVICE void kt_copy_async(u32 to, const void *from, u32 valid) {
    static_assert(BYTES == 16 || (BY_L1 && (BYTES == 4 || BYTES == 8)), "cp.async copies 4, 8 or 16 bytes");
    static_assert(PREFETCH == 0 || PREFETCH == 128 || PREFETCH == 256, "bytes that L2 fetches");
#define KT_COPY_ASYNC(kind)                                                                                                         \
    asm volatile("cp.async." kind " [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid) : "memory")
    if (!BY_L1) {
        if (PREFETCH == 0) KT_COPY_ASYNC("cg.shared.global");
        if (PREFETCH == 128) KT_COPY_ASYNC("cg.shared.global.L2::128B");
        if (PREFETCH == 256) KT_COPY_ASYNC("cg.shared.global.L2::256B");
    } else {
        if (PREFETCH == 0) KT_COPY_ASYNC("ca.shared.global");
        if (PREFETCH == 128) KT_COPY_ASYNC("ca.shared.global.L2::128B");
        if (PREFETCH == 256) KT_COPY_ASYNC("ca.shared.global.L2::256B");
    }
#undef KT_COPY_ASYNC
}
KT_DEVICE void kt_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> KT_DEVICE void kt_copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// 16 bytes of memory that nothing writes during the kernel.
template <int HINT> KT_DEVICE kt_words<4> kt_load_stream(const void *p, u64 policy) {
    kt_words<4> x;
    if (HINT == KT_KEEP_NORMAL)
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(p));
    else
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(p), "l"(policy));
    return x;
}
// 16 bytes that other CTAs wrote in this kernel: through L2.
KT_DEVICE kt_words<4> kt_load_shared_by_ctas(const void *p) {
    kt_words<4> x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(p) : "memory");
    return x;
}

// ---- matrix instructions: d[16 x 8] += a[16 x K] * b[K x 8], K = 32 bytes of elements

KT_DEVICE void kt_mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KT_DEVICE void kt_mma_half_half(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(d[0]), "+r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KT_DEVICE void kt_mma_bfloat(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KT_DEVICE void kt_mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KT_DEVICE void kt_mma_int8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- between kernels: programmatic dependent launch (sm_90 and later)
//
// A kernel launched so may start while the one before it in the stream ends. Until kt_await_previous() it must neither
// read nor write memory that another kernel may use; bringing lines into L2 is harmless, because that cache is coherent.

#ifndef KT_EARLY
#define KT_EARLY 0 /* 1: launched with programmatic stream serialisation */
#endif

// From here on the next kernel may start where there is room for it.
KT_DEVICE void kt_release_next() {
    if (KT_EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Everything that the kernels before this one wrote is there.
KT_DEVICE void kt_await_previous() {
    if (KT_EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
}
KT_DEVICE void kt_prefetch_l2(const void *line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// ---- between CTAs

// Counts an arrival at `counter`, with everything the CTA wrote before its barrier; returns those before.
KT_DEVICE u32 kt_arrive(u32 *counter) {
    u32 before;
    asm volatile("fence.acq_rel.gpu;\n\tatom.global.gpu.acq_rel.add.u32 %0, [%1], 1;\n\tfence.acq_rel.gpu;"
                 : "=r"(before) : "l"(counter) : "memory");
    return before;
}
KT_DEVICE void kt_add_global(int *p, int x) { asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
KT_DEVICE void kt_add_global(double *p, double x) { asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(p), "d"(x) : "memory"); }
KT_DEVICE void kt_add_global(float *p, float x) { asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory"); }
// Four neighbours at once: one message to L2 where the instruction exists.
KT_DEVICE void kt_add_global(float *p, float x, float y, float z, float w) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
#else
    kt_add_global(p, x), kt_add_global(p + 1, y), kt_add_global(p + 2, z), kt_add_global(p + 3, w);
#endif
}

#endif
