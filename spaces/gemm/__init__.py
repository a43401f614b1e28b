"""Kernel families of the GEMM template."""
