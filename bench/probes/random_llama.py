"""A Llama with random weights, big enough for its matrix products to cost what they cost.

python -m radixcache.bench.probes.random_llama FOLDER SEED
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def save_random_llama(folder: Path, seed: int = 0) -> int:
    """Write a loadable model folder (no tokenizer); returns the number of parameters, 32 M."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16_384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    save_random_llama(Path(sys.argv[1]), int(sys.argv[2]))
