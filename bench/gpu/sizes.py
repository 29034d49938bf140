"""How big everything is, on a GPU and in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
"""The shape of Llama-3.1-8B."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of the sections. Lengths in tokens."""

    # Ceilings
    copy_bytes: int
    matmul: int
    # Correctness
    head_dims: tuple[int, ...]
    shrink: int  # lengths are divided by it
    far_elements: int  # of one page tensor, whose last pages are used
    other_dtypes: tuple[torch.dtype, ...]
    # Equality
    small: dict[str, Any]  # a model in whose logits greedy choices are clear
    stem: int
    answer: int
    # LLM
    tokens: int  # of an answer
    streams: int
    # The big model and its workloads
    big: dict[str, Any]
    decode_batches: tuple[int, ...]
    decode_context: int
    steps: int
    cached: tuple[int, ...]
    question: int
    chunk: int  # max_num_batched_tokens
    # Cascade, attention alone
    heads: tuple[tuple[int, int], ...]  # (query heads, KV heads)
    head_dim: int
    rows: tuple[int, ...]
    shared: tuple[int, ...]
    own: int
    beyond_l2: int  # bytes of pages in all layers together
    # Cascade, in the engine
    shared_in_engine: tuple[int, ...]
    shared_rows: int
    # Radix against hash-block and peers
    documents: int
    document: tuple[int, int]  # from, to
    requests: int
    # Open questions
    suffixes: tuple[int, ...]
    prefixes: tuple[int, ...]
    fresh: int
    tile_limits: tuple[tuple[int, int], ...]  # rows, bytes
    repeat: int


FULL = Sizes(
    copy_bytes=8 << 30,
    matmul=8192,
    head_dims=(64, 128),
    shrink=1,
    far_elements=(1 << 31) + (1 << 24),
    other_dtypes=(torch.float16,),
    small={
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    },
    stem=1100,
    answer=24,
    tokens=24,
    streams=64,
    big=LLAMA_8B,
    decode_batches=(1, 16, 64, 256),
    decode_context=1024,
    steps=15,
    cached=(4096, 16_384, 32_768),
    question=64,
    chunk=8192,
    heads=((32, 8), (8, 1)),
    head_dim=128,
    rows=(4, 8, 16, 64),
    shared=(256, 512, 1024, 2048, 8192),
    own=128,
    beyond_l2=200 << 20,
    shared_in_engine=(2048, 8192),
    shared_rows=64,
    documents=8,
    document=(500, 1500),
    requests=64,
    suffixes=(64, 512),
    prefixes=(4096, 16_384, 32_768),
    fresh=8192,
    tile_limits=((512, 64 << 20), (2048, 256 << 20), (2048, 1 << 30), (8192, 1 << 30)),
    repeat=7,
)

_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}

SMALL = Sizes(
    copy_bytes=1 << 20,
    matmul=128,
    head_dims=(16,),
    shrink=32,
    far_elements=1 << 14,
    other_dtypes=(),
    small=_TINY,
    stem=70,
    answer=3,
    tokens=6,
    streams=6,
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
    shared_in_engine=(64,),
    shared_rows=4,
    documents=2,
    document=(20, 60),
    requests=3,
    suffixes=(8,),
    prefixes=(32,),
    fresh=32,
    tile_limits=((16, 1 << 12), (256, 2 << 20)),
    repeat=1,
)
