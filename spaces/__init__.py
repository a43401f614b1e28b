"""What can be tuned: workloads, targets, knobs, legality, kernel source. Touches no device."""
