"""Engines over tiny models, and the independent answer: plain transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedModel

from radixcache import HashBlockCache, NoCache, PagePool, PrefixCache, RadixCache, SamplingParams
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.engine.build import choose_logits_cache, choose_planner
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.scheduling.admission import Policy
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.model.fallback.loading import load_transformers
from radixcache.runtime.model.kv_pool import choose_windows
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.request import Request
from tests.helpers.models import auto_class

Layers = Literal["chosen", "torch", "stock"]
"""As the runtime chooses; our loop in torch, attention too; transformers' own."""

CACHES: dict[str, Callable[[PagePool], PrefixCache]] = {
    "radix": RadixCache,
    "hash-block": HashBlockCache,
    "none": NoCache,
}


@cache
def plain_model(path: Path) -> PreTrainedModel:
    """The model as transformers runs it."""
    kind = auto_class(AutoConfig.from_pretrained(path).model_type)
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    plain: PreTrainedModel = model.eval()
    return plain


@cache
def paged_model(path: Path, layers: Layers = "chosen", kv: str = "auto") -> PagedModel:
    cpu = torch.device("cpu")
    if layers == "stock":
        return load_transformers(path, torch.float32, cpu)
    if layers == "torch":
        return load_model(path, device=cpu, attention=TorchAttention(cpu), kv_cache_dtype=kv)
    return load_model(path, kv_cache_dtype=kv)


def make_engine(
    path: Path = BUNDLED_MODEL,
    cache: str = "radix",
    page_size: int = 16,
    num_pages: int = 512,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 64,
    policy: Policy = "lpm",
    layers: Layers = "chosen",
    num_states: int = 0,
    windows: bool = False,
    kv: str = "auto",
) -> Engine:
    """An engine with a pool of exactly `num_pages`, on shared weights; of a recurrent model with
    `num_states` slots, or with windows that are kept apart."""
    model = paged_model(path, layers, kv)
    apart = choose_windows(model.shapes, model.windows, page_size) if windows else None
    prefix_cache = CACHES[cache](PagePool(num_pages, page_size))
    planner = choose_planner(prefix_cache, num_states, apart)
    kept = choose_logits_cache(prefix_cache, model.vocab_size, num_states)
    scheduler = Scheduler(
        prefix_cache, max_num_batched_tokens, max_num_seqs, policy, planner, logits_cache=kept
    )
    pool = model.allocate(num_pages, page_size, num_states, apart)
    return Engine(model, pool, prefix_cache, scheduler)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    concurrent: bool = True,
    **where: Any,
) -> list[Request]:
    """Run prompts to their end, with all checks after every step."""
    requests = []
    for prompt in prompts:
        requests.append(engine.add_request(prompt, params, **where))
        if not concurrent:
            finish(engine)
    finish(engine)
    return requests


def finish(engine: Engine, max_steps: int = 10_000) -> int:
    """Step until nothing is left, with all checks after every step; how many steps it took."""
    for steps in range(max_steps):
        if not engine.has_work:
            return steps
        engine.step()
        engine.check()
    raise AssertionError(f"more than {max_steps} steps")


@cache
def prompts(vocab_size: int = 250, seed: int = 20_261_120) -> list[list[int]]:
    """Prompts that share stems, end inside others, repeat, and branch in mid-page."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    stem, other = text(37), text(21)
    return [
        stem + text(9),
        stem + text(14),
        stem[:30] + text(5),
        stem[:30],
        other + stem,
        other + stem,
        stem + text(3),
        text(1),
        text(2),
    ]


def assert_no_page_is_lost(engine: Engine) -> None:
    """With nothing running, eviction can free every page."""
    pool = engine.cache.pool
    engine.cache.evict(pool.num_pages)
    engine.cache.check()
    reserved = isinstance(engine.cache, HashBlockCache)  # page 0
    assert pool.num_free == pool.num_pages - reserved


def generated(requests: Sequence[Request]) -> list[list[list[int]]]:
    """Tokens of each completion of each request."""
    return [[s.generated.tolist() for s in request.sequences] for request in requests]


def plain_greedy(
    path: Path, prompt: Sequence[int], max_tokens: int, ignore_eos: bool = False
) -> list[int]:
    """What transformers' own generate gives."""
    return list(_plain_greedy(path, tuple(prompt), max_tokens, ignore_eos))


@torch.inference_mode()
def is_greedy(path: Path, prompt: Sequence[int], answer: Sequence[int], tie: float = 1e-4) -> bool:
    """Whether each token of an answer is the likeliest by one plain forward pass, or tied with it.

    For models whose chunks and single tokens differ by rounding, in transformers' `generate`, too.

    Args:
        tie: how far two logits may be apart, as a share of their range.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = plain_model(path)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    behind = logits.max(1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool(behind.max() <= tie * (logits.max() - logits.min()))


@cache  # tests ask for the same prompts in each mode and at each page size
@torch.inference_mode()
def _plain_greedy(
    path: Path, prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool
) -> list[int]:
    model = plain_model(path)
    ids = torch.tensor([prompt])
    eos = model.generation_config.eos_token_id
    if ignore_eos:
        model.generation_config.eos_token_id = None
    try:
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
    finally:
        model.generation_config.eos_token_id = eos
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def only_by_saved_states(engine: Engine) -> None:
    """As if the windows were too large to be computed again."""
    assert engine.cache.windows is not None
    engine.cache.windows._reach = 0
