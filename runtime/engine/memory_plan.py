"""Shares the KV memory between pages, windows and recurrent states."""

from __future__ import annotations

import logging
from typing import NamedTuple

from radixcache.errors import InvalidRequest
from radixcache.runtime.config.sizes import parse_memory
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.engine.logits_cache import PROMPT_LOGITS_BYTES
from radixcache.runtime.kv_offload.host import staged_bytes
from radixcache.runtime.model.cuda_graphs import bytes_beside_pages
from radixcache.runtime.model.kv_pool import WindowLayout, choose_windows, count_pages
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.spec_decode.proposer import MAX_DRAFT

_MOST_SAVED_STATES = 1024
"""Kept states beside those of running sequences: a look-up tries each length among them."""

_MIN_WINDOWS = 4
"""Windows that must fit into the KV memory beside a step, else all layers keep all tokens."""

_log = logging.getLogger("radixcache")


class MemoryPlan(NamedTuple):
    """How the KV memory is shared.

    Attributes:
        num_states: slots of recurrent states.
        windows: the layout of windows that are kept apart, or None.
    """

    num_pages: int
    num_states: int
    windows: WindowLayout | None


def plan_memory(args: EngineArgs, model: PagedModel, keeps_logits: bool) -> MemoryPlan:
    """How many KV pages and recurrent states fit the memory, and the layout of windows; no more
    pages than all sequences at full context would ever use.

    Args:
        keeps_logits: whether logits are kept where prompts end.

    Raises:
        InvalidRequest: the memory is too small.
    """
    page_size, max_num_seqs = args.page_size, args.max_num_seqs
    taken = bytes_beside_pages(
        model, page_size, max_num_seqs + MAX_DRAFT * (args.speculate == "auto")
    )
    taken += PROMPT_LOGITS_BYTES * keeps_logits
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
        num_states = min(share // max(size, 1), running + _MOST_SAVED_STATES)
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
    return MemoryPlan(num_pages, num_states, windows)


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
    if reason is not None:
        _log_windows(reason)
        return None
    return windows


def _log_windows(reason: str, level: int = logging.INFO) -> None:
    _log.log(level, "layers with a window keep all tokens: %s", reason)
