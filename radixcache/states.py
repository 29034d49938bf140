"""The index of recurrent states: which slot holds the state after which prefix.

A recurrent layer keeps no KV but one state of all tokens so far, which cannot be cut shorter. So a
hit of a hybrid model goes on from the deepest *checkpoint* within the cached KV, and the tokens
between are computed again in place. States are large and few: they are kept beside the tree of KV,
each under a digest of its tokens, and used only where the KV of all these is cached, too.

Like pages, slots are numbers; the owner of the tensors reads and writes them. A slot is free, or
belongs to a running sequence or to a checkpoint. A sequence always gets one, at the expense of a
checkpoint; a checkpoint without a free slot is not kept. Eviction first takes *superseded*
checkpoints (a conversation went on from one and left another), then kinds that are hardly ever hit,
then the least recently used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

from radixcache.base import Tokens
from radixcache.errors import InvalidRequest, OutOfPages

Kind = Literal["boundary", "branch", "prompt", "end"]
"""Why a state is kept: a message ends there, two prompts diverge there, a prompt ends there, or a
sequence ended there."""

RARELY = 0.1
"""A kind with fewer hits per checkpoint is evicted before others."""


class Key(NamedTuple):
    """A prefix: its namespace, length and digest."""

    namespace: Hashable
    length: int
    digest: bytes


@dataclass(slots=True)
class Checkpoint:
    """A kept state, from which a sequence can go on."""

    key: Key
    slot: int
    kind: Kind
    hits: int = 0


class SequenceStates(NamedTuple):
    """The slots that a step reads and writes for one sequence.

    Attributes:
        read: the slot of the state before the new tokens; -1 if these are the first.
        write: the slot for the state after them.
        keeps: (n, slot), ascending: the state after the first n of them also goes to the slot.
    """

    read: int
    write: int
    keeps: tuple[tuple[int, int], ...] = ()


class StateIndex:
    """The slots of recurrent states, and the states in them.

    Args:
        num_slots: more than the sequences that run at the same time.

    >>> import numpy as np
    >>> states = StateIndex(3)
    >>> tokens = np.arange(6, dtype=np.int32)
    >>> own = states.take()
    >>> checkpoint = states.write(tokens[:4], None, "prompt")
    >>> states.find(tokens, None, 6) is None  # not before the step has run
    True
    >>> states.commit()
    >>> states.find(tokens, None, 6).key.length
    4
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise InvalidRequest(f"{num_slots} state slots are too few: one sequence takes two")
        self.num_slots = num_slots
        self.num_evicted = 0
        self.clear()

    def clear(self) -> None:
        """Free every slot, in use or not."""
        self._free = [*range(self.num_slots)]
        self._kept: OrderedDict[Key, Checkpoint] = OrderedDict()
        """Least recently used first."""
        self._written: dict[Key, Checkpoint] = {}
        """The checkpoints that the step being scheduled writes."""
        self._superseded: OrderedDict[Key, None] = OrderedDict()
        self._lengths: dict[Hashable, Counter[int]] = {}
        """How many checkpoints, kept and written, there are of each length, by namespace."""
        self._reads: Counter[int] = Counter()
        """Slots that the step being scheduled reads."""
        self._pinned: Counter[Key] = Counter()
        """Keys that are evicted after all others, whether or not there is such a checkpoint."""
        self._made: Counter[Kind] = Counter()
        self._hits: Counter[Kind] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """How many slots are running, kept and free, between two steps."""
        kept, free = len(self._kept), len(self._free)
        return {"running": self.num_slots - kept - free, "kept": kept, "free": free}

    def depth(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        """Length of the deepest checkpoint within the first `limit` tokens. Changes nothing.
        O(limit)."""
        deepest, _ = self._deepest(tokens, namespace, limit)
        return 0 if deepest is None else deepest.key.length

    def find(self, tokens: Tokens, namespace: Hashable, limit: int) -> Checkpoint | None:
        """The deepest checkpoint within the first `limit` tokens; it counts as used, and keeps its
        slot until `commit`, `recover` or `release`. O(limit)."""
        found, _ = self._deepest(tokens, namespace, limit)
        if found is not None:
            self._use(found.key)
            found.hits += 1
            self._hits[found.kind] += 1
            self._reads[found.slot] += 1
        return found

    def coming(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        """Length of the deepest checkpoint that the step being scheduled writes."""
        return self._deepest(tokens, namespace, limit)[1] if self._written else 0

    def release(self, checkpoint: Checkpoint) -> None:
        """Undo `find`: the sequence does not go on from the checkpoint."""
        self._reads -= Counter([checkpoint.slot])
        checkpoint.hits -= 1
        self._hits[checkpoint.kind] -= 1

    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Evict the state after `tokens` only after all that are not pinned. O(len(tokens))."""
        self._pinned[_key(tokens, namespace)] += 1

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Undo one `pin`."""
        self._pinned -= Counter([_key(tokens, namespace)])

    def _deepest(
        self, tokens: Tokens, namespace: Hashable, limit: int
    ) -> tuple[Checkpoint | None, int]:
        """The deepest kept checkpoint, and the length of the deepest that the step writes."""
        digest, start = blake2b(digest_size=32), 0
        found, coming = None, 0
        for length in sorted(n for n in self._lengths.get(namespace, ()) if n <= limit):
            digest.update(tokens[start:length].tobytes())
            start = length
            key = Key(namespace, length, digest.copy().digest())
            found = self._kept.get(key, found)
            coming = length if key in self._written else coming
        return found, coming

    def take(self) -> int:
        """A slot for a sequence, by eviction if needed.

        Raises:
            OutOfPages: sequences and this step use all slots.
        """
        slot = self._spare()
        if slot is None:
            raise OutOfPages("every state slot is in use")
        return slot

    def write(self, tokens: Tokens, namespace: Hashable, kind: Kind) -> Checkpoint | None:
        """A checkpoint after `tokens`, which the step being scheduled writes, and `commit` makes
        findable; None if there is one already, or no slot. O(len(tokens))."""
        key = _key(tokens, namespace)
        if key in self._kept:
            self._use(key)
        if key in self._kept or key in self._written:
            return None
        slot = self._spare()
        if slot is None:
            return None
        checkpoint = self._written[key] = Checkpoint(key, slot, kind)
        self._note(checkpoint)
        return checkpoint

    def give(
        self, slot: int, tokens: Tokens, namespace: Hashable, before: Iterable[Key] = ()
    ) -> None:
        """Make a checkpoint of a sequence's slot, which holds the state after all of `tokens`.

        Args:
            before: the checkpoints that the sequence went on from, or left. One that no other
                sequence has used is superseded by this one; or this one by it, where ends are hit
                less often than prompts, as where a template leaves out reasoning.
        """
        key = _key(tokens, namespace)
        if not len(tokens) or key in self._kept or key in self._written:
            self.drop(slot)
            return
        self._kept[key] = Checkpoint(key, slot, "end")
        self._note(self._kept[key])
        for other in before:
            older = self._kept.get(other)
            if older is not None and older.kind in ("prompt", "end") and older.hits <= 1:
                ends_pay = self._hits["end"] >= self._hits["prompt"]
                self._superseded[other if older.hits or ends_pay else key] = None

    def drop(self, slot: int) -> None:
        """Free the slot of a sequence."""
        self._free.append(slot)

    def commit(self) -> None:
        """The step has run: the checkpoints that it wrote can be found."""
        self._kept.update(self._written)
        self._written.clear()
        self._reads.clear()

    def recover(self) -> None:
        """After a failed step, or a call that was cut off: take all slots from sequences, and drop
        the checkpoints that the step was to write. Kept ones stay. May itself be cut off, and
        called again. O(num_slots).
        """
        self._written.clear()
        self._reads.clear()
        slots = {checkpoint.slot for checkpoint in self._kept.values()}
        self._free = [slot for slot in range(self.num_slots) if slot not in slots]
        self._superseded = OrderedDict.fromkeys(k for k in self._superseded if k in self._kept)
        self._lengths = {}
        for key in self._kept:
            self._lengths.setdefault(key.namespace, Counter())[key.length] += 1

    def _use(self, key: Key) -> None:
        self._kept.move_to_end(key)
        self._superseded.pop(key, None)

    def _spare(self) -> int | None:
        if not self._free:
            victim = self._victim()
            if victim is None:
                return None
            del self._kept[victim.key]
            self._superseded.pop(victim.key, None)
            self._forget(victim)
            self.num_evicted += 1
        return self._free.pop()

    def _victim(self) -> Checkpoint | None:
        """The checkpoint to evict next, none that the step reads."""
        for key in self._superseded:
            if self._kept[key].slot not in self._reads and key not in self._pinned:
                return self._kept[key]
        oldest = pinned = None
        for checkpoint in self._kept.values():
            if checkpoint.slot in self._reads:
                continue
            if checkpoint.key in self._pinned:
                pinned = pinned or checkpoint
            else:
                # As if there had been two more of the kind and one more hit: a new kind may stay.
                made, hits = self._made[checkpoint.kind], self._hits[checkpoint.kind]
                if hits + 1 < RARELY * (made + 2):
                    return checkpoint
                oldest = oldest or checkpoint
        return oldest or pinned

    def _note(self, checkpoint: Checkpoint) -> None:
        self._made[checkpoint.kind] += 1
        key = checkpoint.key
        self._lengths.setdefault(key.namespace, Counter())[key.length] += 1

    def _forget(self, checkpoint: Checkpoint) -> None:
        self._free.append(checkpoint.slot)
        key = checkpoint.key
        lengths = self._lengths[key.namespace]
        lengths[key.length] -= 1
        if not lengths[key.length]:
            del lengths[key.length]
        if not lengths:
            del self._lengths[key.namespace]

    def check(self, own: Iterable[int] = ()) -> None:
        """Assert that each slot is free, or one of the sequences' `own`, or of a checkpoint."""
        checkpoints = [*self._kept.values(), *self._written.values()]
        slots = [*self._free, *own, *(checkpoint.slot for checkpoint in checkpoints)]
        assert sorted(slots) == [*range(self.num_slots)], f"slots {sorted(slots)}"
        lengths: dict[Hashable, Counter[int]] = {}
        for checkpoint in checkpoints:
            lengths.setdefault(checkpoint.key.namespace, Counter())[checkpoint.key.length] += 1
        assert lengths == self._lengths, "lengths are miscounted"
        assert self._superseded.keys() <= self._kept.keys(), "superseded, and gone"
        assert not self._kept.keys() & self._written.keys(), "a state is there and being written"


def _key(tokens: Tokens, namespace: Hashable) -> Key:
    digest = blake2b(tokens.tobytes(), digest_size=32)
    return Key(namespace, len(tokens), digest.digest())
