"""The step loop: schedule, run, sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as List
from functools import wraps
from threading import get_ident
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from radixcache.base import PrefixCache, as_namespace
from radixcache.errors import ContextExceeded, InvalidRequest, WrongThread
from radixcache.kernels.upload import Fetch, on_device, send
from radixcache.runtime.engine.model_runner import ModelRunner
from radixcache.runtime.engine.multi_step_runner import MultiStepRunner
from radixcache.runtime.engine.output_processor import OutputProcessor
from radixcache.runtime.engine.rows import Row
from radixcache.runtime.engine.sampler import PendingStep, Sampler
from radixcache.runtime.engine.scheduling.chunk import Chunk
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.model.cuda_graphs import CudaGraphRunner
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.multimodal.image import PlacedImage
from radixcache.runtime.multimodal.prompt_images import PromptImages
from radixcache.runtime.request import PromptKey, Request, Sequence
from radixcache.runtime.sampling.grammar import GrammarBackend
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.sampling.penalties import PenaltyState
from radixcache.runtime.sampling.prompt_logprobs import PromptLogprobs, ScoredPrompts, token_cost
from radixcache.runtime.spec_decode.proposer import NO_TOKENS
from radixcache.stats import CacheStats
from radixcache.tokens import Tokens, TokensLike, as_tokens

_F = TypeVar("_F", bound=Callable[..., Any])


def whole(method: _F) -> _F:
    """Make a method of the engine's one thread leave nothing half done.

    If anything is raised in it, the engine recovers: at once, or, if that is cut off too, at the
    next call.
    """

    @wraps(method)
    def call(self: Engine, *args: Any, **kwargs: Any) -> Any:
        self._enter()
        self._cut_off = True
        try:
            result = method(self, *args, **kwargs)
        except InvalidRequest:  # nothing has changed
            self._cut_off = False
            raise
        except BaseException:
            self._recover()
            raise
        self._cut_off = False
        return result

    return cast(_F, call)


class _Forward(NamedTuple):
    """A step that is enqueued on the device up to its logits.

    Attributes:
        ends: those of `chunks` from whose logits a token is drawn.
        hits: chunks of prompts that are cached in full, with kept logits.
        pooled: the rows of those of `chunks` that end a sequence which asks for its own.
        prefills: (position, tokens) of prompts, from which the cost of a token is measured.
        num_rows: tokens that the step decodes or drafts; 0 if it prefills, too.
    """

    chunks: list[Chunk]
    ends: list[Chunk]
    hits: list[Chunk]
    logits: torch.Tensor
    pooled: torch.Tensor | None
    prefills: list[tuple[int, int]]
    num_rows: int


class _Step(NamedTuple):
    pending: PendingStep
    prefills: list[tuple[int, int]]
    num_rows: int
    num_steps: int = 1


class Engine:
    """Runs requests in continuous batches over one model, one KV pool and one prefix cache.

    One thread uses it at a time: another may take over when there is no work.

    Args:
        decode: token ids to text, with `special` including special tokens; None leaves the outputs
            without text.
        encode: text to token ids, without special tokens; None refuses bad words.
        seed: seeds the noise of requests without a seed of their own.
        grammar_backend: compiles the structures that requests ask for.
        sampler: draws the tokens; by default one with `seed`.
        overlap: launch a step before the tokens of the one before it are read, or run several in
            one call, where the device and the model allow that.
    """

    def __init__(
        self,
        model: PagedModel,
        kv_pool: KVPool,
        cache: PrefixCache,
        scheduler: Scheduler,
        decode: Callable[..., str] | None = None,
        seed: int = 0,
        encode: Callable[[str], list[int]] | None = None,
        grammar_backend: GrammarBackend | None = None,
        sampler: Sampler | None = None,
        overlap: bool = True,
    ) -> None:
        self.model, self.kv_pool = model, kv_pool
        self.cache = cache
        self.scheduler = scheduler
        with on_device(model.device):
            most = scheduler.max_rows
            graphs = CudaGraphRunner(model, kv_pool, most) if model.max_graph_rows else None
        self.runner = ModelRunner(model, kv_pool, graphs, scheduler.admission.images.encode)
        self._decode = decode
        self._encode = encode
        self._grammar_backend = grammar_backend or GrammarBackend(None, model.vocab_size, ())
        self.sampler = sampler or Sampler(model.device, seed, model.eos_token_ids)
        self.output_processor = OutputProcessor(scheduler, model.eos_token_ids)
        self._scored = ScoredPrompts(model.vocab_size)
        self._before_flushes = CacheStats()
        self._next_id = 0
        self._ahead: _Step | None = None
        self.overlap = overlap and model.can_overlap
        several = MultiStepRunner(self.runner, scheduler, self.sampler, model.eos_token_ids)
        self.multi_step = several if overlap and model.multi_step else None
        self._thread: int | None = None
        self._cut_off = False
        """A call is under way, or was cut off before it recovered."""
        self._adding: Request | None = None
        """The request that is being added; it is aborted if that fails."""
        self.failed_step: list[Sequence] = []
        """The sequences of the step that failed last: one of them may be the cause."""

    def capture_graphs(self) -> None:
        """Capture all CUDA graphs now; otherwise each is captured when it is first needed."""
        if self.runner.graphs is not None:
            with on_device(self.model.device):
                self.runner.graphs.capture()

    @whole
    def step(self) -> list[Request]:
        """Run one step; returns the requests that got a token or failed.

        If anything is raised, the step is undone and its requests wait for the next one, with the
        tokens that they had. The same noise is drawn again.

        Raises:
            WrongThread: another thread has work in the engine.
        """
        began = time.perf_counter()
        with on_device(self.model.device):
            step = self._ahead or self._run_several() or self._sample(self._launch())
            self._ahead = None
            if step is not None:
                ahead = self._launch(step.pending)
                self.output_processor.finish(step.pending)
                self._ahead = self._sample(ahead)
        seconds = time.perf_counter() - began
        prefills = step.prefills if step is not None else []
        if self.multi_step is not None and step is not None and step.num_rows:
            self.multi_step.note(step.num_rows, step.num_steps, seconds)
        self.scheduler.budget.note(prefills, seconds)
        self.scheduler.admission.loads.note_step(sum(count - 1 for _, count in prefills), seconds)
        if step is not None and step.num_rows and self.scheduler.proposer is not None:
            self.scheduler.proposer.length.note_step(step.num_rows, seconds)
        changed = dict.fromkeys(self.scheduler.take_failed()) | self.output_processor.changed
        self.output_processor.changed = {}
        return [*changed]

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or has ended and `step` has not reported it."""
        return bool(self.scheduler.open or self.output_processor.changed or self._cut_off)

    def _enter(self) -> None:
        thread = get_ident()
        if self._thread != thread:
            if self._thread is not None and self.has_work:
                raise WrongThread("an engine is for one thread, and another one has work in it")
            self._thread = thread
        if self._cut_off:
            self._recover()

    def _recover(self) -> None:
        """Go back to the state between two steps; may be cut off, and called again."""
        self._cut_off = True
        self._ahead = None
        self.sampler.forget()
        self.failed_step = self.scheduler.recover() or self.failed_step
        if self._adding is not None:
            for sequence in self._adding.sequences:
                self.scheduler.finish(sequence, "abort")
            self._adding = None
        for sequence in [*self.scheduler.open]:  # its last token may be its end
            if not sequence.is_fresh:
                self.output_processor.changed[sequence.request] = None
                self.output_processor.end_if_done(sequence)
        self._cut_off = False

    @whole
    def add_request(
        self,
        prompt_token_ids: TokensLike,
        params: SamplingParams,
        *,
        prompt: str | None = None,
        namespace: Hashable = None,
        client: Hashable = None,
        pools: bool = False,
        images: List[PlacedImage] = (),
    ) -> Request:
        """Queue a request of a client; clients share the engine fairly (see `scheduler`).

        With `pools`, it ends with its last token's row, `Request.pooled`, and generates nothing:
        `params` ask for no token. `images` are those of the prompt, in order.

        Raises:
            InvalidRequest: the prompt is empty, it or the parameters have tokens that the model
                does not know, the request does not fit the context (`ContextExceeded`) or, beside
                pinned pages, the KV pool; or the structure does not compile. Nothing has changed.
            WrongThread: another thread has work in the engine.
        """
        tokens, namespace = as_tokens(prompt_token_ids).copy(), as_namespace(namespace)
        max_tokens = self._max_tokens(tokens, params, namespace)
        ends = self.model.eos_token_ids
        penalties = PenaltyState(params, self.model.vocab_size, ends, self._encode)
        placed = self.place(images, len(tokens)) if images else None
        if placed is not None and params.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs are for prompts of text alone, without images")
        request = Request(self._next_id, prompt, tokens, params, namespace, client, pools, placed)
        request.penalties = penalties if penalties.any else None
        request.add_sequences(max_tokens, self._decode)
        if params.structured_outputs is not None:
            for sequence in request.sequences:
                sequence.grammar = self._grammar_backend.grammar(params.structured_outputs)
        if params.prompt_logprobs is not None:  # the first sequence scores it for all
            cost = token_cost(self.model.vocab_size, self.scheduler.max_num_batched_tokens)
            scoring = PromptLogprobs(tokens, namespace, self._scored, cost)
            request.sequences[0].scoring = scoring
        self._next_id += 1
        self._adding = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        self._adding = None
        return request

    @whole
    def abort(self, request: Request) -> None:
        """End the unfinished sequences of a request; their pages are freed, or stay cached."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self.scheduler.finish(sequence, "abort")
        request.note_end()
        self.output_processor.changed.pop(request, None)

    @whole
    def recover(self) -> None:
        """Recover after a change of the cache from outside was cut off."""
        self._recover()

    def match(self, prompt: TokensLike, namespace: Hashable = None) -> int:
        """How many leading tokens a request would not compute if it came now; changes nothing.

        All of them, if the prompt is cached in full and the logits at its end are kept.
        """
        tokens, namespace = as_tokens(prompt), as_namespace(namespace)
        kept = self.scheduler.admission.logits_cache
        if kept is not None and PromptKey(tokens, namespace) in kept:
            cached = self.cache.cached_length(tokens, namespace)
            if self.scheduler.planner.depth(tokens, namespace, cached) == len(tokens):
                return len(tokens)
        return self.scheduler.admission.match(tokens, namespace)

    def end_conversation(self, tokens: Tokens, namespace: Hashable = None) -> None:
        """No later prompt goes on from `tokens`: what they alone use of the cache is evicted first.
        Nothing changes if what they alone used is gone already. O(len(tokens))."""
        lease = self.cache.acquire(tokens, namespace, include_last=True)
        is_whole = len(tokens) - lease.num_tokens <= self.cache.granularity  # the last has no KV
        self.cache.release(lease, ended=is_whole)
        if is_whole:
            self.scheduler.planner.retire(tokens, lease.namespace)

    def reset_cache(self) -> None:
        """Forget all KV and kept logits, and zero the statistics.

        Raises:
            LeaseError: a request runs, or a prefix is pinned.
        """
        stats = self.cache.stats
        self.scheduler.reset()
        self.output_processor.pooled_rows.clear()
        self._before_flushes += stats

    @property
    def lifetime_stats(self) -> CacheStats:
        """The cache's statistics since the engine was made, whatever zeroed them."""
        return self._before_flushes + self.cache.stats

    def check(self) -> None:
        """Verify between two calls the cache's invariants, and that leases and sequences agree.

        Raises `AssertionError`. O(everything).
        """
        self.cache.check()
        scheduler, waiting = self.scheduler, set(self.scheduler.waiting)
        running = set(scheduler.running)
        assert not waiting & running and waiting | running == scheduler.open.keys()
        assert len(waiting) + len(running) == len(scheduler.waiting) + len(scheduler.running)
        for sequence in scheduler.open:
            lease, computed = sequence.lease, sequence.num_computed
            assert sequence.finish_reason is None and computed <= len(sequence)
            assert (lease is not None) == (sequence in running), f"{sequence}: {lease}"
            assert computed <= (lease.capacity if lease else 0), f"{lease} for {computed} tokens"
        leases = {sequence.lease for sequence in running} | {*self.cache.pins.leases.values()}
        assert leases == self.cache._leases.keys(), "leases of nobody"
        scheduler.planner.check(running)
        scheduler.admission.loads.check(waiting)

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer at most: the model's context, or what the KV memory
        holds when nothing is pinned."""
        return min(self.model.max_context, self.tokens_in(self.kv_pool.num_pages - 1) + 1)

    def tokens_in(self, num_pages: int) -> int:
        """Tokens that a sequence may have in so many pages."""
        if self.cache.windows is None:
            return num_pages * self.kv_pool.page_size
        return self.cache.windows.tokens_in(num_pages, self.scheduler.max_num_batched_tokens)

    def check_prompt(self, tokens: Tokens, *, answer: bool = True) -> None:
        """Raise `InvalidRequest` for a prompt that no request can have; `ContextExceeded` if it is
        too long, or leaves no room for an `answer`. O(len(tokens)).
        """
        length, vocab, context = len(tokens), self.model.vocab_size, self.model.max_context
        if not length:
            raise InvalidRequest("the prompt is empty")
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise InvalidRequest(f"the prompt has token ids outside the vocabulary [0, {vocab})")
        if length + answer > context:
            lack = "leave no room to answer" if answer else "are more"
            problem = f"its {length} tokens {lack}"
            raise ContextExceeded.of(self.max_model_len, problem)

    def place(self, images: List[PlacedImage], length: int) -> PromptImages:
        """The images of a prompt of so many tokens, as this model reads them.

        Raises:
            InvalidRequest: one has more rows than a step, and must be computed in one.
        """
        model = self.model
        placed = PromptImages(images, length, axes=model.rope_axes, both_ways=model.both_ways)
        if placed.longest > (most := self.scheduler.max_num_batched_tokens):
            raise InvalidRequest(
                f"an image has {placed.longest:,} tokens, which this model computes in one step: "
                f"max_num_batched_tokens, {most:,}, must be as many"
            )
        return placed

    def _max_tokens(self, tokens: Tokens, params: SamplingParams, namespace: Hashable) -> int:
        """How many tokens the request may generate at most."""
        asked = params.max_tokens
        self.check_prompt(tokens, answer=asked != 0)
        length, context = len(tokens), self.model.max_context
        wanted = context - length if asked is None else min(asked, context - length)
        # One page is spare: a branch in mid-page copies it while both copies are held.
        pinned = self.cache.pinned_pages_beside(tokens, namespace)
        pages = self.kv_pool.num_pages - 1 - pinned
        room = self.tokens_in(pages) - length + 1  # the last token needs no KV
        if room < (1 if asked is None else max(1, wanted)):
            problem = f"{length} prompt tokens and {wanted} to generate do not fit the KV memory"
            if pinned:  # how much may be others' secret
                raise ContextExceeded.of(self.max_model_len, f"{problem} beside what is pinned")
            problem += f" of {room + length - 1:,} tokens: give it more (--kv-cache-memory-bytes)"
            raise ContextExceeded.of(self.max_model_len, problem)
        return min(wanted, room)

    def _run_several(self) -> _Step | None:
        found = None if self.multi_step is None else self.multi_step.run()
        return found and _Step(found[0], [], len(found[0].rows), found[1])

    def _launch(self, before: PendingStep | None = None) -> _Forward | None:
        """Schedule a step and enqueue it up to its logits; None if there is nothing to do.

        Args:
            before: the step before, whose tokens are not read yet; they go from one step to the
                next on the device. So it goes on while the host reads them, ends sequences, moves
                grammars on and makes text (as in SGLang's overlap scheduler, one step deep). A
                sequence that ends with one of them computes one more, which is dropped; the
                device writes it before any other sequence may write to that page.
        """
        if before is None:
            chunks = self.scheduler.schedule()
        elif not self.overlap or any(len(row.draft) for row in before.rows):
            return None  # how much of the drafts is right is not known yet
        else:
            sampled = [row.sequence for row in before.rows]
            chunks = self.scheduler.schedule_ahead([*sampled, *before.pools])
        self.output_processor.answer(self.scheduler.answered)
        if not chunks:
            if before is None:
                self.scheduler.admission.loads.wait()
                self.scheduler.admission.images.wait()
            return None
        hits = [chunk for chunk in chunks if not chunk.num_tokens]
        chunks = [chunk for chunk in chunks if chunk.num_tokens]
        prefills = [(c.end - c.num_new, c.num_tokens) for c in chunks if c.num_tokens > 1]
        drafted = 0 if prefills else sum(chunk.num_new for chunk in chunks)
        pooled = None
        if chunks:
            chunks, logits, pooled = self.runner.run(chunks, before)
        else:
            logits = torch.empty((0, self.model.vocab_size), device=self.model.device)
        self.scheduler.commit()
        ends = [chunk for chunk in chunks if chunk.is_last]
        return _Forward(chunks, ends, hits, logits, pooled, prefills, drafted)

    def _sample(self, forward: _Forward | None) -> _Step | None:
        """Draw the tokens of a step, when those before it are read."""
        if forward is None:
            return None
        chunks, ends, hits, logits, pooled, prefills, num_rows = forward
        pools = [chunk.sequence for chunk in ends if chunk.sequence.request.pools]
        ends = [chunk for chunk in ends if not chunk.sequence.request.pools]
        logits = self._score(chunks + hits, logits)
        # Some have ended, or a grammar has appended more behind the token that was computed.
        kept = [
            at for at, chunk in enumerate(ends)
            if chunk.sequence.finish_reason is None and not chunk.is_behind
        ]  # fmt: skip
        if len(kept) < len(ends):  # in a step without drafts
            ends = [ends[at] for at in kept]
            logits = logits[send(np.array(kept, np.int64), self.model.device)]
        may_keep = hits or any(chunk.ends_prompt for chunk in ends)
        if self.scheduler.admission.logits_cache is not None and may_keep:
            prompts = [(c.sequence.request.prompt_key if c.ends_prompt else None) for c in ends]
            used = [chunk.sequence.request.prompt_key for chunk in hits]
            counts = [1 + len(chunk.draft) for chunk in ends]
            cached = self.scheduler.admission.logits_cache.exchange(logits, prompts, counts, used)
            logits = torch.cat([logits, *cached]) if cached else logits
        rows = [
            Row(chunk.sequence, chunk.draft[:count] if count else NO_TOKENS)
            for chunk in ends + hits
            for count in range(1 + len(chunk.draft))
        ]
        pending = self.sampler.sample(rows, logits)
        if pooled is not None:
            pending = pending._replace(pools=pools, pooled=Fetch(pooled))
        return _Step(pending, prefills, num_rows)

    def _score(self, chunks: list[Chunk], logits: torch.Tensor) -> torch.Tensor:
        """Score prompt tokens by the rows of `_run` for them; returns the rows before."""
        scored = [chunk for chunk in chunks if chunk.sequence.scoring is not None]
        counts = [len(chunk.scored_positions) for chunk in scored]
        end = len(logits) - sum(counts)
        sampled = logits[:end]
        for chunk, count in zip(scored, counts, strict=True):
            sequence, scoring = chunk.sequence, chunk.sequence.scoring
            assert scoring is not None
            scoring.add(logits[end : end + count])
            end += count
            if scoring.is_complete:
                request = sequence.request
                request.prompt_logprobs = scoring.report(request.params.prompt_logprobs or 0)
                sequence.scoring = None
        return sampled
