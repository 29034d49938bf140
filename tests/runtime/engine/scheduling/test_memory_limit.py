"""What is accepted runs: at any page size, in any pool, whatever is cached, shared or pinned."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from radixcache import InvalidRequest, PinError, SamplingParams
from radixcache.runtime.engine.scheduling.scheduler import NO_ROOM, Scheduler
from radixcache.runtime.request import Request, Sequence
from tests.helpers.cover import seeds
from tests.helpers.drafts import speculate
from tests.helpers.engines import CACHES, assert_no_page_is_lost, finish
from tests.helpers.hash_model import VOCAB, assert_cached_is_computed, hash_engine
from tests.helpers.tiers import MemoryStore, attach

KINDS = ("radix", "radix", "radix", "hash-block", "none")


class AtTheLimit:
    """An engine whose pool holds hardly more than one request, all of it drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seen = Counter[str]()
        self.page_size = rng.choice([1, 2, 3, 4, 8, 16])
        running, states = rng.choice([1, 2, 16]), 0
        if rng.random() < 0.25:
            states = running + rng.choice([1, 2, 9])
        self.num_pages = rng.choice([3, 4, 5, 8, rng.randint(3, 20)])
        budget = rng.choice([3, 9, 200])
        kind = rng.choice(KINDS)
        self.engine = hash_engine(kind, self.page_size, self.num_pages, budget, running, states)
        self.engine.scheduler.fail = self.fail  # type: ignore[method-assign]
        self.engine.overlap = not states and rng.random() < 0.5
        if kind == "radix" and not states and rng.random() < 0.3:
            attach(self.engine, MemoryStore(self.engine.kv_pool), rng.choice([4, 200]))
        if not states and rng.random() < 0.3:
            speculate(self.engine, 400)
        self.pins = rng.random() < 0.5
        self.texts: list[list[int]] = [self.text()]
        self.live: list[Request] = []

    def text(self) -> list[int]:
        most = self.num_pages * self.page_size
        return [self.rng.randrange(VOCAB - 1) for _ in range(self.rng.randint(1, most))]

    def left(self, tokens: Any, namespace: Any) -> int:
        """Pages that such a prompt and its answer may have; one is spare."""
        return self.num_pages - 1 - self.engine.cache.pinned_pages_beside(tokens, namespace)

    def ask(self) -> None:
        """One that takes all that there is, or nearly so; it parts from a text before anywhere."""
        rng = self.rng
        base = rng.choice(self.texts)
        cut = rng.choice([0, len(base), rng.randrange(len(base) + 1)])
        prompt = (base[:cut] + (self.text() if rng.random() < 0.8 else [])) or [0]
        namespace = "salt" if rng.random() < 0.1 else None
        room = self.left(prompt, namespace) * self.page_size
        total = room - rng.choice([0, 0, 0, 1, rng.randrange(max(1, room))])
        count = rng.choice([1, 2, 4, rng.randint(1, max(1, total))])
        prompt = prompt[: max(1, total - count + 1)]
        if total > 40:  # the longer they are, the fewer may be one request's
            count = min(count, 12)
        options: dict[str, Any] = {"ignore_eos": rng.random() < 0.7, "n": rng.choice([1, 1, 1, 3])}
        if rng.random() < 0.1:
            options["prompt_logprobs"] = 1
        params = SamplingParams(temperature=rng.choice([0, 1]), max_tokens=count, **options)
        try:
            request = self.engine.add_request(prompt, params, namespace=namespace)
        except InvalidRequest:
            assert -(-(len(prompt) + count - 1) // self.page_size) > self.left(prompt, namespace)
            self.seen["refused"] += 1
        else:
            self.live.append(request)
            self.seen["accepted"] += 1
            self.seen["at the limit"] += -(-(len(prompt) + count - 1) // self.page_size) == (
                room // self.page_size
            )

    def pin(self) -> None:
        cache, rng = self.engine.cache, self.rng
        if cache.pins and rng.random() < 0.5:
            namespace, name = rng.choice([*cache.pins])
            cache.unpin(name, namespace)
            return
        tokens = rng.choice(self.texts)
        try:
            cache.pin(str(rng.randrange(3)), tokens[: rng.randint(1, len(tokens))])
            self.seen["pins"] += 1
        except PinError:
            pass

    def fail(self, sequence: Sequence, error: str, **_: Any) -> None:
        """Nobody that was accepted fails, but who has no room beside what was pinned since."""
        assert error == NO_ROOM and self.pins
        tokens, namespace = sequence.request.prompt_token_ids, sequence.request.namespace
        pages = -(-sequence.max_length // self.page_size)
        free = self.left(tokens, namespace)
        assert pages > free, f"{pages} pages do not fit {free}"
        self.seen["failed beside new pins"] += 1
        Scheduler.fail(self.engine.scheduler, sequence, error)

    def look(self) -> None:
        for request in [request for request in self.live if request.finished]:
            self.live.remove(request)
            self.seen["ended"] += 1
            for sequence in request.sequences:
                self.texts = [*self.texts, sequence.tokens.tolist()][-8:]

    def play(self, num_requests: int) -> Counter[str]:
        steps = 0  # since somebody has ended
        while self.seen["accepted"] + self.seen["refused"] < num_requests or self.live:
            if self.rng.random() < 0.3 and self.seen["accepted"] < num_requests:
                self.ask()
            if self.pins and self.rng.random() < 0.1:
                self.pin()
            ended = self.seen["ended"]
            self.engine.step()
            self.engine.check()
            self.look()
            steps = 0 if self.seen["ended"] > ended or not self.live else steps + 1
            assert steps < 3000, "nobody ends"
        model: Any = self.engine.model
        assert not model.unwritten and not getattr(model, "wrong_states", 0)
        assert_cached_is_computed(self.engine)
        for namespace, name in [*self.engine.cache.pins]:
            self.engine.cache.unpin(name, namespace)
        assert_no_page_is_lost(self.engine)
        self.seen["preempted"] += self.engine.scheduler.num_preemptions
        return self.seen


@seeds(20_261_127, 20)
def test_what_is_accepted_runs_at_the_limit_of_the_memory(seed: int) -> None:
    """With the exhaustive seeds, more than 10,000 requests."""
    seen = Counter[str]()
    for run in range(25):
        number = 1000 * seed + run
        try:
            seen += AtTheLimit(number).play(20)
        except BaseException as error:
            raise AssertionError(f"run {number}: {error!r}") from error
    print(f"seed {seed}: {dict(seen)}")
    assert seen["at the limit"] > 80 and seen["pins"] and seen["preempted"]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("parts_at", range(13))
def test_a_text_runs_again_where_others_have_parted_from_it_in_mid_page(cache, parts_at) -> None:
    """A page at a branch and the copy of it are not both needed: 16 tokens fit 4 pages of 5."""
    engine = hash_engine(cache, page_size=4, num_pages=5)
    text, params = [*range(13)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for prompt in (
        [*text[:parts_at], *range(14, 27 - parts_at)],
        text,
        text,
        [*text[:parts_at], 27],
    ):
        request = engine.add_request(prompt, params)
        finish(engine)
        assert request.error is None


def test_a_page_in_which_a_pin_ends_may_be_copied_for_whoever_goes_on_in_it() -> None:
    """When it was accepted, its prompt went on in that page; when it is admitted, others do."""
    engine = hash_engine(page_size=4, num_pages=6, max_num_seqs=1)

    def ask(*tokens: int) -> Request:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        return engine.add_request(tokens, params)

    prompt = [*range(20)]
    ask(*prompt[:5])
    finish(engine)
    engine.cache.pin("the first five", prompt[:5])
    ask(*prompt[:9])
    finish(engine)
    waiting = [ask(*prompt[:5], 21), ask(*prompt[:6], 22)]
    for length in range(20, 0, -1):
        with suppress(InvalidRequest):
            waiting.append(ask(*prompt[:length]))
            break
    engine.cache.evict(9)
    finish(engine)
    assert length >= 16 and not any(request.error for request in waiting)
