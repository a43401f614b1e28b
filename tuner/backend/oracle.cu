/* Kernels of the CUDA Runner itself: seeded inputs, a float64 reference that no vendor library computes,
 * comparison, guards, and reads that show whether caches are cold. No system header. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* Element types, as numbered by cuda_data.py. */
enum { FP64, FP32, FP16, BF16, INT8, INT32, E4M3, E5M2 };

__device__ static float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ static u16 float_to_half(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ static u16 float_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Minifloats by arithmetic, so that this file also builds for architectures without the conversions. */
__device__ static float small_to_float(u8 x, int mantissa_bits, int bias) {
    const int exponent = (x & 0x7f) >> mantissa_bits, mantissa = x & ((1 << mantissa_bits) - 1);
    const float scale = 1.0f / (float)(1 << mantissa_bits);
    const float value = exponent ? ldexpf(1.0f + mantissa * scale, exponent - bias) : ldexpf(mantissa * scale, 1 - bias);
    return x & 0x80 ? -value : value;
}

__device__ static double load_element(const void *p, long i, int type) {
    switch (type) {
    case FP64: return ((const double *)p)[i];
    case FP32: return ((const float *)p)[i];
    case FP16: return half_to_float(((const u16 *)p)[i]);
    case BF16: return __uint_as_float((u32)((const u16 *)p)[i] << 16);
    case INT8: return ((const signed char *)p)[i];
    case INT32: return ((const int *)p)[i];
    case E4M3: return small_to_float(((const u8 *)p)[i], 3, 7);
    default: return small_to_float(((const u8 *)p)[i], 2, 15);
    }
}

/* Nearest minifloat by search over its 128 magnitudes: slow, simple, exact. */
__device__ static u8 float_to_small(float x, int mantissa_bits, int bias, int largest) {
    int best = 0;
    for (int i = 1; i <= largest; i++)
        if (fabsf(small_to_float((u8)i, mantissa_bits, bias) - fabsf(x)) < fabsf(small_to_float((u8)best, mantissa_bits, bias) - fabsf(x))) best = i;
    return (u8)(best | (x < 0 ? 0x80 : 0));
}

__device__ static void store_element(void *p, long i, int type, double x) {
    switch (type) {
    case FP64: ((double *)p)[i] = x; break;
    case FP32: ((float *)p)[i] = (float)x; break;
    case FP16: ((u16 *)p)[i] = float_to_half((float)x); break;
    case BF16: ((u16 *)p)[i] = float_to_bf16((float)x); break;
    case INT8: ((signed char *)p)[i] = (signed char)fmax(-127.0, fmin(127.0, rint(x * 16))); break;
    case INT32: ((int *)p)[i] = (int)rint(x * 16); break;
    case E4M3: ((u8 *)p)[i] = float_to_small((float)x, 3, 7, 0x7e); break;
    default: ((u8 *)p)[i] = float_to_small((float)x, 2, 15, 0x7b); break;
    }
}

/* Philox4x32-10 (Salmon et al. 2011): random bits as a function of seed and position alone. */
__device__ static void philox(u64 seed, u64 position, u32 out[4]) {
    u32 c0 = (u32)position, c1 = (u32)(position >> 32), c2 = 0, c3 = 0;
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const u64 p = (u64)0xD2511F53u * c0, q = (u64)0xCD9E8D57u * c2;
        const u32 n0 = (u32)(q >> 32) ^ c1 ^ k0, n2 = (u32)(p >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (u32)q, c2 = n2, c3 = (u32)p;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* N(0,1) by Box and Muller; integers get 16 times that, rounded. */
extern "C" __global__ void kt_fill_normal(void *to, long count, int type, u64 seed) {
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i * 2 < count; i += (long)gridDim.x * blockDim.x) {
        u32 bits[4];
        philox(seed, (u64)i, bits);
        const double u = ((double)bits[0] + 1.0) * 0x1p-32, v = (double)bits[1] * 0x1p-32;
        const double radius = sqrt(-2.0 * log(u));
        double s, c;
        sincospi(2.0 * v, &s, &c);
        store_element(to, 2 * i, type, radius * c);
        if (2 * i + 1 < count) store_element(to, 2 * i + 1, type, radius * s);
    }
}

/* N elements of `p`, 0 where the index is negative: no branch between the loads, so that they overlap. */
template <int TYPE, int N> __device__ static void load_typed(double (&to)[N], const void *p, const long (&at)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = at[i] < 0 ? 0 : load_element(p, at[i], TYPE);
}

template <int N> __device__ static void load_elements(double (&to)[N], const void *p, const long (&at)[N], int type) {
    switch (type) {
    case FP64: load_typed<FP64>(to, p, at); break;
    case FP32: load_typed<FP32>(to, p, at); break;
    case FP16: load_typed<FP16>(to, p, at); break;
    case BF16: load_typed<BF16>(to, p, at); break;
    case INT8: load_typed<INT8>(to, p, at); break;
    case INT32: load_typed<INT32>(to, p, at); break;
    case E4M3: load_typed<E4M3>(to, p, at); break;
    default: load_typed<E5M2>(to, p, at); break;
    }
}

enum { GEMM_TILE = 128, GEMM_DEPTH = 8, GEMM_LOADS = GEMM_TILE * GEMM_DEPTH / 256 };

/* What thread `i` of 256 loads of an operand's tile, its k-index and its place along m or n; neighbours read along the
 * stride of one. */
__device__ static int tile_k(int i, long step) { return step == 1 ? i % GEMM_DEPTH : i / GEMM_TILE; }
__device__ static int tile_at(int i, long step) { return step == 1 ? i / GEMM_DEPTH : i % GEMM_TILE; }

__device__ static void load_tile(double (&to)[GEMM_LOADS], const void *p, int type, long first, long at0, long extent,
                                 long k0, long k, long stride, long step) {
    long at[GEMM_LOADS];
#pragma unroll
    for (int j = 0; j < GEMM_LOADS; j++) {
        const long row = at0 + tile_at(threadIdx.x + 256 * j, step), depth = k0 + tile_k(threadIdx.x + 256 * j, step);
        at[j] = row < extent && depth < k ? first + row * stride + depth * step : -1;
    }
    load_elements(to, p, at, type);
}

/* out[batch][m][n] = sum over k of a * b in float64. Element (i, k) of A lies at i * a_row + k * a_step, and so on.
 * A thread has 8 x 8 sums; the next tile is on its way from memory while one is multiplied. */
extern "C" __global__ void __launch_bounds__(256)
kt_reference_gemm(double *out, const void *a, const void *b, int type, long m, long n, long k,
                  long a_row, long a_step, long b_step, long b_col) {
    __shared__ double left[2][GEMM_DEPTH][GEMM_TILE], right[2][GEMM_DEPTH][GEMM_TILE];
    const long row0 = (long)blockIdx.y * GEMM_TILE, col0 = (long)blockIdx.x * GEMM_TILE, batch = blockIdx.z;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    double sum[8][8] = {}, next_a[GEMM_LOADS], next_b[GEMM_LOADS];
    load_tile(next_a, a, type, batch * m * k, row0, m, 0, k, a_row, a_step);
    load_tile(next_b, b, type, batch * k * n, col0, n, 0, k, b_col, b_step);
    int at = 0;
    for (long k0 = 0; k0 < k; k0 += GEMM_DEPTH, at ^= 1) {
#pragma unroll
        for (int j = 0; j < GEMM_LOADS; j++) {
            const int i = threadIdx.x + 256 * j;
            left[at][tile_k(i, a_step)][tile_at(i, a_step)] = next_a[j];
            right[at][tile_k(i, b_step)][tile_at(i, b_step)] = next_b[j];
        }
        __syncthreads();
        if (k0 + GEMM_DEPTH < k) {
            load_tile(next_a, a, type, batch * m * k, row0, m, k0 + GEMM_DEPTH, k, a_row, a_step);
            load_tile(next_b, b, type, batch * k * n, col0, n, k0 + GEMM_DEPTH, k, b_col, b_step);
        }
        for (int d = 0; d < GEMM_DEPTH; d++) {
            double x[8], y[8];
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = left[at][d][ty + 16 * i], y[i] = right[at][d][tx + 16 * i];
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += x[i] * y[j];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const long row = row0 + ty + 16 * i, col = col0 + tx + 16 * j;
            if (row < m && col < n) out[(batch * m + row) * n + col] = sum[i][j];
        }
}

/* NHWC x KRSC -> NPQK in float64. `c` and `k` are channels of one group. */
typedef struct {
    long n, h, w, c, k, r, s, p, q, groups, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
} convolution;

extern "C" __global__ void __launch_bounds__(256)
kt_reference_conv2d(double *out, const void *x, const void *w, int type, const convolution *shape) {
    enum { TILE = 64, DEPTH = 16 };
    __shared__ double left[DEPTH][TILE + 1], right[DEPTH][TILE + 1];
    const convolution v = *shape;
    const long pixels = v.n * v.p * v.q, depth = v.r * v.s * v.c;
    const long pixel0 = blockIdx.x / v.groups * TILE, filter0 = (long)blockIdx.y * TILE, group = blockIdx.x % v.groups;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    double sum[4][4] = {};
    for (long d0 = 0; d0 < depth; d0 += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
            const long d = d0 + i % DEPTH, pixel = pixel0 + i / DEPTH, filter = filter0 + i / DEPTH;
            const long channel = d % v.c, tap = d / v.c, image = pixel / (v.p * v.q), at = pixel % (v.p * v.q);
            const long row = at / v.q * v.stride_h - v.pad_h + tap / v.s * v.dilation_h;
            const long column = at % v.q * v.stride_w - v.pad_w + tap % v.s * v.dilation_w;
            const bool in_x = pixel < pixels && d < depth && row >= 0 && row < v.h && column >= 0 && column < v.w;
            const long index = ((image * v.h + row) * v.w + column) * (v.groups * v.c) + group * v.c + channel;
            left[i % DEPTH][i / DEPTH] = in_x ? load_element(x, index, type) : 0;
            right[i % DEPTH][i / DEPTH] =
                filter < v.k && d < depth ? load_element(w, (group * v.k + filter) * depth + d, type) : 0;
        }
        __syncthreads();
        for (int d = 0; d < DEPTH; d++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sum[i][j] += left[d][ty + 16 * i] * right[d][tx + 16 * j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const long pixel = pixel0 + ty + 16 * i, filter = filter0 + tx + 16 * j;
            if (pixel < pixels && filter < v.k) out[pixel * (v.groups * v.k) + group * v.k + filter] = sum[i][j];
        }
}

/* softmax(scale * q k^T) v in float64; strides in elements. Rows that see no key: 0 and -inf. */
typedef struct {
    long b, h, kv_heads, s, kv_len, d, value_dim;
    long q_row, q_head, q_batch, k_row, k_head, k_batch, v_row, v_head, v_batch, o_row, o_head, o_batch;
    long causal, window; /* window 0: all keys */
    double scale, softcap, tiny; /* softcap 0: none; `tiny`: of a weight, relative to the largest of its row */
} attention;

__device__ static double capped(double logit, double cap) { return cap != 0 ? cap * tanh(logit / cap) : logit; }

/* A CTA has 32 rows of one head and 64 columns of the values; `gain` is sqrt(sum p^2 v^2), laid out as o. */
extern "C" __global__ void __launch_bounds__(256)
kt_reference_attention(double *o, double *gain, double *lse, const void *q, const void *k, const void *v, int type, const attention *shape) {
    enum { ROWS = 32, KEYS = 32, WIDTH = 64, DEPTH = 16 };
    __shared__ float left[ROWS][DEPTH + 1], right[KEYS][DEPTH + 1], values[KEYS][WIDTH];
    __shared__ double score[ROWS][KEYS + 1], factor[ROWS], top[ROWS], total[ROWS];
    const attention a = *shape;
    const long row0 = blockIdx.x / (a.b * a.h) * ROWS, column0 = (long)blockIdx.y * WIDTH;
    const long batch = blockIdx.x % (a.b * a.h) / a.h, head = blockIdx.x % a.h, kv_head = head / (a.h / a.kv_heads);
    const long q0 = batch * a.q_batch + head * a.q_head, k0 = batch * a.k_batch + kv_head * a.k_head;
    const long v0 = batch * a.v_batch + kv_head * a.v_head, shift = a.kv_len - a.s;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    double sums[2][4] = {}, squares[2][4] = {}; /* rows ty + 16 i, columns tx + 16 j */
    if (threadIdx.x < ROWS) top[threadIdx.x] = -1.0 / 0.0, total[threadIdx.x] = 0;
    long begin = a.window ? row0 + shift - a.window + 1 : 0, end = a.causal ? row0 + ROWS + shift : a.kv_len;
    begin = begin < 0 ? 0 : begin / KEYS * KEYS, end = end > a.kv_len ? a.kv_len : end;
    for (long key0 = begin; key0 < end; key0 += KEYS) {
        double dot[2][2] = {};
        for (long d0 = 0; d0 < a.d; d0 += DEPTH) {
            __syncthreads();
            for (int i = threadIdx.x; i < ROWS * DEPTH; i += 256) {
                const long row = row0 + i / DEPTH, key = key0 + i / DEPTH, d = d0 + i % DEPTH;
                left[i / DEPTH][i % DEPTH] = row < a.s && d < a.d ? (float)load_element(q, q0 + row * a.q_row + d, type) : 0;
                right[i / DEPTH][i % DEPTH] = key < a.kv_len && d < a.d ? (float)load_element(k, k0 + key * a.k_row + d, type) : 0;
            }
            __syncthreads();
            for (int d = 0; d < DEPTH; d++)
                for (int i = 0; i < 2; i++)
                    for (int j = 0; j < 2; j++) dot[i][j] += (double)left[ty + 16 * i][d] * right[tx + 16 * j][d];
        }
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++) {
                const long last = row0 + ty + 16 * i + shift, key = key0 + tx + 16 * j;
                const bool seen = key < a.kv_len && (!a.causal || key <= last) && (!a.window || key > last - a.window);
                score[ty + 16 * i][tx + 16 * j] = seen ? capped(dot[i][j] * a.scale, a.softcap) : -1.0 / 0.0;
            }
        for (int i = threadIdx.x; i < KEYS * WIDTH; i += 256) {
            const long key = key0 + i / WIDTH, column = column0 + i % WIDTH;
            values[i / WIDTH][i % WIDTH] =
                key < a.kv_len && column < a.value_dim ? (float)load_element(v, v0 + key * a.v_row + column, type) : 0;
        }
        __syncthreads();
        if (threadIdx.x < ROWS) {
            double *row = score[threadIdx.x], most = top[threadIdx.x], sum = 0;
            for (int i = 0; i < KEYS; i++) most = fmax(most, row[i]);
            const double base = isfinite(most) ? most : 0;
            for (int i = 0; i < KEYS; i++) sum += row[i] = exp(row[i] - base);
            factor[threadIdx.x] = exp(top[threadIdx.x] - base);
            total[threadIdx.x] = total[threadIdx.x] * factor[threadIdx.x] + sum, top[threadIdx.x] = most;
        }
        __syncthreads();
        for (int i = 0; i < 2; i++) {
            const double f = factor[ty + 16 * i];
            for (int j = 0; j < 4; j++) {
                double sum = sums[i][j] * f, square = squares[i][j] * f * f;
                for (int key = 0; key < KEYS; key++) {
                    const double p = score[ty + 16 * i][key], x = values[key][tx + 16 * j], px = (p + (p > 0 ? a.tiny : 0)) * x;
                    sum += p * x, square += px * px;
                }
                sums[i][j] = sum, squares[i][j] = square;
            }
        }
    }
    __syncthreads();
    for (int i = 0; i < 2; i++) {
        const long row = row0 + ty + 16 * i;
        const double all = total[ty + 16 * i];
        if (row >= a.s) continue;
        for (int j = 0; j < 4; j++) {
            const long column = column0 + tx + 16 * j, at = batch * a.o_batch + head * a.o_head + row * a.o_row + column;
            if (column < a.value_dim) o[at] = all > 0 ? sums[i][j] / all : 0, gain[at] = all > 0 ? sqrt(squares[i][j]) / all : 0;
        }
        if (lse && tx == 0 && blockIdx.y == 0) lse[(batch * a.h + head) * a.s + row] = all > 0 ? top[ty + 16 * i] + log(all) : -1.0 / 0.0;
    }
}

/* Epilogue operations, as numbered by cuda_data.py; applied in place, in float64. */
enum { BIAS, RELU, GELU, SILU, RESIDUAL, SCALE, SHIFT, TENSOR_SCALE };

extern "C" __global__ void kt_reference_epilogue(double *x, long count, long columns, int op, const void *operand, int type) {
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (long)gridDim.x * blockDim.x) {
        const double v = x[i];
        switch (op) {
        case BIAS:
        case SHIFT: x[i] = v + load_element(operand, i % columns, type); break;
        case RELU: x[i] = v < 0 ? 0 : v; break;
        case GELU: x[i] = v * normcdf(v); break;
        case SILU: x[i] = v / (1 + exp(-v)); break;
        case RESIDUAL: x[i] = v + load_element(operand, i, type); break;
        case TENSOR_SCALE: x[i] = v * load_element(operand, 0, type); break;
        default: x[i] = v * load_element(operand, i % columns, type); break;
        }
    }
}

typedef struct {
    double error_squares, reference_squares, gain_squares;
    u64 bad, first_bad; /* elements outside their bound (NaN included), and the first of them */
} comparison;

/* |out - reference| <= absolute * gain[column] + relative * |reference|, written so that NaN fails; an infinite
 * reference wants just that. */
extern "C" __global__ void kt_compare(const void *out, int type, const double *reference, const double *gain, long count,
                                      long columns, double absolute, double relative, comparison *result) {
    double errors = 0, references = 0, gains = 0;
    u64 bad = 0, first = ~0ull;
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (long)gridDim.x * blockDim.x) {
        const double r = reference[i], x = load_element(out, i, type), g = gain[i % columns];
        const double d = x == r ? 0 : fabs(x - r);
        errors += d * d;
        if (isfinite(r)) references += r * r, gains += g * g;
        if (!(d <= absolute * g + relative * fabs(r))) {
            bad++;
            if ((u64)i < first) first = (u64)i;
        }
    }
    atomicAdd(&result->error_squares, errors);
    atomicAdd(&result->reference_squares, references);
    atomicAdd(&result->gain_squares, gains);
    if (bad) {
        atomicAdd(&result->bad, bad);
        atomicMin(&result->first_bad, first);
    }
}

/* How many bytes of a zone differ from `value`, or of two buffers from each other. */
extern "C" __global__ void kt_count_changed(const u8 *zone, long bytes, u8 value, u64 *changed) {
    u64 count = 0;
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += (long)gridDim.x * blockDim.x) count += zone[i] != value;
    if (count) atomicAdd(changed, count);
}

extern "C" __global__ void kt_count_differing(const u8 *a, const u8 *b, long bytes, u64 *changed) {
    u64 count = 0;
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += (long)gridDim.x * blockDim.x) count += a[i] != b[i];
    if (count) atomicAdd(changed, count);
}

/* Reads 16 bytes a thread and step; the sum keeps the loads alive. */
extern "C" __global__ void kt_read(const uint4 *from, long count, u32 *sink) {
    u32 sum = 0;
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (long)gridDim.x * blockDim.x) {
        const uint4 v = from[i];
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9E3779B9u) *sink = sum;
}
