"""Plans from which checkpoint a sequence goes on, and where checkpoints are kept.

The hit of a model with recurrent layers, or with windows that are not kept, has two ends. KV is
cached to token M; the deepest checkpoint at or below is after token C. The sequence goes on from C:
what lies between is computed again, in place, over pages that are there, and its lease stands ahead
of what it has computed. Checkpoints are kept where others are likely to go on: where the system
message ends, before the mark that asks the model to speak (chat templates leave out what it
thought, so the next turn parts there), where two prompts have parted, and after all that a sequence
has computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from radixcache.base import Tokens
from radixcache.checkpoints import Checkpoint, CheckpointIndex, Key, Kind
from radixcache.lease import Lease
from radixcache.runtime.request import Request, Sequence
from radixcache.states import SequenceStates

MIN_RECOMPUTED = 16
"""Cached tokens computed again for want of a checkpoint, from which one is kept where they end."""

AFTER_MARK = 16
"""Tokens that may follow the mark of the answer at the end of a prompt, as where a model thinks."""

H = TypeVar("H")


@dataclass(slots=True)
class Plan(Generic[H]):
    """The plan of one sequence, from its admission until it leaves.

    Attributes:
        found: the checkpoint that the first chunk goes on from.
        marks: positions at which a checkpoint is to be kept, descending, and why.
        slot: a recurrent model's state of its own; -1 before it has one.
        begun: a chunk was planned: from the second on, it goes on from what is its own.
        keys: checkpoints that it went on from, or left.
    """

    found: Checkpoint[H] | None
    marks: list[tuple[int, Kind]]
    slot: int = -1
    begun: bool = False
    keys: list[Key] = field(default_factory=list)


class Planner:
    """What sequences need beside pages of KV: nothing here, and a hit goes on where its KV ends."""

    def find(self, sequence: Sequence, lease: Lease) -> None:
        """Lower a new lease's hit to where the sequence goes on from."""

    def depth(self, tokens: Tokens, namespace: Hashable, match: int) -> int:
        """How far a sequence goes on from `match` tokens with KV. Changes nothing."""
        return match

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Take what the sequence needs to compute up to `num_tokens` tokens, but for KV.

        Raises:
            OutOfPages: there is too little; nothing has changed.
        """

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that `take` would take."""
        return 0

    def plan(self, sequence: Sequence, start: int, end: int) -> SequenceStates | None:
        """Plan the step that computes tokens [start, end) of a sequence; returns which slots it
        reads and writes, if the model is recurrent."""
        return None

    def leave(self, sequence: Sequence) -> None:
        """Keep what a sequence that leaves has computed."""

    def release(self, sequence: Sequence) -> None:
        """Give back what a sequence has that has left, or was not admitted after all."""

    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Evict what is kept after `tokens` last."""

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Undo one `pin`."""

    def commit(self) -> None:
        """The step that was planned last has run."""

    def reset(self) -> None:
        """Forget all that is kept, when no sequence runs."""

    def recover(self) -> None:
        """Forget all plans: a step was cut off, and no sequence runs."""

    def check(self, running: Iterable[Sequence]) -> None:
        """Verify all plans between two steps."""


NO_CHECKPOINTS = Planner()


class CheckpointPlanner(Planner, ABC, Generic[H]):
    """The checkpoints of one engine's sequences.

    Args:
        keeps: whether there is a cache of KV, so that a checkpoint is of use to another sequence.
        answer_mark: the tokens with which a chat template asks the model to speak; empty without.
    """

    index: CheckpointIndex[H]

    def __init__(self, keeps: bool = True, answer_mark: Iterable[int] = ()) -> None:
        self._keeps = keeps
        self._mark = np.array([*answer_mark], np.int32)
        self._plans: dict[Sequence, Plan[H]] = {}

    def depth(self, tokens: Tokens, namespace: Hashable, match: int) -> int:
        return self.index.depth(tokens, namespace, match)

    def find(self, sequence: Sequence, lease: Lease) -> None:
        """Lower a new lease's hit to the deepest checkpoint, and decide where to keep others."""
        request, match = sequence.request, lease.cached_tokens
        tokens = sequence.tokens
        found = self.index.find(tokens, request.namespace, match)
        depth = 0 if found is None else found.key.length
        marks = self._marks(request, match, depth) if self._keeps else {}
        plan = Plan(found, sorted(((n, k) for n, k in marks.items() if n > depth), reverse=True))
        plan.keys += [] if found is None else [found.key]
        self._plans[sequence] = plan
        coming = self.index.coming(tokens, request.namespace, len(tokens) - 1)
        lease.next_step_tokens = max(0, coming - depth)
        lease.cached_tokens = depth
        if sequence.is_fresh:
            sequence.num_recomputed = match - depth

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        """Where to keep checkpoints beyond `depth`, from which a sequence goes on, and why; KV is
        cached to `match`."""
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
        return [self._end_of(prompt)]

    @abstractmethod
    def _end_of(self, prompt: Tokens) -> int:
        """Where the same prompt goes on, or one that continues it, if there is no mark."""

    def _due(self, plan: Plan[H], end: int) -> Iterable[tuple[int, Kind]]:
        """The marks up to `end`, which are then done."""
        while plan.marks and plan.marks[-1][0] <= end:
            yield plan.marks.pop()

    def release(self, sequence: Sequence) -> None:
        plan = self._plans.pop(sequence)
        if plan.found is not None and not plan.begun:
            self.index.release(plan.found)

    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        self.index.pin(tokens, namespace)

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        self.index.unpin(tokens, namespace)

    def commit(self) -> None:
        self.index.commit()

    def recover(self) -> None:
        self._plans.clear()

    def check(self, running: Iterable[Sequence]) -> None:
        assert self._plans.keys() == {*running}, "plans without a sequence"
