"""Plans which slot a sequence's recurrent state is read from, and where states are kept.

A hybrid model's hit has two ends. KV is cached to token M; the deepest state at or below is after
token C. The sequence goes on from C: what lies between is computed again, in place, over pages that
are there, and its lease stands ahead of what it has computed. States are kept where others are
likely to go on: where the system message ends, before the mark that asks the model to speak (chat
templates leave out what it thought, so the next turn parts there), where two prompts have parted,
and after all that a sequence has computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from radixcache.base import Tokens
from radixcache.lease import Lease
from radixcache.runtime.request import Request, Sequence
from radixcache.states import Checkpoint, Key, Kind, SequenceStates, StateIndex

MIN_RECOMPUTED = 16
"""Cached tokens computed again for want of a state, from which one is kept where they end."""

AFTER_MARK = 16
"""Tokens that may follow the mark of the answer at the end of a prompt, as where a model thinks."""


@dataclass(slots=True)
class _Plan:
    """The plan of one sequence, from its admission until it leaves.

    Attributes:
        found: the checkpoint that the first chunk goes on from.
        slot: its own; -1 before it has one.
        begun: a chunk was planned: from the second on, it goes on from its own slot.
        marks: positions at which the state is to be kept, descending, and why.
        keys: checkpoints that it went on from, or left.
    """

    found: Checkpoint | None
    marks: list[tuple[int, Kind]]
    slot: int = -1
    begun: bool = False
    keys: list[Key] = field(default_factory=list)


class StatePlanner:
    """The states of one engine's sequences.

    Args:
        index: the slots.
        keeps: whether there is a cache of KV, so that a state is of use to another sequence.
        answer_mark: the tokens with which a chat template asks the model to speak; empty without.
    """

    def __init__(
        self, index: StateIndex, keeps: bool = True, answer_mark: Iterable[int] = ()
    ) -> None:
        self.index = index
        self._keeps = keeps
        self._mark = np.array([*answer_mark], np.int32)
        self._plans: dict[Sequence, _Plan] = {}

    def find(self, sequence: Sequence, lease: Lease) -> None:
        """Lower a new lease's hit to the deepest state, and decide where to keep others."""
        request, match = sequence.request, lease.cached_tokens
        tokens = sequence.tokens
        found = self.index.find(tokens, request.namespace, match)
        depth = 0 if found is None else found.key.length
        marks = self._marks(request, match, depth) if self._keeps else {}
        plan = _Plan(found, sorted(((n, k) for n, k in marks.items() if n > depth), reverse=True))
        plan.keys += [] if found is None else [found.key]
        self._plans[sequence] = plan
        coming = self.index.coming(tokens, request.namespace, len(tokens) - 1)
        lease.next_step_tokens = max(0, coming - depth)
        lease.cached_tokens = depth
        if sequence.is_fresh:
            sequence.num_recomputed = match - depth

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        """Where to keep states beyond `depth`, from which a sequence goes on, and why; KV is cached
        to `match`."""
        *ends, last = self._boundaries(request.prompt_token_ids)
        marks: dict[int, Kind] = {**dict.fromkeys(ends, "boundary"), last: "prompt"}
        if match - depth >= MIN_RECOMPUTED:
            marks[match] = "branch"
        return marks

    def _boundaries(self, prompt: Tokens) -> list[int]:
        """Where others are likely to go on within a prompt: the end of its first message, and its
        own end, before the mark of the answer; 0 is nowhere."""
        mark, tail = self._mark, prompt[-len(self._mark) - AFTER_MARK :]
        for start in range(len(tail) - len(mark), -1, -1):
            if len(mark) and (tail[start : start + len(mark)] == mark).all():
                end = len(prompt) - len(tail) + start
                begins = np.flatnonzero(prompt[:end] == mark[0])[1:2].tolist()
                return [*begins, end] if end else [0]
        # Not before the last token: alone it would be taken for a decode, which Nemotron-H computes
        # by another rule than a prefill (transformers bounds the time step in the latter only).
        return [max(0, len(prompt) - 2)]

    def take(self, sequence: Sequence) -> None:
        """Take a slot for a sequence that has none.

        Raises:
            OutOfPages: there is none.
        """
        plan = self._plans[sequence]
        if plan.slot < 0:
            plan.slot = self.index.take()

    def plan(self, sequence: Sequence, start: int, end: int) -> SequenceStates:
        """Which slots the step that computes tokens [start, end) of a sequence reads and writes."""
        plan, keeps = self._plans[sequence], []
        while plan.marks and plan.marks[-1][0] <= end:
            position, kind = plan.marks.pop()
            namespace = sequence.request.namespace
            checkpoint = self.index.write(sequence.tokens[:position], namespace, kind)
            if checkpoint is not None:
                keeps.append((position - start, checkpoint.slot))
                plan.keys.append(checkpoint.key)
        read = plan.slot if plan.begun else -1 if plan.found is None else plan.found.slot
        plan.begun = True
        return SequenceStates(read, plan.slot, tuple(keeps))

    def leave(self, sequence: Sequence) -> None:
        """Keep the state of a sequence that leaves as a checkpoint."""
        plan = self._plans[sequence]
        if plan.begun and self._keeps:
            done, slot = sequence.tokens[: sequence.num_computed], plan.slot
            plan.slot = -1
            self.index.give(slot, done, sequence.request.namespace, plan.keys)

    def release(self, sequence: Sequence) -> None:
        """Give back the slots of a sequence that has left, or was not admitted after all."""
        plan = self._plans.pop(sequence)
        if plan.slot >= 0:
            self.index.drop(plan.slot)
        if plan.found is not None and not plan.begun:
            self.index.release(plan.found)

    def recover(self) -> None:
        """Forget all plans: a step was cut off, and no sequence runs."""
        self._plans.clear()
        self.index.recover()

    def check(self, running: Iterable[Sequence]) -> None:
        """Verify between two steps that each slot belongs to a sequence or a checkpoint."""
        assert self._plans.keys() == {*running}, "plans without a sequence"
        self.index.check(plan.slot for plan in self._plans.values() if plan.slot >= 0)
