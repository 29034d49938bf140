"""The suffix index against a search through all texts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixcache.runtime.spec_decode import suffix_index
from radixcache.runtime.spec_decode.suffix_index import MAX_MATCH, Segment, SuffixIndex
from tests.helpers.cover import seeds

SEED = 20_261_125


def common_end(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other), MAX_MATCH) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


class Texts:
    """Texts that grow by pieces, and where every pair of tokens ended, in order."""

    def __init__(self, num_tokens: int) -> None:
        self.index = SuffixIndex(num_tokens)
        self.texts: list[list[int]] = []
        self.segments: list[Segment | None] = []
        self.places: list[tuple[int, int]] = []

    def grow(self, number: int, new: list[int]) -> None:
        if number == len(self.texts):
            self.texts.append([])
            self.segments.append(None)
        text, start = self.texts[number], len(self.texts[number])
        text += new
        tokens = np.array(text, np.int32)
        self.segments[number] = self.index.add(tokens, start, self.segments[number])
        self.places += [(number, end) for end in range(max(1, start), len(text))]

    def search(self, tail: list[int]) -> dict[int, list[list[int]]]:
        """What follows the longest match, at each place, by its length."""
        found: dict[int, list[list[int]]] = {}
        for number, end in self.places:
            text = self.texts[number]
            if end + 1 < len(text):
                length = common_end(text[: end + 1], tail)
                found.setdefault(length, []).append(text[end + 1 : end + 9])
        longest = max(found, default=0)
        return {longest: found[longest]} if longest >= 2 else {0: [[]]}


@seeds(SEED, 20)
def test_the_longest_match_is_what_a_search_through_all_texts_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix_index, "CANDIDATES", 10**6)
    rng, texts, matched = random.Random(seed), Texts(1 << 14), 0
    for _ in range(200):
        number = rng.randrange(min(12, len(texts.texts) + 1))
        new = [rng.randrange(6) for _ in range(rng.choice([1, 1, 2, 30]))]
        if texts.texts and rng.random() < 0.5:  # a quotation
            source = rng.choice(texts.texts)
            start = rng.randrange(len(source))
            new = source[start : start + rng.randrange(2, 60)] or new
        texts.grow(number, new)
        tail = texts.texts[number][-rng.choice([2, 10, MAX_MATCH]) :]
        length, followed = texts.index.find(tail, 8)
        ((wanted, places),) = texts.search(tail).items()
        assert length == wanted, f"seed {seed}"
        parts = [place[:count] for place in places for count in range(1, 9)]
        repeated = [(part * 8)[:8] for part in parts if part == tail[-len(part) :]]  # into the tail
        assert any(followed == place[: len(followed)] for place in places + repeated)
        matched += length > 2 and len(followed) == 8
    assert matched > 50


def test_what_has_no_room_is_forgotten_and_nothing_else_is_found(monkeypatch) -> None:
    """Round and round the ring, and past the last place that 32 bits hold."""
    index, rng = SuffixIndex(1 << 10), np.random.default_rng(SEED)
    monkeypatch.setattr(suffix_index, "_LAST_PLACE", 1 << 13)
    segment = None
    for number in range(400):
        text = rng.integers(0, 10_000, rng.integers(2, 700)).astype(np.int32)
        segment = index.add(text, 0)
        more = np.append(text, [7, 8, 9, 10]).astype(np.int32)
        segment = index.add(more, len(text), segment)
        assert index._head < 1 << 13 and segment.end <= index._head
        known = more[-100:].tolist()
        length, followed = index.find(known[: min(50, len(known) - 3)], 3)
        assert followed == known[min(50, len(known) - 3) :][:3] and length >= 2, number
        stranger = [20_000, 20_001]
        assert index.find(stranger, 3) == (0, [])


@pytest.mark.parametrize("tail", [[], [5]])
def test_one_token_says_nothing(tail: list[int]) -> None:
    index = SuffixIndex(1 << 10)
    index.add(np.array([5, 6, 7], np.int32), 0)
    assert index.find(tail, 3) == (0, [])


def test_what_repeats_itself_goes_on_so() -> None:
    index = SuffixIndex(1 << 10)
    text = np.array([9, *[1, 2, 3] * 5], np.int32)
    index.add(text, 0)
    assert index.find(text.tolist(), 7) == (12, [1, 2, 3, 1, 2, 3, 1])
