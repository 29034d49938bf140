# mypy: disable-error-code="import-not-found"
"""Explains SGLang's own radix cache, through SGLang's hooks for plugins.

SGLang's tree stays as it is. A request is explained when its first batch is run; its tokens count
as computed when the tree gets them, so that none is called evicted that it could not have yet.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import numpy as np
import prometheus_client
import sglang
from sglang.srt.mem_cache.registry import default_radix_cache_factory
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from radixcache.plugins.observer import Observer, fail_safe, prometheus, summary

TRIED = ("0.5.23",)
"""Versions that the plugin was tested with; the hooks change between versions."""

_log = logging.getLogger("radixcache.plugins")


class TreeObserver:
    """Observes one tree, as its attribute `radixcache`."""

    def __init__(self, observer: Observer, metrics: bool) -> None:
        self.observer: Any = observer
        self._metrics, self._counters = metrics, dict[str, Any]()
        self._unlogged, self._last_line = Counter[str](), time.monotonic()

    @fail_safe
    def run_batch(self, batch: Any) -> None:
        """A batch is about to run."""
        for req in batch.reqs if batch.forward_mode.is_extend() else ():
            special = req.positional_embed_overrides is not None or req.session is not None
            if getattr(req, "explained", False) or special:
                continue
            req.explained = True
            tokens = np.asarray(req.origin_input_ids, np.int32)
            limited = req.return_logprob and 0 <= req.logprob_start_len < len(tokens) - 1
            self.observer.admit(req.rid, tokens, req.cached_tokens, _namespace(req), not limited)
        if counts := self.observer.take():
            self._unlogged.update(counts)
            if self._metrics:
                prometheus(prometheus_client.Counter, self._counters, counts, {})
        if self._unlogged and time.monotonic() - self._last_line >= 10:
            figures = ", ".join(
                f"{name} {share}" for name, share in summary(self._unlogged).items()
            )
            _log.info("Prefix cache: %s", figures)
            self._unlogged, self._last_line = Counter(), time.monotonic()

    @fail_safe
    def insert(self, req: Any, up_to: int) -> None:
        """The tree gets the KV of a request's first `up_to` tokens."""
        tokens = np.asarray(req.full_untruncated_fill_ids[:up_to], np.int32)
        self.observer.compute(tokens, _namespace(req))


def make_tree_cache(context: Any) -> Any:
    """SGLang's own choice of a tree, with a `TreeObserver` if it can be explained."""
    cache, params = default_radix_cache_factory(context), context.params
    if sglang.__version__ not in TRIED:
        known = " and ".join(TRIED)
        reason = f"it knows SGLang {known}, and this is {sglang.__version__}"
    elif params.disable:
        reason = "the radix cache is disabled"
    elif type(cache) is not UnifiedRadixCache or len(cache.tree_components) != 1:
        reason = f"{type(cache).__name__} keeps several kinds of KV, or is not SGLang's usual tree"
    elif cache.cache_controller is not None or cache.linker is not None:
        reason = "its hits come from other memory, too"
    elif context.tp_rank:
        return cache  # as that of rank 0
    else:
        size = params.token_to_kv_pool_allocator.size
        observer = Observer(f"SGLang {sglang.__version__}", size, params.page_size)
        cache.radixcache = TreeObserver(observer, params.enable_metrics)
        _hook("managers.scheduler.Scheduler.run_batch", _before_run_batch)
        _hook(
            "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree", _before_insert
        )
        HookRegistry.apply_hooks()
        return cache
    _log.warning("radixcache does not look at this prefix cache: %s", reason)
    return cache


def _hook(target: str, function: Any) -> None:
    HookRegistry.register(f"sglang.srt.{target}", function, HookType.BEFORE)


def _before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if (looker := getattr(scheduler.tree_cache, "radixcache", None)) is not None:
        looker.run_batch(batch)


def _before_insert(cache: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
    if (looker := getattr(cache, "radixcache", None)) is not None:
        looker.insert(req, up_to)


def _namespace(req: Any) -> tuple[Any, Any] | None:
    return (req.extra_key, req.cache_salt) if req.extra_key or req.cache_salt else None
