"""Block hashes, byte for byte as vLLM 0.33 computes them.

A block's hash is H((parent's hash, its token ids, extra keys or None)), so that it names the whole
prefix that ends with the block; the parent of a first block is a hash of the seed. H is SHA-256 of
the pickled content, vLLM's default. Only full blocks have a hash.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixcache.errors import InvalidRequest

ExtraKey = tuple[str, Any] | tuple[str, str, Any]

_FIXED_SEED = "vllm-none-hash"
_NO_EMBEDDING = hashlib.sha256(b"").digest()


class Image(NamedTuple):
    """`length` placeholder tokens from position `offset` on stand for the content `identifier`."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class BlockNamespace:
    """A namespace with all that vLLM mixes into block hashes; a plain string is the cache salt.

    >>> namespace = BlockNamespace(lora=("a", "/p"), salt="s", images=(Image("cat", 20, 8),))
    >>> namespace.keys(0, 16)
    (('lora', 'a', '/p'), ('cache_salt', 's'))
    >>> namespace.keys(16, 32)
    (('lora', 'a', '/p'), ('mm', 'cat', 4))
    """

    salt: str | None = None
    """Requests share blocks only within one salt; "" is none. Enters the first block's hash."""
    lora: tuple[str, str] | None = None
    """Name and path of the adapter; enters every block's hash."""
    images: tuple[Image, ...] = ()
    """Multimodal inputs by offset, apart from each other; each enters the blocks it overlaps."""
    prompt_embeds: tuple[bytes, ...] = ()
    """The SHA-256 of each block's part of a prompt that is given as embeddings."""

    def keys(self, start: int, end: int) -> tuple[ExtraKey, ...] | None:
        """The extra keys of the block at positions [start, end). O(log images + keys)."""
        keys: list[ExtraKey] = []
        if self.lora is not None:
            keys.append(("lora", *self.lora))
        if self.images:
            first = bisect_right(self.images, start, key=lambda i: i.offset + i.length)
            for image in self.images[first:]:
                if image.offset >= end:
                    break
                keys.append(("mm", image.identifier, image.offset - start))
        if self.salt and start == 0:
            keys.append(("cache_salt", self.salt))
        if self.prompt_embeds:
            block = start // (end - start)
            given = block < len(self.prompt_embeds)
            keys.append(("prompt_embeds", self.prompt_embeds[block] if given else _NO_EMBEDDING))
        return tuple(keys) or None


def as_block_namespace(namespace: Hashable) -> BlockNamespace | None:
    """Convert a namespace to one with keys; None if it adds no keys."""
    if namespace is None or namespace == "":
        return None
    if isinstance(namespace, str):
        return BlockNamespace(salt=namespace)
    if isinstance(namespace, BlockNamespace):
        return namespace
    raise InvalidRequest(
        f"a namespace of the hash-block cache is a string (the cache salt) or a BlockNamespace, "
        f"not {namespace!r}"
    )


def hash_block(content: object) -> bytes:
    """H of the module's docstring, 32 bytes.

    >>> hash_block("vllm-none-hash").hex()[:16]
    '066b1e8987e02713'
    """
    return hashlib.sha256(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def first_parent() -> bytes:
    """Stands for the parent's hash in a first block's hash (vLLM's NONE_HASH).

    The hash of PYTHONHASHSEED if that is set, else of a fixed text.
    """
    return hash_block(os.environ.get("PYTHONHASHSEED", _FIXED_SEED))
