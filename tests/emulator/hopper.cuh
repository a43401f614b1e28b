// Stands in for the instructions of the hopper_*.cuh headers, beside emulator/ptx.cuh: the CTAs of a cluster run together as
// fibers, each with its own shared memory.
//
// Adversarial like its neighbour: boxes arrive late and in any order, matrix instructions and stores read shared memory as
// late as their waits allow. The parts between the marks take the places of those in the headers.

// ==== cluster
enum : int { EMU_CTAS = 8, EMU_BASE = 0x400 }; // shared addresses begin there, and have the CTA's rank from bit 24 on
static u8 *emu_memory; // of all CTAs
[[noreturn]] static void emu_fail(const char *what) {
    fprintf(stderr, "emulated kernel, thread %d: %s\n", emu_thread, what);
    abort();
}
static int emu_cta_threads;
static unsigned emu_first_cta;
static u32 emu_rank() { return emu_thread / emu_cta_threads; }
static void emu_place_in_cluster() { threadIdx.x = emu_thread % emu_cta_threads, blockIdx.x = emu_first_cta + emu_rank(); }
static u32 emu_cta_address() { return EMU_BASE | emu_rank() << 24; }
static u8 *emu_at(u32 address, u32 bytes) {
    const u32 rank = address >> 24, offset = (address & 0xffffff) - EMU_BASE;
    if (rank >= EMU_CTAS || offset + bytes > 227 * 1024 || address % bytes) emu_fail("rank >= EMU_CTAS || offset + bytes > 227 * 1024 || address % bytes");
    return emu_memory + (size_t)rank * EMU_SHARED + offset;
}
// Others may use a CTA's memory only until it ends.
static void emu_alive(u32 rank) {
    for (int i = 0; i < emu_cta_threads; i++)
        if (!emu_fibers[rank * emu_cta_threads + i].done) return;
    emu_fail("uses the memory of a CTA that has ended");
}
// The address that a swizzle of SPAN bytes makes of one.
static u32 emu_swizzled(u32 address, u32 span) { return address ^ ((address >> 7 & (span / 16 - 1)) << 4); }

// ==== barriers
struct emu_mbarrier {
    u32 expected, pending, phases;
    i64 bytes;
    void settle() {
        if (pending == 0 && bytes == 0) phases++, pending = expected;
    }
    void arrive() {
        if (pending == 0) emu_fail("more arrivals than announced");
        pending--, settle();
    }
};
static std::vector<emu_mbarrier> emu_mbarriers; // one for every eight bytes of all CTAs' shared memory
static emu_mbarrier &emu_mbarrier_at(u32 address) { return emu_mbarriers[(emu_at(address, 8) - emu_memory) / 8]; }
static std::vector<std::function<void()>> emu_boxes; // on their way

static void kt_barrier_init(u32 barrier, u32 arrivals) { emu_mbarrier_at(barrier) = {arrivals, arrivals, 0, 0}; }
static void kt_barrier_init_done() {}
static void kt_barrier_arrive(u32 barrier) { emu_mbarrier_at(barrier).arrive(); }
static void kt_barrier_arrive_at(u32 barrier, u32 rank) {
    emu_alive(rank);
    emu_mbarrier_at((barrier & 0xffffff) | rank << 24).arrive();
}
static void kt_barrier_expect(u32 barrier, u32 bytes) {
    emu_mbarrier &b = emu_mbarrier_at(barrier);
    b.bytes += bytes;
    b.arrive();
}
static void emu_move_a_box() {
    if (emu_boxes.empty() || emu_random() % 4) return;
    const size_t i = emu_random() % emu_boxes.size();
    const std::function<void()> move = emu_boxes[i];
    emu_boxes.erase(emu_boxes.begin() + i);
    move();
}
static int emu_spins; // since a wait ended
static void kt_barrier_wait(u32 barrier, u32 parity) {
    while (emu_mbarrier_at(barrier).phases % 2 == parity) {
        if (++emu_spins > 20000000) emu_fail("hangs");
        emu_move_a_box();
        emu_yield();
    }
    emu_spins = 0;
}

// ==== groups
static emu_barrier emu_named[EMU_CTAS][16];
static int emu_any[EMU_CTAS][16];
static void kt_warpgroup_sync(u32 barrier) { emu_wait(emu_named[emu_rank()][barrier]); }
template <int COUNT> static void kt_consumers_sync() {
    emu_named[emu_rank()][COUNT + 1].expected = COUNT * WARPGROUP;
    kt_warpgroup_sync(COUNT + 1);
}
static bool kt_warpgroup_any(u32 barrier, bool mine) {
    int &any = emu_any[emu_rank()][barrier];
    any |= mine;
    kt_warpgroup_sync(barrier);
    const bool result = any;
    kt_warpgroup_sync(barrier);
    any = 0;
    kt_warpgroup_sync(barrier);
    return result;
}
static u32 kt_cluster_rank() { return emu_rank(); }
static void kt_cluster_start() { emu_wait(emu_block); }
static void kt_cluster_sync() { emu_wait(emu_block); }
template <int COUNT> static void kt_give_registers() {}
template <int COUNT> static void kt_take_registers() {}

// ==== boxes
// words: address, bytes of an element, three extents, two strides, box 0 and 1, box 2 and swizzle
static int emu_element_bytes(int type) { return type == 6 || type == 9 ? 2 : type == 7 || type == 11 ? 4 : 1; }
static int emu_encode(void *map, int type, u32 rank, void *address, const u64 *extents, const u64 *strides, const u32 *box,
                      const u32 *steps, int interleave, int swizzle, int, int) {
    const int size = emu_element_bytes(type), span = swizzle ? 16 << swizzle : 256;
    if (rank != 3 || (u64)address % 16 || interleave || (int)(box[0] * size) > span || box[0] * size % 16) return 1;
    for (int i = 0; i < 3; i++)
        if (extents[i] == 0 || box[i] == 0 || box[i] > 256 || steps[i] != 1) return 1;
    if (strides[0] % 16 || strides[1] % 16) return 1;
    u64 *w = ((kt_tensor_map *)map)->words;
    w[0] = (u64)address, w[1] = size, w[2] = extents[0], w[3] = extents[1], w[4] = extents[2], w[5] = strides[0], w[6] = strides[1];
    w[7] = box[0] | (u64)box[1] << 32, w[8] = box[2] | (u64)span << 32;
    return 0;
}
// Calls f(address in global memory or null, address in shared memory) for every element of a box.
template <class F> static void emu_for_box(const kt_tensor_map &map, u32 shared, int x, int y, int z, F f) {
    const u64 *w = map.words;
    const u32 size = w[1], wide = (u32)w[7], high = w[7] >> 32, span = w[8] >> 32;
    if ((u32)w[8] != 1 || wide * size != span || shared % (8 * span)) emu_fail("what the kernels use");
    if (x * (int)size % 16) emu_fail("the device reads and writes rows of a box from multiples of 16 bytes on");
    for (u32 j = 0; j < high; j++)
        for (u32 i = 0; i < wide; i++) {
            const i64 at[3] = {x + (i64)i, y + (i64)j, z};
            const bool inside = at[0] >= 0 && at[1] >= 0 && at[2] >= 0 && at[0] < (i64)w[2] && at[1] < (i64)w[3] && at[2] < (i64)w[4];
            u8 *global = inside ? (u8 *)w[0] + at[0] * size + at[1] * w[5] + at[2] * w[6] : nullptr;
            f(global, emu_at(emu_swizzled(shared + (j * wide + i) * size, span), size), size);
        }
}
static u32 emu_box_bytes(const kt_tensor_map &map) { return (u32)map.words[1] * (u32)map.words[7] * (u32)(map.words[7] >> 32); }

static void kt_prefetch_map(const kt_tensor_map &) {}
static void kt_prefetch_box(const kt_tensor_map &, int, int, int) {}
static void kt_load_box_to(u32 to, const kt_tensor_map &map, u32 barrier, int x, int y, int z, u16 ctas) {
    for (u32 rank = 0; rank < EMU_CTAS; rank++) {
        if (!(ctas >> rank & 1)) continue;
        const u32 there = (to & 0xffffff) | rank << 24, its_barrier = (barrier & 0xffffff) | rank << 24;
        const kt_tensor_map copy = map;
        emu_boxes.push_back([=] {
            emu_alive(rank);
            emu_for_box(copy, there, x, y, z, [](const u8 *global, u8 *shared, u32 size) {
                if (global) memcpy(shared, global, size);
                else memset(shared, 0, size);
            });
            emu_mbarrier &b = emu_mbarrier_at(its_barrier);
            b.bytes -= emu_box_bytes(copy);
            b.settle();
        });
    }
}
static void kt_load_box(u32 to, const kt_tensor_map &map, u32 barrier, int x, int y, int z) {
    kt_load_box_to(to, map, barrier, x, y, z, 1 << emu_rank());
}
static std::vector<std::function<void()>> emu_stores[EMU_THREADS]; // of a thread, the oldest first
static void kt_store_box(const kt_tensor_map &map, u32 from, int x, int y, int z) {
    const kt_tensor_map copy = map;
    emu_stores[emu_thread].push_back([=] {
        emu_for_box(copy, from, x, y, z, [](u8 *global, const u8 *shared, u32 size) {
            if (global) memcpy(global, shared, size);
        });
    });
}
template <int PENDING> static void kt_store_box_wait() {
    auto &stores = emu_stores[emu_thread];
    while ((int)stores.size() > PENDING) stores.front()(), stores.erase(stores.begin());
}
static void kt_stmatrix(u32 address, const u32 (&x)[4]) {
    emu_exchange(&address, 1, [&](u32(*w)[8], int lane) {
        for (int i = 0; i < 4; i++) memcpy(emu_at(w[8 * i + lane / 4][0], 16) + lane % 4 * 4, &x[i], 4);
    });
}
static kt_words<4> kt_load_of_cta(u32 address, u32 rank) {
    kt_words<4> x;
    emu_alive(rank);
    memcpy(&x, emu_at((address & 0xffffff) | rank << 24, 16), 16);
    return x;
}
static void emu_shared_store(u32 address, kt_words<4> x) { memcpy(emu_at(address, 16), &x, 16); }
static void emu_shared_load(kt_words<4> &x, u32 address) { memcpy(&x, emu_at(address, 16), 16); }
static void emu_shared_store(u32 address, u32 x) { memcpy(emu_at(address, 4), &x, 4); }
static u32 emu_shared_load(u32 address) { return *(const u32 *)emu_at(address, 4); }
static void kt_fence_async_proxy() {}

// ==== products
static std::vector<std::vector<std::function<void()>>> emu_products[EMU_THREADS]; // groups of a thread; the last is open
static void kt_wgmma_fence() {}
static void kt_wgmma_commit() { emu_products[emu_thread].push_back({}); }
// A warp's lanes wait together, the warps of a group each for themselves.
template <int PENDING> static void kt_wgmma_wait() {
    auto &groups = emu_products[emu_thread];
    while ((int)groups.size() - 1 > PENDING) {
        for (auto &product : groups.front()) product();
        groups.erase(groups.begin());
    }
    __syncwarp();
}
static float emu_small(u8 x, int mantissa_bits) {
    const int exponent = (x & 0x7f) >> mantissa_bits, mantissa = x & ((1 << mantissa_bits) - 1), bias = (1 << (6 - mantissa_bits)) - 1;
    const float value = ldexpf((exponent ? 1 << mantissa_bits : 0) + mantissa, (exponent ? exponent : 1) - bias - mantissa_bits);
    return x & 0x80 ? -value : value;
}
// Element (row, k) of an operand as its descriptor says.
static float emu_operand(u64 descriptor, bool transposed, u32 rank, int row, int k) {
    const u32 start = (descriptor & 0x3fff) << 4 | rank << 24, slab = (descriptor >> 16 & 0x3fff) << 4, eight = (descriptor >> 32 & 0x3fff) << 4;
    const u32 span = 256 >> (descriptor >> 62), width = span / ELEMENT_BYTES;
    if (descriptor >> 46 & 0xffff) emu_fail("descriptor >> 46 & 0xffff");
    const u32 offset = transposed ? row / width * slab + k / 8 * eight + k % 8 * span + row % width * ELEMENT_BYTES
                                  : row / 8 * eight + row % 8 * span + k * ELEMENT_BYTES;
    const u8 *p = emu_at(emu_swizzled(start + offset, span), ELEMENT_BYTES);
    if constexpr (ELEMENT_BYTES == 4) return *(const float *)p;
    if constexpr (ELEMENT_BYTES == 1) return emu_small(*p, KT_DTYPE == KT_FP8_E4M3 ? 3 : 2);
    const u16 bits = *(const u16 *)p;
    return KT_DTYPE == KT_FP16 ? kt_from_half(bits) : kt_from_bfloat(bits);
}
// `sum` and the products of one instruction. Those of fp8 are cut where the tensor cores cut: 13 bits below the exponent of
// the largest term, and the result to fp22.
static float emu_add_products(float sum, const float *a, const float *b, int count) {
    if (ELEMENT_BYTES > 1) {
        for (int k = 0; k < count; k++) sum += a[k] * b[k];
        return sum;
    }
    int top = sum ? ilogbf(sum) : -100;
    for (int k = 0; k < count; k++)
        if (a[k] && b[k]) top = kt_max(top, ilogbf(a[k]) + ilogbf(b[k]));
    const float unit = ldexpf(1, top - 13);
    float units = truncf(sum / unit);
    for (int k = 0; k < count; k++) units += truncf(a[k] * b[k] / unit);
    return emu_cast<float>(emu_cast<u32>(units * unit) & ~0x3ffu);
}
template <int N> struct kt_wgmma {
    template <int TRANSPOSED_A, int TRANSPOSED_B> static void multiply(float (&d)[N / 2], u64 a, u64 b, u32 keep) {
        float *sums = d;
        const int t = threadIdx.x % 128;
        const u32 rank = emu_rank();
        auto &groups = emu_products[emu_thread];
        if (groups.empty()) groups.push_back({});
        groups.back().push_back([=] {
            constexpr int DEPTH = 32 / ELEMENT_BYTES;
            for (int h = 0; h < 2; h++) {
                float row[DEPTH];
                for (int k = 0; k < DEPTH; k++) row[k] = emu_operand(a, TRANSPOSED_A, rank, t / 32 * 16 + 8 * h + t % 32 / 4, k);
                for (int j = 0; j < N / 8; j++)
                    for (int e = 0; e < 2; e++) {
                        float column[DEPTH], &sum = sums[4 * j + 2 * h + e];
                        for (int k = 0; k < DEPTH; k++) column[k] = emu_operand(b, TRANSPOSED_B, rank, 8 * j + t % 4 * 2 + e, k);
                        sum = emu_add_products(keep ? sum : 0, row, column, DEPTH);
                    }
            }
        });
    }
};

// ==== launch
enum { cudaEnableDefault = 0, cudaErrorNotSupported = 801 };
#define CUDART_VERSION 13000
typedef int cudaDriverEntryPointQueryResult;
static inline int cudaGetDriverEntryPointByVersion(const char *, void **found, int, int, int *) {
    return *found = (void *)emu_encode, 0;
}

// ==== end
template <size_t... I, size_t... J> static void emu_call_with(const void *f, void **p, std::index_sequence<I...>, std::index_sequence<J...>) {
    ((void (*)(decltype((void)I, (void *)0)..., decltype((void)J, kt_tensor_map{})...))f)(
        *(void **)p[I]..., *(const kt_tensor_map *)p[sizeof...(I) + J]...);
}
static void emu_call_kernel(const void *f, void **p) {
    emu_call_with(f, p, std::make_index_sequence<KT_ARGUMENTS + 1>(), std::make_index_sequence<MAPS>());
}
static cudaError_t emu_launch_clusters(const cudaLaunchConfig_t *c, const void *f, void **p) {
    if (f != (const void *)kt_kernel) return cudaLaunchKernel(f, c->gridDim, c->blockDim, p, c->dynamicSmemBytes, c->stream);
    u32 cluster = 1;
    for (u32 i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = c->attrs[i].val.clusterDim.x;
    const u32 threads = c->blockDim.x;
    if (cluster > EMU_CTAS || cluster * threads > EMU_THREADS || c->gridDim.x % cluster || c->dynamicSmemBytes > 227 * 1024) return 1;
    emu_memory = (u8 *)malloc((size_t)EMU_CTAS * EMU_SHARED);
    gridDim = c->gridDim, blockDim = c->blockDim;
    void (*const place)() = emu_place;
    emu_place = emu_place_in_cluster, emu_cta_threads = threads;
    for (u32 first = 0; first < c->gridDim.x; first += cluster) {
        emu_first_cta = first;
        memset(emu_memory, 0xff, (size_t)EMU_CTAS * EMU_SHARED);
        emu_mbarriers.assign((size_t)EMU_CTAS * EMU_SHARED / 8, {});
        for (auto &cta : emu_named)
            for (emu_barrier &barrier : cta) barrier = {128, 0, 0};
        emu_run_block(cluster * threads, [&] { emu_call_kernel(f, p); });
        if (!emu_boxes.empty()) emu_fail("!emu_boxes.empty()");
        for (u32 i = 0; i < cluster * threads; i++)
            if (!emu_stores[i].empty()) emu_fail("!emu_stores[i].empty()");
    }
    free(emu_memory);
    emu_place = place, emu_cta_threads = 0;
    return cudaSuccess;
}
static const bool emu_ready = (emu_launch = emu_launch_clusters, true);
