"""The index of recurrent states: which slot holds the state after which prefix.

Like pages, slots are numbers; the owner of the tensors reads and writes them. A slot is free, or
belongs to a running sequence or to a saved state (`radixcache.states.saved`). A sequence always
gets one, at the expense of a saved state; a saved state without a free slot is not kept.

A prompt that parts from a cached text needs a state before that place, which nobody knows ahead. So
slots that nobody else wants hold spare states: one shortly before a prompt's end, where the next
question about a document parts from this one, and some on the way to it. Spare states take the
places of other spare ones alone, the farthest from their prompts' ends first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from radixcache.errors import InvalidRequest, OutOfPages
from radixcache.states.saved import Key, Kind, SavedState, SavedStateIndex, key_of
from radixcache.tokens import Tokens

ALWAYS_FREE = 2
"""Slots that spare states leave: a running sequence takes one, and its end may need another."""

ROOMY = 6
"""With so many slots for each running sequence, states near prompts' ends may be no spares."""


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


class StateIndex(SavedStateIndex[int]):
    """The slots of recurrent states, and the states in them.

    Args:
        num_slots: more than the sequences that run at the same time.

    >>> import numpy as np
    >>> states = StateIndex(3)
    >>> tokens = np.arange(6, dtype=np.int32)
    >>> own = states.take()
    >>> saved = states.write(tokens[:4], None, "prompt")
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
        super().__init__(lambda: self._num_ended)

    def clear(self) -> None:
        """Free every slot, in use or not."""
        super().clear()
        self._num_ended = 0
        """Sequences that have left a state: the time."""
        self._before_end: dict[int, int] = {}
        """Tokens between the states in these slots, which were spare, and their prompts' ends."""
        self._free = [*range(self.num_slots)]
        self._reads: Counter[int] = Counter()
        """Slots that the step being scheduled reads."""

    @property
    def counts(self) -> dict[str, int]:
        kept, free = len(self._kept), len(self._free)
        return {"running": self.num_slots - kept - free, "kept": kept, "free": free}

    def find(self, tokens: Tokens, namespace: Hashable, limit: int) -> SavedState[int] | None:
        """As in `SavedStateIndex`; the saved state keeps its slot until `commit`, `recover` or
        `release`."""
        found = super().find(tokens, namespace, limit)
        if found is not None:
            self._reads[found.held] += 1
        return found

    def release(self, saved: SavedState[int]) -> None:
        self._reads -= Counter([saved.held])
        super().release(saved)

    def take(self) -> int:
        """A slot for a sequence, by eviction if needed.

        Raises:
            OutOfPages: sequences and this step use all slots.
        """
        slot = self._slot()
        if slot is None:
            raise OutOfPages("every state slot is in use")
        return slot

    def write(
        self, tokens: Tokens, namespace: Hashable, kind: Kind, before_end: int = 0
    ) -> SavedState[int] | None:
        """A saved state after `tokens`, which the step being scheduled writes, and `commit` makes
        findable; None if there is one already, or no slot. O(len(tokens)).

        Args:
            before_end: how many tokens of the prompt follow.
        """
        key = key_of(tokens, namespace)
        if not self._is_new(key, kind):
            return None
        is_full = len(self._free) + len(self._spares()) <= ALWAYS_FREE
        if is_full and kind in self._spare_kinds():
            return None
        slot = self._slot(key in self._pinned)
        if slot is None:
            return None
        self._before_end[slot] = before_end
        return self._add(self._written, key, slot, kind)

    def keep(
        self, slot: int, tokens: Tokens, namespace: Hashable, before: Iterable[Key] = ()
    ) -> None:
        """Make a saved state of a sequence's slot, which holds the state after all of `tokens`.

        Args:
            before: the saved states that the sequence went on from, or left.
        """
        self._num_ended += 1
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
        """As in `SavedStateIndex`; all slots are taken from sequences. O(num_slots)."""
        super().recover()
        self._reads.clear()
        slots = {saved.held for saved in self._kept.values()}
        self._free = [slot for slot in range(self.num_slots) if slot not in slots]

    def _is_read(self, saved: SavedState[int]) -> bool:
        return saved.held in self._reads

    def _spare_kinds(self) -> set[Kind]:
        is_roomy = self.num_slots >= ROOMY * (self.counts["running"] + 1)
        return {"trail"} if is_roomy and not self._is_rare("near") else {"trail", "near"}

    def _spares(self) -> list[SavedState[int]]:
        """Those that are kept just because there is room, and may go."""
        kinds = self._spare_kinds()
        kept = (one for one in self._kept.values() if one.kind in kinds)
        return [one for one in kept if not self._is_read(one) and one.key not in self._pinned]

    def _slot(self, pinned: bool = True) -> int | None:
        if not self._free:
            spare = max(self._spares(), key=lambda one: self._before_end[one.held], default=None)
            victim = spare or self._victim(pinned)
            if victim is None:
                return None
            self._remove(victim)
            self._free.append(victim.held)
        return self._free.pop()

    def check(self, own: Iterable[int] = ()) -> None:
        """Assert that each slot is free, or one of the sequences' `own`, or of a saved state."""
        saved_states = [*self._kept.values(), *self._written.values()]
        slots = [*self._free, *own, *(saved.held for saved in saved_states)]
        assert sorted(slots) == [*range(self.num_slots)], f"slots {sorted(slots)}"
        self._check_keys()
