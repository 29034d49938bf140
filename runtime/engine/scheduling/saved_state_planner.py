"""Plans from which saved state a sequence resumes, and where saved states are kept.

In a model with recurrent layers, or with windows that are not kept, a hit has two ends. KV is
cached to token M; the deepest saved state at or before M is after token C. The sequence resumes at
C: tokens C to M are computed again, in place, over pages that are there; until then its lease is
ahead of what it has computed. Saved states are kept where others are likely to resume: where the
system message ends, where two prompts have diverged, after all that a sequence has computed, and
before the mark that asks the model to speak. The next turn diverges at that mark, because chat
templates leave out the reasoning behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import numpy as np

from radixcache.lease import Lease
from radixcache.runtime.request import Request, Sequence
from radixcache.states.recurrent import SequenceStates
from radixcache.states.saved import Key, Kind, SavedState, SavedStateIndex
from radixcache.tokens import Tokens

MIN_RECOMPUTED = 16
"""If a hit computes so many cached tokens again, it leaves a saved state where they end."""

AFTER_MARK = 16
"""Most tokens that may follow the answer's mark in a prompt, such as an opening think tag."""

H = TypeVar("H")


@dataclass(slots=True)
class Plan(Generic[H]):
    """The plan of one sequence, from its admission until it leaves.

    Attributes:
        found: the saved state from which the first chunk resumes.
        marks: positions at which to keep a saved state, descending, and why.
        slot: the sequence's own state in a recurrent model; -1 before it has one.
        other: the slot with the state before a token that was not read yet when it was planned, and
            may be one too many; -1 before the first such token.
        is_ahead: whether the last token that was planned was one.
        begun: whether a chunk was planned; later chunks read the sequence's own slot.
        keys: saved states that the sequence resumed from, or left.
    """

    found: SavedState[H] | None
    marks: list[tuple[int, Kind]]
    slot: int = -1
    other: int = -1
    is_ahead: bool = False
    begun: bool = False
    keys: list[Key] = field(default_factory=list)


class Planner:
    """Base of planners, for models whose sequences need KV alone: a hit ends where its KV ends."""

    def counts(self) -> dict[str, dict[str, int]]:
        """Slots of states, or pages of windows, by what they are used for."""
        return {}

    def find(self, sequence: Sequence, lease: Lease) -> None:
        """Lower a new lease's hit to the position from which the sequence resumes."""

    def depth(self, tokens: Tokens, namespace: Hashable, match: int) -> int:
        """How many of `match` tokens with KV a hit can use. Changes nothing."""
        return match

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Take what the sequence needs besides KV to compute up to `num_tokens` tokens, of which
        the last may be one that is not read yet.

        Raises:
            OutOfPages: there is too little; nothing has changed.
        """

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that `take` would take."""
        return 0

    def plan(self, sequence: Sequence, start: int, end: int) -> SequenceStates | None:
        """Plan the step that computes tokens [start, end) of a sequence, as `take`; returns the
        slots that it reads and writes, if the model is recurrent."""
        return None

    def leave(self, sequence: Sequence) -> None:
        """Keep a saved state of what a leaving sequence has computed, unless no other is expected
        to go on from there."""

    def retire(self, tokens: Tokens, namespace: Hashable) -> None:
        """No sequence is expected to go on from `tokens`."""

    def release(self, sequence: Sequence) -> None:
        """Give back what `find` and `take` gave, if anything: the sequence has left, or was not
        admitted."""

    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Evict the saved state after `tokens` only after all others."""

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        """Undo one `pin`."""

    def commit(self) -> None:
        """The step that was planned last has run."""

    def reset(self) -> None:
        """Forget all saved states, when no sequence runs."""

    def recover(self) -> None:
        """Forget all plans: a step was cut off, and no sequence runs."""

    def check(self, running: Iterable[Sequence]) -> None:
        """Verify all plans between two steps."""


NO_SAVED_STATES = Planner()


class SavedStatePlanner(Planner, ABC, Generic[H]):
    """Base of planners that keep saved states, for one engine's sequences.

    Args:
        index: the saved states.
        keeps: whether KV is cached, so that another sequence can use a saved state.
        answer_mark: the tokens with which a chat template asks the model to speak; empty without.
    """

    kept_in: ClassVar[str]
    """What `counts` counts."""

    def __init__(
        self, index: SavedStateIndex[H], keeps: bool = True, answer_mark: Iterable[int] = ()
    ) -> None:
        self.index, self._keeps = index, keeps
        self._mark = np.array([*answer_mark], np.int32)
        self._plans: dict[Sequence, Plan[H]] = {}

    def counts(self) -> dict[str, dict[str, int]]:
        return {self.kept_in: self.index.counts}

    def depth(self, tokens: Tokens, namespace: Hashable, match: int) -> int:
        return self.index.depth(tokens, namespace, match)

    def _look_back(self, match: int) -> tuple[int, int]:
        """From where a sequence can resume without a saved state if KV is cached to `match`, and
        from which length on it can leave one."""
        return 0, 0

    def find(self, sequence: Sequence, lease: Lease) -> None:
        """Lower a new lease's hit to the deepest saved state, and decide where to keep others."""
        request, match = sequence.request, lease.cached_tokens
        tokens = sequence.tokens
        found = self.index.find(tokens, request.namespace, match)
        depth = 0 if found is None else found.key.length
        start, whole = self._look_back(match)
        if start > depth:
            if found is not None:
                self.index.release(found)
            found, depth = None, start
        marks = self._marks(request, match, depth) if self._keeps else {}
        least = max(depth + 1, 0 if depth > start else whole)
        plan = Plan(found, sorted(((n, k) for n, k in marks.items() if n >= least), reverse=True))
        plan.keys += [] if found is None else [found.key]
        self._plans[sequence] = plan
        ahead = self.index.in_flight(tokens, request.namespace, len(tokens) - 1)
        lease.next_step_tokens = max(0, ahead - depth)
        lease.cached_tokens = depth
        if sequence.is_fresh:
            sequence.num_recomputed = match - depth

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        """Where to keep saved states, and why; the sequence resumes at `depth`, and KV is cached to
        `match`."""
        *ends, last = self._boundaries(request.prompt_token_ids)
        marks: dict[int, Kind] = {**dict.fromkeys(ends, "boundary"), last: "prompt"}
        if match - depth >= MIN_RECOMPUTED:
            marks[match] = "branch"
        return marks

    def _boundaries(self, prompt: Tokens) -> list[int]:
        """Where others are likely to resume within a prompt: the end of its first message, and its
        own end, before the answer's mark; 0 is nowhere."""
        mark, tail = self._mark, prompt[-len(self._mark) - AFTER_MARK :]
        for start in range(len(tail) - len(mark), -1, -1):
            if len(mark) and (tail[start : start + len(mark)] == mark).all():
                end = len(prompt) - len(tail) + start
                begins = np.flatnonzero(prompt[:end] == mark[0])[1:2].tolist()
                return [*begins, end] if end else [0]
        return [self._end_of(prompt)]

    @abstractmethod
    def _end_of(self, prompt: Tokens) -> int:
        """Where to keep a saved state for the same prompt, or a longer one, if there is no mark."""

    def _due(self, plan: Plan[H], end: int) -> Iterable[tuple[int, Kind]]:
        """Remove and give the marks up to `end`."""
        while plan.marks and plan.marks[-1][0] <= end:
            yield plan.marks.pop()

    def release(self, sequence: Sequence) -> None:
        plan = self._plans.pop(sequence, None)
        if plan is not None and plan.found is not None and not plan.begun:
            self.index.release(plan.found)

    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        self.index.pin(tokens, namespace)

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        self.index.unpin(tokens, namespace)

    def retire(self, tokens: Tokens, namespace: Hashable, before: Iterable[Key] = ()) -> None:
        self.index.retire(tokens, namespace, before)

    def commit(self) -> None:
        self.index.commit()

    def recover(self) -> None:
        self._plans.clear()

    def check(self, running: Iterable[Sequence]) -> None:
        assert self._plans.keys() == {*running}, "plans without a sequence"
