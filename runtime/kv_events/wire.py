"""Translates a cache's events into the maps that vLLM 0.33 sends, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from radixcache.events import Cleared, Evicted, Stored
from radixcache.hash_block.blocks import BlockEvicted, BlocksStored
from radixcache.hash_block.hashes import ExtraKey, as_block_namespace, first_parent, hash_block
from radixcache.tiers.stored_pages import Medium, StoredPage
from radixcache.tokens import Tokens

MEDIA: dict[Medium, str] = {"host": "CPU", "disk": "DISK"}
"""vLLM's names of the tiers below its device's memory, which is always called "GPU"."""


@dataclass(frozen=True, eq=False)
class StoredBelow:
    """A tier holds a whole page, at the end of the prefix `tokens`."""

    page: StoredPage
    tokens: Tokens
    medium: str


@dataclass(frozen=True)
class DroppedBelow:
    """A tier no longer holds the block `key`."""

    key: bytes
    medium: str


Event = Stored | Evicted | Cleared | StoredBelow | DroppedBelow

_sha256, _first_parent = hash_block, first_parent()


class Wire:
    """Translates events; a page is a block, with vLLM's hash.

    Blocks of the tree are hashed here, by SHA-256; those of the hash-block cache have a hash.

    Args:
        block_size: tokens of a block.
        num_blocks: hashes to keep, so that a long path is not hashed again for each event.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._size = block_size
        self._hash = lru_cache(num_blocks)(_hash)
        self._below: dict[bytes, bytes] = {}
        """The hashes of the tier's blocks, by its keys."""

    def describe(self, event: Event) -> Iterator[dict[str, Any]]:
        """The maps for one event; none if no block becomes whole or goes.

        A parent is stored before its children, and removed after them.
        """
        medium = "GPU"
        if isinstance(event, Cleared):
            self._below.clear()
            yield {"type": "AllBlocksCleared"}
            return
        if isinstance(event, DroppedBelow):
            if (gone := self._below.pop(event.key, None)) is not None:
                yield _removed(gone, event.medium)
            return
        if isinstance(event, StoredBelow):
            page, medium = event.page, event.medium
            event = Stored(None, event.tokens, len(event.tokens) - self._size)
            parent, tokens = self._below.get(page.parent), page.tokens.tobytes()
            if parent is None and event.start:  # the parent is not in the tier
                parent = self._read(Stored(None, event.tokens[: event.start], 0))[1][-1]
            self._below[page.key] = self._hash(parent, tokens, None)
            hashes = [self._below[page.key]]
        else:
            parent, hashes, tokens = self._read(event)
        if isinstance(event, Evicted):
            for name in reversed(hashes):
                yield _removed(name, medium)
        elif hashes:
            size, keys = self._size, as_block_namespace(event.namespace)
            first = event.start // size * size
            starts = range(first, first + len(hashes) * size, size)
            yield {
                "type": "BlockStored",
                "block_hashes": [_number(name) for name in hashes],
                "parent_block_hash": None if parent is None else _number(parent),
                "token_ids": np.frombuffer(tokens, np.int32).tolist(),
                "block_size": size,
                "lora_id": None,
                "medium": medium,
                "lora_name": keys.lora[0] if keys and keys.lora else None,
                "extra_keys": [keys and _untagged(keys.keys(at, at + size)) for at in starts],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }

    def _read(self, event: Stored | Evicted) -> tuple[bytes | None, list[bytes], bytes]:
        """The parent's hash, the hashes and the tokens (int32 bytes) of an event's blocks.

        In the tree, a block is cached if its last token is. O(path), with kept hashes.
        """
        if isinstance(event, BlocksStored | BlockEvicted):
            blocks = event.blocks
            before = blocks[0].parent if blocks else None
            tokens = b"".join(block.tokens for block in blocks)
            return before and before.hash, [block.hash for block in blocks], tokens
        size, keys = self._size, as_block_namespace(event.namespace)
        first, end = event.start // size, len(event.tokens) // size
        data, width = event.tokens.tobytes(), event.tokens.itemsize * size
        path: list[bytes] = []
        for at in range(end if end > first else 0):
            extra = keys and keys.keys(at * size, (at + 1) * size)
            block = data[at * width : (at + 1) * width]
            path.append(self._hash(path[-1] if path else None, block, extra))
        parent = path[first - 1] if 0 < first < end else None
        return parent, path[first:], data[first * width : end * width]


def _hash(parent: bytes | None, tokens: bytes, extra: tuple[ExtraKey, ...] | None) -> bytes:
    ids = tuple(np.frombuffer(tokens, np.int32).tolist())
    return _sha256((_first_parent if parent is None else parent, ids, extra))


def _removed(name: bytes, medium: str) -> dict[str, Any]:
    gone = {"block_hashes": [_number(name)], "medium": medium, "group_idx": 0}
    return {"type": "BlockRemoved", **gone}


def _number(name: bytes) -> int:
    """A hash as it is sent: the low 64 bits."""
    return int.from_bytes(name[-8:], "big")


def _untagged(keys: tuple[ExtraKey, ...] | None) -> list[Any] | None:
    """Extra keys as they are sent: salts and names alone, images with offsets."""
    return None if keys is None else [key[1:] if key[0] == "mm" else key[1] for key in keys]
