"""What a start says of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixcache.runtime.config.sizes import format_memory
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.model.host.system_memory import resident_bytes


def start_notes(engine: Engine, more_notes: Sequence[str], load_seconds: float) -> list[str]:
    """Device and kernels, context and KV memory, `more_notes`, the cost of loading: a line each."""
    pool, threads = engine.kv_pool, torch.get_num_threads()
    tokens = pool.num_pages * pool.page_size
    each = pool.page_bytes // pool.page_size
    memory, more = format_memory(pool.num_pages * pool.page_bytes), ""
    if pool.states is not None:
        count = pool.states.num_slots
        more = f"; {count:,} recurrent states in "
        more += format_memory(count * engine.model.bytes_per_state)
    if pool.windows is not None:
        window, size = pool.windows.window, pool.windows.page_size
        pages = -(-window // size)
        tokens -= pages * pool.page_size
        more = f" and {format_memory(pages * pool.page_bytes)} a sequence (window {window:,}; "
        more += "older tokens stay until their memory is needed)"
    elif any(engine.model.windows):
        more += ", in layers with a window too"
    context = f"context {engine.max_model_len:,} tokens"
    return [
        engine.model.placement,
        f"{context}; KV memory {memory} = {tokens:,} tokens of {each:,} bytes{more}",
        *more_notes,
        f"loaded in {load_seconds:.1f} s, {format_memory(resident_bytes())} of memory in "
        f"use, {threads} thread{'s' * (threads != 1)}",
    ]
