"""GGUF files: their blocks, configs and weights."""
