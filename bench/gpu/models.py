"""Makes models with random weights on the GPU, and engines that run them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from radixcache import HashBlockCache, NoCache, PagePool, RadixCache, SamplingParams
from radixcache.base import PrefixCache, Tokens
from radixcache.bench.gpu.place import Place, Work
from radixcache.bench.gpu.report import NotRun
from radixcache.runtime.engine.build import choose_logits_cache, choose_planner
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.scheduler import Scheduler
from radixcache.runtime.model.checkpoint import Checkpoint
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.generation import GenerationDefaults
from radixcache.runtime.model.kv_pool import choose_windows
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.weights import CheckpointWeights
from radixcache.runtime.request import Request

Cache = type[RadixCache] | type[HashBlockCache] | type[NoCache]

# Factors on variance-keeping weights, which make attention and greedy choices clear.
_GAINS = {"q_proj": 2.5, "k_proj": 2.5, "lm_head": 4.0}


def random_llama(place: Place, shape: dict[str, Any]) -> PreTrainedModel:
    """A Llama of this shape; its activations stay in range and its greedy choices are clear."""
    model = random_model(place, LlamaConfig(**shape, tie_word_embeddings=False))
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _join([attention.q_proj, attention.k_proj, attention.v_proj])
        _join([mlp.gate_proj, mlp.up_proj])
    return model


def random_model(place: Place, config: PreTrainedConfig) -> Any:
    """A model with random weights whose activations stay in range."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(place.dtype)
    try:
        with torch.device(place.device):
            model = AutoModelForCausalLM.from_config(config, dtype=place.dtype).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed" in name:
                weight.normal_()
            elif weight.ndim > 1:
                gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
                weight.normal_(0.0, gain * weight.shape[-1] ** -0.5)
            elif "norm" not in name:
                weight.normal_(0.0, 0.5)
            elif weight.shape[-1] > 1:
                weight.add_(torch.randn_like(weight).mul_(0.1))
    model.set_experts_implementation("eager")  # grouped products in bfloat16 alone
    model.generation_config.eos_token_id = None
    model.requires_grad_(False)
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

    def __init__(self, model: PreTrainedModel) -> None:
        self._weights = {name: w.detach() for name, w in model.state_dict().items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def tensor(self, name: str, exact: bool = False) -> torch.Tensor:
        return self._weights[name]


def paged(model: PreTrainedModel) -> PagedModel:
    """The same model in the decoder loop, with its weights shared."""
    architecture = describe(model.config.to_dict())
    weights = CheckpointWeights(_Memory(model), architecture)
    eos = GenerationDefaults(eos_token_id=model.generation_config.eos_token_id)
    return Decoder(architecture, eos, weights, model.dtype, model.device)


@contextmanager
def engine_on(
    place: Place,
    model: PreTrainedModel,
    *,
    num_tokens: int,
    cache: Cache = RadixCache,
    page_size: int = 16,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    windows: bool = False,
) -> Iterator[Engine]:
    """An engine with noise in its KV pool and its own attention backend, freed at the end; with
    `windows`, these are kept apart."""
    on_pages = paged(model)
    if place.with_flashinfer and on_pages.placement.count("FlashInfer") != 2:
        raise RuntimeError(f"something fell back to torch, the log says why: {on_pages.placement}")
    num_pages = -(-num_tokens // page_size) + 2 * max_num_seqs
    index: PrefixCache = cache(PagePool(num_pages, page_size))
    num_states = 4 * max_num_seqs if on_pages.state_shapes else 0
    apart = None
    if windows:
        apart = choose_windows(on_pages.shapes, on_pages.windows, page_size)
        assert apart is not None, "its windows cannot be kept apart"
    pool = on_pages.allocate(num_pages, page_size, num_states, apart)
    for pages in pool.layers:
        for side in pages:
            side.normal_()
    planner = choose_planner(index, num_states, apart)
    kept = choose_logits_cache(index, on_pages.vocab_size, num_states)
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


def remember(engine: Engine, tokens: Tokens) -> None:
    """Let the cache hold `tokens` as if they had been computed: the noise in the pool is theirs."""
    lease = engine.cache.acquire(tokens)
    engine.cache.reserve(lease, len(tokens))
    engine.cache.publish(lease, tokens[lease.num_tokens :])
    lease.take_copies()
    engine.cache.commit()
    engine.cache.release(lease)


def random_tokens(rng: np.random.Generator, engine: Engine, count: int) -> Tokens:
    return rng.integers(0, engine.model.vocab_size, count).astype(np.int32)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@contextmanager
def decoding(
    place: Place, model: PreTrainedModel, batch: int, steps: int, page_size: int = 16
) -> Iterator[Engine]:
    """An engine that decodes `batch` sequences for `steps` more steps, behind made-up KV."""
    context, rng = place.sizes.decode_context, np.random.default_rng(batch)
    with engine_on(
        place, model, num_tokens=batch * (context + 256), page_size=page_size, max_num_seqs=batch
    ) as engine:
        for _ in range(batch):
            prompt = random_tokens(rng, engine, context)
            remember(engine, prompt[:-1])
            engine.add_request(prompt, greedy(steps + 16))
        for _ in range(8):
            engine.step()
            if len(engine.scheduler.running) == batch:
                break
        else:
            raise RuntimeError(f"{len(engine.scheduler.running)} of {batch} prompts decode")
        for _ in range(3):  # the first one captures the graph
            engine.step()
        yield engine


def last_graph(engine: Engine) -> Work:
    """The graph that was captured last; it repeats the last step."""
    replays = list(engine.runner.graphs._replays.values()) if engine.runner.graphs else []
    if not replays or replays[-1] is None:
        raise NotRun("no step ran in a graph")
    return replays[-1]


def prefill_graph(engine: Engine, tokens: int) -> Work | None:
    """The graph that runs `tokens` new tokens of one prompt, if there is one."""
    replays = engine.runner.graphs._replays if engine.runner.graphs else {}
    fits = [s for s in replays if s.tokens >= tokens and not s.only_decodes]
    return replays[min(fits)] if fits else None


def run_all(engine: Engine, prompts: list[Tokens], max_tokens: int) -> list[Request]:
    """Run all prompts at once, to their ends."""
    requests = [engine.add_request(prompt, greedy(max_tokens)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    failed = [request.error for request in requests if request.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return requests


def generated(requests: list[Request]) -> list[list[int]]:
    return [request.sequences[0].generated.tolist() for request in requests]


logging.getLogger("transformers").setLevel(logging.ERROR)
