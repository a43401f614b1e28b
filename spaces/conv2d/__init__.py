"""Kernel families of the conv2d template."""
