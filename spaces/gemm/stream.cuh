// Matrix product with M or N of at most 16, where reading the large operand once decides the time.
//
// The large operand ("stream") goes from global memory into registers in 16-byte loads, many of them in flight; the small
// one ("tokens") waits in shared memory. Warps of a CTA share rows of the stream and take turns along k.
#include "thin.cuh"
#include "thin_mma.cuh"
#include "thin_fma.cuh"

// tile
#ifndef KT_ROWS
#define KT_ROWS 1 /* a warp's rows of the stream, in units of its kt_engine */
#endif
// mem
#ifndef KT_HINT
#define KT_HINT 1 /* kt_hint of the stream */
#endif
#ifndef KT_WARM
#define KT_WARM 0 /* KiB of its part of the stream that a CTA asks L2 for while the kernel before it ends */
#endif
// unroll
#ifndef KT_UNROLL
#define KT_UNROLL 2 /* steps along k whose loads are started together */
#endif
#ifndef KT_BATCHES
#define KT_BATCHES 2 /* 2: the next batch of loads is started before this one is used */
#endif
// map
#ifndef KT_WARPS_N
#define KT_WARPS_N 1 /* warps side by side */
#endif
#ifndef KT_WARPS_K
#define KT_WARPS_K 8 /* warps that share rows and take turns along k */
#endif
#ifndef KT_BLOCKS
#define KT_BLOCKS 1 /* CTAs that must fit one SM */
#endif

using Engine = kt_engine<KT_ROWS>;
constexpr int STEP = Engine::STEP, WARP_ROWS = Engine::WARP_ROWS, VECTORS = Engine::VECTORS;
constexpr int BLOCK = KT_WARPS_N * WARP_ROWS, THREADS = 32 * KT_WARPS_N * KT_WARPS_K;
constexpr u32 BLOCKS = kt_ceil_div(LONG, BLOCK), STEPS = kt_ceil_div(KT_K, STEP);
static_assert(KT_DTYPE == KT_FP16 || KT_DTYPE == KT_BF16 || KT_DTYPE == KT_FP32, "a type with an engine");
static_assert(TINY <= 16, "one extent is tiny");
static_assert(KT_SPLIT_K <= STEPS, "every split has a step");

constexpr int MOST_STEPS = kt_ceil_div<int>(STEPS, KT_SPLIT_K);
// Eight lanes that read together, two tokens by four chunks, must hit different banks.
constexpr int TOKEN_STRIDE = kt_round_up(MOST_STEPS * STEP * ELEMENT_BYTES, 128) + 64;
constexpr int SHARED_BYTES = kt_max(TINY * TOKEN_STRIDE, KT_WARPS_K * TINY * BLOCK * ACC_BYTES);

using Shares = kt_shares<BLOCK, THREADS>;
using Splits = kt_split_workspace<(u64)BLOCKS * KT_BATCH, (u64)Shares::EACH * Shares::OWNERS>;
constexpr u64 WORKSPACE_BYTES = Splits::BYTES;

#ifdef KT_EXPECT_SHARED_BYTES
static_assert(SHARED_BYTES == KT_EXPECT_SHARED_BYTES, "shared memory");
static_assert(WORKSPACE_BYTES == KT_EXPECT_WORKSPACE_BYTES && Splits::ZEROED == KT_EXPECT_ZEROED_BYTES, "workspace");
#endif

// One lane's way through the stream.
struct kt_stream {
    const kt_element *from, *end; // `from`: the lane's first vector of the CTA's first step
    u64 policy;
    int rows_left; // from the lane's first row on
    i64 k_left;    // from the lane's first k on
    int steps;     // of the CTA

    KT_DEVICE bool inside(int step, int v) const {
        return step < steps && (LONG % BLOCK == 0 || Engine::vector_row(v) < rows_left) &&
               (KT_K % STEP == 0 || (i64)step * STEP + Engine::vector_k(v) < k_left);
    }
    KT_DEVICE void load(Held (&x)[KT_UNROLL][VECTORS], int batch) const {
#pragma unroll
        for (int u = 0; u < KT_UNROLL; u++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int step = batch * KT_UNROLL + u;
                const i64 k = (i64)step * STEP + Engine::vector_k(v), row = Engine::vector_row(v);
                x[u][v] = {};
                if (inside(step, v)) x[u][v].template load<KT_HINT>(from + (STREAM_K_MAJOR ? row * STREAM_LD + k : k * STREAM_LD + row), end, policy);
            }
    }
    KT_DEVICE void use(Engine &engine, const Held (&held)[VECTORS], int step) const {
        // A row may end inside a vector; what follows in memory must not count.
        const bool cut = STREAM_K_MAJOR && KT_K % STEP != 0;
        const int valid = cut ? (int)kt_min<i64>(16, (k_left - (i64)step * STEP) * ELEMENT_BYTES) : 16;
        kt_words<4> x[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) x[v] = held[v].get(valid);
        engine.multiply(x, step);
    }
};

// Asks for lines of the CTA's part of the stream: `own` is its first row (K-major) or its first k.
KT_DEVICE void kt_warm_stream(const kt_element *own, int rows, i64 depth) {
    const int outer = STREAM_K_MAJOR ? rows : (int)kt_min<i64>(depth, 1 << 20);
    const int lines = (int)kt_ceil_div<i64>((STREAM_K_MAJOR ? depth : rows) * ELEMENT_BYTES, 128);
    const int most = kt_min(outer * lines, KT_WARM * 8);
    for (int i = threadIdx.x; i < most; i += THREADS) kt_prefetch_l2((const u8 *)(own + i / lines * STREAM_LD) + i % lines * 128);
}

extern __shared__ __align__(128) u8 kt_shared[];

extern "C" __global__ void __launch_bounds__(THREADS, KT_BLOCKS) kt_kernel(KT_PARAMETERS) {
    kt_release_next();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_n = warp % KT_WARPS_N, warp_k = warp / KT_WARPS_N;
    const u32 block = blockIdx.x % BLOCKS, part = blockIdx.x / BLOCKS, batch = part / KT_SPLIT_K, split = part % KT_SPLIT_K;
    const u32 first = kt_split(STEPS, KT_SPLIT_K, split);
    const int steps = (int)(kt_split(STEPS, KT_SPLIT_K, split + 1) - first);
    const i64 k = (i64)first * STEP, lane_k = k + Engine::lane_k(lane);
    const i64 row = (i64)block * BLOCK + warp_n * WARP_ROWS + Engine::lane_row(lane);

    const kt_element *matrix = STREAM_IS_A ? a : b, *small = (STREAM_IS_A ? b : a) + batch * ((i64)TINY * KT_K);
    const kt_element *own = matrix + batch * ((i64)LONG * KT_K);
    const kt_stream stream = {own + (STREAM_K_MAJOR ? row * STREAM_LD + lane_k : lane_k * STREAM_LD + row),
                              matrix + KT_BATCH * ((i64)LONG * KT_K), kt_cache_policy<KT_HINT>(), (int)(LONG - row),
                              (i64)KT_K - lane_k, steps};
    if (KT_WARM) {
        const i64 at = (i64)block * BLOCK;
        kt_warm_stream(own + (STREAM_K_MAJOR ? at * STREAM_LD + k : k * STREAM_LD + at), (int)kt_min<i64>(BLOCK, LONG - at),
                       kt_min<i64>((i64)KT_K - k, steps * STEP));
    }
    kt_await_previous();
    Held held[KT_BATCHES][KT_UNROLL][VECTORS];
    stream.load(held[0], (int)warp_k); // on its way while the tokens are staged
    kt_stage_tokens<TOKEN_STRIDE, THREADS>(kt_shared, small, k, (int)kt_min<i64>((i64)KT_K - k, steps * STEP), steps * STEP);

    Engine engine;
    engine.begin(kt_shared, TOKEN_STRIDE, lane);
    const int batches = kt_ceil_div(steps, KT_UNROLL);
#pragma unroll 1
    for (int at = (int)warp_k; at < batches; at += KT_BATCHES * KT_WARPS_K) {
#pragma unroll
        for (int p = 0; p < KT_BATCHES; p++) {
            const int now = at + p * KT_WARPS_K;
            if (KT_BATCHES == 2) stream.load(held[(p + 1) % KT_BATCHES], now + KT_WARPS_K);
#pragma unroll
            for (int u = 0; u < KT_UNROLL; u++)
                if (now * KT_UNROLL + u < steps) stream.use(engine, held[p][u], now * KT_UNROLL + u);
            if (KT_BATCHES == 1) stream.load(held[0], now + KT_WARPS_K);
        }
    }

    __syncthreads(); // the tokens make room for the sums
    kt_acc *sums = (kt_acc *)kt_shared;
    engine.put(sums + warp_k * TINY * BLOCK + warp_n * WARP_ROWS, BLOCK, lane);
    __syncthreads();
    kt_finish_thin<BLOCK, KT_WARPS_K, THREADS, Splits>(sums, block, BLOCKS, batch, split, KT_EPILOGUE_OPERANDS, c, workspace);
}

#include "launch.cuh"
