"""The index of recurrent states: which slot holds the state after which prefix.

Like pages, slots are numbers; the owner of the tensors reads and writes them. A slot is free, or
belongs to a running sequence or to a checkpoint (`radixcache.checkpoints`). A sequence always gets
one, at the expense of a checkpoint; a checkpoint without a free slot is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from radixcache.checkpoints import Checkpoint, CheckpointIndex, Key, Kind, key_of
from radixcache.errors import InvalidRequest, OutOfPages
from radixcache.nodes import Tokens


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


class StateIndex(CheckpointIndex[int]):
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
        super().__init__()

    def clear(self) -> None:
        """Free every slot, in use or not."""
        super().clear()
        self._free = [*range(self.num_slots)]
        self._reads: Counter[int] = Counter()
        """Slots that the step being scheduled reads."""

    @property
    def counts(self) -> dict[str, int]:
        kept, free = len(self._kept), len(self._free)
        return {"running": self.num_slots - kept - free, "kept": kept, "free": free}

    def find(self, tokens: Tokens, namespace: Hashable, limit: int) -> Checkpoint[int] | None:
        """As in `CheckpointIndex`; the checkpoint keeps its slot until `commit`, `recover` or
        `release`."""
        found = super().find(tokens, namespace, limit)
        if found is not None:
            self._reads[found.held] += 1
        return found

    def release(self, checkpoint: Checkpoint[int]) -> None:
        self._reads -= Counter([checkpoint.held])
        super().release(checkpoint)

    def take(self) -> int:
        """A slot for a sequence, by eviction if needed.

        Raises:
            OutOfPages: sequences and this step use all slots.
        """
        slot = self._spare()
        if slot is None:
            raise OutOfPages("every state slot is in use")
        return slot

    def write(self, tokens: Tokens, namespace: Hashable, kind: Kind) -> Checkpoint[int] | None:
        """A checkpoint after `tokens`, which the step being scheduled writes, and `commit` makes
        findable; None if there is one already, or no slot. O(len(tokens))."""
        key = key_of(tokens, namespace)
        slot = self._spare(key in self._pinned) if self._is_new(key) else None
        return None if slot is None else self._add(self._written, key, slot, kind)

    def keep(
        self, slot: int, tokens: Tokens, namespace: Hashable, before: Iterable[Key] = ()
    ) -> None:
        """Make a checkpoint of a sequence's slot, which holds the state after all of `tokens`.

        Args:
            before: the checkpoints that the sequence went on from, or left.
        """
        key = key_of(tokens, namespace)
        if not len(tokens) or key in self._kept or key in self._written:
            self.drop(slot)
            return
        self._add(self._kept, key, slot, "end")
        self._supersede(key, before)

    def drop(self, slot: int) -> None:
        """Free the slot of a sequence."""
        self._free.append(slot)

    def commit(self) -> None:
        super().commit()
        self._reads.clear()

    def recover(self) -> None:
        """As in `CheckpointIndex`; all slots are taken from sequences. O(num_slots)."""
        super().recover()
        self._reads.clear()
        slots = {checkpoint.held for checkpoint in self._kept.values()}
        self._free = [slot for slot in range(self.num_slots) if slot not in slots]

    def _is_read(self, checkpoint: Checkpoint[int]) -> bool:
        return checkpoint.held in self._reads

    def _spare(self, pinned: bool = True) -> int | None:
        if not self._free:
            victim = self._victim(pinned)
            if victim is None:
                return None
            self._remove(victim)
            self._free.append(victim.held)
        return self._free.pop()

    def check(self, own: Iterable[int] = ()) -> None:
        """Assert that each slot is free, or one of the sequences' `own`, or of a checkpoint."""
        checkpoints = [*self._kept.values(), *self._written.values()]
        slots = [*self._free, *own, *(checkpoint.held for checkpoint in checkpoints)]
        assert sorted(slots) == [*range(self.num_slots)], f"slots {sorted(slots)}"
        self._check_keys()
