"""Drafts for tests: of known answers, with faults in them, as many as there is room for."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf

from radixcache import LLM
from radixcache.runtime.engine.build import explain_and_draft
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.explain import Explainer
from radixcache.runtime.request import Sequence
from radixcache.runtime.spec_decode.draft_length import DraftLength, Kind
from radixcache.runtime.spec_decode.proposer import DraftProposer


class Always(DraftLength):
    """Every draft pays, and there is time to look for it."""

    step_seconds = inf

    def costs(self, num_sequences: int) -> tuple[float, float]:
        return 1e-6, 0.0

    def note_step(self, rows: int, seconds: float) -> None:
        pass

    def chances(self, kind: Kind, match: int, count: int, least: float) -> list[float]:
        return [1.0] * count


class RandomProposer(DraftProposer):
    """Drafts what `answer` says of a sequence, or something else, or begins so and goes on so."""

    def __init__(
        self,
        rng: random.Random,
        answer: Callable[[Sequence], list[int]],
        vocab_size: int,
        end_tokens: list[int],
    ) -> None:
        super().__init__(lambda *_: [], end_tokens)
        self.length = Always()
        self._rng, self._answer, self._vocab_size = rng, answer, vocab_size

    def _look_up(self, sequence: Sequence, count: int) -> list[int]:
        count = min(count, sequence.max_tokens - len(sequence.generated) - 1)
        if count < 1 or sequence.scoring is not None or self._rng.random() < 0.2:
            return []
        draft = self._answer(sequence)[len(sequence.generated) :][: self._rng.randrange(count + 1)]
        share = self._rng.choice([0, 0, 0.1, 0.5])
        draft = [
            self._rng.randrange(self._vocab_size) if self._rng.random() < share else token
            for token in draft
        ]
        return self._before_end(sequence, draft)


def drafting_llm() -> LLM:
    """The bundled model; it drafts whenever there is something to draft."""
    llm = LLM(kv_cache_memory_bytes="32MiB", speculate="auto")
    draft_always(llm.engine)
    return llm


def speculate(engine: Engine, num_tokens: int = 4000) -> DraftProposer:
    """Let an engine draft as an `LLM` does, however much it costs."""
    explainer = Explainer(engine.cache, num_tokens)
    scheduler, ends = engine.scheduler, engine.model.eos_token_ids
    scheduler.proposer, scheduler.on_publish = explain_and_draft(explainer, ends)
    scheduler.catch_up = explainer.catch_up
    return draft_always(engine)


def draft_always(engine: Engine) -> DraftProposer:
    """Let what drafts there do so whenever there is something to draft."""
    proposer = engine.scheduler.proposer
    assert proposer is not None
    proposer.length = Always()
    return proposer
