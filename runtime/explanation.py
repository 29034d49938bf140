"""The stretches of a prompt that were not cached or were loaded, and a sentence for each.

The reasons are those of `engine/explain.py`, which finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from radixcache.tiers.stored_pages import UNMEASURED, LoadCost, Medium

Reason = Literal[
    "first_seen", "diverged", "evicted", "page_not_finished", "no_saved_state", "on_host",
    "on_disk", "caching_off",
]  # fmt: skip
REASONS: tuple[Reason, ...] = get_args(Reason)

BELOW: dict[Medium, Reason] = {"host": "on_host", "disk": "on_disk"}
_LOADED_FROM: dict[Medium, str] = {"host": "host memory", "disk": "disk"}

CONTEXT = 8
"""Tokens shown before a divergence, and of each side after it."""

Decode = Callable[[list[int]], str]
"""Token ids to text."""

_SENTENCES: dict[tuple[Reason, bool], str] = {
    ("first_seen", False): "first seen: {}",
    ("evicted", False): "evicted: {}, computed before but no longer cached",
    ("page_not_finished", True): (
        "page not finished: {}, which another request computes in the same step"
    ),
    ("page_not_finished", False): (
        "page not finished: {}, computed before, but only whole pages are cached"
    ),
    ("no_saved_state", False): (
        "no saved state: {}, cached but computed again: no window or recurrent state is left there"
    ),
    ("on_host", False): "in host memory: {}, which are ",
    ("on_disk", False): "on disk: {}, which are ",
    ("caching_off", False): "caching is off: {}, computed before",
}


@dataclass(frozen=True)
class Miss:
    """Says that tokens [start, end) of a prompt were not cached, and why.

    Attributes:
        num_tokens: length of the whole prompt.
        in_flight: of `page_not_finished`: another request computes it in this step; else the cache
            holds only whole pages.
        before: of `diverged`: the last tokens that both texts have in common.
        prompt: of `diverged`: the prompt's tokens from `start` on.
        cached: of `diverged`: the tokens of the known text there.
        rejoin: of `diverged`: where in the prompt the text goes on as the known one does.
        repeated: of `diverged`: for how many tokens from `rejoin` on.
        cost: of `on_host` and `on_disk`: of loading it, and of computing it.
        computed: of these: a request was admitted without them; else none has needed them.
        image: of the last stretch: the image in which it begins, by its number, the number of all
            images and its tokens; None if it begins in text.
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
    cost: LoadCost = UNMEASURED
    computed: bool = False
    image: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        return self.end - self.start

    def redacted(self, *, before: bool = False) -> Miss:
        """The same without the tokens of other prompts.

        Args:
            before: leave out `before`, too: the prompt goes on from another user's prefix.
        """
        return replace(self, cached=(), before=() if before else self.before)

    def describe(self, decode: Decode | None = None) -> str:
        """One sentence; without `decode`, texts are shown as token ids."""
        if self.reason == "diverged":
            return self._describe_divergence(decode)
        where = f"{_tokens(len(self))} from token {self.start:,} on"
        if self.image is not None:
            where += f" (image {self.image[0]} of {self.image[1]})"
        sentence = _SENTENCES[self.reason, self.in_flight].format(where)
        return sentence + self._describe_cost() if self.reason in BELOW.values() else sentence

    def _describe_cost(self) -> str:
        load, compute = self.cost
        if load is None or compute is None or self.cost.pays:
            return "not loaded" if self.computed else "loaded"
        return f"computed, in some {_time(compute)}: loading them takes {_time(load)}"

    def _describe_divergence(self, decode: Decode | None) -> str:
        ours = _quote(self.before, self.prompt, self.start, decode)
        where = f"token {self.start:,} of {self.num_tokens:,}"
        if self.image is not None:
            number, count, size = self.image
            where = f"image {number} of {count}, {_tokens(size)}, at {where}"
        text = f"diverged at {where}: the prompt has {ours}"
        if self.cached:
            text += f", an earlier text {_quote(self.before, self.cached, self.start, decode)}"
        return text + (
            f"; {_tokens(len(self))} not cached, although {self.repeated:,} of them, from token "
            f"{self.rejoin:,} on, are the same in both: move what changes to the end"
        )


@dataclass(frozen=True)
class Loaded:
    """Says that tokens [start, end) of a prompt were loaded within `seconds`."""

    reason: ClassVar[Literal["loaded"]] = "loaded"
    medium: Medium
    start: int
    end: int
    seconds: float

    def __len__(self) -> int:
        return self.end - self.start

    def redacted(self, *, before: bool = False) -> Loaded:
        """Return it as it is: it shows no tokens."""
        return self

    def describe(self, decode: Decode | None = None) -> str:
        """One sentence."""
        time = _time(self.seconds)
        return f"loaded from {_LOADED_FROM[self.medium]}: {_tokens(len(self))}, {time}"


@dataclass(frozen=True)
class Explanation:
    """How much of a prompt is cached, and why the rest is not; prints a line for each stretch.

    The last token, which is in no stretch, has a line of its own, so that all add up.
    """

    num_tokens: int
    num_cached_tokens: int
    misses: list[Miss]
    decode: Decode | None = None

    def __str__(self) -> str:
        sentences = [miss.describe(self.decode) for miss in self.misses]
        below = [miss for miss in self.misses if miss.reason in BELOW.values()]
        loadable = sum(len(miss) for miss in below if miss.cost.pays)
        return summarise(self.num_tokens, self.num_cached_tokens, sentences, loadable)


def summarise(
    num_tokens: int, num_cached_tokens: int, sentences: Iterable[str], loadable: int = 0
) -> str:
    """How much of a prompt is cached, what can be loaded from lower tiers, and a line for each
    stretch that is not cached."""
    head = f"{num_cached_tokens:,} of {_tokens(num_tokens)} cached"
    head += f", {loadable:,} more to be loaded" if loadable else ""
    if num_cached_tokens == num_tokens:
        return f"{head}, and the logits at the end are kept: nothing is computed"
    return "\n- ".join([head, *sentences, "the last token is computed for its logits"])


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


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
