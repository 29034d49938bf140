"""Plans which slot a sequence's recurrent state is read from and written to."""

from __future__ import annotations

from collections.abc import Iterable

from radixcache.base import Tokens
from radixcache.runtime.engine.checkpoint_planner import CheckpointPlanner
from radixcache.runtime.request import Sequence
from radixcache.states import SequenceStates, StateIndex


class StatePlanner(CheckpointPlanner[int]):
    """Plans states and their checkpoints for one engine's sequences."""

    index: StateIndex

    def _end_of(self, prompt: Tokens) -> int:
        # Not before the last token: alone it would be taken for a decode, which Nemotron-H computes
        # by another rule than a prefill (transformers bounds the time step in the latter only).
        return max(0, len(prompt) - 2)

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        plan = self._plans[sequence]
        if plan.slot < 0:
            plan.slot = self.index.take()
        if plan.other < 0 and num_tokens > len(sequence):
            plan.other = self.index.take()

    def plan(self, sequence: Sequence, start: int, end: int) -> SequenceStates:
        plan, keeps = self._plans[sequence], []
        for position, kind in self._due(plan, end):
            namespace = sequence.request.namespace
            checkpoint = self.index.write(sequence.tokens[:position], namespace, kind)
            if checkpoint is not None:
                keeps.append((position - start, checkpoint.held))
                plan.keys.append(checkpoint.key)
        read = plan.slot if plan.begun else -1 if plan.found is None else plan.found.held
        plan.begun, plan.is_ahead = True, end > len(sequence)
        if plan.is_ahead:
            plan.slot, plan.other = plan.other, plan.slot
        return SequenceStates(read, plan.slot, tuple(keeps))

    def leave(self, sequence: Sequence) -> None:
        plan = self._plans[sequence]
        if plan.begun and self._keeps:
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
        """As in `Planner`, and that each slot belongs to a sequence or a checkpoint."""
        super().check(running)
        plans = self._plans.values()
        self.index.check(slot for plan in plans for slot in (plan.slot, plan.other) if slot >= 0)
