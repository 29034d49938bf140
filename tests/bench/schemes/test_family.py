"""The schemes that led here, held against brute force."""

from __future__ import annotations

from random import Random

import numpy as np

from radixcache import PagePool
from radixcache.bench.replay.index_level import Serving, run_index
from radixcache.bench.replay.play import Arrivals
from radixcache.bench.schemes.named import FAMILY, parse_scheme
from radixcache.bench.schemes.named_prefixes import PrefixObjectCache, TemplateCache
from radixcache.bench.workloads.generators import generate
from radixcache.bench.workloads.workload import Workload
from tests.bench.model import BruteFirst, BruteNamed
from tests.bench.replay.random_play import outcomes, random_workload, run
from tests.helpers.cover import covering


def tokens(count, start=0):
    return np.arange(start, start + count, dtype=np.int32)


def test_a_workload_says_which_prefixes_an_operator_and_which_a_sender_knows():
    workload = generate("best-of-n:questions=3,n=2,instruction=20", 0, 50_000)
    (instruction,) = workload.templates()
    assert len(instruction) == 20
    prompts = [arrival.prompt() for arrival in workload.arrivals[::2]]
    for stem, prompt in zip(workload.stems(), prompts, strict=True):
        assert np.array_equal(stem, prompt[:-1])
    assert not generate("bursts:bursts=2,size=2", 0, 100).templates()
    assert len(generate("chat:conversations=3,turns=2", 0, 100).stems()) == 1
    assert len(generate("few-shot:tasks=3,questions=2", 0, 100).templates()) == 3
    assert len(generate("documents:documents=2,questions=20", 0, 100).templates()) == 2


def test_a_template_takes_memory_from_the_start_and_a_prefix_object_when_it_is_named():
    names = [tokens(8), tokens(12, 50)]
    for kind, free in ((TemplateCache, 27), (PrefixObjectCache, 32)):
        assert kind(PagePool(32, 4), names).pool.num_free == free


@covering(seed=range(8), size=[4, 16], memory=[192, 320, 640, 4096], kind=["prefix", "template"])
def test_named_prefixes_hit_what_a_brute_force_simulation_hits(seed, size, memory, kind):
    workload = random_workload(seed)
    names = workload.templates() if kind == "template" else workload.stems()
    brute = BruteNamed(memory, size, names, kind == "template")
    settings = {"concurrency": 1 + seed % 4, "budget": (24, 64, 500)[seed % 3]}
    expected = outcomes(run(workload, brute, checked=lambda: None, **settings))
    found = run(workload, parse_scheme(f"{kind}-{size}").make(memory, workload), **settings)
    assert outcomes(found) == expected, f"seed {seed}"


def repeating_workload(seed):
    """Few prompts and few answers, so that requests in flight share half-filled blocks."""
    rng = Random(f"repeating {seed}")
    workload = Workload("repeating", f"seed {seed}")
    texts = [tokens(60, 100 * number) for number in range(3)]
    for _ in range(80):
        parts = [rng.choice(texts)[: rng.randint(1, 40)] for _ in range(rng.randint(1, 2))]
        workload.add(parts, rng.choice(texts)[: rng.randint(1, 30)])
        for _ in range(rng.randint(0, 2)):
            workload.add(parts, rng.choice(texts)[: rng.randint(1, 30)], together=True)
    return workload


@covering(
    seed=range(6), size=[4, 16], memory=[192, 640, 4096], make=[random_workload, repeating_workload]
)
def test_first_blocks_hit_what_a_brute_force_simulation_hits(seed, size, memory, make):
    workload = make(seed)
    settings = {"concurrency": 1 + seed % 4, "budget": (24, 64, 500)[seed % 3]}
    brute = BruteFirst(memory, size)
    expected = outcomes(run(workload, brute, checked=lambda: None, **settings))
    cache = parse_scheme(f"cow-{size}").make(memory)
    assert outcomes(run(workload, cache, **settings)) == expected, f"seed {seed}"
    assert (cache.stats.evicted_pages, cache.stats.copied_pages) == (brute.evicted, brute.copies)


def test_first_blocks_copy_what_a_shared_block_has_and_never_find_the_last_one():
    cache = parse_scheme("cow-4").make(64)
    one, other = leases = [cache.acquire(tokens(10)) for _ in range(2)]
    for lease in leases:
        cache.reserve(lease, 10)
        cache.publish(lease, tokens(10))
    cache.commit()
    cache.reserve(one, 11)
    assert [(c[0], c[2]) for c in one.take_copies()] == [(other.page_table[2], 2)]
    assert (cache.match(tokens(4)), cache.match(tokens(10))) == (0, 4)


def test_the_brute_force_reaches_copies_swaps_and_evictions():
    brute = BruteFirst(640, 4)
    run(repeating_workload(3), brute, checked=lambda: None)
    assert min(brute.copies, brute.swaps, brute.evicted) > 3


def test_each_step_of_the_family_finds_no_less_than_the_one_before():
    workload = generate("chat:conversations=8,turns=4", 0, 50_000)
    serving = Serving(Arrivals(concurrency=4))
    hits = [run_index(workload, parse_scheme(n), 1 << 14, serving).hit_tokens for n in FAMILY]
    assert hits == sorted(hits) and hits[0] == 0
