"""transformers: `generate` as it comes, and with a KV cache kept by hand."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from bench.peers.engines.cases import Answer, Request


class Transformers:
    """Requests at once are one batch (they are equally long); nothing is kept between calls."""

    version = transformers.__version__

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        self.model.generation_config.eos_token_id = None  # else it stands in for `greedy`'s

    def generate(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        return self._generate(requests, max_tokens, DynamicCache())

    def _generate(
        self, requests: list[Request], max_tokens: int, cache: DynamicCache
    ) -> list[Answer]:
        """Goes on from `cache`, and leaves all but the last token in it."""
        start = time.perf_counter()
        cached = cache.get_seq_length()
        prompts = torch.tensor([request.tokens for request in requests])
        first = FirstToken()
        sequences = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=greedy(max_tokens),
            past_key_values=cache,
            stopping_criteria=StoppingCriteriaList([first]),
        )
        answers = sequences[:, prompts.shape[1] :].tolist()
        return [Answer(first.time - start, tokens, cached) for tokens in answers]

    def forget(self) -> None:
        pass


class TransformersKept(Transformers):
    """Keeps the KV of what requests share, and of each conversation: what one would write by hand.

    A cache is forked, not copied: `DynamicCache` appends by making new tensors. Requests at once
    are a batch on the shared prefix's KV, repeated.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.forget()

    def forget(self) -> None:
        self.shared: dict[tuple[int, ...], DynamicCache] = {}
        self.conversations: dict[int, DynamicCache] = {}

    def generate(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        request = requests[0]
        if not request.shared:
            return super().generate(requests, max_tokens)
        if request.conversation in self.conversations:
            cache = self.conversations[request.conversation]
            return self._generate(requests, max_tokens, cache)
        prefix = tuple(request.tokens[: request.shared])
        known = prefix in self.shared
        start = time.perf_counter()
        if not known and len(requests) > 1:
            self.shared[prefix] = self._prefill(prefix)
        prefilled = time.perf_counter() - start
        cache = fork(self.shared[prefix]) if prefix in self.shared else DynamicCache()
        if len(requests) > 1:
            cache.batch_repeat_interleave(len(requests))
        answers = self._generate(requests, max_tokens, cache)
        if request.conversation is not None:
            self.conversations[request.conversation] = cache
        if prefix not in self.shared:
            self.shared[prefix] = fork(cache)
            self.shared[prefix].crop(len(prefix) - cache.get_seq_length())
        return [answer._replace(ttft=answer.ttft + prefilled) for answer in answers]

    @torch.no_grad()
    def _prefill(self, prefix: tuple[int, ...]) -> DynamicCache:
        cache = DynamicCache()
        self.model(torch.tensor([prefix]), past_key_values=cache, logits_to_keep=1)
        return cache


class FirstToken(StoppingCriteria):
    """Stops nothing, and remembers when it was asked first."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.time = self.time or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def greedy(max_tokens: int) -> GenerationConfig:
    """Greedy, `max_tokens` long whatever comes."""
    return GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def fork(cache: DynamicCache) -> DynamicCache:
    """A cache that grows on its own from the same tensors."""
    new = copy.copy(cache)
    new.layers = [copy.copy(layer) for layer in cache.layers]
    return new
