"""The index in an engine of one's own: page numbers are all that it knows.

    .venv/bin/python examples/own_engine.py         # NumPy and sortedcontainers, no torch

The engine below is a toy. Its "KV" of a token is the token itself, in an array of pages; so it can
check, as no real engine can, that the pages that the index names hold the very sequence. What it
does around the index is what a real engine does, in the same order.
"""

import numpy as np

from radixcache import PagePool, RadixCache

PAGE_SIZE = 4
cache = RadixCache(PagePool(num_pages=32, page_size=PAGE_SIZE))
kv = np.full((32, PAGE_SIZE), -1)  # of a real model: [pages, slots, heads, dim], twice a layer


def run(text: str) -> None:
    """Prefill one prompt, a letter being a token, and tell what it took."""
    tokens = [ord(letter) for letter in text]
    lease = cache.acquire(tokens)  # pins the longest cached prefix
    cache.reserve(lease, len(tokens))  # pages for the rest; evicts if it must
    cache.publish(lease, tokens[lease.num_tokens :])  # others may share them from now on

    copies = lease.take_copies()  # a prefix that ends in mid-page: copy before writing
    for copy in copies:
        kv[copy.target, : copy.num_slots] = kv[copy.source, : copy.num_slots]
    for position in range(lease.cached_tokens, len(tokens)):  # the model runs on these alone
        kv[lease.page_table[position // PAGE_SIZE], position % PAGE_SIZE] = tokens[position]
    cache.commit()  # the step has run

    held = kv[lease.page_table].ravel()[: len(tokens)]
    assert held.tolist() == tokens, "a page holds another sequence's token"
    print(f"{lease.cached_tokens:6} {len(tokens) - lease.cached_tokens:9} {len(copies):7}  {text}")
    cache.release(lease)  # stays cached until evicted


print("cached  computed  copies  prompt")
for prompt in ("the cat sat on the mat", "the cat sat on the map", "the cat ran", "a dog", "a den"):
    run(prompt)
cache.check()  # verifies every invariant
print(
    f"\nA page holds {PAGE_SIZE} letters, and yet a hit ends at any letter: if that is in mid-page,"
)
print("this one page is copied. Every page held what it should.")
