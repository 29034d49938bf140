"""GGUF files: their blocks and configs."""
