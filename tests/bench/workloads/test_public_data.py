"""Real text: where token-exact matching pays, and that it hardly does on long documents.

Runs only where the data are: in ../shared/data, or in the folder that RADIXCACHE_DATA names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from radixcache.bench.replay.index_level import Serving, run_index
from radixcache.bench.replay.play import Arrivals
from radixcache.bench.schemes.bounds import build_trie, unlimited_hits
from radixcache.bench.schemes.named import parse_scheme
from radixcache.bench.workloads.public_data import PUBLIC, data_folder, load_public

pytestmark = pytest.mark.skipif(data_folder() is None, reason="the public data are not here")

SERVING = Serving(Arrivals(concurrency=32))
# Of each workload the first requests, and between which bounds the tokens lie that blocks of 16
# prefill for one that a token-exact tree does.
RATIOS = {
    "gsm8k-best-of-8": (1600, 1.7, 1.9),
    "short-instructions": (1319, 1.4, 1.8),
    "gsm8k-8-shot": (400, 1.1, 1.35),
    "mt-bench": (160, 1.05, 1.25),
    "mmlu-5-shot": (1500, 1.04, 1.12),
    "long-documents": (600, 1.003, 1.011),
}


CHEAPEST = {"short-instructions", "mt-bench"}
EACH = [
    pytest.param(name, marks=() if name in CHEAPEST else pytest.mark.exhaustive) for name in RATIOS
]


@cache
def ratio(name: str) -> float:
    """Tokens that blocks of 16 prefill, over those of a token-exact tree."""
    workload = load_public(name)
    workload = replace(workload, arrivals=workload.arrivals[: RATIOS[name][0]])
    trie = build_trie(workload)
    room = 2 * trie.footprint // 16 * 16
    block, tree = (
        run_index(workload, parse_scheme(scheme), room, SERVING)
        for scheme in ("hash-16", "radix-1")
    )
    assert tree.hit_tokens == unlimited_hits(trie)
    assert not block.refused and not tree.refused
    return block.computed_tokens / tree.computed_tokens


def test_every_workload_is_measured():
    assert RATIOS.keys() == PUBLIC.keys()


@pytest.mark.parametrize("name", EACH)
def test_blocks_of_16_prefill_as_many_more_tokens_as_is_known(name):
    _, low, high = RATIOS[name]
    assert low < ratio(name) < high


def test_half_filled_pages_are_why_pages_hit_less_than_blocks_on_mt_bench():
    """In as much more memory as half-filled pages waste, they do not. One request at a time: what
    waiting ones will find is kept."""
    workload = load_public("mt-bench")
    serving, footprint = Serving(Arrivals(concurrency=1)), build_trie(workload).footprint
    block, tree, more = (
        run_index(workload, parse_scheme(scheme), int(share * footprint) // 16 * 16, serving)
        for scheme, share in (("hash-16", 0.6), ("radix-16", 0.6), ("radix-16", 0.615))
    )
    assert 0.02 < (tree.empty_share or 0) < 0.025
    assert tree.hit_tokens < 0.9 * block.hit_tokens < 0.92 * more.hit_tokens
