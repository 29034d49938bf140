"""The router against books kept the slow way: sets of prefixes, and a list of what is in flight."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from radixcache.errors import InvalidRequest
from radixcache.runtime.router.policy import (
    ANSWER,
    MOST_LEFT,
    QUEUED,
    SHORT,
    Router,
    Standing,
    preference,
)

Prefix = tuple[Hashable, tuple[int, ...]]


class Books:
    """What a router should know whose trees evict nothing, by brute force."""

    def __init__(self, kv_tokens: int, max_num_seqs: int) -> None:
        self.kv_tokens, self.max_num_seqs = kv_tokens, max_num_seqs
        self.answer = float(ANSWER)
        self.prefixes: dict[str, set[Prefix]] = {}
        self.booked: dict[int, tuple[str, list[int], Hashable]] = {}
        self.to_compute: dict[int, int] = {}
        self.sent: list[str] = []

    def remember(self, name: str, tokens: list[int], salt: Hashable) -> None:
        self.prefixes[name] |= {(salt, tuple(tokens[:n])) for n in range(1, len(tokens) + 1)}

    def cached(self, name: str, tokens: list[int], salt: Hashable) -> int:
        known = self.prefixes[name]
        return max(
            (n for n in range(1, len(tokens)) if (salt, tuple(tokens[:n])) in known), default=0
        )

    def rank(self, name: str, tokens: list[int], salt: Hashable) -> tuple[float, int, int]:
        here = [key for key, booking in self.booked.items() if booking[0] == name]
        queued = sum(self.to_compute[key] for key in here)
        last = max((n for n, sent in enumerate(self.sent, 1) if sent == name), default=0)
        cached = self.cached(name, tokens, salt)
        held = self.held(here) + len(tokens) - cached + int((len(here) + 1) * self.answer)
        to_end = int((len(here) + 1 - self.max_num_seqs) * self.answer)
        short = max(0, held - self.kv_tokens, to_end)
        to_compute = len(tokens) if cached < len(tokens) / 10 else len(tokens) - cached
        cost = to_compute + QUEUED * queued + SHORT * short
        return cost, len(here), last

    def held(self, keys: list[int]) -> int:
        """Each prefix of what is booked is one token's KV."""
        booked = [self.booked[key][1:] for key in keys]
        return len({(salt, tuple(t[:n])) for t, salt in booked for n in range(1, len(t) + 1)})

    def book(self, key: int, name: str, tokens: list[int], salt: Hashable) -> None:
        self.booked.pop(key, None)
        self.to_compute[key] = len(tokens) - self.cached(name, tokens, salt)
        self.booked[key] = (name, tokens, salt)
        self.sent.append(name)
        self.remember(name, tokens, salt)

    def release(self, key: int, answers: list[list[int]]) -> None:
        if key in self.booked:
            name, tokens, salt = self.booked.pop(key)
            for answer in answers:
                self.remember(name, tokens + answer[:-1], salt)
            if answers:
                self.answer += (sum(len(a) for a in answers) - self.answer) / 32

    def forget(self, name: str) -> None:
        self.prefixes.pop(name, None)
        self.booked = {key: b for key, b in self.booked.items() if b[0] != name}
        self.sent = ["" if sent == name else sent for sent in self.sent]


def choose(router: Router, key: Any, tokens: Sequence[int], salt: str | None = None) -> Standing:
    router.release(key)
    return router.book(key, router.order(tokens, salt)[0], tokens, salt)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_go_as_by_brute_force(seed: int) -> None:
    print(f"seed {seed}")
    rng = Random(f"router {seed}")
    router, books = Router(), Books(kv_tokens=3_000, max_num_seqs=4)
    words = rng.choice([2, 5, 1000])
    say = lambda most: [rng.randrange(words) for _ in range(rng.randint(1, most))]  # noqa: E731
    stems = [say(12) for _ in range(4)]

    def prompt() -> list[int]:
        known = [list(tokens) for prefixes in books.prefixes.values() for _, tokens in prefixes]
        stem = rng.choice(sorted(known)) if known and rng.random() < 0.3 else rng.choice(stems)
        return stem + say(6)

    short = 0
    for key in range(150):
        operation = rng.random()
        names = [*books.prefixes]
        tokens, salt = prompt(), rng.choice([None, "salt"])
        some = rng.randrange(key + 1)
        if len(names) < 2 or operation < 0.06:
            name = rng.choice("abcd")
            router.add(name, 3_000, max_num_seqs=4)
            books.forget(name)
            books.prefixes[name] = set()
        elif operation < 0.10:
            name = rng.choice("abcd")
            router.forget(name)
            books.forget(name)
        elif operation < 0.55:
            chosen = choose(router, key, tokens, salt)
            ranks = {name: books.rank(name, tokens, salt) for name in names}
            best = min(ranks.values())
            assert preference(chosen) == ranks[str(chosen.replica)] == best
            books.book(key, str(chosen.replica), tokens, salt)
        elif operation < 0.65:
            name = rng.choice(names)
            router.book(some, name, np.array(tokens, np.int32), salt)
            books.book(some, name, tokens, salt)
        elif operation < 0.8:
            router.started(some)
            books.to_compute[some] = 0
        else:
            answers = [say(9) for _ in range(rng.randrange(3))]
            router.release(some, *answers)
            books.release(some, answers)
        router.check()
        tokens, salt = prompt(), rng.choice([None, "salt", "other"])
        short += sum(s.short_tokens > 0 for s in router.standings(tokens, salt))
        found = {str(s.replica): preference(s) for s in router.standings(tokens, salt)}
        assert found == {name: books.rank(name, tokens, salt) for name in books.prefixes}
        assert router.order(tokens, salt) == sorted(found, key=lambda name: found[name])
    assert len(books.sent) > 50 and short


@pytest.mark.parametrize("seed", range(3))
def test_trees_stay_as_large_as_the_replicas_memory(seed: int) -> None:
    print(f"seed {seed}")
    rng = Random(f"small {seed}")
    router = Router()
    sizes = {"a": 40, "b": 60, "c": 7}
    for name, size in sizes.items():
        router.add(name, size)
    stems = [[rng.randrange(9) for _ in range(20)] for _ in range(5)]
    for key in range(200):
        tokens = rng.choice(stems)[: rng.randint(1, 20)] + [rng.randrange(9) for _ in range(8)]
        best = router.order(tokens)[0]
        assert choose(router, key, tokens).replica == best
        router.check()
        cached = {s.replica: s.cached_tokens for s in router.standings([*tokens, 0])}
        assert cached[best] == min(len(tokens), sizes[str(best)])
        router.release(rng.randrange(key + 1), tokens)
        router.check()


def test_a_burst_with_one_stem_stays_where_it_is_until_another_replica_is_quicker() -> None:
    stem = list(range(1000))
    for queue, own, copies in ((1, 1, 1), (1, 200, 8), (4000, 10, 1)):
        router = Router()
        for name in range(8):
            router.add(name, 100_000)
            if name:
                router.book(("before", name), name, [5000 + name] * queue)
        chosen = [choose(router, n, [*stem, *[2000 + n] * own]) for n in range(32)]
        assert sum(standing.cached_tokens == 0 for standing in chosen) == copies
        assert len({standing.replica for standing in chosen}) == copies
        router.check()


def test_equal_prompts_that_do_not_end_spread_once_the_memory_of_a_replica_is_full() -> None:
    router = Router()
    for name in range(4):
        router.add(name, 101 + 10 * ANSWER)
    chosen = []
    for key in range(40):
        chosen.append(choose(router, key, range(100)))
        router.started(key)
        router.check()
    assert [standing.replica for standing in chosen[:10]] == [0] * 10
    assert [sum(s.replica == name for s in chosen) for name in range(4)] == [10] * 4
    assert not any(standing.short_tokens for standing in chosen)
    assert choose(router, "full", range(100)).short_tokens == ANSWER
    for key in range(10, 20):  # all of those on the second
        router.release(key)
    assert router.order(range(100))[0] == 1


def test_what_is_refused_changes_nothing() -> None:
    router = Router()
    router.add("a", 1000)
    choose(router, "k", [1, 2, 3])
    before = router.standings([1, 2, 3])
    bad: list[tuple[Any, Any, str]] = [
        ([1.5], None, "."),
        ([[1], [2]], None, "."),
        ([2**40], None, "."),
        ([1, 2, 3], [], "must be hashable"),
        ([1, 2, 3], ([],), "must be hashable"),
    ]
    for tokens, salt, said in bad:
        with pytest.raises(InvalidRequest, match=said):
            router.book("k", "a", tokens, salt)
    for kv_tokens, max_num_seqs in ((0, 1), (-1, 1), (9, 0), (9, -1)):
        with pytest.raises(InvalidRequest):
            router.add("a", kv_tokens, max_num_seqs)
    assert router.standings([1, 2, 3]) == before
    router.check()
    router.forget("a")
    router.forget("a")
    with pytest.raises(InvalidRequest, match="no replica 'a'"):
        router.book("k", "a", [1])
    assert router.order([1]) == []


def test_what_a_replica_can_load_attracts_and_what_is_salted_does_not() -> None:
    text, others = [*range(100)], [*range(1000, 1100)]
    for salt, wanted in ((None, "a"), ("mine", "b")):
        router = Router()
        router.add("a", kv_tokens=100, lower_tokens=200)
        router.book("first", "a", text, salt)
        router.started("first")
        router.release("first")
        router.book("second", "a", others, salt)  # takes the room of the first
        router.started("second")
        router.release("second")
        router.add("b", kv_tokens=100)
        assert choose(router, "third", text, salt).replica == wanted
        router.check()
    (standing, _) = router.standings([*text, 7])
    assert (standing.num_tokens, standing.cached_tokens) == (101, 0), "salted, it is not on disk"


def test_who_takes_over_a_folder_attracts_what_is_in_it() -> None:
    text = [*range(100)]
    router = Router()
    sizes = {"kv_tokens": 100, "lower_tokens": 200}
    for name in "ab":
        router.add(name, **sizes, folder=f"folder of {name}")
    router.book("first", "b", text)
    router.forget("b")
    router.add("other", **sizes, folder="one more")
    assert [s.cached_tokens for s in router.standings(text)] == [0, 0]
    router.add("new", **sizes, folder="folder of b")
    assert router.order(text)[0] == "new"
    router.add("new", **sizes, folder="folder of b")  # it was silent for a while
    assert router.order(text)[0] == "new"
    assert [s.cached_tokens for s in router.standings(text)] == [0, 0, 94]
    for number in range(2 * MOST_LEFT):
        router.add(number, **sizes, folder=number)
        router.forget(number)
    router.check()
    assert [*router._left] == [*range(MOST_LEFT, 2 * MOST_LEFT)]
