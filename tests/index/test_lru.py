"""Eviction is exact, to the token at page size 1, to the page where paths align to pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from radixcache import Lease, OutOfPages, PagePool, RadixCache
from radixcache.eviction import POLICIES, EvictionPolicy
from tests.index.reference import SENTINEL, Chain, ExactEviction, Holder, chain_of


def reads_all(leaf: Any) -> object:
    """A policy that nobody knows."""
    return leaf.uses > 2, leaf.priority, leaf.created if leaf.uses % 2 else 0, leaf.last_use


@dataclass(eq=False)
class Turn:
    """One request being served by the cache and by the model, in units."""

    session: int
    units: list[int]
    answer: list[int]
    lease: Lease
    holder: Holder


@dataclass
class Chat:
    """Random multi-turn traffic over one small pool, compared with `ExactEviction` at every call.

    A unit is `page_size` equal tokens. Prompts grow by what was said before; now and then one is
    asked again, so that a path ends inside what is cached already.
    """

    seed: int
    page_size: int
    num_pages: int
    asks_again: float
    policy: str | EvictionPolicy = "lru"
    at_once: int = 3
    found: int = 0
    refused: int = 0
    histories: dict[int, list[int]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = Random(f"{self.seed}/{self.page_size}/{self.num_pages}")
        policy = self.policy
        self.cache = RadixCache(PagePool(self.num_pages, self.page_size), policy=policy)
        key = POLICIES[policy] if isinstance(policy, str) else policy
        self.model = ExactEviction(self.num_pages, key)
        self.last_word = 10

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.turns) < self.rng.choice(range(1, self.at_once + 1)):
                self.ask()
            else:
                self.answer(self.rng.choice(self.turns))
            self.compare()
            self.cache.check()

    def ask(self) -> None:
        """Admit a request: hit, reservation and what it evicts must be those of the model."""
        rng = self.rng
        session = min(int(rng.expovariate(0.25)), 11)
        history = self.histories.setdefault(session, [session % 3] * 2)
        again = rng.random() < self.asks_again and len(history) > 2
        units = history[: rng.randint(1, len(history))] if again else history + self.new_words(3)
        chain = chain_of(None, units)
        hit_most = len(units) - 1
        holder = self.model.acquire(chain, hit_most)
        lease = self.cache.acquire(self.tokens(units))
        assert lease.cached_tokens == holder.cursor * self.page_size, self.where("hit differs")
        turn = Turn(session, units, self.new_words(3), lease, holder)
        self.turns.append(turn)
        if self.reserve(turn, len(units)):
            self.found += holder.cursor
            self.publish(turn, units[holder.cursor :], chain)

    def answer(self, turn: Turn) -> None:
        """Decode one unit, or finish."""
        if not turn.answer:
            self.finish(turn)
            return
        units = turn.units + turn.answer[:1]
        if self.reserve(turn, len(units)):
            self.publish(turn, turn.answer[:1], chain_of(None, units))
            turn.units, turn.answer = units, turn.answer[1:]

    def reserve(self, turn: Turn, num_units: int) -> bool:
        """Both have room, or neither; then the turn is over."""
        possible = self.model.reserve(turn.holder, num_units)
        try:
            self.cache.reserve(turn.lease, num_units * self.page_size)
        except OutOfPages:
            assert not possible, self.where("OutOfPages, but the model had room")
            self.refused += 1
            self.finish(turn)
            return False
        assert possible, self.where("the model has no room")
        return True

    def publish(self, turn: Turn, units: list[int], chain: Chain) -> None:
        self.model.publish(turn.holder, chain)
        self.cache.publish(turn.lease, self.tokens(units))
        turn.lease.take_copies()
        self.cache.commit()

    def finish(self, turn: Turn) -> None:
        """Release; sometimes the session is forgotten and a new one takes its number."""
        if self.policy != "lru":
            turn.lease.priority = self.rng.randrange(-1, 3)
        self.cache.release(turn.lease)
        if turn.holder.cursor == len(turn.units):
            self.model.release(turn.holder, turn.lease.priority)
        else:  # never published: holding it was no use
            self.model.holders.remove(turn.holder)
        self.turns.remove(turn)
        if len(turn.units) > self.num_pages // 3 or self.rng.random() < 0.05:
            self.histories.pop(turn.session, None)
        else:
            self.histories[turn.session] = turn.units

    def compare(self) -> None:
        """The two hold exactly the same units."""
        assert self.cache.pool.num_free == self.model.num_free, self.where("free pages differ")
        for history in self.histories.values():
            chain = chain_of(None, history)
            held = sum(name in self.model.units for name in chain)
            hit = self.cache.match([*self.tokens(history), SENTINEL])
            assert hit == held * self.page_size, self.where(f"{history}: {hit}, model {held}")

    def new_words(self, most: int) -> list[int]:
        count = self.rng.randint(1, most)
        self.last_word += count
        return list(range(self.last_word - count + 1, self.last_word + 1))

    def tokens(self, units: list[int]) -> list[int]:
        return [unit for unit in units for _ in range(self.page_size)]

    def where(self, what: str) -> str:
        return f"seed {self.seed}, page size {self.page_size}, {self.num_pages} pages: {what}"


@pytest.mark.parametrize("seed", range(8))
def test_the_same_tokens_go_as_in_a_brute_force_lru(seed: int) -> None:
    chat = Chat(seed, page_size=1, num_pages=40, asks_again=0.0)
    chat.run(600)
    assert chat.cache.stats.evicted_tokens > 100 and chat.found > 100


@pytest.mark.parametrize("seed", range(8))
def test_the_same_tokens_go_when_prompts_end_inside_an_edge(seed: int) -> None:
    chat = Chat(seed, page_size=1, num_pages=30, asks_again=0.3)
    chat.run(600)
    assert chat.cache.stats.evicted_tokens > 100 and chat.found > 100


@pytest.mark.parametrize("page_size", [2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_pages_go_where_sequences_align_to_pages(seed: int, page_size: int) -> None:
    chat = Chat(seed, page_size=page_size, num_pages=40, asks_again=0.0)
    chat.run(400)
    assert chat.cache.stats.evicted_pages > 60 and chat.found > 60


@pytest.mark.parametrize("seed", range(3))
def test_out_of_pages_comes_exactly_when_leases_hold_the_rest(seed: int) -> None:
    chat = Chat(seed, page_size=1, num_pages=12, asks_again=0.0)
    chat.run(600)
    assert chat.refused


@pytest.mark.parametrize(("asks_again", "at_once"), [(0.0, 3), (0.3, 1)])
@pytest.mark.parametrize("policy", ["lfu", "fifo", "priority", reads_all])
def test_every_policy_reads_of_each_token_what_is_its_own(
    policy: str | EvictionPolicy, asks_again: float, at_once: int
) -> None:
    """Not what its stem has, nor what was evicted beside it or split off from it."""
    for seed in range(3):
        chat = Chat(seed, 1, 40, asks_again, policy, at_once)
        chat.run(400)
        assert chat.cache.stats.evicted_tokens > 60 and chat.found > 60, chat.where("too little")
