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

    def plan(self, sequence: Sequence, start: int, end: int) -> SequenceStates:
        plan, keeps = self._plans[sequence], []
        for position, kind in self._due(plan, end):
            namespace = sequence.request.namespace
            checkpoint = self.index.write(sequence.tokens[:position], namespace, kind)
            if checkpoint is not None:
                keeps.append((position - start, checkpoint.held))
                plan.keys.append(checkpoint.key)
        read = plan.slot if plan.begun else -1 if plan.found is None else plan.found.held
        plan.begun = True
        return SequenceStates(read, plan.slot, tuple(keeps))

    def leave(self, sequence: Sequence) -> None:
        plan = self._plans[sequence]
        if plan.begun and self._keeps:
            done, slot = sequence.tokens[: sequence.num_computed], plan.slot
            plan.slot = -1
            self.index.keep(slot, done, sequence.request.namespace, plan.keys)

    def release(self, sequence: Sequence) -> None:
        slot = self._plans[sequence].slot
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
        self.index.check(plan.slot for plan in self._plans.values() if plan.slot >= 0)
