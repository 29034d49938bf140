"""How big everything is, on a GPU and in a rehearsal."""

from __future__ import annotations

from typing import NamedTuple

import torch

_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


def _llama(*values: int) -> dict[str, int]:
    return dict(zip(_FIELDS, values, strict=True))


LLAMA_8B = _llama(128_256, 4096, 14_336, 32, 32, 8, 128, 131_072)
"""The shape of Llama-3.1-8B."""

_CLEAR = _llama(2048, 512, 1024, 4, 8, 2, 64, 4096)
_TINY = _llama(256, 64, 64, 2, 4, 2, 16, 1024)


class Sizes(NamedTuple):
    """Numbers of the sections, on a GPU unless said otherwise. Lengths in tokens."""

    repeat: int = 7
    # Ceilings
    copy_bytes: int = 8 << 30
    matmul: int = 8192
    # Correctness
    head_dims: tuple[int, ...] = (64, 128)
    shrink: int = 1  # lengths are divided by it
    far_elements: int = (1 << 31) + (1 << 24)  # of one page tensor, whose last pages are used
    other_dtypes: tuple[torch.dtype, ...] = (torch.float16,)
    # Equality, LLM
    small: dict[str, int] = _CLEAR  # a model in whose logits greedy choices are clear
    stem: int = 1100
    answer: int = 24
    # Decode, TTFT
    big: dict[str, int] = LLAMA_8B
    decode_batches: tuple[int, ...] = (1, 16, 64, 256)
    decode_context: int = 1024
    steps: int = 15
    cached: tuple[int, ...] = (4096, 16_384, 32_768)
    question: int = 64
    chunk: int = 8192  # max_num_batched_tokens
    # Cascade
    heads: tuple[tuple[int, int], ...] = ((32, 8), (8, 1))  # (query heads, KV heads)
    head_dim: int = 128
    rows: tuple[int, ...] = (4, 8, 16, 64)
    shared: tuple[int, ...] = (256, 512, 1024, 2048, 8192)
    own: int = 128
    beyond_l2: int = 200 << 20  # bytes of pages in all layers together


FULL = Sizes()

SMALL = Sizes(
    repeat=1,
    copy_bytes=1 << 20,
    matmul=128,
    head_dims=(16,),
    shrink=32,
    far_elements=1 << 14,
    other_dtypes=(),
    small=_TINY,
    stem=70,
    answer=3,
    big=_TINY,
    decode_batches=(1, 3),
    decode_context=40,
    steps=2,
    cached=(64,),
    question=8,
    chunk=128,
    heads=((4, 2), (2, 1)),
    head_dim=16,
    rows=(4,),
    shared=(32, 64),
    own=8,
    beyond_l2=1 << 12,
)
