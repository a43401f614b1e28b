// The product of a CTA on mma.sync: accumulators, the loop over tiles of k in a ring of stages, and the sum of groups of
// warps. Comes after a kernel file has defined the layouts of its tiles (LayoutA, LayoutB) and the fragments that warps read
// of them (FragmentsA, FragmentsB).
#ifndef KT_MMA_LOOP_CUH
#define KT_MMA_LOOP_CUH

#include "mma_config.cuh"
#include "tile.cuh"

// ---- memory

constexpr int STAGE_BYTES = LayoutA::BYTES + LayoutB::BYTES;
constexpr int RING = LayoutA::RESIDENT_BYTES; // comes after what stays in shared memory longer than a tile of k
constexpr int SLAB_STRIDE = WARP_N + 8; // accumulators; 16 rows of a warp's tile wait in shared memory for staged stores
constexpr int STAGED_BYTES = KT_STORE == KT_STORE_STAGED ? WARPS_MN * 16 * SLAB_STRIDE * ACC_BYTES : 0;
constexpr int WARPS_K_BYTES = KT_WARPS_K / 2 * BM * BN * ACC_BYTES;
constexpr int SHARED_BYTES = kt_max(RING + STAGES * STAGE_BYTES, kt_max(STAGED_BYTES, WARPS_K_BYTES));

// ---- the product

struct kt_accumulators {
#if KT_ACC_HALF
    u32 half[M_TILES * N_TILES][2];
#else
    kt_acc sum[M_TILES * N_TILES][4];
#endif

    KT_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
#if KT_ACC_HALF
                half[i][j / 2] = 0;
#else
                sum[i][j] = 0;
#endif
            }
    }

    KT_DEVICE void multiply(const u32 (&a)[FragmentsA::BLOCKS][4], const u32 (&b)[FragmentsB::BLOCKS][4]) {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                const int j = i % 2 ? N_TILES - 1 - n : n; // there and back: the fragments at the turn are used twice
                const u32 b0 = b[j / 2][j % 2 * 2], b1 = b[j / 2][j % 2 * 2 + 1];
#if KT_ACC_HALF
                kt_mma_half_half(half[i * N_TILES + j], a[i], b0, b1);
#elif KT_DTYPE == KT_FP16
                kt_mma_half(sum[i * N_TILES + j], a[i], b0, b1);
#elif KT_DTYPE == KT_BF16
                kt_mma_bfloat(sum[i * N_TILES + j], a[i], b0, b1);
#elif KT_DTYPE == KT_TF32
                kt_mma_tf32(sum[i * N_TILES + j], a[i], b0, b1);
#else
                kt_mma_int8(sum[i * N_TILES + j], a[i], b0, b1);
#endif
            }
    }

    // Accumulator 4 * (i * N_TILES + j) + 2 * h + e of a lane is at row 16 * i + 8 * h + lane / 4, column
    // 8 * j + 2 * (lane % 4) + e of the warp's tile.
    KT_DEVICE void take(kt_acc (&out)[ACCS]) const {
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
#if KT_ACC_HALF
                out[4 * i + j] = kt_from_half((u16)(half[i][j / 2] >> (16 * (j % 2))));
#else
                out[4 * i + j] = sum[i][j];
#endif
            }
    }
};
KT_DEVICE u32 kt_next_stage(u32 offset) { return offset == (STAGES - 1) * STAGE_BYTES ? 0 : offset + STAGE_BYTES; }

// All tiles of k of a CTA. A stage is refilled only after the barrier that follows its last use. The loader moves one tile
// after the other: `begin_a`, `begin_b` start its copies, `end` stores what came through registers.
template <class Loader>
KT_DEVICE void kt_multiply(kt_accumulators &acc, Loader &loader, FragmentsA &at_a, const FragmentsB &at_b, u32 ring, int tiles) {
    constexpr bool DOUBLE = KT_FRAGMENT_STAGES == 2;
    constexpr int B_STEP = KT_STAGGER ? STEPS / 2 : 0;
    u32 a[KT_FRAGMENT_STAGES][FragmentsA::BLOCKS][4], b[KT_FRAGMENT_STAGES][FragmentsB::BLOCKS][4];
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < tiles) {
            loader.begin_a(ring + s * STAGE_BYTES);
            loader.begin_b(ring + s * STAGE_BYTES);
            loader.end(ring + s * STAGE_BYTES);
        }
        kt_copy_commit();
    }
    u32 read = 0, write = (STAGES - 1) * STAGE_BYTES;
    if (DOUBLE) {
        kt_copy_wait<STAGES - 2>();
        __syncthreads();
        at_a.load(a[0], ring, 0);
        at_b.load(b[0], ring + LayoutA::BYTES, 0);
    }
#pragma unroll UNROLL
    for (int tile = 0; tile < tiles; tile++) {
        const bool more = tile + STAGES - 1 < tiles;
        if (!DOUBLE) {
            kt_copy_wait<STAGES - 2>();
            __syncthreads();
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (step == 0 && more) loader.begin_a(ring + write);
            if (step == B_STEP) {
                if (more) loader.begin_b(ring + write);
                kt_copy_commit();
            }
            if (DOUBLE) {
                if (step == STEPS - 1) {
                    if (more) loader.end(ring + write);
                    at_a.next();
                    read = kt_next_stage(read);
                    kt_copy_wait<STAGES - 2>();
                    __syncthreads();
                }
                at_a.load(a[(step + 1) % 2], ring + read, (step + 1) % STEPS);
                at_b.load(b[(step + 1) % 2], ring + read + LayoutA::BYTES, (step + 1) % STEPS);
                acc.multiply(a[step % 2], b[step % 2]);
            } else {
                at_a.load(a[0], ring + read, step);
                at_b.load(b[0], ring + read + LayoutA::BYTES, step);
                acc.multiply(a[0], b[0]);
            }
        }
        if (!DOUBLE) {
            if (more) loader.end(ring + write);
            at_a.next();
            read = kt_next_stage(read);
        }
        write = kt_next_stage(write);
    }
    kt_copy_wait<0>();
}

// Groups of warps that took turns along k add up, each half giving its sums to the other.
KT_DEVICE void kt_join_warps(kt_acc (&acc)[ACCS], u32 group, u32 owner, u8 *shared) {
#pragma unroll
    for (u32 half = KT_WARPS_K / 2; half >= 1; half /= 2) {
        __syncthreads();
        if (group >= half && group < 2 * half)
#pragma unroll
            for (int v = 0; v < ACCS / 4; v++)
                kt_store_words(shared + (((group - half) * (ACCS / 4) + v) * OWNERS + owner) * 16, kt_acc_words<4>(acc + 4 * v));
        __syncthreads();
        if (group < half)
#pragma unroll
            for (int v = 0; v < ACCS / 4; v++)
                kt_add_acc_words<4>(acc + 4 * v, kt_load_words<4>(shared + ((group * (ACCS / 4) + v) * OWNERS + owner) * 16));
    }
}

#endif
