"""Finds earlier places where a text's last tokens stood, and the tokens that followed them.

Hash chains as in LZ77 (Ziv and Lempel 1977; as zlib keeps them): a table from each pair of tokens
to where it stood last, and from each such place to the one before. A candidate is compared token by
token, so that a stale entry, or one of another pair, does no harm: the ring of texts is overwritten
without deleting entries.
"""

from __future__ import annotations

import numpy as np

from radixcache.tokens import Tokens

MAX_MATCH = 64
"""Tokens that are compared backwards."""

CANDIDATES = 16
"""Places that are compared, the latest first."""

_NOTHING = -1  # around texts; no token
_ROOM = 256  # for tokens that a text will generate, so that it stays in one piece
_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_WORD = (1 << 64) - 1
_LAST_PLACE = (1 << 31) - 1


class Segment:
    """The stretch [start, limit) of the ring that holds one text, written up to `end`."""

    __slots__ = ("end", "limit", "start")

    def __init__(self, start: int, limit: int) -> None:
        self.start, self.end, self.limit = start, start, limit


class SuffixIndex:
    """Indexes the texts of one namespace.

    Args:
        num_tokens: the size of the ring, a power of two; 10 bytes a token, taken as they come.

    >>> index = SuffixIndex(1 << 10)
    >>> segment = index.add(np.array([5, 6, 7, 8, 9], np.int32), 0)
    >>> index.find([1, 6, 7], 2)
    (2, [8, 9])
    """

    def __init__(self, num_tokens: int) -> None:
        self._size = num_tokens
        self._shift = 66 - num_tokens.bit_length()
        self._ring = np.empty(num_tokens + 1, np.int32)
        self._ring[-1] = _NOTHING
        self._before = np.empty(num_tokens, np.int32)
        # An item of a view costs a third of NumPy's.
        self._tokens, self._before_view = self._ring.data, self._before.data
        self._clear()

    def _clear(self) -> None:
        self._head = 0
        """Places grow for ever; a token's place in the ring is its place modulo the size."""
        self._latest = np.zeros(1 << (64 - self._shift), np.int32)
        self._latest_view = self._latest.data

    def add(self, text: Tokens, start: int, segment: Segment | None = None) -> Segment:
        """Add `text[start:]` behind `text[:start]`, which is in `segment` if there is one.

        Returns the segment for the next tokens. O(new tokens), vectorised.
        """
        start = max(start, len(text) - self._size // 4)
        count = len(text) - start
        goes_on = (
            segment is not None
            and segment.end + count <= segment.limit
            and self._head - self._size <= segment.start < segment.limit <= self._head
        )
        if segment is None or not goes_on:
            lead = min(start, MAX_MATCH)
            segment = self._allocate(lead + count + min(_ROOM, self._size // 4))
            self._write(segment, text[start - lead : start])
        if goes_on and count < 8:
            self._add_few(text[start:].tolist(), segment)
            return segment
        first = max(segment.end - (not goes_on), segment.start + 1)  # the end of a lead, too
        self._write(segment, text[start:])
        self._link(first, segment.end)
        return segment

    def _allocate(self, count: int) -> Segment:
        if self._head + 2 * self._size > _LAST_PLACE:
            self._clear()
        start = self._head % self._size
        if start + count + 1 > self._size:  # a segment is in one piece
            self._head += self._size - start
            start = 0
        self._ring[start : start + count + 2] = _NOTHING  # before it, and behind
        segment = Segment(self._head + 1, self._head + 1 + count)
        self._head = segment.limit
        return segment

    def _write(self, segment: Segment, tokens: Tokens) -> None:
        at = segment.end % self._size
        self._ring[at : at + len(tokens)] = tokens
        segment.end += len(tokens)

    def _add_few(self, new: list[int], segment: Segment) -> None:
        """`_write` and `_link` for a few tokens, faster than NumPy's calls."""
        tokens, before, latest = self._tokens, self._before_view, self._latest_view
        for token in new:
            at = segment.end % self._size
            tokens[at] = token
            pair = self._pair(tokens[at - 1], token) if tokens[at - 1] >= 0 else 0
            before[at], latest[pair] = latest[pair], segment.end
            segment.end += 1

    def _link(self, first: int, end: int) -> None:
        """Enter the pairs that end at places [first, end)."""
        if first >= end:
            return
        at = first % self._size
        tokens = self._ring[at - 1 : at + end - first].astype(np.uint64)
        mixed = tokens[:-1] * np.uint64(_MIX[0]) + tokens[1:] * np.uint64(_MIX[1])
        pairs = (mixed >> np.uint64(self._shift)).astype(np.int64)
        order = pairs.argsort(kind="stable")
        pairs, places = pairs[order], first + order
        before, is_last = np.empty_like(places), np.ones(len(pairs), bool)
        np.not_equal(pairs[1:], pairs[:-1], out=is_last[:-1])
        before[1:] = places[:-1]  # of the same pair, unless the one before is the last of its own
        is_first = np.ones_like(is_last)
        is_first[1:] = is_last[:-1]
        before[is_first] = self._latest[pairs[is_first]]
        self._before[at + order] = before
        self._latest[pairs[is_last]] = places[is_last]

    def _pair(self, one: int, other: int) -> int:
        return ((one * _MIX[0] + other * _MIX[1]) & _WORD) >> self._shift

    def find(self, tail: list[int], count: int) -> tuple[int, list[int]]:
        """The longest end of `tail` that came before (the latest of equals): its length, and up to
        `count` tokens that followed; (0, []) if not even the last two tokens came before.

        A continuation that runs into `tail` itself repeats its last tokens.
        O(CANDIDATES * MAX_MATCH), some microseconds.
        """
        if len(tail) < 2:
            return 0, []
        tokens, size = self._tokens, self._size
        before, last, limit = tail[-2], tail[-1], min(len(tail), MAX_MATCH)
        longest, found = 0, 0
        oldest = max(1, self._head - size)
        place = self._latest_view[self._pair(before, last)]
        for _ in range(CANDIDATES):
            if place < oldest:
                break
            at = place % size
            if (
                tokens[at + 1] >= 0
                and tokens[at] == last
                and tokens[at - 1] == before
                and (not longest or tokens[at - longest] == tail[-1 - longest])
            ):
                length = 2
                while length < limit and tokens[at - length] == tail[-1 - length]:
                    length += 1
                if length > longest:
                    longest, found = length, at
                    if length == limit:
                        break
            place = self._before_view[at]
        if not longest:
            return 0, []
        followed = tokens[found + 1 : min(found + 1 + count, size)].tolist()
        if _NOTHING in followed:
            followed = followed[: followed.index(_NOTHING)]
            if followed == tail[-len(followed) :]:
                followed = (followed * count)[:count]
        return longest, followed
