"""Checkpoints: saved prefixes for models whose state, unlike KV, cannot be cut to a shorter prefix.

A recurrent layer keeps one state of all tokens so far, and a layer with a sliding window keeps only
its last tokens. So a hit resumes at the deepest *checkpoint* within the cached KV, and the tokens
from there to the end of the KV are computed again in place. A checkpoint holds a state's slot or
pages of a window; these are large, so there are few. They are kept beside the tree of KV, each by a
digest of its tokens, and are used only where the KV of all these tokens is cached, too.

Eviction first takes *superseded* checkpoints (a conversation went on from one and left another),
then kinds that are hardly ever hit, then the least recently used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, Literal, NamedTuple, TypeVar

from radixcache.nodes import Tokens

Kind = Literal["boundary", "branch", "prompt", "end"]
"""Why a checkpoint is kept: a message ends there, two prompts diverge there, a prompt ends there,
or a sequence ended there."""

RARELY = 0.1
"""A kind with fewer hits per checkpoint is evicted before others."""

RECENT = 256
"""Checkpoints of a kind after which those before count half, and evicted ones remembered."""

MOST_CHECKPOINTS = 2048
"""Kept checkpoints of one index: a look-up tries each length among them."""

STRIDE = 512
"""A look-up takes a digest so often, and tries the lengths of checkpoints that agree so far."""

H = TypeVar("H")


class Key(NamedTuple):
    """A prefix: its namespace, length and digest, and that of its first multiple of `STRIDE`."""

    namespace: Hashable
    length: int
    digest: bytes
    stem: bytes = b""


@dataclass(slots=True)
class Checkpoint(Generic[H]):
    """A kept prefix with what a sequence needs to resume from it."""

    key: Key
    held: H
    kind: Kind
    hits: int = 0
    last_use: int = 0
    """The time of the last use, by the index's clock."""
    inside: Checkpoint[H] | None = None
    """The kept checkpoint that holds this place."""


class CheckpointIndex(ABC, Generic[H]):
    """Finds and evicts checkpoints by their tokens; subclasses decide what a checkpoint holds.

    Args:
        clock: returns the time, for `Checkpoint.last_use`.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self._clock = clock
        self.num_evicted = 0
        self.clear()

    def clear(self) -> None:
        """Forget all checkpoints, and what sequences hold."""
        self._kept: OrderedDict[Key, Checkpoint[H]] = OrderedDict()
        """Least recently used first."""
        self._written: dict[Key, Checkpoint[H]] = {}
        """The checkpoints that the step being scheduled writes."""
        self._superseded: OrderedDict[Key, None] = OrderedDict()
        self._lengths: dict[tuple[Hashable, bytes], Counter[int]] = {}
        """How many checkpoints, kept and written, there are of each length, by namespace and
        stem."""
        self._pinned: Counter[Key] = Counter()
        """How often each key is pinned; a pinned key may have no checkpoint yet."""
        self._made: Counter[Kind] = Counter()
        self._hits: Counter[Kind] = Counter()
        """Checkpoints that were found, or made again after they were evicted."""
        self._gone: OrderedDict[Key, Kind] = OrderedDict()
        """The kinds of those that were evicted last."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Slots or pages: running sequences', checkpoints' and free ones, between two steps."""

    def depth(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        """Length of the deepest checkpoint within the first `limit` tokens. Changes nothing.
        O(limit)."""
        deepest, _ = self._deepest(tokens, namespace, limit)
        return 0 if deepest is None else deepest.key.length

    def find(self, tokens: Tokens, namespace: Hashable, limit: int) -> Checkpoint[H] | None:
        """The deepest checkpoint within the first `limit` tokens; it counts as used. O(limit)."""
        found, _ = self._deepest(tokens, namespace, limit)
        return None if found is None else self._hit(found)

    def _hit(self, found: Checkpoint[H]) -> Checkpoint[H]:
        """Count a hit of a kept checkpoint."""
        self._use(found)
        found.hits += 1
        self._hits[found.kind] += 1
        return found

    def in_flight(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        """Length of the deepest checkpoint that the step being scheduled writes."""
        return self._deepest(tokens, namespace, limit)[1] if self._written else 0

    def release(self, checkpoint: Checkpoint[H]) -> None:
        """Undo `find`: the sequence does not go on from the checkpoint."""
        checkpoint.hits -= 1
        self._hits[checkpoint.kind] -= 1
        if checkpoint.inside is not None:
            checkpoint.inside.hits -= 1

    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Evict the checkpoint after `tokens` only after all that are not pinned.
        O(len(tokens))."""
        self._pinned[key_of(tokens, namespace)] += 1

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Undo one `pin`."""
        self._pinned -= Counter([key_of(tokens, namespace)])

    def commit(self) -> None:
        """The step has run: the checkpoints that it wrote can be found."""
        self._kept.update(self._written)
        self._written.clear()

    def _deepest(
        self, tokens: Tokens, namespace: Hashable, limit: int
    ) -> tuple[Checkpoint[H] | None, int]:
        """The deepest kept checkpoint, and the length of the deepest that the step writes."""
        found, ahead = None, 0
        for key in self._prefixes(tokens, namespace, limit):
            found = self._kept.get(key, found)
            ahead = key.length if key in self._written else ahead
        return found, ahead

    def _prefixes(self, tokens: Tokens, namespace: Hashable, limit: int) -> Iterator[Key]:
        """The first tokens, up to `limit`, in each length that a checkpoint has. O(limit)."""
        digest = blake2b(digest_size=32)
        for start in range(0, limit + 1, STRIDE):
            stem = digest.copy().digest()
            lengths, longer, end = self._lengths.get((namespace, stem), ()), digest.copy(), start
            for length in sorted(n for n in lengths if n <= limit):
                longer.update(tokens[end:length].tobytes())
                end = length
                yield Key(namespace, length, longer.copy().digest(), stem)
            digest.update(tokens[start : start + STRIDE].tobytes())

    def _is_new(self, key: Key) -> bool:
        """Whether there is no such checkpoint; one that is kept counts as used."""
        if key in self._kept:
            self._use(self._kept[key])
        return key not in self._kept and key not in self._written

    def _use(self, checkpoint: Checkpoint[H]) -> None:
        checkpoint.last_use = self._clock()
        self._kept.move_to_end(checkpoint.key)
        self._superseded.pop(checkpoint.key, None)

    def _add(self, to: dict[Key, Checkpoint[H]], key: Key, held: H, kind: Kind) -> Checkpoint[H]:
        checkpoint = to[key] = Checkpoint(key, held, kind, last_use=self._clock())
        self._made[kind] += 1
        if self._made[kind] >= RECENT:
            self._made[kind] //= 2
            self._hits[kind] //= 2
        if key in self._gone:  # else a kind that goes first could never show that it pays
            self._hits[self._gone.pop(key)] += 1
        self._lengths.setdefault((key.namespace, key.stem), Counter())[key.length] += 1
        return checkpoint

    def _supersede(self, key: Key, before: Iterable[Key]) -> None:
        """A sequence ended at `key`: mark those checkpoints superseded that it resumed from or left
        and that no other sequence has used. Where ends are hit less often than prompts (a template
        leaves out reasoning, say), mark the new one superseded instead."""
        for other in before:
            older = self._kept.get(other)
            if older is not None and older.kind in ("prompt", "end") and older.hits <= 1:
                self._superseded[other if older.hits or self._ends_pay else key] = None

    @property
    def _ends_pay(self) -> bool:
        return self._hits["end"] >= self._hits["prompt"]

    def _victim(self, pinned: bool = True) -> Checkpoint[H] | None:
        """The checkpoint to evict next; never one that the step reads, and a pinned one only if
        there is no other and `pinned` allows it."""
        for key in self._superseded:
            if not self._is_read(self._kept[key]) and key not in self._pinned:
                return self._kept[key]
        oldest, rare = None, self._rare_kinds()
        for checkpoint in self._kept.values():
            is_rare = checkpoint.kind in rare or not rare
            if oldest is not None and not is_rare:
                continue
            if not self._is_read(checkpoint) and checkpoint.key not in self._pinned:
                if is_rare:
                    return checkpoint
                oldest = checkpoint
        left = (c for c in self._kept.values() if pinned and not self._is_read(c))
        return oldest or next(left, None)

    def _rare_kinds(self) -> set[Kind]:
        # Counts two more of the kind and one more hit than there were, so that a new kind may stay.
        return {kind for kind, n in self._made.items() if self._hits[kind] + 1 < RARELY * (n + 2)}

    def _is_read(self, checkpoint: Checkpoint[H]) -> bool:
        """Whether the step being scheduled reads what the checkpoint holds."""
        return False

    def _remove(self, checkpoint: Checkpoint[H]) -> None:
        """Evict a kept checkpoint; the caller frees what it held."""
        del self._kept[checkpoint.key]
        self._superseded.pop(checkpoint.key, None)
        key = checkpoint.key
        self._gone[key] = checkpoint.kind
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
        """After a failed step, or a call that was cut off: drop the checkpoints that the step was
        to write. Kept ones stay. May itself be cut off, and called again. O(checkpoints)."""
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
        assert not self._kept.keys() & self._written.keys(), "a checkpoint is kept and in flight"


def key_of(tokens: Tokens, namespace: Hashable) -> Key:
    """The key of all of `tokens`. O(len(tokens))."""
    start = len(tokens) // STRIDE * STRIDE
    digest = blake2b(tokens[:start].tobytes(), digest_size=32)
    stem = digest.copy().digest()
    digest.update(tokens[start:].tobytes())
    return Key(namespace, len(tokens), digest.digest(), stem)
