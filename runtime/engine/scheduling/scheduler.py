"""Decides what the next step computes.

Decodes come first, one token each, or more where a grammar leaves no choice; the rest of the step's
budget (`step_budget.py`) goes to prefill chunks (chunked prefill), of running sequences before
waiting ones (`admission.py`), and last to drafts (`spec_decode`), which preempt no sequence and
evict no page. A prefill chunk is published while it is being scheduled, so that the next sequence
of the same step can already share it.

Clients share fairly (`fairness.py`). Among the requests of one client the longest cached prefix
decides, as in Cao et al. ("Locality-aware Fair Scheduling in LLM Serving", 2025).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from itertools import islice

import numpy as np

from radixcache.base import PrefixCache
from radixcache.errors import InvalidRequest, OutOfPages, first_line
from radixcache.runtime.engine.logits_cache import PromptLogitsCache
from radixcache.runtime.engine.scheduling.admission import LOOK_AHEAD, Admission, Policy
from radixcache.runtime.engine.scheduling.chunk import Chunk
from radixcache.runtime.engine.scheduling.image_encoding import ImageEncoding
from radixcache.runtime.engine.scheduling.saved_state_planner import NO_SAVED_STATES, Planner
from radixcache.runtime.engine.scheduling.step_budget import StepBudget
from radixcache.runtime.kv_offload.page_loader import NO_LOADS, PageLoader
from radixcache.runtime.multimodal.image import EncodeImage
from radixcache.runtime.request import PromptKey, Request, Sequence
from radixcache.runtime.spec_decode.proposer import MAX_DRAFT, NO_TOKENS, DraftProposer
from radixcache.states.recurrent import SequenceStates

OnPublish = Callable[[Sequence, int], None]

NO_ROOM = "the KV memory has no room for the request beside what is pinned"
"""Why a request fails; without the number of pinned pages, which may belong to others."""

DECODE_AHEAD = 128
"""Tokens for which a decoding sequence reserves pages at a time, where there are enough."""


class Scheduler:
    """The waiting and the running sequences of one engine.

    Args:
        cache: gives sequences their pages.
        max_num_batched_tokens: tokens per step, decodes and prefill chunks together.
        max_num_seqs: running sequences at most.
        policy: "lpm" admits the longest cached prefix first (SGLang's cache-aware
            order), with ageing; "fcfs" admits in order of arrival.
        planner: plans the states of a recurrent model, or windows that are kept apart.
        loads: loads pages from a tier below the cache's pool.
        logits_cache: keeps the logits at the ends of prompts; without it, the last token of each
            prompt is computed.
        proposer: drafts tokens; not for a recurrent model, whose state would then hold them.
        encode_image: gives the features of images, on a thread, for prompts that wait.
        on_publish: called before the first n tokens of a sequence are published.
        catch_up: does what `on_publish` has put off until the step is launched.
        step_seconds: what a step should take at most, by what `StepBudget` measures.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        policy: Policy = "lpm",
        planner: Planner = NO_SAVED_STATES,
        *,
        loads: PageLoader = NO_LOADS,
        logits_cache: PromptLogitsCache | None = None,
        proposer: DraftProposer | None = None,
        encode_image: EncodeImage | None = None,
        on_publish: OnPublish = lambda sequence, num_tokens: None,
        catch_up: Callable[[], None] = lambda: None,
        step_seconds: float | None = None,
    ) -> None:
        self.cache = cache
        self.planner, self.proposer = planner, proposer
        self.on_publish, self.catch_up = on_publish, catch_up
        self.max_num_batched_tokens = max_num_batched_tokens
        self.budget = StepBudget(step_seconds)
        self.max_num_seqs = max_num_seqs
        self.open: dict[Sequence, None] = {}
        """All sequences that have not ended, in order of arrival; a failed step changes none."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Running sequences in order of admission: the last one is preempted first."""
        self.on_no_room: Callable[[], bool] = lambda: False
        """Called before a request fails for lack of pages; returns whether it freed any."""
        self.has_row: Callable[[Sequence], bool] = lambda sequence: False
        """Whether the row that a sequence asks for is kept."""
        self.answered: dict[Sequence, None] = {}
        """Waiting sequences that the last step found to end with a kept row."""
        self.num_preemptions = 0
        self._short_of_pages = False
        self._no_room = False
        """The last admission failed for lack of pages; no sequence has come or ended since."""
        self._tried = 0
        """`cache.changes` at that admission: no other is tried before it changes."""
        self._lacks_pages = False
        """A running sequence got no page in the last step that was scheduled ahead."""
        self._ahead = DECODE_AHEAD
        """Tokens to reserve at a time; fewer once a reservation failed, until a sequence leaves."""
        self._failed = list[Request]()
        self.admission = Admission(
            *(cache, self.budget, planner, loads, logits_cache, policy),
            ImageEncoding(encode_image),
        )
        self._shares = self.admission.shares
        cache.coming = lambda: ((s.tokens, s.request.namespace) for s in self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._shares.come(sequence.request.client)
        self.open[sequence] = None
        self.waiting.append(sequence)
        self._no_room = False

    def schedule(self) -> list[Chunk]:
        """Choose the chunks of the next step, reserve their pages and publish their tokens."""
        chunks: list[Chunk] = []
        self.answered = {}
        self.admission.loads.begin_step()
        self._lacks_pages = False
        if (victim := self._victim()) is not None:
            self._preempt(victim)
            self._short_of_pages = self._no_room = False
        self._fill(chunks)
        if self.proposer is not None and self.budget.tokens:
            chunks = self._with_drafts(self.proposer, chunks)
        return chunks

    def schedule_ahead(self, sampled: list[Sequence]) -> list[Chunk]:
        """The chunks of the step after one whose tokens, one for each of `sampled`, are not read.

        The sequences that may go on compute that token; prompts go on, and waiting sequences are
        admitted, as in `schedule`. No sequence is preempted: if one should be, or if a draft is
        expected, the list is empty.
        """
        self.answered = {}
        going = [s for s in sampled if not s.finish_reason and s.num_generated + 1 < s.max_tokens]
        drafts = self.proposer if going else None
        expected = drafts is not None and drafts.expects(going)
        if self._lacks_pages or expected or self._victim() is not None:
            return []
        try:
            for sequence in going:
                self.reserve_decode(sequence)
        except OutOfPages:
            return []
        self.admission.loads.begin_step()
        chunks = [Chunk(s, 1, self._plan_decode(s), is_unread=True) for s in going]
        self._fill(chunks, sampled)
        return chunks

    def schedule_decodes(self, steps: int) -> list[Chunk]:
        """The chunks of so many steps in one call, or fewer, if all running sequences only decode,
        and their tokens need only be drawn; else none. None waits; later steps evict no page.

        The draft of a chunk stands for the tokens that are drawn on the way.
        """
        going, more = self.running, steps - 1
        if self.waiting or self.proposer is not None or not going:
            return []
        for sequence in going:
            if sequence.num_pending != 1 or sequence.in_prefill or sequence.needs_logits:
                return []
            more = min(more, sequence.max_tokens - sequence.num_generated - 1)
        try:
            for sequence in going:
                if more > 0:
                    self.reserve_decode(sequence)
                    more = min(more, self._reserve_draft(sequence, 1 + more) - 1)
        except OutOfPages:
            return []
        if more < 1:
            return []
        self.answered = {}
        self.admission.loads.begin_step()
        draft = np.zeros(more, np.int32)
        return [Chunk(s, 1, self._plan_decode(s), draft) for s in going]

    def _plan_decode(self, sequence: Sequence) -> SequenceStates | None:
        start, sequence.num_computed = sequence.num_computed, sequence.num_computed + 1
        return self.planner.plan(sequence, start, start + 1)

    def _fill(self, chunks: list[Chunk], sampled: Collection[Sequence] | None = None) -> None:
        """Add chunks of running sequences, without those `sampled`, and of waiting ones."""
        budget = self.budget
        budget.begin(self.max_num_batched_tokens - len(chunks), alone=len(self.open) == 1)
        skipped = {*(sampled or ())}
        going = [s for s in self.running if s not in skipped]
        # One token first, then what a grammar has forced, then prompts, the shortest rest first.
        rank = lambda s: (s.num_pending > 1, s.in_prefill and s.num_pending)  # noqa: E731
        prompts = [sequence for sequence in going if sequence.in_prefill]
        share = 1
        if prompts and not self._is_full:  # half for waiting prompts, if one may begin
            first = islice(self.waiting, LOOK_AHEAD)
            share += any(self.admission.may_begin(s, prompts, 2) for s in first)
        parts = len(prompts) * share
        for sequence in sorted(going, key=rank):
            if sequence.lease is None:  # preempted a moment ago
                continue
            room, start = budget.tokens, None
            if sequence.in_prefill:
                start = sequence.num_computed
                room, parts = budget.room(start, parts), parts - share
            chunk = room and self._schedule_running(sequence, room, chunks, sampled is None)
            if chunk:
                chunks.append(chunk)
                budget.spend(chunk.cost, start)
        if not self._short_of_pages or not self.running:
            self._admit(chunks)

    @property
    def max_rows(self) -> int:
        """Rows of logits in one step at most: of tokens to sample and drafted ones to check."""
        return self.max_num_seqs + MAX_DRAFT * (self.proposer is not None)

    def _with_drafts(self, proposer: DraftProposer, chunks: list[Chunk]) -> list[Chunk]:
        # A prompt that is cached in full has its first token at once, and nothing to wait for.
        last = [chunk for chunk in chunks if chunk.is_last and chunk.num_tokens]
        ends = [chunk.sequence for chunk in last if not chunk.sequence.request.pools]
        room = min(self.budget.tokens, self.max_rows - sum(chunk.is_last for chunk in chunks))
        drafts = proposer.propose(ends, room) if ends else {}
        with_drafts = []
        for chunk in chunks:
            draft = drafts.get(chunk.sequence, NO_TOKENS)
            room = self._reserve_draft(chunk.sequence, len(draft)) if len(draft) else 0
            with_drafts.append(chunk._replace(draft=draft[:room]) if room else chunk)
        return with_drafts

    def _reserve_draft(self, sequence: Sequence, count: int) -> int:
        """Reserve free pages for drafted tokens; returns for how many tokens there are pages."""
        lease, end = sequence.lease, sequence.num_computed + count
        assert lease is not None
        missing = max(0, -(-(end - lease.capacity) // self.cache.page_size))
        missing += self.planner.missing(sequence, end)
        # One more for a page that may be copied, and one for the next token of each sequence: a
        # draft that is refused keeps its pages.
        if missing > 0 and not self.cache.would_evict(missing + 1 + len(self.running)):
            self.cache.reserve(lease, end)
            self.planner.take(sequence, end)
        if self.planner.missing(sequence, end):
            return 0
        return min(count, lease.capacity - sequence.num_computed)

    @property
    def _is_full(self) -> bool:
        short = self._short_of_pages and bool(self.running)
        return short or self._no_room or len(self.running) >= self.max_num_seqs

    def _victim(self) -> Sequence | None:
        """The running sequence to preempt for another client, which has one to compute."""
        if not self._is_full:
            return None
        coming = self._coming()
        waiting = (s for s in self.waiting if not self._needs_no_pass(s, coming))
        return self._shares.victim(self.running, waiting)

    def _schedule_running(
        self, sequence: Sequence, budget: int, chunks: list[Chunk], may_preempt: bool
    ) -> Chunk | None:
        assert sequence.lease is not None
        while True:
            try:
                return self._take(sequence, budget)
            except OutOfPages:
                if not may_preempt:
                    self._lacks_pages = True
                    return None
                scheduled = {chunk.sequence for chunk in chunks}
                newest = next(s for s in reversed(self.running) if s not in scheduled)
                if newest is not sequence:
                    self._preempt(newest)
                    self._short_of_pages = True
                elif chunks or len(self.running) > 1:
                    return None  # the others will free pages
                elif not self.on_no_room():
                    self.fail(sequence, NO_ROOM)
                    return None

    def _admit(self, chunks: list[Chunk]) -> None:
        """Add chunks of waiting sequences."""
        in_vain = self._no_room and self._tried == self.cache.changes
        if in_vain and self.planner is NO_SAVED_STATES and not self.admission.loads.pending:
            return
        if not self.waiting or not self.budget.room(0) or len(self.running) >= self.max_num_seqs:
            return  # before the waiting prompts are looked up
        budget, ending = self.budget, self.admission.ending(chunks)
        prompts = [sequence for sequence in self.running if sequence.in_prefill]
        coming = self._coming()
        for sequence in self.admission.in_order(self.waiting, self.running):
            if not budget.room(0) or len(self.running) >= self.max_num_seqs:
                break
            if self._needs_no_pass(sequence, coming):
                continue
            if not self.admission.admits(sequence, prompts, ending):
                continue
            hit = sequence.num_computed
            try:
                chunk = self._take(sequence, budget.room(hit))
            except OutOfPages:
                self.admission.release(sequence)
                if not self.running and not self.on_no_room():
                    self.waiting.remove(sequence)
                    self.fail(sequence, NO_ROOM)
                self._no_room, self._tried = bool(self.running), self.cache.changes
                break
            sequence.note_hit(hit)
            self.admission.note(sequence, self.waiting)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            coming |= {sequence.request.prompt_key} if sequence.request.pools else set()
            chunks.append(chunk)
            ending |= self.admission.ending([chunk])
            budget.spend(chunk.cost, hit)
            prompts += [sequence] * sequence.in_prefill
        for request, error in self.admission.images.take_failed().items():
            invalid, why = isinstance(error, InvalidRequest), first_line(error)
            for sequence in request.sequences:
                if sequence in self.waiting:
                    self.fail(sequence, why, invalid=invalid)

    def _coming(self) -> set[PromptKey]:
        """The texts whose rows are about to come from sequences that run."""
        return {s.request.prompt_key for s in self.running if s.request.pools}

    def _needs_no_pass(self, sequence: Sequence, coming: set[PromptKey]) -> bool:
        """Whether the row that a waiting sequence asks for is kept, which answers it, or is among
        those `coming`: equal texts have one row."""
        if not sequence.request.pools:
            return False
        if self.has_row(sequence):
            self.answered[sequence] = None
            return True
        return sequence.request.prompt_key in coming

    def _take(self, sequence: Sequence, budget: int) -> Chunk:
        """Reserve pages for the next tokens of a sequence, and publish those of a prefill chunk.

        A prefill chunk is published now, so that the next sequence of this step can share it.
        Decoded tokens are published when the sequence leaves, since no other waits for them: most
        steps cost the cache nothing.

        Raises:
            OutOfPages: nothing has changed.
        """
        lease = sequence.lease
        assert lease is not None
        count = min(sequence.num_pending, max(1, budget // sequence.token_cost))
        end = sequence.num_computed + count
        if (images := sequence.request.images) is not None:
            end = images.cut(sequence.num_computed, end)
            count = end - sequence.num_computed
        if sequence.in_prefill or not count:
            self.planner.take(sequence, end)
            self.cache.reserve(lease, end)
            self.on_publish(sequence, end)
            if not count:
                self.cache.touch(lease)
            elif end > lease.num_tokens:  # else computed for its logits only
                self.cache.publish(lease, sequence.tokens[lease.num_tokens : end])
            sequence.request.prefilled_tokens += count
            self._shares.note(sequence.request.client, count)
        else:
            self.reserve_decode(sequence, count)
        start, sequence.num_computed = sequence.num_computed, end
        return Chunk(sequence, count, self.planner.plan(sequence, start, end))

    def reserve_decode(self, sequence: Sequence, count: int = 1) -> None:
        """Reserve pages for the next tokens of a decoding sequence, and for more where they last.

        Raises:
            OutOfPages: there are too few.
        """
        lease, end = sequence.lease, sequence.num_computed + count
        assert lease is not None
        self.planner.take(sequence, end)
        if end > lease.capacity:
            try:
                self.cache.reserve(lease, min(end + self._ahead - 1, sequence.max_length))
            except OutOfPages:
                if self._ahead == 1:
                    raise
                self._ahead = max(1, self._ahead // 8)
                self.reserve_decode(sequence, count)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages; what it computed stays cached, so resuming costs little."""
        self._leave(sequence)
        sequence.preemptions += 1
        self.num_preemptions += 1
        sequence.resumes = True
        self.waiting.appendleft(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take a running sequence's pages before it fails, and forget what is in them."""
        self.running.remove(sequence)
        self.admission.release(sequence, discard=True)

    def fail(self, sequence: Sequence, error: str, *, invalid: bool = False) -> None:
        """End a sequence that cannot go on; `invalid` if the request is to blame."""
        self._failed.append(sequence.request)
        sequence.request.error, sequence.request.error_is_invalid = error, invalid
        self.finish(sequence, "error")
        sequence.request.note_end()

    def take_failed(self) -> list[Request]:
        """The requests that failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        assert sequence.lease is not None
        if len(sequence.unpublished):
            self._shares.note(sequence.request.client, len(sequence.unpublished))
            self.on_publish(sequence, sequence.num_computed)
            self.cache.publish(sequence.lease, sequence.unpublished, written=True)
            self.catch_up()
        self.planner.leave(sequence)
        self.admission.release(sequence)
        self._ahead = DECODE_AHEAD

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, running or waiting."""
        sequence.finish_reason = reason
        if sequence.lease is not None:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.admission.loads.forget(sequence)
        self.admission.images.forget(sequence)
        self._short_of_pages = self._no_room = False
        if sequence in self.open:
            del self.open[sequence]
            self._shares.leave(sequence.request.client)

    def commit(self) -> None:
        """The step that was scheduled last has run: its KV and its saved states are there."""
        self.cache.commit()
        self.planner.commit()
        self.catch_up()

    def reset(self) -> None:
        """Forget all KV, states, kept logits and texts to draft from.

        Raises:
            LeaseError: a request runs, or a prefix is pinned.
        """
        self.cache.reset()
        if self.admission.logits_cache is not None:
            self.admission.logits_cache.clear()
        self.planner.reset()
        if self.proposer is not None:
            self.proposer.clear()

    def recover(self) -> list[Sequence]:
        """Let all open sequences wait for another step after a step or an `abort` was cut off.

        What the step published is undone (`PrefixCache.recover`). This may be cut off, too, and
        called again. Returns the sequences that were running.
        """
        running = [sequence for sequence in self.running if sequence.finish_reason is None]
        for sequence in self.open:
            if sequence.lease is not None:
                sequence.resumes |= sequence.lease.used
        self.cache.recover()
        self.planner.recover()
        self.admission.loads.recover()
        for sequence in [*self.open]:
            sequence.lease, sequence.num_computed = None, 0
            self.admission.images.forget(sequence)
            if sequence.finish_reason is not None:
                del self.open[sequence]
        order = dict.fromkeys([*running, *self.waiting, *self.open])
        self.waiting = deque(sequence for sequence in order if sequence in self.open)
        self.running = []
        self._short_of_pages = self._no_room = False
        self._shares.keep(sequence.request.client for sequence in self.open)
        return running
