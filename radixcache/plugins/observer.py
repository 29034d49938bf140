"""Explains another engine's prefix cache: its hits, its misses, and what would have been hits.

The engine reports each prompt that it admits with its hit, and the tokens that it computes. Three
ghosts of its cache remember once, twice and four times as many tokens as its KV memory holds. The
first tells what token-exact reuse would hit in the same memory. The others take whole blocks, as
the engine does, and tell what more memory would hit. They evict least recently used tokens first
(Mattson et al., 1970: hits of all sizes from one trace). The engine's KV is not touched.
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

from radixcache.base import PrefixCache
from radixcache.hash_block.cache import HashBlockCache
from radixcache.pages import PagePool
from radixcache.radix.cache import RadixCache
from radixcache.radix.ghost import GhostIndex
from radixcache.runtime.engine.explain import Explainer
from radixcache.tokens import Tokens, TokensLike, as_tokens

FILE = "RADIXCACHE_REPORT"
"""The environment variable that names a file to which JSON lines are appended, if it is set."""

REASONS = ("first_seen", "diverged", "evicted", "block_size", "salt", "not_read")
"""`radixcache.runtime.engine.explain` defines the first three; but here, "diverged" are only the
tokens that both texts have in common again. `block_size`: computed before, but only whole blocks
are cached. `salt`: computed under another `cache_salt` or adapter. `not_read`: the
request did not look, as with log-probabilities of the prompt."""

_METRICS = {
    "requests": "Requests that were admitted.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "hit_tokens": "Prompt tokens that the engine's prefix cache had.",
    "exact_tokens": "Prompt tokens that a token-exact cache of the same size would have had.",
    "twice_tokens": "Prompt tokens that the cache would have had in twice the memory.",
    "fourfold_tokens": "Prompt tokens that the cache would have had in four times the memory.",
    "missed_tokens": "Prompt tokens that were computed, by reason.",
}

BYTES_PER_TOKEN = (20, 320)
"""Memory of a ghost: with long texts; with prompts of a few tokens, each with its own salt."""

_log = logging.getLogger("radixcache.plugins")
_P = ParamSpec("_P")


class Stretch(NamedTuple):
    """Tokens [start, end) of a prompt that were not cached, and why."""

    reason: str
    start: int
    end: int


def fail_safe(method: Callable[Concatenate[Any, _P], None]) -> Callable[Concatenate[Any, _P], None]:
    """Decorates a plugin's method, so that no error in it stops the engine.

    The plugin's `observer` becomes None after an error, and its methods then do nothing.
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
    """Observes the prefix cache of one engine, in its scheduler's thread.

    Args:
        engine: name and version.
        capacity: tokens whose KV fits the engine's memory.
        block_size: tokens of the blocks that the engine caches.
    """

    def __init__(self, engine: str, capacity: int, block_size: int) -> None:
        self.counts: Counter[str] = Counter()
        """Counts since the last `take`, by metric; `missed_tokens:REASON` for each reason."""
        self._block_size = block_size
        # An empty cache that hits by the engine's rule; the engine itself reports the hits.
        empty: PrefixCache = RadixCache(PagePool(1, 1))
        if block_size > 1:
            empty = HashBlockCache(PagePool(2, block_size))
        self._explainer = Explainer(empty, 4 * capacity)
        self._exact, self._twice = GhostIndex(capacity), GhostIndex(2 * capacity)
        self._capacity = capacity
        self._salted: GhostIndex | None = None  # salted tokens, without their salts
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
        """Note that a prompt is admitted, with a hit of `hit` tokens. O(len(tokens)).

        Args:
            namespace: what else must be equal for a hit, such as a salt; None if nothing must.
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
        else:  # it would not have looked into another cache, either
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
        """Note that the KV of `tokens`, a text from its beginning, is there. O(len(tokens))."""
        tokens = as_tokens(tokens)
        if namespace is not None:
            if self._salted is None:
                self._salted = GhostIndex(4 * self._capacity)
            self._salted.remember(tokens)
        self._explainer.remember(tokens, namespace)
        self._exact.remember(tokens, namespace)
        self._twice.remember(tokens, namespace)

    def take(self) -> dict[str, int]:
        """Take the counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def _explain(self, tokens: Tokens, hit: int, namespace: Hashable) -> list[Stretch]:
        stretches = []
        for miss in self._explainer.explain(tokens, hit, namespace):
            if miss.reason not in ("first_seen", "diverged"):
                reason = "block_size" if miss.reason == "page_not_finished" else miss.reason
                stretches.append(Stretch(reason, miss.start, miss.end))
                continue
            salted = miss.start if namespace is None else self._explainer.known(tokens)
            if self._salted is not None:
                salted = max(salted, self._salted.match(tokens))
            salted = max(miss.start, salted)  # known up to here under another salt
            same = (max(miss.rejoin, salted), max(miss.rejoin + miss.repeated, salted))
            stretches += [
                Stretch("salt", miss.start, salted),
                Stretch("first_seen", salted, same[0] if miss.repeated else miss.end),
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
    """Add counts to the metrics `radixcache_*_total`; missed tokens are labelled by reason.

    Args:
        kind: prometheus_client's `Counter`, or the engine's substitute.
        counters: the counters made so far, by name.
        labels: labels that name the engine.
    """
    for key, count in counts.items():
        name, _, reason = key.partition(":")
        all_labels = labels | ({"reason": reason} if reason else {})
        if name not in counters:
            counters[name] = kind(f"radixcache_{name}", _METRICS[name], [*all_labels])
        (counters[name].labels(**all_labels) if all_labels else counters[name]).inc(count)


def summary(counts: dict[str, int]) -> dict[str, str]:
    """Shares of the prompt tokens, for a log line."""
    names = {"hit": "hit_tokens", "token-exact": "exact_tokens", "twice the memory": "twice_tokens"}
    names["four times"] = "fourfold_tokens"
    names |= {reason.replace("_", " "): f"missed_tokens:{reason}" for reason in REASONS}
    total = max(1, counts.get("prompt_tokens", 0))
    shares = {name: counts.get(key, 0) / total for name, key in names.items()}
    figures = {"prompt tokens": f"{counts.get('prompt_tokens', 0):,}"}
    return figures | {name: f"{share:.1%}" for name, share in shares.items() if share}
