"""Plans the window tables of sequences, where layers with a window keep only their last window."""

from __future__ import annotations

from collections.abc import Hashable

from radixcache.base import Tokens
from radixcache.checkpoints import Kind
from radixcache.lease import Lease
from radixcache.runtime.engine.checkpoint_planner import CheckpointPlanner
from radixcache.runtime.request import Request, Sequence
from radixcache.windows import Window, WindowIndex


class WindowPlanner(CheckpointPlanner[Window]):
    """Plans windows and their checkpoints for one engine's sequences."""

    index: WindowIndex

    def find(self, sequence: Sequence, lease: Lease) -> None:
        match = lease.cached_tokens
        super().find(sequence, lease)
        found, (start, whole) = self._plans[sequence].found, self.index.look_back(match)
        if found is None and lease.cached_tokens == start > 0:
            self.index.begin(lease, None, start, whole)
        else:
            self.index.begin(lease, found)

    def depth(self, tokens: Tokens, namespace: Hashable, match: int) -> int:
        return self.index.resume(tokens, namespace, match)[0]

    def _look_back(self, match: int) -> tuple[int, int]:
        return self.index.look_back(match)

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        """Adds two at a prompt's end, which share all pages but one: the same prompt resumes behind
        its last token if its logits are kept, before it otherwise, at the end of a block where hits
        are whole blocks."""
        end, block = len(request.prompt_token_ids), self.index.granularity
        ends: dict[int, Kind] = {(end - 1) // block * block: "prompt", end: "prompt"}
        return ends | super()._marks(request, match, depth)

    def _end_of(self, prompt: Tokens) -> int:
        return len(prompt) - 1

    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        super().pin(self._blocks(tokens), namespace)

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        super().unpin(self._blocks(tokens), namespace)

    def _blocks(self, tokens: Tokens) -> Tokens:
        """The whole blocks of them, which alone can be a hit."""
        return tokens[: len(tokens) // self.index.granularity * self.index.granularity]

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        lease = sequence.lease
        assert lease is not None
        if self.index.missing(lease, num_tokens):
            self.index.reserve(lease, num_tokens)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        assert sequence.lease is not None
        return self.index.missing(sequence.lease, num_tokens)

    def plan(self, sequence: Sequence, start: int, end: int) -> None:
        plan, lease = self._plans[sequence], sequence.lease
        assert lease is not None
        for position, kind in self._due(plan, end):
            checkpoint = self.index.write(lease, sequence.tokens[:position], kind)
            if checkpoint is not None:
                plan.keys.append(checkpoint.key)
        plan.begun = True

    def leave(self, sequence: Sequence) -> None:
        plan, lease = self._plans[sequence], sequence.lease
        assert lease is not None
        assert lease.window is not None
        if plan.begun and self._keeps and sequence.num_computed >= lease.window.whole:
            self.index.keep(lease, sequence.tokens[: sequence.num_computed], plan.keys)

    def commit(self) -> None:
        super().commit()
        for sequence, plan in self._plans.items():
            if plan.begun and sequence.lease is not None:
                # With overlap, the last token may yet be dropped.
                self.index.slide(sequence.lease, sequence.num_computed - 1)
