"""Kernel families of the attention operator."""
