"""Replacements for layers of transformers' models: packed, exact, over latents."""
