// Barriers of sm_90: mbarriers in shared memory (of this CTA or another of its cluster), named barriers of a warpgroup, the
// cluster's barrier, and the registers that warps hand over to each other.
#ifndef KT_HOPPER_BARRIER_CUH
#define KT_HOPPER_BARRIER_CUH

#include "ptx.cuh"

enum : int { WARPGROUP = 128 };

// ---- mbarriers, by shared address

KT_DEVICE void kt_barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last kt_barrier_init, before the barrier of the CTA or cluster that makes them known.
KT_DEVICE void kt_barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

KT_DEVICE void kt_barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same barrier of CTA `rank` of the cluster. Without a scope in the instruction: `.release.cluster` would make a
// barrier of the whole device of every arrival, and a quarter of the speed is gone.
KT_DEVICE void kt_barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(barrier), "r"(rank) : "memory");
}
// One arrival that also announces `bytes` of asynchronous copies.
KT_DEVICE void kt_barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the phase of that parity; a fresh barrier has passed the one of parity 1.
KT_DEVICE void kt_barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n\t.reg .pred done;\nagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" ::"r"(barrier), "r"(parity) : "memory");
}

// A place in a ring of STAGES barriers, and the parity of the round.
template <int STAGES> struct kt_ring {
    u32 stage = 0, parity = 0;

    KT_DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    KT_DEVICE void skip(u32 count) {
        const u32 at = stage + count;
        parity ^= at / STAGES & 1;
        stage = at % STAGES;
    }
};

// ---- barriers of a warpgroup; 0 belongs to __syncthreads

KT_DEVICE void kt_warpgroup_sync(u32 barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }
// Of COUNT warpgroups, which use the barriers 1 to COUNT alone.
template <int COUNT> KT_DEVICE void kt_consumers_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(COUNT + 1), "n"(COUNT * WARPGROUP) : "memory");
}
// Whether `mine` holds in any thread of the warpgroup.
KT_DEVICE bool kt_warpgroup_any(u32 barrier, bool mine) {
    u32 any;
    asm volatile("{\n\t.reg .pred mine, any;\n\tsetp.ne.u32 mine, %1, 0;\n\tbar.red.or.pred any, %2, 128, mine;\n\t"
                 "selp.u32 %0, 1, 0, any;\n\t}" : "=r"(any) : "r"((u32)mine), "r"(barrier) : "memory");
    return any;
}

// ---- clusters

KT_DEVICE u32 kt_cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// After kt_barrier_init_done in one thread: all of the cluster know its barriers.
KT_DEVICE void kt_cluster_start() { asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait.acquire;" ::: "memory"); }
KT_DEVICE void kt_cluster_sync() { asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory"); }

// ---- registers of a warpgroup, a multiple of 8; what is taken must have been given before, or the taker waits for ever

template <int COUNT> KT_DEVICE void kt_give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> KT_DEVICE void kt_take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

#endif
