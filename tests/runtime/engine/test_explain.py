"""Why not a hit: every reason against a list of all that was ever computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from itertools import groupby
from random import Random
from typing import Any

import pytest

from radixcache import (
    HashBlockCache,
    Lease,
    NoCache,
    OutOfPages,
    PagePool,
    PrefixCache,
    RadixCache,
)
from radixcache.events import Evicted, Stored
from radixcache.runtime.engine.explain import Explainer, find_rejoin, table_of
from radixcache.runtime.explanation import Miss
from radixcache.tokens import as_tokens

SEED = 20_261_120
NAMESPACES: tuple[Hashable, ...] = (None, "a", "b")
Text = tuple[int, ...]


# --------------------------------------------------------------------------------- by brute force


class World:
    """A cache in too little memory, driven at random, and all that was ever computed in it.

    Whatever is computed is kept by namespace and prefix, with the ways on from there; a reason is
    worked out for each token by itself.
    """

    def __init__(self, seed: int, kind: type[Any], page_size: int, num_pages: int) -> None:
        self.rng = Random(f"{seed}/{kind.__name__}/{page_size}")
        self.cache: PrefixCache = kind(PagePool(num_pages, page_size))
        self.page_size = page_size
        self.longest = page_size * num_pages // 2
        self.alphabet = self.rng.choice([3, 4, 50])
        self.marks = frozenset(range(self.rng.choice([0, 1, 2])))
        self.explainer = Explainer(self.cache, num_tokens=1 << 14, marks=self.marks)
        self.computed: dict[Hashable, set[Text]] = {name: set() for name in NAMESPACES}
        self.ways_on: dict[tuple[Hashable, Text], list[Text]] = {}
        self.cached: set[tuple[Hashable, Text]] = set()
        self.in_flight: set[tuple[Hashable, Text]] = set()
        self.running: list[tuple[Lease, Hashable, Text]] = []
        self.past = [self.text(self.longest) for _ in range(3)]
        self.counted: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        if kind is RadixCache:
            self.cache.events.append(self._hear)

    def _hear(self, event: object) -> None:
        if isinstance(event, Stored | Evicted):
            tokens = tuple(event.tokens.tolist())
            prefixes = {
                (event.namespace, tokens[:end]) for end in range(event.start + 1, len(tokens) + 1)
            }
            if isinstance(event, Stored):
                self.cached |= prefixes
            else:
                self.cached -= prefixes

    def run(self, operations: int) -> None:
        choices = {self.admit: 10, self.step: 4, self.finish: 8, self.evict: 1, self.reset: 0.3}
        for _ in range(operations):
            self.rng.choices(list(choices), list(choices.values()))[0]()
            self.cache.check()
            self.explainer.check()
        assert {k: v for k, v in self.explainer.missed_tokens.items() if v} == dict(+self.counted)

    def admit(self) -> None:
        if len(self.running) >= 4:
            return
        namespace, tokens = self.rng.choices(NAMESPACES, [4, 1, 1])[0], self.prompt()
        lease = self.cache.acquire(tokens, namespace)
        try:
            self.cache.reserve(lease, len(tokens))
        except OutOfPages:
            self.cache.release(lease)
            return
        hit = lease.cached_tokens
        misses = self.explainer.explain(tokens, hit, namespace)
        self.compare(misses, tokens, hit, namespace)
        observed = self.explainer.observe(tokens, hit, namespace)
        self.explainer.catch_up()
        assert observed == misses
        for miss in misses:
            self.counted[miss.reason] += len(miss)
        chunk = tokens[: self.rng.choice([hit + 1, len(tokens), len(tokens)])]
        self.publish(lease, namespace, chunk)
        self.running.append((lease, namespace, chunk))
        self.past.append(tokens)

    def prompt(self) -> Text:
        """One from before that goes on, or ends otherwise, or has another token in its middle."""
        known, rng = self.rng.choice(self.past[-8:]), self.rng
        at = rng.choice([len(known), rng.randint(0, len(known)), rng.randint(0, 3) * 8])
        new = self.text(rng.choice([1, 3, 25]))
        rest = known[at + rng.randint(0, 3) :] * rng.choice([0, 1, 1])
        return (known[:at] + new + rest)[: self.longest]

    def text(self, longest: int) -> Text:
        count = self.rng.randint(1, longest)
        return tuple(self.rng.randrange(self.alphabet) for _ in range(count))

    def publish(self, lease: Lease, namespace: Hashable, tokens: Text, late: bool = False) -> None:
        self.explainer.remember(tokens, namespace)
        computed = self.computed[namespace]
        for end in range(1, len(tokens) + 1):
            if tokens[:end] not in computed:
                computed.add(tokens[:end])
                self.ways_on.setdefault((namespace, tokens[: end - 1]), []).insert(0, tokens[:end])
            if not late and (namespace, tokens[:end]) not in self.cached:
                self.in_flight.add((namespace, tokens[:end]))
        self.cache.publish(lease, tokens[lease.num_tokens :], written=late)

    def step(self) -> None:
        for lease, _, _ in self.running:
            lease.take_copies()
        self.cache.commit()
        self.in_flight.clear()

    def finish(self) -> None:
        if not self.running:
            return
        self.step()
        lease, namespace, tokens = self.running.pop(self.rng.randrange(len(self.running)))
        decoded = tuple(self.rng.randrange(self.alphabet) for _ in range(self.rng.randint(0, 5)))
        decoded = decoded[: lease.capacity - len(tokens)]
        if decoded:
            self.publish(lease, namespace, tokens + decoded, late=True)
            self.past.append(tokens + decoded)
        self.cache.release(lease)

    def evict(self) -> None:
        self.cache.evict(self.rng.randint(1, 3))

    def reset(self) -> None:
        if not self.running:
            self.cache.reset()
            self.cached.clear()

    def compare(self, misses: list[Miss], tokens: Text, hit: int, namespace: Hashable) -> None:
        self.met: dict[int, Any] = {}
        labels = [self.reason(tokens, at, hit, namespace) for at in range(hit, len(tokens) - 1)]
        expected, at = [], hit
        for label, run in groupby(labels):
            start, at = at, at + len(list(run))
            expected.append((*label, start, at))
        found = [(m.reason, m.in_flight, m.start, m.end) for m in misses]
        assert found == expected, f"{tokens} in {namespace}, hit {hit}, seed {SEED}"
        for miss in misses:
            self.seen[miss.reason + " in flight" * miss.in_flight] += 1
            assert miss.num_tokens == len(tokens)
            if miss.reason == "diverged":
                (after, repeated), following = self.met[miss.start]
                assert miss.before == tokens[max(0, miss.start - 8) : miss.start]
                assert miss.prompt == tokens[miss.start : miss.start + 8]
                assert miss.cached == following[:8] and miss.cached[0] != miss.prompt[0]
                assert (miss.rejoin, miss.repeated) == (miss.start + after, repeated)
                self.seen["in an older branch"] += (
                    following != self.branches(tokens[: miss.start], namespace)[0]
                )
            else:
                assert miss == Miss(miss.reason, miss.start, miss.end, len(tokens), miss.in_flight)

    def reason(self, tokens: Text, at: int, hit: int, namespace: Hashable) -> tuple[str, bool]:
        """Why token `at` is missed, and whether because it is in flight."""
        computed = self.computed[namespace]
        if tokens[: at + 1] in computed:
            if isinstance(self.cache, NoCache):
                return "caching_off", False
            if isinstance(self.cache, HashBlockCache):
                end = (at // self.page_size + 1) * self.page_size
                whole = end < len(tokens) and tokens[:end] in computed
                return ("evicted" if whole else "page_not_finished"), False
            if (namespace, tokens[: at + 1]) not in self.cached:
                return "evicted", False
            assert any((namespace, tokens[:end]) in self.in_flight for end in range(at + 2))
            assert at // self.page_size == hit // self.page_size
            return "page_not_finished", True
        start = max(
            end for end in range(at + 1) if not end or tokens[:end] in computed or end == hit
        )
        if start not in self.met:
            self.met[start] = max(
                (
                    (met, text)
                    for text in self.branches(tokens[:start], namespace)
                    if (met := naive_rejoin(tokens[start:-1], text, self.marks))
                ),
                key=lambda meeting: meeting[0][1],
                default=None,
            )
        return ("diverged" if self.met[start] else "first_seen"), False

    def branches(self, prefix: Text, namespace: Hashable) -> list[Text]:
        """What was computed after `prefix`: 8 texts, along what was new last, the nearest fork's
        first."""
        found, waiting = [], [prefix]
        for path in waiting:
            while following := self.ways_on.get((namespace, path)):
                path, *others = following
                waiting += others
            found.append(path[len(prefix) :])
        return [text for text in found if text][:8]


def naive_rejoin(
    one: Sequence[int], other: Sequence[int], marks: Collection[int]
) -> tuple[int, int] | None:
    def spell(text: Sequence[int]) -> list[tuple[int, tuple[int | None, int]]]:
        before = [None, *(token if token in marks else None for token in text)]
        return [(i, (before[i], text[i])) for i in range(len(text)) if text[i] not in marks]

    ours, theirs = spell(one[:1040]), spell(other[:1040])
    for within, count in (16, 8), (1024, 16):
        places: dict[Any, list[int]] = {}
        for b in range(min(within, len(theirs) - count + 1)):
            places.setdefault(theirs[b][1], []).append(b)
        starts = range(min(within, len(ours) - count + 1))
        for a, b in [(x, y) for x in starts for y in places.get(ours[x][1], ())]:
            if all(ours[a + k][1] == theirs[b + k][1] for k in range(count)):
                i, j = ours[a][0], theirs[b][0]
                while i and j and one[i - 1] == other[j - 1]:
                    i, j = i - 1, j - 1
                pairs = zip(one[i:], other[j:], strict=False)
                length = next((k for k, (x, y) in enumerate(pairs) if x != y), None)
                return i, min(len(one) - i, len(other) - j) if length is None else length
    return None


@pytest.mark.parametrize(
    "page_sizes",
    [[1, 4, 7, 16], pytest.param([1, 4, 7, 16, 5, 8, 1, 4, 7, 16], marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("kind", [RadixCache, HashBlockCache, NoCache])
def test_each_token_has_the_reason_that_a_list_of_everything_computed_gives(
    kind: type, page_sizes: list[int]
) -> None:
    seen: Counter[str] = Counter()
    for number, page_size in enumerate(page_sizes):
        world = World(SEED + number, kind, page_size, num_pages=160 // page_size)
        world.run(120)
        seen += world.seen
    always = {"first_seen", "diverged", "in an older branch"}
    of_kind: dict[Any, set[str]] = {
        RadixCache: {"evicted", "page_not_finished in flight"},
        HashBlockCache: {"evicted", "page_not_finished"},
        NoCache: {"caching_off"},
    }
    assert seen.keys() == always | of_kind[kind], f"{seen}, seed {SEED}"


def test_texts_that_meet_again_are_found_where_a_naive_search_finds_them() -> None:
    rng, found = Random(SEED), 0
    for number in range(300):
        kinds = 9 if number < 294 else 999
        gaps = [0, 1, 5, 15, 16, 17, 60] if number < 294 else [1023, 1024, 1025]
        marks = {*range(rng.choice([0, 1, 3]))}
        same = [rng.randrange(kinds) for _ in range(rng.randint(6, 40))]
        one, *others = (
            [rng.randrange(kinds) for _ in range(rng.choice(gaps))]
            + same[rng.choice([0, 0, len(same) // 2]) :]
            + [rng.randrange(kinds) for _ in range(rng.randint(0, 20))]
            for _ in range(rng.choice([2, 2, 5]))
        )
        if number % 10 == 0:  # no text has all of it
            cut = rng.randrange(len(same))
            others = [same[:cut], same[cut:]]
        each = [naive_rejoin(one, other, marks) for other in others]
        most = max((length for _, length in filter(None, each)), default=0)
        known = [as_tokens(other) for other in others]
        met = find_rejoin(as_tokens(one), known, table_of(marks))
        if met is None:
            assert not any(each), f"seed {SEED}"
        else:
            longest = next(n for n, one in enumerate(each) if one and one[1] == most)
            assert met[:2] == each[longest] and met[2] is known[longest], f"seed {SEED}"
        found += met is not None
    assert 50 < found < 290, f"{found} of 300 met again, seed {SEED}"


def test_more_than_can_be_remembered_is_remembered_from_its_start() -> None:
    rng = Random(SEED)
    explainer = Explainer(RadixCache(PagePool(4, 16)), num_tokens=50)
    for _ in range(100):
        text = [rng.randrange(3) for _ in range(rng.randint(0, 200))]
        explainer.remember(text, rng.choice(NAMESPACES))
        explainer.check()
    text = list(range(80))
    explainer.remember(text)
    assert [(m.reason, m.start, m.end) for m in explainer.explain(text, 0)] == [
        ("evicted", 0, 50),
        ("first_seen", 50, 79),
    ]


# --------------------------------------------------------------------------------- the sentences


def test_what_is_put_off_is_done_after_it_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    explainer = Explainer(RadixCache(PagePool(4, 4)))
    misses = explainer.observe([1, 2, 3], 0)
    with monkeypatch.context() as patch:
        patch.setattr("radixcache.runtime.engine.explain.Miss.__len__", cut_off)
        with pytest.raises(MemoryError):
            explainer.catch_up()
    explainer.catch_up()
    assert [(miss.start, miss.end) for miss in misses] == [(0, 2)]
    assert sum(explainer.missed_tokens.values()) == 2


def cut_off(*_: object) -> int:
    raise MemoryError
