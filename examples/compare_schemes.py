"""Caching schemes on one trace: what each prefills of the same requests, in the same memory.

    .venv/bin/python examples/compare_schemes.py    # NumPy and sortedcontainers, no torch

All schemes stand behind `PrefixCache`, so one loop drives them. Requests come one after the other;
`radixcache bench` has many at once, traces from files, and a model.
"""

import random

from radixcache import HashBlockCache, NoCache, PagePool, PrefixCache, RadixCache

MEMORY = 1 << 18  # tokens: enough for all


def schemes() -> dict[str, PrefixCache]:
    return {
        "no cache": NoCache(PagePool(MEMORY // 16, 16)),
        "hash-64": HashBlockCache(PagePool(MEMORY // 64, 64)),
        "hash-16": HashBlockCache(PagePool(MEMORY // 16, 16)),
        "radix-16": RadixCache(PagePool(MEMORY // 16, 16)),
    }


def trace(stem: int, question: int) -> list[list[int]]:
    """200 prompts in random order: one of 8 texts of `stem` tokens each, then `question` tokens."""
    rng = random.Random(0)
    texts = [rng.choices(range(50_000), k=stem) for _ in range(8)]
    return [rng.choice(texts) + rng.choices(range(50_000), k=question) for _ in range(200)]


def prefilled(cache: PrefixCache, prompts: list[list[int]]) -> int:
    """Prompt tokens that an engine with this cache computes."""
    for prompt in prompts:
        lease = cache.acquire(prompt)
        cache.reserve(lease, len(prompt))
        cache.publish(lease, prompt[lease.num_tokens :])
        cache.commit()
        cache.release(lease)
    return cache.stats.query_tokens - cache.stats.hit_tokens


print(f"{'prompt tokens prefilled':32}", *(f"{name:>10}" for name in schemes()))
for stem, question in ((90, 10), (6010, 400)):
    name = f"text of {stem:,}, question of {question}"
    counts = [prefilled(cache, trace(stem, question)) for cache in schemes().values()]
    print(f"{name:32}", *(f"{count:10,}" for count in counts))
print("\nBlocks round a hit down, and every request computes the rest of its text again:")
print("no less here than the short question has itself, and little beside the long one.")
