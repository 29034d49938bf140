"""What "why not a hit?" costs: trace T with every request explained, in time and memory.

The time of the explainer's calls beside the time of the cache's own, both in microseconds per
request; a request is one turn of some thousands of prompt tokens and 300 generated ones. Prints
what the missed tokens were missed for, too.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from bench.peers.index.trace_t import Request, Tokens, TraceT, replay
from radixcache import HashBlockCache, Lease, PagePool, PrefixCache, RadixCache
from radixcache.runtime.engine.explain import Explainer

CACHES: dict[str, Callable[[PagePool], PrefixCache]] = {
    "radix": RadixCache,
    "hash-block": HashBlockCache,
}
AHEAD = 128


class Explained:
    """A cache, driven as our scheduler drives it, and its explainer. A `Replayed`."""

    def __init__(self, trace: TraceT, cache: PrefixCache) -> None:
        self.cache = cache
        self.explainer = Explainer(cache)
        self.texts = trace.texts()
        self.leases: dict[int, Lease] = {}
        self.cache_ns = self.explain_ns = self.remember_ns = 0

    def _cache(self, call: Callable[..., Any], *args: Any) -> Any:
        start = perf_counter_ns()
        result = call(*args)
        self.cache_ns += perf_counter_ns() - start
        return result

    def _observe(self, prompt: Tokens, hit: int) -> None:
        start = perf_counter_ns()
        self.explainer.observe(prompt, hit)
        self.explain_ns += perf_counter_ns() - start

    def _remember(self, tokens: Tokens) -> None:
        start = perf_counter_ns()
        self.explainer.remember(tokens)
        self.remember_ns += perf_counter_ns() - start

    def decode(self, requests: list[Request]) -> None:
        for request in requests:
            lease = self.leases[request.number]
            if request.done + 1 > lease.capacity:
                end = min(request.done + AHEAD, request.num_tokens)
                self._cache(self.cache.reserve, lease, end)

    def admit(self, request: Request) -> int:
        prompt = self.texts[request.conversation][: request.num_prompt]
        lease = self._cache(self.cache.acquire, prompt)
        self._cache(self.cache.reserve, lease, len(prompt))
        self._observe(prompt, lease.cached_tokens)
        self._remember(prompt)
        self._cache(self.cache.publish, lease, prompt[lease.num_tokens :])
        lease.take_copies()
        self.leases[request.number] = lease
        hit: int = lease.cached_tokens
        return hit

    def end_step(self) -> None:
        self._cache(self.cache.commit)

    def finish(self, request: Request) -> None:
        lease = self.leases.pop(request.number)
        tokens = self.texts[request.conversation][: request.num_tokens]
        self._remember(tokens)
        publish = self.cache.publish
        self._cache(lambda: publish(lease, tokens[lease.num_tokens :], written=True))
        self._cache(self.cache.release, lease)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trace = TraceT(seed=args.seed, conversations=args.conversations)
    print(f"trace T, {trace.requests:,} requests, page size {args.page_size}, seed {args.seed}")
    for name, make in CACHES.items():
        replayed = Explained(trace, make(PagePool(trace.num_pages(args.page_size), args.page_size)))
        for count in replay(trace, replayed):  # noqa: B007
            pass
        explainer = replayed.explainer
        times = (replayed.cache_ns, replayed.explain_ns, replayed.remember_ns)
        cache, explain, remember = (ns / 1000 / trace.requests for ns in times)
        print(
            f"{name}: {count.rate:.1%} hit; per request {cache:,.0f} µs in the cache, "
            f"{explain:,.0f} µs to explain and {remember:,.0f} µs to remember "
            f"({(explain + remember) / cache:.2f} of the cache's)"
        )
        missed = explainer.missed_tokens
        total = sum(missed.values())
        print("  missed: " + ", ".join(f"{k} {v / total:.1%}" for k, v in missed.items() if v))
    gc.collect()
    texts = trace.texts()
    tracemalloc.start()
    explainer = Explainer(RadixCache(PagePool(trace.num_pages(args.page_size), args.page_size)))
    for text in texts:
        explainer.remember(text)
    used = tracemalloc.get_traced_memory()[0]
    remembered = min(trace.footprint, explainer.num_tokens)
    print(f"memory: {used / remembered:.1f} bytes per remembered token")


if __name__ == "__main__":
    main()
