/* Closes what cpu_isa.h opens (clang insists); the last include of every kernel file. */
#if defined(__clang__) && (KT_ISA == KT_ISA_AVX512 || KT_ISA == KT_ISA_AVX2)
#pragma clang attribute pop
#endif
