"""Windows in the tiers below the pool: evicted saved states with copies of their pages.

A tier finds pages by the tokens up to their end. A window's pages are a path of their own there,
whose tokens are the window's *name*: the digests of its tokens, its kind and its length, written as
negative numbers, which no token of a text is. So tiers, stores and files know nothing of windows,
and a window is found again after a restart if its pages are. A page is found by the name up to its
end, so that the digest comes first: no two windows of other tokens share a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from radixcache.pages import Pages
from radixcache.states.saved import MOST_SAVED_STATES, Key, Kind, SavedState, SavedStateIndex
from radixcache.tiers.index import LowerTier
from radixcache.tiers.stored_pages import StoredPage
from radixcache.tokens import Tokens

_KINDS: tuple[Kind, ...] = ("boundary", "branch", "prompt", "end")

_STEM, _KIND, _LENGTH, _NAME_BYTES = 32, 64, 65, 69
"""Where parts of a name begin, behind the digest of all tokens; its size."""

_NAME = _NAME_BYTES // 3
"""Tokens of a name: three bytes each. Windows of so few pages have no room for it, and are not
stored: they would save hardly more tokens than that."""

_MIN_PAGE_SIZE = 4
"""The first of smaller pages would have less than 12 bytes of the digest."""


class StoredWindow(NamedTuple):
    """A window that can be loaded: all of its pages are in one tier."""

    tier: LowerTier[Any]
    pages: list[StoredPage]
    length: int
    kind: Kind


class StoredWindows(SavedStateIndex[None]):
    """Finds the windows whose pages are in a tier or those below it.

    An entry may outlive its pages until a look-up sees that, or the oldest entries make room.

    Args:
        tier: the upper tier; windows that it holds from before are found, too.
        span: the position from which the window of a prefix of so many tokens has pages, and how
            many.
    """

    def __init__(self, tier: LowerTier[Any], span: Callable[[int], tuple[int, int]]) -> None:
        self._tier, self._span = tier, span
        super().__init__()
        for one in [*tier.chain()][::-1]:
            for page, path in one.from_root():
                if page.is_of_window and 0 <= len(path) - _NAME < one.page_size:
                    key, kind = _read(path)
                    if kind < len(_KINDS):  # else a file was changed, which its checksum will show
                        self._enter(key, _KINDS[kind])

    @property
    def counts(self) -> dict[str, int]:
        return {"kept": len(self._kept)}

    def demote(self, saved: SavedState[Any], pages: Pages) -> None:
        """Take a window that leaves the pool, whose pages still have their bytes."""
        key, kind = saved.key, saved.kind
        if key.namespace is not None:  # salted tokens are secret
            return
        kept = self._kept.get(key)
        path = self._path(key, kind if kept is None else kept.kind)
        is_told_apart = self._tier.page_size >= _MIN_PAGE_SIZE
        if is_told_apart and _NAME <= len(path) <= self._tier.num_slots * self._tier.page_size:
            self._enter(key, kind)
            self._tier.demote(path, 0, pages)

    def find_stored(self, tokens: Tokens, limit: int, beyond: int) -> StoredWindow | None:
        """The deepest window after at most `limit` and more than `beyond` of the tokens. Changes
        nothing that is stored, but forgets those that were evicted meanwhile. O(limit)."""
        known = [self._kept[k] for k in self._prefixes(tokens, None, limit) if k in self._kept]
        for found in reversed(known):
            if found.key.length <= beyond:
                break
            path = self._path(found.key, found.kind)
            tier, pages, end = self._tier.search(path, 0)
            if end == len(path):
                return StoredWindow(tier, pages, found.key.length, found.kind)
            if not any(one.begins(path) for one in self._tier.chain()):
                self._remove(found)
        return None

    def _enter(self, key: Key, kind: Kind) -> None:
        if not self._is_new(key, kind):
            return
        if len(self._kept) >= MOST_SAVED_STATES:
            self._remove(next(iter(self._kept.values())))
        self._add(self._kept, key, None, kind)

    def _path(self, key: Key, kind: Kind) -> Tokens:
        """[pages * page_size] int32, the tokens under which tiers have the pages of a window."""
        size = self._span(key.length)[1] * self._tier.page_size
        tail = bytes([_KINDS.index(kind)]) + key.length.to_bytes(4, "little")
        triples = np.frombuffer(key.digest + key.stem + tail, np.uint8).reshape(-1, 3)
        path = np.full(max(size, _NAME), -1, np.int32)
        path[:_NAME] -= triples.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
        return path[:size]

    def check(self) -> None:
        """Assert that the tables of keys agree."""
        self._check_keys()


def _read(path: Tokens) -> tuple[Key, int]:
    """The key of a window, and the index of its kind, from the first tokens of its path."""
    name = -1 - path[:_NAME]
    parts = np.stack([name >> 16, name >> 8 & 255, name & 255], 1).astype(np.uint8).tobytes()
    length = int.from_bytes(parts[_LENGTH:], "little")
    return Key(None, length, parts[:_STEM], parts[_STEM:_KIND]), parts[_KIND]
