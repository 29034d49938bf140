"""Triton's kernels, on any GPU: attention, experts, the recurrence of delta nets and Mamba 2."""
