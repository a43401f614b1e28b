// The matrix product C[b, m, n] = epilogue(A * B): its extents, and how its operands lie in memory.
#ifndef KT_PROBLEM_CUH
#define KT_PROBLEM_CUH

#include "types.cuh"

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
#define KT_TRANS_A 0 /* 1: A is stored [K, M] */
#endif
#ifndef KT_TRANS_B
#define KT_TRANS_B 0 /* 1: B is stored [N, K] */
#endif
#ifndef KT_BATCH_IN_ROWS
#define KT_BATCH_IN_ROWS 0 /* 1: the columns of all batches lie side by side in a row of C */
#endif
#ifndef KT_SWAPPED
#define KT_SWAPPED 0 /* 1: what is computed is the transpose of C, [M, N] here and stored [N, M]; A and B have traded places */
#endif
#ifndef KT_DESCRIBE
#define KT_DESCRIBE "{}"
#endif

// "K-major": neighbours along k are neighbours in memory. The other way is called M-major or N-major.
[[maybe_unused]] constexpr bool A_K_MAJOR = !KT_TRANS_A, B_K_MAJOR = KT_TRANS_B;
[[maybe_unused]] constexpr i64 A_LD = A_K_MAJOR ? KT_K : KT_M, B_LD = B_K_MAJOR ? KT_K : KT_N; // elements from row to row in memory
constexpr i64 C_ELEMENTS = (i64)KT_M * KT_N; // of one batch
[[maybe_unused]] constexpr u32 C_ROWS = KT_SWAPPED ? KT_N : KT_M, C_COLUMNS = KT_SWAPPED ? KT_M : KT_N; // as they are stored
constexpr bool C_BATCH_IN_ROWS = KT_BATCH_IN_ROWS;
[[maybe_unused]] constexpr i64 C_LD = C_BATCH_IN_ROWS ? (i64)KT_BATCH * C_COLUMNS : C_COLUMNS;
[[maybe_unused]] constexpr i64 C_BATCH = C_BATCH_IN_ROWS ? C_COLUMNS : C_ELEMENTS;

// Outputs in one access of at most 16 bytes that every row of C allows.
constexpr int C_GROUP = kt_alignment((i64)C_COLUMNS * OUTPUT_BYTES, 16) / OUTPUT_BYTES;

#endif
