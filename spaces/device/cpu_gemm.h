/* Workload macros of a matrix product C[M,N] = A[M,K] B[K,N], row-major; a transposed operand is stored [K,M] or [N,K]. */
#ifndef KT_CPU_GEMM_H
#define KT_CPU_GEMM_H

#ifndef KT_M
#define KT_M 512
#endif
#ifndef KT_N
#define KT_N 512
#endif
#ifndef KT_K
#define KT_K 512
#endif
#ifndef KT_BATCH
#define KT_BATCH 1
#endif
#ifndef KT_TRANS_A
#define KT_TRANS_A 0
#endif
#ifndef KT_TRANS_B
#define KT_TRANS_B 0
#endif

#define KT_C_ELEMENTS ((size_t)KT_BATCH * KT_M * KT_N)

#endif
