"""Builds an engine: the model, its KV pages, the cache, the tokenizer and the grammars."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import torch

from radixcache.base import PrefixCache
from radixcache.errors import InvalidRequest, ModelError, first_sentence
from radixcache.hash_block import HashBlockCache
from radixcache.no_cache import NoCache
from radixcache.pages import PagePool
from radixcache.radix import RadixCache
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL, check_model
from radixcache.runtime.config.sizes import parse_memory
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.engine.checkpoint_planner import NO_CHECKPOINTS, Planner
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.explain import Explainer
from radixcache.runtime.engine.logits_cache import PROMPT_LOGITS_BYTES, PromptLogitsCache
from radixcache.runtime.engine.scheduler import OnPublish, Scheduler
from radixcache.runtime.engine.state_planner import StatePlanner
from radixcache.runtime.engine.step_budget import STEP_SECONDS
from radixcache.runtime.engine.window_planner import WindowPlanner
from radixcache.runtime.engine.worker import answer
from radixcache.runtime.kv_events.config import KVEventsConfig
from radixcache.runtime.kv_events.publisher import KVEventPublisher
from radixcache.runtime.kv_offload.host import staged_bytes
from radixcache.runtime.kv_offload.offload import Offload, open_offload
from radixcache.runtime.kv_offload.page_loader import NO_LOADS
from radixcache.runtime.model import cgroups
from radixcache.runtime.model.cuda_graphs import bytes_beside_pages
from radixcache.runtime.model.device import resolve_device
from radixcache.runtime.model.kv_pool import WindowLayout, choose_windows, count_pages
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import report
from radixcache.runtime.model.system_memory import give_back
from radixcache.runtime.request import Sequence
from radixcache.runtime.sampling.grammar import GrammarBackend
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.spec_decode.proposer import MAX_DRAFT, DraftProposer
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.states import StateIndex
from radixcache.windows import WindowIndex

CACHES: dict[str, type[RadixCache] | type[HashBlockCache] | type[NoCache]] = {
    "radix": RadixCache,
    "hash-block": HashBlockCache,
    "none": NoCache,
}


_MOST_CHECKPOINTS = 1024
"""Kept states beside those of running sequences: a look-up tries each length among them."""

_MIN_WINDOWS = 4
"""Windows that must fit into the KV memory beside a step, else all layers keep all tokens."""

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


def model_path(args: EngineArgs) -> str:
    """The folder, file or hub id of the model."""
    return str(args.model if args.model is not None else BUNDLED_MODEL)


def build_engine(args: EngineArgs) -> Built:
    """Load the model and build an engine for it.

    Raises:
        ModelError: there is no such model, or it would be silently wrong over pages, or it is not
            exact, or it cannot be split over so many ranks.
        InvalidRequest: the settings do not fit the model, or this machine.
        RanksLost: one of the model's processes ended as it was loaded.
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
    model = load(args)
    try:
        report("preparing the engine", 1.0)
        if args.max_model_len is not None:
            if args.max_model_len > model.max_context:
                raise InvalidRequest(
                    f"max_model_len {args.max_model_len:,} is more than the model's context of "
                    f"{model.max_context:,} tokens"
                )
            model.max_context = args.max_model_len
        num_pages, num_states, windows = _share_memory(args, model)
        cache = kind(PagePool(num_pages, page_size))
        if tokenizer is not None:
            tokenizer.max_tokens = model.max_context
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
        pool = model.allocate(num_pages, page_size, num_states, windows)
        explainer = Explainer(cache, marks=tokenizer.added if tokenizer else ())
        drafts = args.speculate == "auto" and not num_states
        proposer, on_publish = explain_and_draft(explainer, model.eos_token_ids if drafts else None)
        tiers = args.host_memory, args.kv_dir, args.kv_dir_size
        offload = open_offload(model_path(args), model, cache, pool, *tiers)
        if offload is not None:
            explainer.cost = offload.loads.cost
        try:
            scheduler = Scheduler(
                cache,
                args.max_num_batched_tokens,
                max_num_seqs,
                args.schedule_policy,
                planner,
                loads=NO_LOADS if offload is None else offload.loads,
                logits_cache=choose_logits_cache(cache, model.vocab_size, num_states),
                proposer=proposer,
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
            params = _default_params(model.generation_config)
            publisher = None if events is None else KVEventPublisher(cache, events)
        except BaseException:
            if offload is not None:
                offload.close()
            raise
        return Built(engine, tokenizer, grammars, explainer, publisher, params, offload)
    except BaseException:
        model.close()  # else its ranks would live as long as the error's traceback
        raise


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
    return NO_CHECKPOINTS


def choose_logits_cache(
    cache: PrefixCache, vocab_size: int, num_states: int
) -> PromptLogitsCache | None:
    """Where logits are kept; None in a recurrent model, whose next token needs a state."""
    return PromptLogitsCache(vocab_size) if cache.full_prompt_hits and not num_states else None


def _share_memory(args: EngineArgs, model: PagedModel) -> tuple[int, int, WindowLayout | None]:
    """How many KV pages and recurrent states fit the memory, and the layout of windows; no more
    pages than all sequences at full context would ever use.

    Raises:
        InvalidRequest: the memory is too small.
    """
    page_size, max_num_seqs = args.page_size, args.max_num_seqs
    taken = bytes_beside_pages(
        model, page_size, max_num_seqs + MAX_DRAFT * (args.speculate == "auto")
    )
    taken += PROMPT_LOGITS_BYTES * CACHES[args.cache].full_prompt_hits
    windows = _choose_windows(args, model)
    page_bytes, num_states = model.bytes_per_page(page_size, windows), 0
    if args.host_memory is not None:
        most = 0 if windows is None else windows.window // windows.page_size + 2
        taken += staged_bytes(most * page_bytes)
    num_pages = count_pages(args.kv_cache_memory_bytes, page_bytes, model.device, taken)
    if windows is not None:
        step = args.max_num_batched_tokens
        most = _MIN_WINDOWS * windows.window + step
        if num_pages * windows.page_size < most:
            reason = f"the KV memory has no room for {_MIN_WINDOWS} windows and a step"
            _log_windows(reason, logging.WARNING)
            windows, page_bytes = None, model.bytes_per_page(page_size)
            num_pages = count_pages(args.kv_cache_memory_bytes, page_bytes, model.device, taken)
    if model.state_shapes:
        size, memory, asked = model.bytes_per_state, num_pages * page_bytes, args.state_memory
        share = memory // 4 if asked is None else parse_memory(asked)
        running = max_num_seqs * (1 + model.can_overlap)
        num_states = min(share // max(size, 1), running + _MOST_CHECKPOINTS)
        num_pages -= -(-num_states * size // page_bytes)
        if num_states < 2 or num_pages < 1:
            raise InvalidRequest(
                f"{share:,} bytes for recurrent states, of {memory:,} bytes of KV memory, leave no "
                f"room: a sequence takes two states of {size:,} bytes, and pages of {page_bytes:,}"
            )
    elif args.state_memory is not None:
        raise InvalidRequest("state_memory is for models with recurrent layers, and this has none")
    if args.kv_cache_memory_bytes is None:
        each = model.max_context // page_size + 2
        each += 0 if windows is None else 2 * windows.window // windows.page_size + 2
        num_pages = min(num_pages, each * max_num_seqs * 4)
    return num_pages, num_states, windows


def _choose_windows(args: EngineArgs, model: PagedModel) -> WindowLayout | None:
    """The layout of windows, kept apart from full KV; None if all layers keep all tokens."""
    windows = choose_windows(model.shapes, model.windows, args.page_size)
    if windows is None:
        if any(model.windows):
            _log_windows("every layer has one, or their sizes differ")
        return None
    reason = None
    if model.max_context <= 2 * windows.window:
        reason = f"a context of {model.max_context:,} tokens is at most two of {windows.window:,}"
    elif model.state_shapes:
        reason = "other layers are recurrent"
    elif args.tensor_parallel_size > 1:
        reason = "the model is split over several processes"
    if reason is not None:
        _log_windows(reason)
        return None
    return windows


def _log_windows(reason: str, level: int = logging.INFO) -> None:
    _log.log(level, "layers with a window keep all tokens: %s", reason)


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


def load(args: EngineArgs) -> PagedModel:
    """`load_model`, or `load_parallel` for several ranks; on a CPU in a thread that ends with it.

    OpenMP keeps a pool of threads for each thread that has computed. With a second pool beside the
    engine's there are more threads than cores, and GNU's puts them to sleep after each operation:
    a decoded token took 1.4 to 1.7 times as long, four times beside other work (measured).
    """
    if (quota := cgroups.cpu_quota()) is not None and "OMP_NUM_THREADS" not in os.environ:
        # More threads use the quota up sooner: then all stand still for the rest of the period.
        torch.set_num_threads(min(torch.get_num_threads(), max(1, round(quota))))
    path = model_path(args)
    read: Callable[[], PagedModel]
    if args.tensor_parallel_size > 1:  # imports transformers' layers
        from radixcache.runtime.model.parallel.load import load_parallel

        ranks = args.tensor_parallel_size
        read = partial(load_parallel, path, ranks, args.dtype, args.device, args.kv_cache_dtype)
    else:
        read = partial(
            load_model, path, dtype=args.dtype, device=args.device, exact=args.exact,
            max_model_len=args.max_model_len, kv_cache_dtype=args.kv_cache_dtype,
            quantized_activations=args.quantized_activations,
        )  # fmt: skip
    if resolve_device(args.device).type != "cpu":
        return read()
    future: Future[PagedModel] = Future()
    loading = partial(copy_context().run, read)  # so that progress is reported here
    thread = threading.Thread(target=answer, args=(future, loading), daemon=True)
    try:
        thread.start()
        wait([future])  # after an interrupted `join`, Python 3.11 thinks that it ended
    except BaseException:  # as by Ctrl-C: a thread within torch must end before the interpreter
        if thread.ident is not None:  # it has begun
            if not future.cancel():
                stop = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), stop)
            wait([future])
        raise
    thread.join()
    return future.result()


def explain_and_draft(
    explainer: Explainer, end_tokens: list[int] | None
) -> tuple[DraftProposer | None, OnPublish]:
    """A proposer that drafts from the texts of `explainer` (None without `end_tokens`, the model's
    own), and the function that shows both each text before it is published."""
    proposer = None
    if end_tokens is not None:
        proposer = DraftProposer(explainer.continuations, end_tokens)
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
            sequence.tokens, hit, request.namespace, kv=lease.num_tokens
        )
    tokens = sequence.tokens[:num_tokens]
    explainer.put_off.append(partial(explainer.remember, tokens, request.namespace))
    if proposer is not None:
        proposer.remember(sequence, num_tokens)


def _default_params(config: Any) -> SamplingParams:
    """Sampling as the model's generation_config.json asks for it.

    Without it, the temperature is 1, as in OpenAI's API and vLLM; ``"do_sample": false`` takes the
    likeliest token.
    """
    greedy = getattr(config, "do_sample", None) is False

    def setting(name: str, default: Any) -> Any:
        value = getattr(config, name, None)
        return default if value is None or greedy else value

    try:
        return SamplingParams(
            temperature=0.0 if greedy else float(setting("temperature", 1.0)),
            top_p=float(setting("top_p", 1.0)),
            top_k=int(setting("top_k", 0)),
            min_p=float(setting("min_p", 0.0)),
            max_tokens=int(getattr(config, "max_new_tokens", None) or 16),
            repetition_penalty=float(getattr(config, "repetition_penalty", None) or 1.0),
        )
    except (TypeError, ValueError, OverflowError) as error:
        reason = first_sentence(error)
        raise ModelError(f"the model's generation config makes no sense: {reason}") from None
