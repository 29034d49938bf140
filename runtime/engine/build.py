"""Builds an engine: the model, its KV pages, the cache, the tokenizer and the grammars."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

import torch

from radixcache.base import PrefixCache
from radixcache.errors import InvalidRequest
from radixcache.hash_block.cache import HashBlockCache
from radixcache.no_cache import NoCache
from radixcache.pages import PagePool
from radixcache.radix.cache import RadixCache
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL, check_model
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.explain import Explainer, no_cost
from radixcache.runtime.engine.loading_thread import run_in_thread
from radixcache.runtime.engine.logits_cache import PromptLogitsCache
from radixcache.runtime.engine.memory_plan import plan_memory
from radixcache.runtime.engine.pooling_inputs import judge_tokens
from radixcache.runtime.engine.scheduling.saved_state_planner import NO_SAVED_STATES, Planner
from radixcache.runtime.engine.scheduling.scheduler import OnPublish, Scheduler
from radixcache.runtime.engine.scheduling.state_planner import StatePlanner
from radixcache.runtime.engine.scheduling.step_budget import STEP_SECONDS
from radixcache.runtime.engine.scheduling.window_planner import WindowPlanner
from radixcache.runtime.kv_events.config import KVEventsConfig
from radixcache.runtime.kv_events.publisher import KVEventPublisher
from radixcache.runtime.kv_offload.offload import Offload, open_offload
from radixcache.runtime.kv_offload.page_loader import NO_LOADS
from radixcache.runtime.model.host import cgroups
from radixcache.runtime.model.host.device import resolve_device
from radixcache.runtime.model.host.system_memory import give_back
from radixcache.runtime.model.kv_pool import WindowLayout
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import report
from radixcache.runtime.multimodal.images import Images, open_images
from radixcache.runtime.request import Sequence
from radixcache.runtime.sampling.defaults import default_params
from radixcache.runtime.sampling.grammar import GrammarBackend
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.spec_decode.proposer import DraftProposer
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.states.recurrent import StateIndex
from radixcache.states.windows import WindowIndex

CACHES: dict[str, type[RadixCache] | type[HashBlockCache] | type[NoCache]] = {
    "radix": RadixCache,
    "hash-block": HashBlockCache,
    "none": NoCache,
}


_MARK_TOKENS = 3
"""Tokens of an answer's mark that are compared: later ones may differ, as where a model thinks."""

_log = logging.getLogger("radixcache")


class Built(NamedTuple):
    """An engine and its parts."""

    engine: Engine
    tokenizer: Tokenizer | None
    grammar_backend: GrammarBackend
    explainer: Explainer
    kv_events: KVEventPublisher | None
    default_params: SamplingParams
    offload: Offload | None
    images: Images


def model_path(args: EngineArgs) -> str:
    """The folder, file or hub id of the model."""
    return str(args.model if args.model is not None else BUNDLED_MODEL)


def build_engine(args: EngineArgs) -> Built:
    """Load the model and build an engine for it.

    Raises:
        ModelError: there is no such model, or it would be silently wrong over pages, or it is not
            exact.
        InvalidRequest: the settings do not fit the model, or this machine.
    """
    kind, page_size = CACHES[args.cache], args.page_size
    events = KVEventsConfig.asked(args.kv_events_config, page_size, caches=args.cache != "none")
    if args.host_memory is not None and resolve_device(args.device).type != "cuda":
        raise InvalidRequest(
            "host_memory is for a GPU; on a CPU, KV memory is memory of the host: give it more "
            "(kv_cache_memory_bytes), or a folder (kv_dir)"
        )
    check_model(model_path(args))
    tokenizer = Tokenizer.load(model_path(args))  # before the weights: it takes memory for a while
    give_back()
    model = load(args, judge_tokens(tokenizer))
    report("preparing the engine", 1.0)
    if (args.max_model_len or 0) > model.max_context:
        raise InvalidRequest(
            f"max_model_len {args.max_model_len:,} is more than the model's context of "
            f"{model.max_context:,} tokens"
        )
    num_pages, num_states, windows = plan_memory(args, model, kind.full_prompt_hits)
    cache = kind(PagePool(num_pages, page_size))
    if tokenizer is not None:
        tokenizer = tokenizer.limited(model.max_context, model.vocab_size)
    grammars = GrammarBackend(tokenizer, model.vocab_size, model.eos_token_ids)
    max_num_seqs, mark = args.max_num_seqs, list[int]()
    if tokenizer and (num_states or windows):
        mark = _answer_mark(tokenizer)
    planner = choose_planner(cache, num_states, windows, mark)
    if num_states:
        each = 1 + model.can_overlap  # states of a running sequence
        max_num_seqs = min(max_num_seqs, max(1, (num_states - 1) // each))
        _log.info(
            "%s recurrent states of %s bytes; %s sequences run at the same time",
            f"{num_states:,}", f"{model.bytes_per_state:,}", max_num_seqs,
        )  # fmt: skip
    images = open_images(model_path(args), model)
    pool = model.allocate(num_pages, page_size, num_states, windows)
    tiers = args.host_memory, args.kv_dir, args.kv_dir_size
    offload = open_offload(model_path(args), model, cache, pool, *tiers)
    cost = no_cost if offload is None else offload.loads.cost
    explainer = Explainer(cache, marks=tokenizer.added if tokenizer else (), cost=cost)
    drafts = args.speculate == "auto" and not num_states
    ends = model.eos_token_ids if drafts else None
    proposer, on_publish = explain_and_draft(explainer, ends, model.vocab_size)
    with ExitStack() as undo:
        if offload is not None:
            undo.callback(offload.close)
        scheduler = Scheduler(
            cache,
            args.max_num_batched_tokens,
            max_num_seqs,
            args.schedule_policy,
            planner,
            loads=NO_LOADS if offload is None else offload.loads,
            logits_cache=choose_logits_cache(cache, model.vocab_size, num_states),
            proposer=proposer,
            encode_image=images.encode,
            on_publish=on_publish,
            catch_up=explainer.catch_up,
            step_seconds=STEP_SECONDS,
        )
        engine = Engine(
            model,
            pool,
            cache,
            scheduler,
            tokenizer.decode if tokenizer else None,
            args.seed,
            partial(tokenizer.encode, special=False) if tokenizer else None,
            grammars,
        )
        engine.capture_graphs()
        params = default_params(model.generation_config)
        publisher = None if events is None else KVEventPublisher(cache, events)
        undo.pop_all()
    return Built(engine, tokenizer, grammars, explainer, publisher, params, offload, images)


def choose_planner(
    cache: PrefixCache,
    num_states: int,
    windows: WindowLayout | None,
    answer_mark: Iterable[int] = (),
) -> Planner:
    """The planner over `cache` of a model with state slots, or with windows that are kept apart."""
    if windows is not None:
        layers = sum(windows.layers)
        index = WindowIndex(cache, windows.window, windows.page_size, layers)
        return WindowPlanner(index, cache.caches, answer_mark)
    if num_states:
        return StatePlanner(StateIndex(num_states), cache.caches, answer_mark)
    return NO_SAVED_STATES


def choose_logits_cache(
    cache: PrefixCache, vocab_size: int, num_states: int
) -> PromptLogitsCache | None:
    """Where logits are kept; None in a recurrent model, whose next token needs a state."""
    return PromptLogitsCache(vocab_size) if cache.full_prompt_hits and not num_states else None


def _answer_mark(tokenizer: Tokenizer) -> list[int]:
    """The first tokens with which the chat template asks for an answer."""
    question = [{"role": "system", "content": "!"}, {"role": "user", "content": "?"}]
    for messages in (question[1:], question):  # templates may demand or refuse a system message
        with suppress(InvalidRequest):
            before, asked = (
                tokenizer.encode(tokenizer.render_chat(messages, ask=ask)) for ask in (False, True)
            )
            if asked[: len(before)] == before:
                return asked[len(before) :][:_MARK_TOKENS]
    return []  # no template, or no chat


def load(args: EngineArgs, judges: tuple[int, ...] | None = None) -> PagedModel:
    """`load_model`, with threads for the processors that this process may use."""
    if (quota := cgroups.cpu_quota()) is not None and "OMP_NUM_THREADS" not in os.environ:
        # More threads use the quota up sooner: then all stand still for the rest of the period.
        torch.set_num_threads(min(torch.get_num_threads(), max(1, round(quota))))
    read = partial(
        load_model, model_path(args), dtype=args.dtype, device=args.device, exact=args.exact,
        max_model_len=args.max_model_len, kv_cache_dtype=args.kv_cache_dtype,
        quantized_activations=args.quantized_activations, judges=judges,
    )  # fmt: skip
    return run_in_thread(read) if resolve_device(args.device).type == "cpu" else read()


def explain_and_draft(
    explainer: Explainer, end_tokens: list[int] | None, vocab_size: int = 2**31
) -> tuple[DraftProposer | None, OnPublish]:
    """A proposer that drafts from the texts of `explainer` (None without `end_tokens`, the model's
    own), and the function that shows both each text before it is published."""
    proposer = None
    if end_tokens is not None:
        proposer = DraftProposer(explainer.continuations, end_tokens, vocab_size)
    return proposer, partial(_before_publish, explainer, proposer)


def _before_publish(
    explainer: Explainer, proposer: DraftProposer | None, sequence: Sequence, num_tokens: int
) -> None:
    """Explain a request when it is admitted, and remember the tokens that it computes; what takes
    long is put off until the step is launched."""
    request, lease = sequence.request, sequence.lease
    if request.explanation is None and lease is not None:
        hit = lease.num_tokens - sequence.num_recomputed
        request.explanation = explainer.observe(
            sequence.tokens, hit, request.namespace, lease.num_tokens, request.images
        )
    tokens = sequence.tokens[:num_tokens]
    explainer.put_off.append(partial(explainer.remember, tokens, request.namespace))
    if proposer is not None:
        proposer.remember(sequence, num_tokens)
