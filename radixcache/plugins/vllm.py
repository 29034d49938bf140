# mypy: disable-error-code="import-not-found, misc"
"""A KV connector for vLLM that moves no KV, but explains vLLM's own prefix cache."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from radixcache.plugins.observer import Observer, fail_safe, prometheus, summary
from radixcache.tokens import Tokens

TRIED = ("0.32.", "0.33.")
"""Versions that the connector was tested with."""

_log = logging.getLogger("radixcache.plugins")


class RadixCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Observes a step once it is scheduled, in the scheduler's order: an admitted request is
    explained before its own tokens and those of later requests count as computed, since vLLM caches
    the blocks of a step while it schedules.
    """

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.observer: Any = None
        self._admitted: list[Any] = []
        self._hits: dict[str, int] = {}
        """Hits of waiting requests, as vLLM looked them up last."""
        self._texts: dict[str, Tokens] = {}
        """Prompts of running requests."""
        self._prefilling: dict[str, Any] = {}
        if role is not KVConnectorRole.SCHEDULER:
            return
        if not _log.hasHandlers():
            _log.parent = logging.getLogger("vllm")  # the only one that vLLM sets up
        if reason := _refusal(vllm_config, kv_cache_config):
            _log.warning("radixcache does not look at this prefix cache: %s", reason)
        else:
            block_size = vllm_config.cache_config.block_size
            tokens = kv_cache_config.num_blocks * block_size
            self.observer = Observer(f"vLLM {vllm.__version__}", tokens, block_size)

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        self._hits[request.request_id] = num_computed
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        self._admitted.append(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._look(scheduler_output.num_scheduled_tokens)
        self._admitted.clear()
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._prefilling.pop(request.request_id, None)
        self._hits.pop(request.request_id, None)
        tokens = self._texts.pop(request.request_id, None)
        if tokens is not None:
            self._finish(request, tokens)
        return False, None

    request_finished_all_groups = request_finished

    def get_kv_connector_stats(self) -> Stats | None:
        return Stats(self.observer.take()) if self.observer and self.observer.counts else None

    @fail_safe
    def _look(self, scheduled: dict[str, int]) -> None:
        """Observe a step; `scheduled` has its new tokens by request."""
        for request in [*self._prefilling.values()]:
            self._compute_chunk(request, scheduled)
        for request in self._admitted:
            name = request.request_id
            hit = self._hits.pop(name, request.num_computed_tokens)
            if not _is_text(request) or name in self._texts:  # loaded by now, or preempted before
                continue
            tokens = np.asarray(request.prompt_token_ids, np.int32)
            self._texts[name], self._prefilling[name] = tokens, request
            read = not request.skip_reading_prefix_cache
            self.observer.admit(name, tokens, hit, _namespace(request), read)
            self._compute_chunk(request, scheduled)

    def _compute_chunk(self, request: Any, scheduled: dict[str, int]) -> None:
        name, tokens = request.request_id, self._texts[request.request_id]
        if count := scheduled.get(name, 0):
            end = request.num_computed_tokens + count
            self.observer.compute(tokens[:end], _namespace(request))
            if end >= len(tokens):
                del self._prefilling[name]

    @fail_safe
    def _finish(self, request: Any, prompt: Tokens) -> None:
        count = min(request.num_computed_tokens, request.num_tokens - 1)
        answer = np.asarray([*request.output_token_ids], np.int32)
        self.observer.compute(np.concatenate((prompt, answer))[:count], _namespace(request))

    # The worker's side has nothing to do.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    # Metrics, which vLLM carries from the engine's process to the one that serves /metrics.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Metrics:
        return Metrics(*args, **kwargs)


class Stats(KVConnectorStats):
    """Counts of an interval, as `Observer.counts`."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> Stats:
        names = self.data.keys() | other.data.keys()
        return Stats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        shares: dict[str, Any] = summary(self.data)
        return shares

    def is_empty(self) -> bool:
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """`radixcache_*_total`, by engine; `radixcache_missed_tokens_total` by reason, too."""

    def __init__(self, config: Any, types: Any, labels: list[str], engines: dict[int, Any]) -> None:
        super().__init__(config, types, labels, engines)
        self._labels, self._counters = labels, dict[str, Any]()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = dict(zip(self._labels, self.per_engine_labelvalues[engine_idx], strict=True))
        prometheus(self._counter_cls, self._counters, transfer_stats_data, engine)


def _refusal(config: Any, kv_cache_config: Any) -> str | None:
    """Why this engine's hits cannot be explained; None if they can."""
    version = vllm.__version__
    if not version.startswith(TRIED):
        return f"it knows vLLM {' and '.join(one + 'x' for one in TRIED)}, and this is {version}"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    if config.kv_transfer_config.is_kv_consumer:  # deferred frees: other preemptions, other hits
        return 'vLLM frees blocks later for this kv_role; say "kv_role": "kv_producer"'
    groups = len(kv_cache_config.kv_cache_groups)
    return f"the model keeps {groups} kinds of KV" if groups != 1 else None


def _is_text(request: Any) -> bool:
    """Whether a prompt has tokens to compare: images and embeddings have none."""
    return request.prompt_token_ids is not None and not (
        request.mm_features or request.prompt_embeds is not None
    )


def _namespace(request: Any) -> tuple[Any, Any] | None:
    adapter = request.lora_request and request.lora_request.lora_name
    return (request.cache_salt, adapter) if request.cache_salt or adapter else None
