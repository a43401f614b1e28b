"""Building, checking and timing kernels on real devices."""
