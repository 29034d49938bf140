"""Saved prefixes for models whose state, unlike KV, cannot be cut to a shorter prefix.

A recurrent layer keeps one state of all tokens so far, and a layer with a sliding window keeps only
its last tokens. So a hit resumes at the deepest *saved state* within the cached KV, and the tokens
from there to the end of the KV are computed again in place. A saved state holds a state's slot or
pages of a window; these are large, so there are few. They are kept beside the tree of KV, each by a
digest of its tokens, and are used only where the KV of all these tokens is cached, too.

Eviction first takes *spare* saved states, which are made only where there is room, then
*superseded* ones (a conversation went on from one and left another), then kinds that are hardly
ever hit, then the least recently used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, Literal, NamedTuple, TypeVar

from radixcache.tokens import Tokens

Kind = Literal["boundary", "branch", "prompt", "end", "near", "trail"]
"""Why a saved state is kept: a message ends there; two prompts diverge there; a prompt ends there;
a sequence ended there; a prompt ends shortly after; or a long prompt passed there, the next one may
diverge from it before its end, and there is room."""

RARELY = 0.1
"""A kind with fewer hits per saved state is evicted before others."""

NEAR_AGE = 16
"""A saved state of kind "near" counts as so many times as old as it is: where memory is full, the
second question about a text hits twice as often, and other prompts lose next to nothing."""

RECENT = 256
"""After so many saved states of a kind earlier ones count half; as many evicted ones are known."""

MOST_SAVED_STATES = 2048
"""Kept saved states of one index: a look-up tries each length among them."""

STRIDE = 512
"""A look-up takes a digest so often, and tries the lengths of saved states that agree so far."""

H = TypeVar("H")


class Key(NamedTuple):
    """A prefix: its namespace, length and digest, and that of its first multiple of `STRIDE`."""

    namespace: Hashable
    length: int
    digest: bytes
    stem: bytes = b""


@dataclass(slots=True)
class SavedState(Generic[H]):
    """A kept prefix with what a sequence needs to resume from it."""

    key: Key
    held: H
    kind: Kind
    hits: int = 0
    last_use: int = 0
    """The time of the last use, by the index's clock."""


class SavedStateIndex(ABC, Generic[H]):
    """Finds and evicts saved states by their tokens; subclasses decide what a saved state holds.

    Args:
        clock: returns the time, for `SavedState.last_use`.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self._clock = clock
        self.num_evicted = 0
        self.clear()

    def clear(self) -> None:
        """Forget all saved states, and what sequences hold."""
        self._kept: OrderedDict[Key, SavedState[H]] = OrderedDict()
        """Least recently used first."""
        self._written: dict[Key, SavedState[H]] = {}
        """The saved states that the step being scheduled writes."""
        self._superseded: OrderedDict[Key, None] = OrderedDict()
        self._lengths: dict[tuple[Hashable, bytes], Counter[int]] = {}
        """How many saved states, kept and written, there are of each length, by namespace and
        stem."""
        self._pinned: Counter[Key] = Counter()
        """How often each key is pinned; a pinned key may have no saved state yet."""
        self._made: Counter[Kind] = Counter()
        self._hits: Counter[Kind] = Counter()
        """Saved states that were found, or made again after they were evicted."""
        self._gone: OrderedDict[Key, Kind] = OrderedDict()
        """The kinds of those that were evicted last."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Slots or pages: running sequences', saved states' and free ones, between two steps."""

    def depth(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        """Length of the deepest saved state within the first `limit` tokens. Changes nothing.
        O(limit)."""
        deepest, _ = self._deepest(tokens, namespace, limit)
        return 0 if deepest is None else deepest.key.length

    def find(self, tokens: Tokens, namespace: Hashable, limit: int) -> SavedState[H] | None:
        """The deepest saved state within the first `limit` tokens; it counts as used. O(limit)."""
        found, _ = self._deepest(tokens, namespace, limit)
        return None if found is None else self._hit(found)

    def _hit(self, found: SavedState[H]) -> SavedState[H]:
        """Count a hit of a kept saved state."""
        self._use(found)
        found.hits += 1
        self._hits[found.kind] += 1
        return found

    def in_flight(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        """Length of the deepest saved state that the step being scheduled writes."""
        return self._deepest(tokens, namespace, limit)[1] if self._written else 0

    def release(self, saved: SavedState[H]) -> None:
        """Undo `find`: the sequence does not go on from the saved state."""
        saved.hits -= 1
        self._hits[saved.kind] -= 1

    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Evict the saved state after `tokens` only after all that are not pinned.
        O(len(tokens))."""
        self._pinned[key_of(tokens, namespace)] += 1

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Undo one `pin`."""
        self._pinned -= Counter([key_of(tokens, namespace)])

    def commit(self) -> None:
        """The step has run: the saved states that it wrote can be found."""
        self._kept.update(self._written)
        self._written.clear()

    def _deepest(
        self, tokens: Tokens, namespace: Hashable, limit: int
    ) -> tuple[SavedState[H] | None, int]:
        """The deepest kept saved state, and the length of the deepest that the step writes."""
        found, ahead = None, 0
        for key in self._prefixes(tokens, namespace, limit):
            found = self._kept.get(key, found)
            ahead = key.length if key in self._written else ahead
        return found, ahead

    def _prefixes(self, tokens: Tokens, namespace: Hashable, limit: int) -> Iterator[Key]:
        """The first tokens, up to `limit`, in each length that a saved state has. O(limit)."""
        digest = blake2b(digest_size=32)
        for start in range(0, limit + 1, STRIDE):
            stem = digest.copy().digest()
            lengths, longer, end = self._lengths.get((namespace, stem), ()), digest.copy(), start
            for length in sorted(n for n in lengths if n <= limit):
                longer.update(tokens[end:length].tobytes())
                end = length
                yield Key(namespace, length, longer.copy().digest(), stem)
            digest.update(tokens[start : start + STRIDE].tobytes())

    def _is_new(self, key: Key, kind: Kind) -> bool:
        """Whether there is no such saved state; one that is kept counts as used, and as one of the
        better kind."""
        if (kept := self._kept.get(key)) is not None:
            self._use(kept)
            if kept.kind == "trail" or (kept.kind == "near" and kind != "trail"):
                kept.kind = kind
        return kept is None and key not in self._written

    def _use(self, saved: SavedState[H]) -> None:
        saved.last_use = self._clock()
        self._kept.move_to_end(saved.key)
        self._superseded.pop(saved.key, None)

    def _add(self, to: dict[Key, SavedState[H]], key: Key, held: H, kind: Kind) -> SavedState[H]:
        saved = to[key] = SavedState(key, held, kind, last_use=self._clock())
        self._made[kind] += 1
        if self._made[kind] >= RECENT:
            self._made[kind] //= 2
            self._hits[kind] //= 2
        if key in self._gone:  # else a kind that goes first could never show that it pays
            self._hits[self._gone.pop(key)] += 1
        self._lengths.setdefault((key.namespace, key.stem), Counter())[key.length] += 1
        return saved

    def _supersede(self, key: Key, before: Iterable[Key]) -> None:
        """A sequence ended at `key`: mark those saved states superseded that it resumed from or
        left and that no other sequence has used. Where ends are hit less often than prompts (a
        template leaves out reasoning, say), mark the new one superseded instead."""
        for other in before:
            older = self._kept.get(other)
            if older is not None and older.kind in ("prompt", "end") and older.hits <= 1:
                self._superseded[other if older.hits or self._ends_pay else key] = None

    def retire(self, tokens: Tokens, namespace: Hashable, before: Iterable[Key] = ()) -> None:
        """No prompt is expected to go on from `tokens`: what is kept at their end goes first, and
        `before` it, unless several prompts have gone on from there. O(len(tokens))."""
        found, _ = self._deepest(tokens, namespace, len(tokens))
        for key in (*before, *([] if found is None else [found.key])):
            one = self._kept.get(key)
            if one is not None and one.kind in ("prompt", "end") and one.hits <= 1:
                self._superseded[key] = None

    @property
    def _ends_pay(self) -> bool:
        return self._hits["end"] >= self._hits["prompt"]

    def _victim(self, pinned: bool = True) -> SavedState[H] | None:
        """The saved state to evict next; never one that the step reads, and a pinned one only if
        there is no other and `pinned` allows it."""
        for key in self._superseded:
            if not self._is_read(self._kept[key]) and not self._is_wanted(key):
                return self._kept[key]
        oldest, near, rare = None, None, self._rare_kinds()
        for saved in self._kept.values():
            if self._is_read(saved) or self._is_wanted(saved.key):
                continue
            if saved.kind == "near":
                near = near or saved
            elif saved.kind in rare:
                return saved
            else:
                oldest = oldest or saved
            if oldest and near and not rare:
                break
        if near and (oldest is None or self._age(near) >= self._age(oldest)):
            return near
        left = (c for c in self._kept.values() if pinned and not self._is_read(c))
        return oldest or next(left, None)

    def _is_wanted(self, key: Key) -> bool:
        """Whether it goes after all that are not."""
        return key in self._pinned

    def _age(self, saved: SavedState[H]) -> int:
        """How long it was not used, for eviction."""
        age = self._clock() - saved.last_use + 1
        return NEAR_AGE * age if saved.kind == "near" else age

    def _is_rare(self, kind: Kind) -> bool:
        # Counts two more of the kind and one more hit than there were, so that a new kind may stay.
        return self._hits[kind] + 1 < RARELY * (self._made[kind] + 2)

    def _rare_kinds(self) -> set[Kind]:
        return {kind for kind in self._made if kind != "near" and self._is_rare(kind)}

    def _is_read(self, saved: SavedState[H]) -> bool:
        """Whether the step being scheduled reads what the saved state holds."""
        return False

    def _remove(self, saved: SavedState[H]) -> None:
        """Evict a kept saved state; the caller frees what it held."""
        del self._kept[saved.key]
        self._superseded.pop(saved.key, None)
        key = saved.key
        if saved.kind not in ("near", "trail"):  # there are many, which say nothing
            self._gone[key] = saved.kind
        if len(self._gone) > RECENT:
            self._gone.popitem(last=False)
        lengths = self._lengths[key.namespace, key.stem]
        lengths[key.length] -= 1
        if not lengths[key.length]:
            del lengths[key.length]
        if not lengths:
            del self._lengths[key.namespace, key.stem]
        self.num_evicted += 1

    def recover(self) -> None:
        """After a failed step, or a call that was cut off: drop the saved states that the step was
        to write. Kept ones stay. May itself be cut off, and called again. O(saved states)."""
        self._written.clear()
        self._superseded = OrderedDict.fromkeys(k for k in self._superseded if k in self._kept)
        self._lengths = self._count_lengths()

    def _count_lengths(self) -> dict[tuple[Hashable, bytes], Counter[int]]:
        lengths: dict[tuple[Hashable, bytes], Counter[int]] = {}
        for key in [*self._kept, *self._written]:
            lengths.setdefault((key.namespace, key.stem), Counter())[key.length] += 1
        return lengths

    def _check_keys(self) -> None:
        """Assert that the tables of keys agree."""
        assert self._count_lengths() == self._lengths, "lengths are miscounted"
        assert self._superseded.keys() <= self._kept.keys(), "superseded, and gone"
        assert not self._kept.keys() & self._written.keys(), "a saved state is kept and in flight"


def key_of(tokens: Tokens, namespace: Hashable) -> Key:
    """The key of all of `tokens`. O(len(tokens))."""
    start = len(tokens) // STRIDE * STRIDE
    digest = blake2b(tokens[:start].tobytes(), digest_size=32)
    stem = digest.copy().digest()
    digest.update(tokens[start:].tobytes())
    return Key(namespace, len(tokens), digest.digest(), stem)
