"""Explains why tokens were no hit: one reason for each stretch of a prompt that was computed.

The cache knows what it holds, not what it held. A ghost index, a second radix tree without KV,
remembers what was computed. The scheduler feeds it, not the cache's events, which do not report the
half-filled blocks that a hash-block cache drops. The reason of a stretch says what would have made
it a hit:

- `evicted`: it was computed before, and is no longer cached; but for an eviction (or a `reset`, or
  a step that failed) it would be.
- `page_not_finished`: it was computed before, but its page is in flight in this very step, or the
  cache holds only whole pages (hash-block caching) and the two texts diverge within one.
- `diverged`: the prompt diverges from a known text and then continues like it: an edited message,
  the time of day in a system prompt, words in other tokens, examples in another order. The tokens
  that are the same in both are computed again because of the change before them.
- `first_seen`: none of these tokens are known. That is the normal case: a new turn, a new prompt.
  The prompt may begin as others do, with the first tokens of the chat template, a system prompt or
  a question's first words; that common beginning is cached, and diverging from it cost nothing.
- `no_saved_state`: its KV is cached, but the model has windows or recurrent layers and no saved
  state this far into the text: it is computed again from the last one on, in place.
- `on_host`, `on_disk`: it was evicted, and its pages are in host memory or on disk: they are
  loaded, unless computing them takes less time. Loaded tokens are a hit (`Loaded`).
- `caching_off`: it was computed before, and the engine runs without a prefix cache.

Two texts continue alike if 8 tokens in a row are the same within 16 tokens of their divergence, or
16 within 1,024. Marks (a tokenizer's added tokens, such as begin and end messages) do not count: a
template puts the same ones between two messages in all chats. The known texts are at most 8: the
latest branches where the prompt diverges from the ghost index, then those of these that fork again.

The last token of a prompt is no miss: it is computed to get logits, unless these are kept.

Privacy: a namespace (`cache_salt`) hides from others even that a text was sent, so nothing here is
remembered, counted or told across namespaces. Within one, `Miss.cached` may be the text of another
user: show it to the engine's administrator alone, and `Miss.redacted()` to all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.base import PrefixCache
from radixcache.radix.ghost import GhostIndex
from radixcache.runtime.explanation import BELOW, CONTEXT, REASONS, Miss
from radixcache.runtime.kv_offload.below import find_below, parts_below
from radixcache.runtime.multimodal.prompt_images import PromptImages
from radixcache.tiers.stored_pages import UNMEASURED, LoadCost, Medium
from radixcache.tokens import Tokens, TokensLike, as_tokens, common_length

Marks = NDArray[np.bool_]
"""See `table_of`."""

WINDOW = 1024
"""Tokens after a divergence within which the texts must meet again."""

ALIKE = ((16, 8), (WINDOW, 16))
"""Within so many tokens, so many in a row must be alike for that."""

_BASE = 0x9E3779B97F4A7C15

BRANCHES = 8
"""How many known texts a prompt is compared with."""


def no_cost(medium: Medium, num_pages: int, num_tokens: int) -> LoadCost:
    """Of a cache without tiers."""
    return UNMEASURED


class Explainer:
    """Remembers what an engine has computed, and explains by it what its cache does not hold.

    Args:
        cache: the cache that it explains; only asked, never changed.
        num_tokens: how many tokens to remember; by default four times what the cache can hold.
            Some 20 bytes each.
        marks: the tokens that are no text, such as begin and end messages.
        cost: of loading so many pages from a tier, and of computing so many tokens instead.

    >>> from radixcache import PagePool, RadixCache
    >>> cache = RadixCache(PagePool(num_pages=8, page_size=4))
    >>> explainer = Explainer(cache)
    >>> explainer.remember([1, 2, 3, 4, 5, 6])  # as if it had been computed, and evicted
    >>> for miss in explainer.explain([1, 2, 3, 7, 8, 9], hit=0):
    ...     print(miss.describe())
    evicted: 3 tokens from token 0 on, computed before but no longer cached
    first seen: 2 tokens from token 3 on
    """

    def __init__(
        self,
        cache: PrefixCache,
        num_tokens: int | None = None,
        marks: Iterable[int] = (),
        cost: Callable[[Medium, int, int], LoadCost] = no_cost,
    ) -> None:
        self.cache, self._cost = cache, cost
        if num_tokens is None:
            num_tokens = 4 * cache.pool.num_pages * cache.page_size
        self.num_tokens = num_tokens
        self.missed_tokens: dict[str, int] = dict.fromkeys(REASONS, 0)
        """Tokens that were computed, by reason; the last token of each prompt is not counted."""
        self._marks = table_of(marks)
        self._known = GhostIndex(num_tokens)
        self.put_off: deque[Callable[[], None]] = deque()
        """What waits for `catch_up`, so that a step is launched before it."""

    def explain(
        self,
        tokens: TokensLike,
        hit: int,
        namespace: Hashable = None,
        kv: int = 0,
        images: PromptImages | None = None,
    ) -> list[Miss]:
        """Why only the first `hit` tokens of a prompt were found; changes nothing.

        Args:
            kv: how many have KV, if these are more, as beyond the last saved state.
            images: of the prompt.

        The stretches follow each other without a gap, from `hit` to the last token, which belongs
        to none. Call it before the rest is published, or remembered. O(len(tokens)).
        """
        misses, rest = self._explain(as_tokens(tokens), hit, namespace, kv)
        return misses + [_in_image(find(), images) for find in rest]

    def _explain(
        self, tokens: Tokens, hit: int, namespace: Hashable, kv: int = 0
    ) -> tuple[list[Miss], list[Callable[[], Miss]]]:
        """`explain`; what finds the last miss takes long, and asks no cache and no index."""
        self.catch_up()
        last = len(tokens) - 1
        if hit >= last:
            return [], []
        below, reach = self._explain_below(tokens[:last], hit, max(hit, kv), namespace)
        if below:
            misses, rest = self._explain(tokens, reach, namespace)
            return below + misses, rest
        length, branches = self._known.follow(tokens, namespace, len(tokens) + WINDOW, BRANCHES)
        known = max(hit, min(length, last))
        misses = self._explain_known(tokens, hit, known, namespace)
        known_texts = branches if length == known else []
        find_last = partial(_explain_new, tokens, known, known_texts, self._marks)
        return misses, [find_last] * (known < last)

    def _explain_below(
        self, tokens: Tokens, hit: int, kv: int, namespace: Hashable
    ) -> tuple[list[Miss], int]:
        """Why tokens from `hit` on are no hit that have KV, in the pool up to `kv` or in a tier
        beyond; and where the next tier's begin, or those without any."""
        cache, count, reach = self.cache, len(tokens) + 1, min(kv, len(tokens))
        misses = list[Miss]()
        if cache.lower is not None and namespace is None:
            below = find_below(cache.lower, cache.windows, tokens, kv)
            parts = parts_below(cache.lower, tokens, reach)
            reach = parts[-1][2] if parts else reach
            if below is not None:
                resume = reach if cache.windows is None else min(reach, hit + below.gain)
                for tier, pages, end in parts or [(below.tier, below.pages, resume)]:
                    if hit < (end := min(end, resume)):
                        whole = cache.windows is not None
                        size = (below.num_pages, below.gain) if whole else (len(pages), end - hit)
                        cost = self._cost(tier.medium, *size)
                        misses.append(Miss(BELOW[tier.medium], hit, end, count, cost=cost))
                        hit = end
        if reach > hit:
            misses.append(Miss("no_saved_state", hit, reach, count))
        return misses, reach

    def _explain_known(
        self, tokens: Tokens, hit: int, known: int, namespace: Hashable
    ) -> list[Miss]:
        """Why the tokens [hit, known), which were computed before, are no hit."""
        count, unit = len(tokens), self.cache.granularity
        if hit == known:
            return []
        if not self.cache.caches:
            return [Miss("caching_off", hit, known, count)]
        in_flight = hit
        if unit == 1:  # whole pages are hit in flight, too
            in_flight = max(hit, min(known, self.cache.cached_length(tokens, namespace)))
        whole = max(in_flight, known // unit * unit)
        misses = [
            Miss("page_not_finished", hit, in_flight, count, in_flight=True),
            Miss("evicted", in_flight, whole, count),
            Miss("page_not_finished", whole, known, count),
        ]
        return [miss for miss in misses if len(miss)]

    def observe(
        self,
        tokens: TokensLike,
        hit: int,
        namespace: Hashable = None,
        kv: int = 0,
        images: PromptImages | None = None,
    ) -> list[Miss]:
        """`explain` for a request that is being admitted. `catch_up` adds the last miss, and counts
        all of them in `missed_tokens`."""
        found, rest = self._explain(as_tokens(tokens), hit, namespace, kv)
        misses = [
            replace(miss, computed=True) if miss.reason in BELOW.values() else miss
            for miss in found
        ]

        def finish() -> None:
            misses[len(found) :] = [_in_image(find(), images) for find in rest]
            for miss in misses:
                self.missed_tokens[miss.reason] += len(miss)

        self.put_off.append(finish)
        return misses

    def remember(self, tokens: TokensLike, namespace: Hashable = None) -> None:
        """All of `tokens` is computed now. O(len(tokens)), amortised."""
        self._known.remember(tokens, namespace)

    def catch_up(self) -> None:
        """Do what was put off; whatever depends on it calls this."""
        while self.put_off:
            task = self.put_off.popleft()
            try:
                task()
            except (MemoryError, KeyboardInterrupt):  # it is done when the engine has recovered
                self.put_off.appendleft(task)
                raise

    def known(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        """How many of the first tokens are remembered, the last one left out. O(len(tokens))."""
        self.catch_up()
        return self._known.match(tokens, namespace)

    def continuations(self, tokens: Tokens, namespace: Hashable, count: int) -> list[Tokens]:
        """Up to `count` tokens that came after all of `tokens`, the newest of at most `BRANCHES`
        texts first. O(len(tokens))."""
        self.catch_up()
        known, texts = self._known.follow(tokens, namespace, count, BRANCHES)
        return texts if known == len(tokens) else []

    def check(self) -> None:
        """Verify the invariants of the ghost index. O(everything)."""
        self.catch_up()
        self._known.check()


def _explain_new(tokens: Tokens, start: int, known: list[Tokens], marks: Marks) -> Miss:
    """Why [start, last) was never computed; `known` are the tokens of known texts there."""
    last = len(tokens) - 1
    first_seen = Miss("first_seen", start, last, len(tokens))
    met = find_rejoin(tokens[start:last], known, marks)
    if met is None:
        return first_seen
    after, repeated, text = met
    return replace(
        first_seen,
        reason="diverged",
        before=tuple(tokens[max(0, start - CONTEXT) : start].tolist()),
        prompt=tuple(tokens[start : start + CONTEXT].tolist()),
        cached=tuple(text[:CONTEXT].tolist()),
        rejoin=start + after,
        repeated=repeated,
    )


def find_rejoin(one: Tokens, known: list[Tokens], marks: Marks) -> tuple[int, int, Tokens] | None:
    """Where `one` goes on as a known text that begins differently, for how many tokens, and which.

    It does at the first place that `ALIKE` allows, the narrower window first. Marks must be alike,
    too, but are not counted. Of several texts, the one that is alike for longest; None if none is.
    O((WINDOW + len) * len(known)).

    >>> same = list(range(100, 120))
    >>> one, other = as_tokens([10, 41, *same, 7]), as_tokens([9, 5, 8, *same])
    >>> find_rejoin(one, [other], table_of([]))[:2]
    (2, 20)
    """
    best: tuple[int, int, Tokens] | None = None
    met: dict[int, tuple[int, int]] = {}
    spelt = _spell([one, *known], marks)
    for within, count in ALIKE:
        met = _meet(spelt, within, count) | met
    for number in sorted(met):
        (i, j), text = met[number], known[number - 1]
        while i and j and one[i - 1] == text[j - 1]:  # marks
            i, j = i - 1, j - 1
        length = min(len(one) - i, len(text) - j)
        length = common_length(one[i : i + length], text[j : j + length])
        if best is None or length > best[1]:
            best = i, length, text
    return best


def table_of(marks: Iterable[int]) -> Marks:
    """Whether each token up to the last mark is one; then False, for all others."""
    places = [*marks]
    table = np.zeros(max(places, default=-1) + 2, bool)
    table[places] = True
    return table


class _Spelt(NamedTuple):
    """The tokens of several texts that are no marks, each with the mark before it, [n] each.

    Attributes:
        tokens: one text behind the other.
        texts: the number of each token's text.
        places: where the token is in its text, and how many of these are before it.
    """

    tokens: NDArray[np.uint64]
    texts: NDArray[np.intp]
    places: NDArray[np.intp]
    counts: NDArray[np.intp]


def _in_image(miss: Miss, images: PromptImages | None) -> Miss:
    """A miss that says in which image it begins, if it does."""
    return miss if images is None else replace(miss, image=images.at(miss.start))


def _spell(texts: list[Tokens], marks: Marks) -> _Spelt:
    cut = [text[: WINDOW + max(count for _, count in ALIKE)] for text in texts]
    tokens, lengths = np.concatenate(cut), [len(text) for text in cut]
    numbers = np.repeat(np.arange(len(cut)), lengths)
    is_mark = marks[np.clip(tokens, -1, len(marks) - 1)]
    spelt = tokens.astype(np.uint64)
    behind = is_mark[:-1] & (numbers[1:] == numbers[:-1])
    spelt[1:] += (spelt[:-1] + np.uint64(1) << np.uint64(32)) * behind
    kept = np.flatnonzero(~is_mark)
    numbers = numbers[kept]
    begins = np.cumsum([0, *lengths[:-1]])
    counts = np.arange(len(kept)) - np.searchsorted(kept, begins)[numbers]
    return _Spelt(spelt[kept], numbers, kept - begins[numbers], counts)


def _meet(spelt: _Spelt, within: int, count: int) -> dict[int, tuple[int, int]]:
    """For each text that is the same as text 0 for `count` tokens: where these begin first, in text
    0 and in it, among the first `within` tokens of each."""
    runs = _runs(spelt.tokens, count)
    texts, size = spelt.texts[: len(runs)], len(runs)
    may = texts == spelt.texts[len(spelt.texts) - size :]  # a run of one text
    may &= spelt.counts[:size] < within
    ours, first_bits = np.flatnonzero(may & (texts == 0)), runs >> np.uint64(48)
    likely = np.zeros(1 << 16, bool)  # by their first bits; only such runs are compared
    likely[first_bits[ours]] = True
    theirs = np.flatnonzero(may & (texts > 0) & likely[first_bits])
    met: dict[int, tuple[int, int]] = {}
    if not len(theirs):
        return met
    ours = ours[runs[ours].argsort(kind="stable")]
    found = ours[runs[ours].searchsorted(runs[theirs]).clip(max=len(ours) - 1)]
    same = runs[found] == runs[theirs]
    for our, their in zip(found[same].tolist(), theirs[same].tolist(), strict=True):
        places = spelt.places.item(our), spelt.places.item(their)
        text = texts.item(their)
        met[text] = min(met.get(text, places), places)
    return met


def _runs(spelt: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """A polynomial of the `count` tokens, a power of two, from each place on.

    Modulo 2**64: collisions are negligible, and a client that forges one only gets a wrong
    explanation.
    """
    step = 1
    while step < count:
        spelt = spelt[:-step] * np.uint64(pow(_BASE, step, 1 << 64)) + spelt[step:]
        step *= 2
    return spelt
