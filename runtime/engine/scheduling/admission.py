"""Decides whether a waiting sequence runs from this step on, and what it waits for if not."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from collections.abc import Sequence as List
from functools import partial
from math import inf
from typing import Literal

from radixcache.base import PrefixCache
from radixcache.lease import Lease
from radixcache.runtime.engine.logits_cache import PromptLogitsCache
from radixcache.runtime.engine.scheduling.chunk import Chunk
from radixcache.runtime.engine.scheduling.fairness import FairShares
from radixcache.runtime.engine.scheduling.image_encoding import ImageEncoding
from radixcache.runtime.engine.scheduling.prefills import may_begin
from radixcache.runtime.engine.scheduling.saved_state_planner import Planner
from radixcache.runtime.engine.scheduling.step_budget import StepBudget
from radixcache.runtime.kv_offload.page_loader import NO_LOADS, PageLoader
from radixcache.runtime.request import PromptKey, Sequence
from radixcache.tokens import Tokens

Policy = Literal["lpm", "fcfs"]

MAX_SKIPS = 64
"""How often later sequences of its client may overtake a waiting one before it goes first; one that
overtakes the client's oldest counts twice."""

LOOK_AHEAD = 64
"""Waiting sequences of a client that are compared for the longest cached prefix in one step."""


class Admission:
    """Looks up waiting sequences for the scheduler, in the order in which they should be admitted.

    Args:
        budget: of the step that is being scheduled.
        planner, loads, logits_cache, policy, images: those of the scheduler.
    """

    def __init__(
        self,
        cache: PrefixCache,
        budget: StepBudget,
        planner: Planner,
        loads: PageLoader,
        logits_cache: PromptLogitsCache | None,
        policy: Policy,
        images: ImageEncoding,
    ) -> None:
        self.images = images
        self.shares = FairShares()
        self._cache, self._budget, self._planner, self.loads = cache, budget, planner, loads
        self.logits_cache, self._policy = logits_cache, policy

    def in_order(
        self, waiting: Collection[Sequence], running: Collection[Sequence]
    ) -> Iterator[Sequence]:
        """The clients in turn, each with its longest cached prefixes first."""
        return self.shares.in_turn(waiting, running, self._by_prefix)

    def admits(
        self, sequence: Sequence, prompts: Collection[Sequence], ending: set[PromptKey]
    ) -> bool:
        """Acquire the sequence's cached prefix, after which it may take pages, unless it should
        wait: for pages that are read from a tier below; for a prompt in prefill that computes what
        it lacks, or has the step's room; for rows of images; for another sequence that computes, in
        this step, most of what it lacks in a page that cannot be shared yet; or for the logits of
        the same prompt.

        Args:
            prompts: the running sequences in prefill.
            ending: the prompts whose logits will be kept after this step.
        """
        if self.loads.waits(sequence):
            return False
        if not (self.loads.has_read(sequence) or self.may_begin(sequence, prompts)):
            return False
        lease = self._acquire(sequence)
        reads_more = self.loads.load(sequence, lease)
        self._budget.tokens = self.loads.charge(self._budget.tokens)
        if reads_more:
            self.release(sequence)
            return False
        lease.cached_tokens = self._leave_images_whole(sequence, lease.cached_tokens)
        self._planner.find(sequence, lease)
        if self.images.waits(sequence, lease.cached_tokens):
            self.release(sequence)
            return False
        missing = len(sequence) - lease.cached_tokens
        is_twin = missing and sequence.is_fresh and sequence.request.prompt_key in ending
        if (2 * lease.next_step_tokens > missing or is_twin) and not sequence.deferred:
            sequence.deferred = True
            self.release(sequence)
            return False
        sequence.num_computed, sequence.prefill_end = lease.cached_tokens, len(sequence)
        return True

    def note(self, sequence: Sequence, waiting: Collection[Sequence]) -> None:
        """A sequence is admitted: it has overtaken those of its client that came before."""
        weight, client = 2, sequence.request.client
        for other in waiting:
            if other is sequence:
                break
            if other.request.client == client:
                other.num_skips += weight
                weight = 1
        self.shares.admit(client)
        self.loads.forget(sequence)
        self.images.forget(sequence)
        sequence.request.note_admission()

    def may_begin(self, sequence: Sequence, prompts: Collection[Sequence], parts: int = 1) -> bool:
        """Whether its prefill may begin beside `prompts`, in one of `parts` of the step's room."""
        waited = sequence.num_skips >= MAX_SKIPS or self.shares.has_waited(sequence.request.client)
        any_size = waited or self.loads is not NO_LOADS
        room = None if any_size else partial(self._budget.room, parts=parts)
        return not prompts or may_begin(sequence, prompts, self.match, room)

    def ending(self, chunks: List[Chunk]) -> set[PromptKey]:
        """The prompts whose logits will be kept once these chunks are computed."""
        if self.logits_cache is None:
            return set()
        return {chunk.sequence.request.prompt_key for chunk in chunks if chunk.ends_prompt}

    def match(self, tokens: Tokens, namespace: Hashable) -> int:
        """Leading tokens that a sequence would not compute: with KV, up to a saved state."""
        return self._planner.depth(tokens, namespace, self._cache.match(tokens, namespace))

    def release(self, sequence: Sequence, discard: bool = False) -> None:
        """Give its lease back; with `discard`, what it computed is forgotten."""
        assert sequence.lease is not None
        self._cache.release(sequence.lease, ended=sequence.ends_conversation, discard=discard)
        self._planner.release(sequence)
        sequence.lease, sequence.num_computed = None, 0

    def _by_prefix(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences of one client in the order in which they should be admitted: those that
        were overtaken often, then those with the longest cached prefixes."""
        sequences = sequences[:LOOK_AHEAD]
        if self._policy != "lpm" or len(sequences) < 2:
            return sequences

        def rank(sequence: Sequence) -> float:
            overtaken = sequence.num_skips >= MAX_SKIPS
            return -inf if overtaken else -self.match(sequence.tokens, sequence.request.namespace)

        return sorted(sequences, key=rank)

    def _leave_images_whole(self, sequence: Sequence, hit: int) -> int:
        """A hit lowered to where its sequence may resume: not within an image that is computed in
        one step, nor at a saved state there."""
        images, namespace = sequence.request.images, sequence.request.namespace
        while images is not None and hit != (found := images.resume(hit)):
            hit = self._planner.depth(sequence.tokens, namespace, found)
        return hit

    def _acquire(self, sequence: Sequence) -> Lease:
        """Lease the sequence's cached prefix: all of a prompt whose logits are kept."""
        request, end = sequence.request, len(sequence)
        if sequence.scoring is not None:  # tokens with KV but without scores are computed again
            end = sequence.scoring.recall()
        include_last = (
            self.logits_cache is not None
            and sequence.is_fresh
            and end == len(sequence)
            and request.prompt_key in self.logits_cache
            and self._planner.depth(sequence.tokens, request.namespace, end) == end
        )
        lease = sequence.lease = self._cache.acquire(
            sequence.tokens, request.namespace, resumed=sequence.resumes, include_last=include_last
        )
        lease.cached_tokens = min(lease.cached_tokens, end)
        return lease
