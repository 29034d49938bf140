"""Names all that KV on disk depends on: any difference makes another name."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import xxhash

from radixcache.errors import InvalidRequest
from radixcache.kernels.attention import PagedBatch
from radixcache.runtime.checkpoints.model_files import find_file, find_gguf
from radixcache.runtime.model.checkpoint import checkpoint_files
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel

FORMAT = 6
"""Version of the format of slots, rows, notes and checksums."""

_PROBED = 64
"""Tokens whose KV is computed and compared."""

_PART = 1 << 24  # bytes that are read at a time


def fingerprint(model: PagedModel, name_or_path: str, pool: KVPool) -> str:
    """32 hexadecimal digits for the model, its weights and the code that computes KV here.

    They depend on every byte of the weights and of the config, and on the KV of 64 tokens as this
    process computes it. The bytes reveal other weights where the KV of those tokens does not; the
    probe reveals other kernels, number formats and rotary embeddings. O(bytes of the checkpoint).

    Raises:
        InvalidRequest: the weights are neither in safetensors nor in GGUF.
    """
    inputs = {
        "format": FORMAT,
        "page_size": pool.page_size,
        "model_type": model.model_type,
        "shapes": model.shapes,
        "dtype": str(model.dtype),
        **({} if model.kv_cache_dtype == "auto" else {"kv": model.kv_cache_dtype}),
        **({} if pool.windows is None else {"windows": pool.windows}),
        **({"activations": "int8"} if model.quantized_activations else {}),
        "layers": model.layers_by,
        "attention": model.attention.name,
        "exact": model.exact,
        "files": [_checksum(path) for path in _files(name_or_path)],
        "probe": _probe(model, pool.page_size),
    }
    return blake2b(json.dumps(inputs).encode(), digest_size=16).hexdigest()


def _files(name_or_path: str) -> list[str]:
    if gguf := find_gguf(name_or_path):
        return gguf
    found = checkpoint_files(name_or_path)
    config = find_file(name_or_path, "config.json")
    if not found or config is None:
        raise InvalidRequest(
            f"kv_dir is for checkpoints in safetensors or GGUF, and {name_or_path} is none"
        )
    return [config, *found]


def _checksum(path: str) -> str:
    digest = xxhash.xxh3_128()
    with Path(path).open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.hexdigest()


def _probe(model: PagedModel, page_size: int) -> str:
    """A digest of the KV of some tokens, computed in one prefill."""
    length = min(_PROBED, model.max_context)
    tokens = np.arange(1, length + 1, dtype=np.int32) * 7919 % model.vocab_size
    num_pages = -(-length // page_size)
    pool = model.allocate(num_pages, page_size)
    table = np.arange(num_pages, dtype=np.int32)
    model.forward(tokens, PagedBatch.of([table], [length], [length], page_size), np.arange(0), pool)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return xxhash.xxh3_128(pool.read_pages(table).numpy().data).hexdigest()
