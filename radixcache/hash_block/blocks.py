"""Blocks of the hash-block cache: their content, pages by hash, hashes by prompt."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from radixcache.events import Evicted, Stored
from radixcache.tokens import Tokens


class Block(NamedTuple):
    """A full block: a page's content and, through its parents, the whole prefix that ends there.

    A block keeps its parents alive when they are evicted, so that it still knows its prefix.
    """

    hash: bytes
    parent: Block | None
    tokens: bytes
    """The token ids as int32."""
    namespace: Hashable

    def prefix(self) -> Tokens:
        """All tokens from the first block's to this one's. O(prefix)."""
        parts = []
        block: Block | None = self
        while block is not None:
            parts.append(block.tokens)
            block = block.parent
        return np.frombuffer(b"".join(reversed(parts)), np.int32)


class BlocksStored(Stored):
    """`Stored` of `blocks` that follow each other; the prefix is made when a listener reads it."""

    blocks: list[Block]

    def __init__(self, blocks: list[Block], start: int) -> None:
        vars(self).update(namespace=blocks[0].namespace, start=start, blocks=blocks)

    @cached_property
    def tokens(self) -> Tokens:
        return self.blocks[-1].prefix()


class BlockEvicted(Evicted):
    """`Evicted` of one block; its prefix is made when a listener reads it."""

    blocks: list[Block]
    """The block, unless another page holds the same one."""
    _block: Block

    def __init__(self, block: Block, is_gone: bool) -> None:
        blocks = [block] if is_gone else []
        vars(self).update(namespace=block.namespace, blocks=blocks, _block=block)

    @cached_property
    def tokens(self) -> Tokens:
        return self._block.prefix()

    @cached_property
    def start(self) -> int:
        return len(self.tokens) - len(self._block.tokens) // self.tokens.itemsize


class Row(NamedTuple):
    """Blocks that follow each other, and the number of blocks before the first one."""

    num_before: int
    blocks: list[Block]


class BlockRows:
    """The tree that blocks form through their parents, with only children joined into rows.

    Args:
        blocks: of several with one hash, one counts.
        ends: hashes of blocks that end their row in any case.
    """

    def __init__(self, blocks: Iterable[Block], ends: Container[bytes]) -> None:
        self._ends = ends
        self._children: dict[bytes, list[Block]] = {}
        self.tops: dict[Hashable, list[Row]] = {}
        """Rows without a predecessor in the cache, by namespace."""
        distinct = {block.hash: block for block in blocks}
        tops = []
        for block in distinct.values():
            if block.parent is not None and block.parent.hash in distinct:
                self._children.setdefault(block.parent.hash, []).append(block)
            else:
                tops.append(block)
        for block in tops:
            before = len(block.prefix()) * 4 // len(block.tokens) - 1
            self.tops.setdefault(block.namespace, []).append(self._row(before, block))

    def below(self, row: Row) -> list[Row]:
        """The rows that go on from this one."""
        before = row.num_before + len(row.blocks)
        return [self._row(before, block) for block in self._children.get(row.blocks[-1].hash, ())]

    def _row(self, num_before: int, block: Block) -> Row:
        blocks = [block]
        while block.hash not in self._ends:
            children = self._children.get(block.hash, [])
            if len(children) != 1:
                break
            (block,) = children
            blocks.append(block)
        return Row(num_before, blocks)


class BlockMap:
    """The pages that hold a block of a given hash, in order of insertion. All O(1)."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, dict[int, None]] = {}
        """Further pages of the same hash, in order of insertion."""

    def get(self, block_hash: bytes) -> int | None:
        """The page inserted first of those still in the map."""
        return self._first.get(block_hash)

    def insert(self, block_hash: bytes, page: int) -> None:
        """Add `page`, which is not in the map."""
        if self._first.setdefault(block_hash, page) != page:
            self._others.setdefault(block_hash, {})[page] = None

    def remove(self, block_hash: bytes, page: int) -> None:
        """Remove `page`; if it was the first of its hash, the next one takes its place."""
        others = self._others.get(block_hash)
        if others is None:
            del self._first[block_hash]
            return
        if self._first[block_hash] == page:
            page = self._first[block_hash] = next(iter(others))
        del others[page]
        if not others:
            del self._others[block_hash]

    def items(self) -> Iterator[tuple[bytes, int]]:
        """All pairs of hash and page."""
        for block_hash, page in self._first.items():
            yield block_hash, page
            for other in self._others.get(block_hash, ()):
                yield block_hash, other


class PromptHashes:
    """Block hashes of the prompts looked up last, by their tokens and as far as needed, so that a
    waiting prompt is hashed once. vLLM keeps them with the request."""

    MAX_TOKENS = 1 << 20

    def __init__(self) -> None:
        self._hashes: dict[tuple[Hashable, bytes], list[bytes]] = {}
        self._num_tokens = 0

    def of(self, tokens: Tokens, namespace: Hashable) -> list[bytes]:
        """Hashes of the first blocks of a prompt, to be extended by the caller. O(len(tokens))."""
        key = (namespace, tokens.tobytes())
        hashes = self._hashes.pop(key, None)
        if hashes is None:
            hashes = []
            self._num_tokens += len(tokens)
            while self._num_tokens > self.MAX_TOKENS and self._hashes:
                oldest = next(iter(self._hashes))
                del self._hashes[oldest]
                self._num_tokens -= len(oldest[1]) // tokens.itemsize
        self._hashes[key] = hashes
        return hashes
