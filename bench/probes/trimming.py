"""Eviction of whole leaves against trimming them, and against hash-blocks, in too little memory.

Questions about long documents come in random order, about some documents more often than others;
the pool holds a small share of all tokens, so that most are evicted before they are asked about
again. An engine that drops whole
leaves throws away what a trimmed leaf would still give. Prints the share of prompt tokens hit.
"""

from __future__ import annotations

import argparse

import numpy as np

from radixcache import HashBlockCache, PagePool, PrefixCache, RadixCache


class WholeLeaves(RadixCache):
    """Drops each leaf whole, as SGLang's eviction does, however little is asked for."""

    def evict(self, num_pages: int) -> int:
        freed = 0
        while freed < num_pages and (leaf := self._order.first()) is not None:
            freed += super().evict(leaf.num_pages)
        return freed


CACHES = {"radix, whole leaves": WholeLeaves, "radix": RadixCache, "hash-block": HashBlockCache}


def ask(cache: PrefixCache, prompt: np.ndarray) -> int:
    """One request, prefilled at once; returns the tokens hit."""
    lease = cache.acquire(prompt)
    cache.reserve(lease, len(prompt))
    cache.publish(lease, prompt[lease.num_tokens :])
    lease.take_copies()
    cache.commit()
    cache.release(lease)
    return lease.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=17_800, help="of a document, mean (17800)")
    parser.add_argument("--questions", type=int, default=15, help="per document, mean (15)")
    parser.add_argument("--memory", type=float, default=0.06, help="share of all tokens (0.06)")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    questions = args.documents * args.questions
    print(f"{args.documents} documents, {questions} questions, page size {args.page_size}")
    for seed in args.seeds:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(args.tokens // 2, args.tokens * 3 // 2, args.documents)
        documents = [rng.integers(0, 100_000, size, dtype=np.int32) for size in sizes]
        popularity = 1 / np.arange(1, args.documents + 1)  # Zipf: some are asked about often
        order = rng.choice(args.documents, questions, p=popularity / popularity.sum())
        prompts = [
            np.concatenate((documents[i], rng.integers(0, 100_000, 60, dtype=np.int32)))
            for i in order
        ]
        footprint = int(sizes[np.unique(order)].sum()) + 60 * len(prompts)
        total = sum(map(len, prompts))
        num_pages = int(footprint * args.memory) // args.page_size
        rates = []
        for name, kind in CACHES.items():
            cache = kind(PagePool(num_pages, args.page_size))
            rates.append(f"{name} {sum(ask(cache, prompt) for prompt in prompts) / total:.2%}")
            cache.check()
        print(f"seed {seed}, {num_pages:,} pages: " + ", ".join(rates))


if __name__ == "__main__":
    main()
