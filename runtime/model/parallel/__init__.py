"""Tensor parallelism: a process for each device."""
