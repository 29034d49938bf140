"""Plans which slot a sequence's recurrent state is read from and written to."""

from __future__ import annotations

from collections.abc import Iterable

from radixcache.runtime.engine.scheduling.saved_state_planner import SavedStatePlanner
from radixcache.runtime.request import Request, Sequence
from radixcache.states.recurrent import SequenceStates, StateIndex
from radixcache.states.saved import Kind
from radixcache.tokens import Tokens

NEAR = 128
"""Tokens between a prompt's end and the state before it: most questions about a document are
shorter."""

TRAIL = 2048
"""Tokens between the states on the way through a prompt."""


class StatePlanner(SavedStatePlanner[int]):
    """Plans states and their saved states for one engine's sequences."""

    kept_in = "recurrent_states"
    index: StateIndex

    def _end_of(self, prompt: Tokens) -> int:
        # Not before the last token: alone it would be taken for a decode, which Nemotron-H computes
        # by another rule than a prefill (transformers bounds the time step in the latter only).
        return max(0, len(prompt) - 2)

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        """Adds spare ones: one shortly before the prompt's end, and some on the way to it."""
        end = len(request.prompt_token_ids)
        marks: dict[int, Kind] = dict.fromkeys(range(TRAIL, end - NEAR, TRAIL), "trail")
        if end - NEAR - depth >= NEAR:
            marks[end - NEAR] = "near"
        return marks | super()._marks(request, match, depth)

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        plan = self._plans[sequence]
        if plan.slot < 0:
            plan.slot = self.index.take()
        if plan.other < 0 and num_tokens > len(sequence):
            plan.other = self.index.take()

    def plan(self, sequence: Sequence, start: int, end: int) -> SequenceStates:
        plan, keeps = self._plans[sequence], []
        for position, kind in self._due(plan, end):
            request = sequence.request
            saved = self.index.write(
                sequence.tokens[:position],
                request.namespace,
                kind,
                len(request.prompt_token_ids) - position,
            )
            if saved is not None:
                keeps.append((position - start, saved.held))
                plan.keys.append(saved.key)
        read = plan.slot if plan.begun else -1 if plan.found is None else plan.found.held
        plan.begun, plan.is_ahead = True, end > len(sequence)
        if plan.is_ahead:
            plan.slot, plan.other = plan.other, plan.slot
        return SequenceStates(read, plan.slot, tuple(keeps))

    def leave(self, sequence: Sequence) -> None:
        plan = self._plans[sequence]
        if sequence.ends_conversation:
            self.retire(sequence.tokens, sequence.request.namespace, plan.keys)
        elif plan.begun and self._keeps:
            end = sequence.num_computed
            if plan.is_ahead and end >= len(sequence):  # the last token, or one that never came
                plan.slot, plan.other, end = plan.other, plan.slot, end - 1
            slot, plan.slot = plan.slot, -1
            self.index.keep(slot, sequence.tokens[:end], sequence.request.namespace, plan.keys)

    def release(self, sequence: Sequence) -> None:
        plan = self._plans[sequence]
        for slot in (plan.slot, plan.other):
            if slot >= 0:
                self.index.drop(slot)
        super().release(sequence)

    def reset(self) -> None:
        self.index.clear()

    def recover(self) -> None:
        super().recover()
        self.index.recover()

    def check(self, running: Iterable[Sequence]) -> None:
        """As in `Planner`, and that each slot belongs to a sequence or a saved state."""
        super().check(running)
        plans = self._plans.values()
        self.index.check(slot for plan in plans for slot in (plan.slot, plan.other) if slot >= 0)
