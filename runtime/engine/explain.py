"""Why not a hit? One reason for each stretch of a prompt that had to be computed.

The cache knows what it holds, not what it held. A *ghost index* remembers what was computed: a
second radix tree with no KV behind its pages, which forgets what was stored longest ago. (Ghost
lists, which remember what a cache has evicted, come from Megiddo and Modha's ARC, 2003.) It is fed
by the scheduler and not by the cache's events, which do not tell of the half-filled blocks that a
hash-block cache drops. A stretch is explained by what it would have taken to hit it:

- `evicted`: it was computed before, and is no longer cached; but for an eviction (or a `reset`, or
  a step that failed) it would be.
- `page_not_finished`: it was computed before, but its page is in flight in this very step, or the
  cache holds only whole pages (hash-block caching) and the two texts part within one.
- `diverged`: where the known text goes on, the prompt has another token.
- `first_seen`: the known text ends there. That is the normal case: a new turn, a new prompt.
- `caching_off`: it was computed before, and the engine runs without a prefix cache.

The last token of a prompt is no miss: it is computed to get logits, unless these are kept.

What may be told to whom: a namespace (`cache_salt`) hides from others even whether a text was sent,
so nothing here is remembered, counted or told across namespaces. Within one, `Miss.cached` may be
the text of another user: show it to whoever runs the engine, and `Miss.redacted()` to everybody
else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from radixcache.base import PrefixCache, Tokens, TokensLike, as_tokens
from radixcache.nodes import common_length
from radixcache.pages import PagePool
from radixcache.radix import RadixCache

Reason = Literal["first_seen", "diverged", "evicted", "page_not_finished", "caching_off"]
REASONS: tuple[Reason, ...] = get_args(Reason)

Decode = Callable[[list[int]], str]
"""Token ids to text."""

CONTEXT = 8
"""Tokens shown before a divergence, and of each side after it."""

WINDOW = 128
"""Tokens after a divergence within which the texts must meet again to be called the same."""

_SAME = 16
"""Tokens in a row that must be equal for that; the loop in `find_rejoin` doubles up to it."""


_SENTENCES: dict[tuple[Reason, bool], str] = {
    ("first_seen", False): "first seen: {}",
    ("evicted", False): "evicted: {}, computed before but no longer cached",
    ("page_not_finished", True): (
        "page not finished: {}, which another request computes in the same step"
    ),
    ("page_not_finished", False): (
        "page not finished: {}, computed before, but only whole pages are cached"
    ),
    ("caching_off", False): "caching is off: {}, computed before",
}


@dataclass(frozen=True)
class Miss:
    """Tokens [start, end) of a prompt were not cached, for one reason.

    Attributes:
        num_tokens: length of the whole prompt.
        in_flight: of `page_not_finished`: another request computes it in this step; else the cache
            holds only whole pages.
        before: of `diverged`: the last tokens that both texts have in common.
        prompt: of `diverged`: the prompt's tokens from `start` on.
        cached: of `diverged`: the tokens that the cache was given there, in the branch added last.
        rejoin: of `diverged`: where in the prompt the text goes on as the cached one does; 0 if it
            does not.
        repeated: of `diverged`: for how many tokens from `rejoin` on.
    """

    reason: Reason
    start: int
    end: int
    num_tokens: int
    in_flight: bool = False
    before: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    rejoin: int = 0
    repeated: int = 0

    def __len__(self) -> int:
        return self.end - self.start

    def redacted(self, *, before: bool = False) -> Miss:
        """The same without the tokens of other prompts.

        Args:
            before: without those that come first, too: the prompt goes on from somebody's prefix.
        """
        return replace(self, cached=(), before=() if before else self.before)

    def describe(self, decode: Decode | None = None) -> str:
        """One sentence; without `decode`, texts are shown as token ids."""
        if self.reason == "diverged":
            return self._describe_divergence(decode)
        where = f"{_tokens(len(self))} from token {self.start:,} on"
        return _SENTENCES[self.reason, self.in_flight].format(where)

    def _describe_divergence(self, decode: Decode | None) -> str:
        ours = _quote(self.before, self.prompt, self.start, decode)
        text = f"diverged at token {self.start:,} of {self.num_tokens:,}: the prompt has {ours}"
        if self.cached:
            text += f", the cache has {_quote(self.before, self.cached, self.start, decode)}"
        text += f"; {_tokens(len(self))} computed again"
        if self.repeated:
            text += (
                f", although {self.repeated:,} of them, from token {self.rejoin:,} on, are the "
                f"same in both: move what changes to the end"
            )
        return text


@dataclass(frozen=True)
class Explanation:
    """What of a prompt is cached, and why the rest is not; prints as one line for each stretch."""

    num_tokens: int
    num_cached_tokens: int
    misses: list[Miss]
    decode: Decode | None = None

    def __str__(self) -> str:
        lines = [f"{self.num_cached_tokens:,} of {_tokens(self.num_tokens)} cached"]
        if self.num_cached_tokens == self.num_tokens:
            lines[0] += ", and the logits at the end are kept: nothing is computed"
        lines += [miss.describe(self.decode) for miss in self.misses]
        return "\n- ".join(lines)


class Explainer:
    """Remembers what an engine has computed, and explains by it what its cache does not hold.

    Args:
        cache: the cache that it explains; only asked, never changed.
        num_tokens: how many tokens to remember; by default four times what the cache can hold.
            Some 20 bytes each.

    >>> cache = RadixCache(PagePool(num_pages=8, page_size=4))
    >>> explainer = Explainer(cache)
    >>> explainer.remember([1, 2, 3, 4, 5, 6])  # as if it had been computed, and evicted
    >>> for miss in explainer.explain([1, 2, 3, 7, 8, 9], hit=0):
    ...     print(miss.describe())
    evicted: 3 tokens from token 0 on, computed before but no longer cached
    diverged at token 3 of 6: the prompt has [1, 2, 3, 7, 8, 9], the cache has [1, 2, 3, 4, 5, 6]; \
2 tokens computed again
    """

    def __init__(self, cache: PrefixCache, num_tokens: int | None = None) -> None:
        self.cache = cache
        if num_tokens is None:
            num_tokens = 4 * cache.pool.num_pages * cache.page_size
        self.num_tokens = num_tokens
        self.missed_tokens: dict[str, int] = dict.fromkeys(REASONS, 0)
        """Tokens that were computed, by reason; the last token of each prompt is not counted."""
        # At page size 1 no branch begins in mid-page: nothing is copied, every token counts once.
        self._known = RadixCache(PagePool(num_tokens, page_size=1))

    def explain(self, tokens: TokensLike, hit: int, namespace: Hashable = None) -> list[Miss]:
        """Why only the first `hit` tokens of a prompt were found; changes nothing.

        The stretches follow each other without a gap, from `hit` to the last token, which belongs
        to none. Call it before the rest is published, or remembered. O(len(tokens)).
        """
        tokens = as_tokens(tokens)
        last = len(tokens) - 1
        if hit >= last:
            return []
        length, following = self._known.follow(tokens, namespace, len(tokens) + WINDOW)
        known = max(hit, min(length, last))
        misses = self._explain_known(tokens, hit, known, namespace)
        if known < last:
            misses.append(_explain_new(tokens, known, following if length == known else None))
        return misses

    def _explain_known(
        self, tokens: Tokens, hit: int, known: int, namespace: Hashable
    ) -> list[Miss]:
        """Why the tokens [hit, known), which were computed before, are no hit."""
        count, unit = len(tokens), self.cache.granularity
        if hit == known:
            return []
        if not unit:
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

    def observe(self, tokens: TokensLike, hit: int, namespace: Hashable = None) -> list[Miss]:
        """`explain` for a request that is being admitted: counts in `missed_tokens`."""
        misses = self.explain(tokens, hit, namespace)
        for miss in misses:
            self.missed_tokens[miss.reason] += len(miss)
        return misses

    def remember(self, tokens: TokensLike, namespace: Hashable = None) -> None:
        """All of `tokens` is computed now. O(len(tokens)), amortised."""
        tokens = as_tokens(tokens)[: self.num_tokens]
        if not len(tokens):
            return
        ghost = self._known
        if not ghost.idle:  # a call was cut off
            ghost.recover()
        lease = ghost.acquire(tokens, namespace)
        ghost.reserve(lease, len(tokens))
        ghost.publish(lease, tokens[lease.num_tokens :], written=True)
        ghost.release(lease)

    def check(self) -> None:
        """Verify the invariants of the ghost index. O(everything)."""
        self._known.check()


def _explain_new(tokens: Tokens, start: int, following: Tokens | None) -> Miss:
    """Why nobody has computed [start, last); `following` is what is known there instead, if it is.

    Texts that have nothing in common, not even their first token, are called different prompts
    unless they meet again: a template may begin with the time of day.
    """
    last = len(tokens) - 1
    first_seen = Miss("first_seen", start, last, len(tokens))
    if following is None or not len(following):
        return first_seen
    rejoin = find_rejoin(tokens[start:last], following)
    if not start and rejoin is None:
        return first_seen
    after, repeated = rejoin if rejoin else (-start, 0)
    return replace(
        first_seen,
        reason="diverged",
        before=tuple(tokens[max(0, start - CONTEXT) : start].tolist()),
        prompt=tuple(tokens[start : start + CONTEXT].tolist()),
        cached=tuple(following[:CONTEXT].tolist()),
        rejoin=start + after,
        repeated=repeated,
    )


def find_rejoin(one: Tokens, other: Tokens) -> tuple[int, int] | None:
    """Where two texts that begin differently go on alike, and for how many tokens.

    The place in `one` of the first 16 tokens in a row that `other` has too, both within `WINDOW`
    tokens from the start, so that what differs may be of different lengths; None if there is none.
    O(WINDOW² + len).

    >>> same = list(range(100, 120))
    >>> find_rejoin(as_tokens([10, 41, *same, 7]), as_tokens([9, 5, 8, *same]))
    (2, 20)
    """
    run = one[: WINDOW + _SAME, None] == other[None, : WINDOW + _SAME]
    for step in (1, 2, 4, 8):  # run[i, j]: one[i : i + 2 * step] is other[j : j + 2 * step]
        run = run[:-step, :-step] & run[step:, step:]
    if not run.any():
        return None
    i, j = divmod(int(run.argmax()), run.shape[1])
    length = min(len(one) - i, len(other) - j)
    return i, common_length(one[i : i + length], other[j : j + length])


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' if count != 1 else ''}"


def _quote(
    before: tuple[int, ...], after: tuple[int, ...], start: int, decode: Decode | None
) -> str:
    if decode is None:
        return str([*before, *after])
    lead = "…" if len(before) < start else ""
    tail = "…" if len(after) == CONTEXT else ""
    return repr(f"{lead}{decode([*before, *after])}{tail}")
