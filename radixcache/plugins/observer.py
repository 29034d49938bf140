"""What another engine's prefix cache held of each prompt, why not the rest, and what would have.

An engine says which prompt it admits with which hit, and what it computes. Of that, three ghosts of
its cache remember token by token as much as its KV memory holds, twice and four times that: the
first tells what token-exact reuse would hit in the same memory, the others what more memory would
hit by the engine's own rule, which takes whole blocks. They evict what was used least recently
(Mattson et al., 1970, on telling the hits of all sizes from one trace). Nobody's KV is touched.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec

from radixcache.base import PrefixCache, Tokens, TokensLike, as_tokens
from radixcache.ghost import GhostIndex
from radixcache.hash_block import HashBlockCache
from radixcache.pages import PagePool
from radixcache.radix import RadixCache
from radixcache.runtime.engine.explain import Explainer

FILE = "RADIXCACHE_REPORT"
"""The variable that names the file of JSON lines, to which a process appends; without, none."""

REASONS = ("first_seen", "diverged", "evicted", "block_size", "salt", "not_read")
"""`radixcache.runtime.engine.explain` has the first three; of what it calls diverged, only what is
the same in both texts is called so here. `block_size`: computed before, but only whole blocks are
cached. `salt`: computed under another `cache_salt` or adapter. `not_read`: the request did not
look, as with log-probabilities of the prompt."""

_METRICS = {
    "requests": "Requests that were admitted.",
    "prompt_tokens": "Tokens of their prompts.",
    "hit_tokens": "Of these, those that the engine's prefix cache had.",
    "exact_tokens": "Of these, those that a token-exact cache of the same size would have had.",
    "twice_tokens": "Of these, those that the engine's cache would have had in twice the memory.",
    "fourfold_tokens": "Of these, those that it would have had in four times the memory.",
    "missed_tokens": "Of these, those that were computed, by reason.",
}

BYTES_PER_TOKEN = (20, 320)
"""Of a ghost: with long texts; with prompts of a few tokens, each with a salt of its own."""

_log = logging.getLogger("radixcache.plugins")
_P = ParamSpec("_P")


class Stretch(NamedTuple):
    """Tokens [start, end) of a prompt that were not cached, and why."""

    reason: str
    start: int
    end: int


def looking(method: Callable[Concatenate[Any, _P], None]) -> Callable[Concatenate[Any, _P], None]:
    """Of a plugin, which has an `observer`, or None: the engine goes on, whatever happens here.

    After an error nothing more is looked at.
    """

    @wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.observer is None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.observer = None
            _log.exception("radixcache stops looking at the prefix cache; the engine goes on")

    return call


class Observer:
    """Looks at the prefix cache of one engine, from its scheduler's thread.

    Args:
        engine: name and version.
        capacity: tokens whose KV the engine has room for.
        block_size: it caches whole blocks of so many tokens.
    """

    def __init__(self, engine: str, capacity: int, block_size: int) -> None:
        self.counts: Counter[str] = Counter()
        """Since the last `take`: the metrics' names, `missed_tokens:` with a reason."""
        self._block_size = block_size
        # An empty cache with the rule of the engine's; its hits are told, not asked for.
        empty: PrefixCache = RadixCache(PagePool(1, 1))
        if block_size > 1:
            empty = HashBlockCache(PagePool(2, block_size))
        self._explainer = Explainer(empty, 4 * capacity)
        self._exact, self._twice = GhostIndex(capacity), GhostIndex(2 * capacity)
        self._capacity = capacity
        self._salted: GhostIndex | None = None  # what has a salt, as if it had none
        self._run = f"{time.time_ns():x}"
        self._file, path = None, os.environ.get(FILE)
        if path:
            try:
                self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                _log.error("no lines for radixcache report: %s", error)
        _log.info(
            "radixcache looks at the prefix cache of %s: %s tokens in blocks of %d; it remembers "
            "%s tokens at most, in %d MB with long texts and %d MB at the very worst; %s",
            engine, f"{capacity:,}", block_size, f"{11 * capacity:,}",
            *(11 * capacity * each >> 20 for each in BYTES_PER_TOKEN),
            f"appends to {path}" if self._file else f"no {FILE}",
        )  # fmt: skip
        self._write(
            {"run": self._run, "engine": engine, "capacity": capacity, "block_size": block_size}
        )

    def admit(
        self,
        request: str,
        tokens: TokensLike,
        hit: int,
        namespace: Hashable = None,
        read: bool = True,
    ) -> None:
        """A prompt is admitted, of which the engine has found `hit` tokens. O(len(tokens)).

        Args:
            namespace: what else must be the same for a hit, as a salt; None if there is nothing.
            read: whether the engine looked into its cache at all.
        """
        tokens = as_tokens(tokens)
        last = max(0, len(tokens) - 1)
        size, would = self._block_size, dict.fromkeys(("exact", "twice", "fourfold"), hit)
        if read:
            misses = self._explain(tokens, hit, namespace)
            would["exact"] = self._exact.match(tokens, namespace)
            would["twice"] = self._twice.match(tokens, namespace) // size * size
            would["fourfold"] = self._explainer.known(tokens, namespace) // size * size
        else:  # nor would it have looked into another cache
            misses = [Stretch("not_read", hit, last)] if hit < last else []
        self.counts.update(
            {"requests": 1, "prompt_tokens": len(tokens), "hit_tokens": hit}
            | {f"{name}_tokens": count for name, count in would.items()}
        )
        for reason, start, end in misses:
            self.counts[f"missed_tokens:{reason}"] += end - start
        line = {"run": self._run, "time": round(time.time(), 3), "request": request}
        self._write({**line, "tokens": len(tokens), "hit": hit, **would, "misses": misses})

    def compute(self, tokens: TokensLike, namespace: Hashable = None) -> None:
        """KV of all these tokens, a text from its beginning on, is there now. O(len(tokens))."""
        tokens = as_tokens(tokens)
        if namespace is not None:
            if self._salted is None:
                self._salted = GhostIndex(4 * self._capacity)
            self._salted.remember(tokens)
        self._explainer.remember(tokens, namespace)
        self._exact.remember(tokens, namespace)
        self._twice.remember(tokens, namespace)

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def _explain(self, tokens: Tokens, hit: int, namespace: Hashable) -> list[Stretch]:
        stretches = []
        for miss in self._explainer.explain(tokens, hit, namespace):
            if miss.reason not in ("first_seen", "diverged"):
                reason = "block_size" if miss.reason == "page_not_finished" else miss.reason
                stretches.append(Stretch(reason, miss.start, miss.end))
                continue
            foreign = miss.start if namespace is None else self._explainer.known(tokens)
            if self._salted is not None:
                foreign = max(foreign, self._salted.match(tokens))
            foreign = max(miss.start, foreign)
            same = (max(miss.rejoin, foreign), max(miss.rejoin + miss.repeated, foreign))
            stretches += [
                Stretch("salt", miss.start, foreign),
                Stretch("first_seen", foreign, same[0] if miss.repeated else miss.end),
                Stretch("diverged", *same),
                Stretch("first_seen", same[1] if miss.repeated else miss.end, miss.end),
            ]
        return [one for one in stretches if one.start < one.end]

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self._file = None
            _log.error("no more lines for radixcache report: %s", error)


def prometheus(
    kind: Callable[..., Any],
    counters: dict[str, Any],
    counts: dict[str, int],
    labels: dict[str, Any],
) -> None:
    """Add counts to `radixcache_*_total`; `radixcache_missed_tokens_total` is by reason.

    Args:
        kind: prometheus_client's `Counter`, or what the engine has instead.
        counters: those made so far, by name.
        labels: what the engine tells of itself.
    """
    for key, count in counts.items():
        name, _, reason = key.partition(":")
        all_labels = labels | ({"reason": reason} if reason else {})
        if name not in counters:
            counters[name] = kind(f"radixcache_{name}", _METRICS[name], [*all_labels])
        (counters[name].labels(**all_labels) if all_labels else counters[name]).inc(count)


def summary(counts: dict[str, int]) -> dict[str, str]:
    """Shares of the prompt tokens, for a line of the log."""
    names = {"hit": "hit_tokens", "token-exact": "exact_tokens", "twice the memory": "twice_tokens"}
    names["four times"] = "fourfold_tokens"
    names |= {reason.replace("_", " "): f"missed_tokens:{reason}" for reason in REASONS}
    total = max(1, counts.get("prompt_tokens", 0))
    shares = {name: counts.get(key, 0) / total for name, key in names.items()}
    figures = {"prompt tokens": f"{counts.get('prompt_tokens', 0):,}"}
    return figures | {name: f"{share:.1%}" for name, share in shares.items() if share}
