"""The schemes that led here, held against their rules case by case, and against brute force."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from radixcache import OutOfPages, PagePool
from radixcache.bench.replay.index_level import Serving, run_index
from radixcache.bench.replay.play import Arrivals
from radixcache.bench.schemes.first_blocks import FirstBlocksCache
from radixcache.bench.schemes.named import FAMILY, parse_scheme
from radixcache.bench.schemes.named_prefixes import PrefixObjectCache, TemplateCache
from radixcache.bench.workloads.generators import generate
from radixcache.bench.workloads.workload import Workload
from tests.bench.model import BruteFirst, BruteNamed
from tests.bench.replay.test_play import outcomes, random_workload, run
from tests.cover import covering


def tokens(count, start=0):
    return np.arange(start, start + count, dtype=np.int32)


def begin(cache, prompt):
    """Admit a request and schedule its whole prompt; the step has not run."""
    lease = cache.acquire(prompt)
    cache.reserve(lease, len(prompt))
    cache.publish(lease, prompt[lease.num_tokens :])
    cache.check()
    return lease


def end(cache, lease, answer):
    """All of the answer but its last token gets KV; then the request leaves."""
    if len(answer) > 1:
        cache.reserve(lease, lease.num_tokens + len(answer) - 1)
        cache.check()
        cache.publish(lease, answer[:-1], written=True)
    cache.check()
    cache.release(lease)
    cache.check()


def serve(cache, prompt, answer=(0,)):
    """A whole request; returns what it hit."""
    lease = begin(cache, prompt)
    cache.commit()
    end(cache, lease, answer)
    return lease.cached_tokens


# -- the prefix object and templates -----------------------------------------------------------


@pytest.mark.parametrize("kind", [PrefixObjectCache, TemplateCache])
def test_a_named_prefix_is_found_in_whole_blocks_and_nothing_else_is(kind):
    cache = kind(PagePool(32, 4), [tokens(10)])
    assert cache.match(tokens(20)) == 0
    assert serve(cache, tokens(20), tokens(9, 50)) == 0
    assert serve(cache, tokens(20)) == 8 == cache.match(tokens(9))  # not the prompt, not the answer
    assert cache.match(tokens(8)) == 0  # one token must be computed
    assert cache.cached_length(tokens(8)) == 8
    assert serve(cache, np.append(tokens(7), tokens(9, 70))) == 0  # all of it or nothing
    assert cache.match(tokens(20), namespace="other") == 0


def test_a_prefix_object_takes_memory_when_it_is_named_and_a_template_from_the_start():
    asked, registered = (
        kind(PagePool(32, 4), [tokens(8), tokens(12, 50)])
        for kind in (PrefixObjectCache, TemplateCache)
    )
    assert (asked.pool.num_free, registered.pool.num_free) == (32, 27)
    for cache, left in ((asked, 30), (registered, 27)):
        serve(cache, tokens(20))
        assert cache.evict(99) == 0  # never freed
        assert cache.pool.num_free == left
    for cache in (asked, registered):
        cache.reset()
        cache.check()
        assert cache.match(tokens(20)) == 0


@pytest.mark.parametrize("kind", [PrefixObjectCache, TemplateCache])
def test_prefixes_take_no_more_than_half_of_the_memory(kind):
    cache = kind(PagePool(10, 4), [tokens(12), tokens(12, 50), tokens(8, 90)])
    for start, hit in ((0, 12), (50, 0), (90, 8)):
        assert serve(cache, tokens(16, start)) == 0
        assert serve(cache, tokens(16, start)) == hit
    assert cache.pool.num_free == 5
    with pytest.raises(OutOfPages):
        cache.reserve(cache.acquire(tokens(24, 300)), 24)


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


# -- vLLM 0.4.3 --------------------------------------------------------------------------------


@pytest.mark.parametrize("generated", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64])
def test_a_prompt_sent_again_finds_what_the_rule_says(prompt, generated):
    cache = FirstBlocksCache(PagePool(16, 16))
    assert serve(cache, tokens(prompt), tokens(generated, 500)) == 0
    expected = 16 * max(0, min((prompt + generated - 1) // 16 - 1, -(-prompt // 16) - 1))
    assert cache.match(tokens(prompt)) == expected
    assert serve(cache, tokens(prompt)) == expected


def test_who_appends_to_a_shared_half_filled_block_gets_a_copy_and_the_last_one_keeps_it():
    cache = FirstBlocksCache(PagePool(16, 4))
    one, other = begin(cache, tokens(10)), begin(cache, tokens(10))
    cache.commit()
    cache.reserve(one, 11)
    ((source, target, num_slots),) = one.take_copies()
    assert (source, num_slots) == (other.page_table[2], 2) and target == one.page_table[2]
    assert one.page_table[:2].tolist() == other.page_table[:2].tolist()
    cache.reserve(other, 11)
    assert not other.take_copies() and other.page_table[2] == source
    assert cache.stats.copied_pages == 1
    cache.check()
    end(cache, one, tokens(2, 50))
    end(cache, other, tokens(2, 60))
    late = begin(cache, tokens(10))
    assert late.page_table[2] in (source, target)  # by the hash of the half-filled block


# -- all of them -------------------------------------------------------------------------------


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


def test_the_brute_force_reaches_copies_swaps_and_evictions():
    brute = BruteFirst(640, 4)
    run(repeating_workload(3), brute, checked=lambda: None)
    assert min(brute.copies, brute.swaps, brute.evicted) > 3


def test_each_step_of_the_family_finds_no_less_than_the_one_before():
    workload = generate("chat:conversations=8,turns=4", 0, 50_000)
    serving = Serving(Arrivals(concurrency=4))
    hits = [run_index(workload, parse_scheme(n), 1 << 14, serving).hit_tokens for n in FAMILY]
    assert hits == sorted(hits) and hits[0] == 0
