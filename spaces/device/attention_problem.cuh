// Attention o = softmax(scale * q k^T) v: extents, strides, which keys a query sees, and the signature of every kernel.
#ifndef KT_ATTENTION_PROBLEM_CUH
#define KT_ATTENTION_PROBLEM_CUH

#include "memory.cuh"

#ifndef KT_B
#define KT_B 2 /* batch entries */
#endif
#ifndef KT_H
#define KT_H 4 /* query heads */
#endif
#ifndef KT_GROUP
#define KT_GROUP 1 /* query heads that share one key/value head */
#endif
#ifndef KT_KV_HEADS
#define KT_KV_HEADS (KT_H / KT_GROUP)
#endif
#ifndef KT_S
#define KT_S 512 /* queries */
#endif
#ifndef KT_KV_LEN
#define KT_KV_LEN 512 /* keys */
#endif
#ifndef KT_D
#define KT_D 64 /* head dimension of q and k */
#endif
#ifndef KT_VALUE_DIM
#define KT_VALUE_DIM 64 /* head dimension of v and o */
#endif
#ifndef KT_CAUSAL
#define KT_CAUSAL 0
#endif
#ifndef KT_WINDOW
#define KT_WINDOW 0 /* the last keys up to its diagonal that a query sees; 0: all */
#endif
#ifndef KT_SCALE
#define KT_SCALE 0.125 /* of q k^T */
#endif
#ifndef KT_SOFTCAP
#define KT_SOFTCAP 0.0 /* logits become softcap * tanh(logits / softcap); 0: as they are */
#endif
#ifndef KT_LSE
#define KT_LSE 0 /* 1: the log-sum-exp is an output, [B, H, S] */
#endif
#ifndef KT_Q_ROW_STRIDE /* elements between batch entries, heads and positions; the stub sets all, here: BSHD */
#define KT_Q_BATCH_STRIDE ((i64)KT_S * KT_H * KT_D)
#define KT_Q_HEAD_STRIDE KT_D
#define KT_Q_ROW_STRIDE (KT_H * KT_D)
#define KT_K_BATCH_STRIDE ((i64)KT_KV_LEN * KT_KV_HEADS * KT_D)
#define KT_K_HEAD_STRIDE KT_D
#define KT_K_ROW_STRIDE (KT_KV_HEADS * KT_D)
#define KT_V_BATCH_STRIDE ((i64)KT_KV_LEN * KT_KV_HEADS * KT_VALUE_DIM)
#define KT_V_HEAD_STRIDE KT_VALUE_DIM
#define KT_V_ROW_STRIDE (KT_KV_HEADS * KT_VALUE_DIM)
#define KT_O_BATCH_STRIDE ((i64)KT_S * KT_H * KT_VALUE_DIM)
#define KT_O_HEAD_STRIDE KT_VALUE_DIM
#define KT_O_ROW_STRIDE (KT_H * KT_VALUE_DIM)
#endif
#ifndef KT_DESCRIBE
#define KT_DESCRIBE "{}"
#endif

static_assert(KT_DTYPE == KT_FP16 || KT_DTYPE == KT_BF16, "16-bit elements");
static_assert(KT_H == KT_KV_HEADS * KT_GROUP, "every key/value head serves as many query heads");
static_assert(KT_S <= 1 << 30 && KT_KV_LEN <= 1 << 30, "positions of keys and queries are sums of two extents");

#if KT_LSE
#define KT_LSE_PARAMETER float *__restrict__ lse,
#define KT_LSE_OPERAND lse
#else
#define KT_LSE_PARAMETER
#define KT_LSE_OPERAND nullptr
#endif
#define KT_PARAMETERS                                                                                     \
    const kt_element *__restrict__ q, const kt_element *__restrict__ k, const kt_element *__restrict__ v, \
        kt_output *__restrict__ o, KT_LSE_PARAMETER u8 *__restrict__ workspace
enum : int { KT_ARGUMENTS = 4 + KT_LSE }; // the workspace comes after them

// Query i sees the keys from kt_first_key(i) up to, without it, kt_end_key(i).
constexpr int DIAGONAL = KT_KV_LEN - KT_S; // the key of query 0 on the diagonal
constexpr bool HAS_WINDOW = KT_WINDOW > 0 && KT_WINDOW < KT_KV_LEN;

KT_DEVICE int kt_end_key(int query) { return KT_CAUSAL ? kt_max(0, kt_min(KT_KV_LEN, query + DIAGONAL + 1)) : KT_KV_LEN; }
KT_DEVICE int kt_first_key(int query) { return HAS_WINDOW ? kt_max(0, query + DIAGONAL + 1 - KT_WINDOW) : 0; }

KT_DEVICE u32 kt_pack(float low, float high) { return KT_DTYPE == KT_FP16 ? kt_pack_half(low, high) : kt_pack_bfloat(low, high); }

#endif
