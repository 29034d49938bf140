"""Processor time of the routing policy, µs: choosing a replica, and keeping the books.

Every prompt begins with one of 30 stems, each of which some replicas have cached by then. The
machine's other work counts as far as it takes caches and clock away.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from radixcache.base import Tokens
from radixcache.runtime.routing.policy import Router


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64], help="(2 8 64)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt (4096)")
    parser.add_argument("--requests", type=int, default=2000, help="timed, after as many (2000)")
    args = parser.parse_args()
    for replicas in args.replicas:
        measure(replicas, args.tokens, args.requests)


def measure(replicas: int, length: int, requests: int) -> None:
    """Print medians and 99th percentiles, with 20 requests in flight."""
    rng = np.random.default_rng(0)

    def text(count: int) -> Tokens:
        return rng.integers(0, 32_000, count, dtype=np.int32)

    stems = [text(length - 96) for _ in range(30)]
    router = Router()
    for name in range(replicas):
        router.add(name, kv_tokens=500_000)
    times: dict[str, list[float]] = {"order": [], "choose and book": [], "release": []}

    def timed(name: str, key: int, since: float) -> None:
        if key >= requests:
            times[name].append((time.thread_time() - since) * 1e6)

    for key in range(2 * requests):
        prompt, answer = np.concatenate((stems[key * 7 % 30], text(96))), text(100)
        start = time.thread_time()
        router.order(prompt)
        timed("order", key, start)
        start = time.thread_time()
        router.choose(key, prompt)
        timed("choose and book", key, start)
        start = time.thread_time()
        router.started(key - 10)
        router.release(key - 20, answer)
        timed("release", key, start)
    found = [
        f"{name} {np.median(taken):.0f} (p99 {np.percentile(taken, 99):.0f})"
        for name, taken in times.items()
    ]
    print(f"{replicas} replicas, {length} tokens, µs: {', '.join(found)}")


if __name__ == "__main__":
    main()
