"""Plans the window tables of sequences, where layers with a window keep only their last window."""

from __future__ import annotations

from collections.abc import Hashable

from radixcache.lease import Lease
from radixcache.runtime.engine.scheduling.saved_state_planner import SavedStatePlanner
from radixcache.runtime.request import Request, Sequence
from radixcache.states.saved import Kind
from radixcache.states.windows import LeftWindow, Window, WindowIndex
from radixcache.tokens import Tokens


class WindowPlanner(SavedStatePlanner[Window]):
    """Plans windows and their saved states for one engine's sequences."""

    kept_in = "window_pages"
    index: WindowIndex

    def find(self, sequence: Sequence, lease: Lease) -> None:
        match, end = lease.cached_tokens, len(sequence.request.prompt_token_ids)
        super().find(sequence, lease)
        plan, (start, whole) = self._plans[sequence], self.index.look_back(match)
        if plan.found is None and lease.cached_tokens == start > 0:
            self.index.begin(lease, None, start, whole)
        else:
            self.index.begin(lease, plan.found)
        assert lease.window is not None
        lease.window.near = end - 2 * self.index.window, end
        if isinstance(plan.found, LeftWindow):  # let the next prompt find a saved state
            plan.keys = [] if plan.found.deepest is None else [plan.found.deepest.key]
            plan.marks = sorted({**dict(plan.marks), match: "branch"}.items(), reverse=True)

    def depth(self, tokens: Tokens, namespace: Hashable, match: int) -> int:
        return self.index.resume(tokens, namespace, match)[0]

    def _look_back(self, match: int) -> tuple[int, int]:
        return self.index.look_back(match)

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        """Adds two at a prompt's end, which share all pages but one. The same prompt resumes behind
        its last token if its logits are kept, else before it; where hits are whole blocks, it does
        so at the end of one. A third, a window before, is for a prompt that parts from this one
        shortly before its end."""
        end, block = len(request.prompt_token_ids), self.index.granularity
        ends: dict[int, Kind] = {(end - 1) // block * block: "prompt", end: "prompt"}
        if not self.index.looks_back:
            ends.setdefault(end - self.index.window, "near")
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
            saved = self.index.write(lease, sequence.tokens[:position], kind)
            if saved is not None:
                plan.keys.append(saved.key)
        plan.begun = True
        if start < sequence.prefill_end:  # no other waits for decoded tokens
            self.index.compute(lease, end)

    def leave(self, sequence: Sequence) -> None:
        plan, lease = self._plans[sequence], sequence.lease
        assert lease is not None
        assert lease.window is not None
        tokens = sequence.tokens[: sequence.num_computed]
        if plan.begun and self._keeps:
            self.index.enter(lease, len(tokens))
        if sequence.ends_conversation:
            self.retire(tokens, lease.namespace, plan.keys)
        elif plan.begun and self._keeps and sequence.num_computed >= lease.window.whole:
            self.index.keep(lease, tokens, plan.keys)

    def commit(self) -> None:
        super().commit()
        for sequence, plan in self._plans.items():
            if plan.begun and sequence.lease is not None:
                # With overlap, the last token may yet be dropped.
                self.index.slide(sequence.lease, sequence.num_computed - 1)
