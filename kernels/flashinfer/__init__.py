"""FlashInfer's kernels, on NVIDIA GPUs."""
