"""Llamas with random weights on the GPU, and engines that run them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixcache import HashBlockCache, NoCache, PagePool, RadixCache, SamplingParams
from radixcache.runtime.engine.build import choose_logits_cache, choose_planner
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.model.checkpoint import Checkpoint
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.generation import GenerationDefaults
from radixcache.runtime.model.weights.sources import SafetensorsSource
from radixcache.runtime.request import Request
from radixcache.tokens import Tokens
from tests.gpu.place import Place

Cache = type[RadixCache] | type[HashBlockCache] | type[NoCache]

# Factors on variance-keeping weights, which make attention and greedy choices clear.
_GAINS = {"q_proj": 2.5, "k_proj": 2.5, "lm_head": 4.0}


def random_llama(place: Place, shape: dict[str, Any]) -> LlamaForCausalLM:
    """A Llama of this shape; its activations stay in range and its greedy choices are clear."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(place.dtype)
    try:
        with torch.device(place.device):
            model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed" in name:
                weight.normal_()
            elif weight.ndim > 1:
                gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
                weight.normal_(0.0, gain * weight.shape[-1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight).mul_(0.1))
    model.generation_config.eos_token_id = None
    model.requires_grad_(False)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _join([attention.q_proj, attention.k_proj, attention.v_proj])
        _join([mlp.gate_proj, mlp.up_proj])
    return model


@torch.no_grad()
def _join(linears: Sequence[torch.nn.Linear]) -> None:
    """Store the weights one below the other, so that the decoder loop uses them as one."""
    joined = torch.cat([linear.weight for linear in linears])
    parts = joined.split([len(linear.weight) for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = torch.nn.Parameter(part, requires_grad=False)


class _Memory(Checkpoint):
    """A checkpoint that reads the weights of a model in memory."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._weights = {name: w.detach() for name, w in model.state_dict().items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def tensor(self, name: str, exact: bool = False) -> torch.Tensor:
        return self._weights[name]


@contextmanager
def engine_on(
    place: Place,
    model: LlamaForCausalLM,
    *,
    num_tokens: int,
    cache: Cache = RadixCache,
    page_size: int = 16,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
) -> Iterator[Engine]:
    """An engine over the model's own weights, with noise in its KV pool, freed at the end."""
    architecture = describe(model.config.to_dict())
    weights = SafetensorsSource(_Memory(model), architecture)
    defaults = GenerationDefaults(eos_token_id=None)
    on_pages = Decoder(architecture, defaults, weights, model.dtype, model.device)
    if place.problem is None:
        assert on_pages.placement.count("FlashInfer") == 2, "something fell back: see the log"
    num_pages = -(-num_tokens // page_size) + 2 * max_num_seqs
    index = cache(PagePool(num_pages, page_size))
    pool = on_pages.allocate(num_pages, page_size, 0, None)
    for pages in pool.layers:
        for side in pages:
            side.normal_()
    planner, kept = (
        choose_planner(index, 0, None),
        choose_logits_cache(index, on_pages.vocab_size, 0),
    )
    scheduler = Scheduler(
        index, max_num_batched_tokens, max_num_seqs, planner=planner, logits_cache=kept
    )
    engine = Engine(on_pages, pool, index, scheduler)
    try:
        yield engine
    finally:
        for request in {s.request for s in [*scheduler.running, *scheduler.waiting]}:
            engine.abort(request)
        engine.runner.graphs = None
        pool.layers.clear()
        pool._blocks.clear()
        del engine, pool, on_pages
        free_memory()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def random_tokens(rng: np.random.Generator, engine: Engine, count: int) -> Tokens:
    return rng.integers(0, engine.model.vocab_size, count).astype(np.int32)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def run_all(engine: Engine, prompts: Sequence[Tokens], max_tokens: int) -> list[Request]:
    """Run all prompts at once, to their ends."""
    requests = [engine.add_request(prompt, greedy(max_tokens)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    assert [request.error for request in requests if request.error] == []
    return requests
