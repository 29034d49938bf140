"""Metrics for Prometheus: latencies as they happen, the engine's state when it is scraped.

Metrics that vLLM has are repeated under vLLM's names, so that its dashboards and alerts work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from radixcache.runtime.request import Request
from radixcache.runtime.server.protocol.answers import RecentRequest
from radixcache.runtime.spec_decode.draft_length import SOURCES
from radixcache.runtime.spec_decode.proposer import DraftProposer

if TYPE_CHECKING:  # imports torch
    from radixcache.runtime.llm import LLM

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))
_REASONS = ("stop", "length", "abort", "error")

VLLM = {
    "vllm:e2e_request_latency_seconds": "radixcache_request_latency_seconds",
    "vllm:time_to_first_token_seconds": "radixcache_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "radixcache_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "radixcache_time_per_output_token_seconds",
    "vllm:request_queue_time_seconds": "radixcache_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "radixcache_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "radixcache_decode_time_seconds",
    "vllm:request_prompt_tokens": "radixcache_request_prompt_tokens",
    "vllm:request_generation_tokens": "radixcache_request_generation_tokens",
    "vllm:request_max_num_generation_tokens": "radixcache_request_longest_generation_tokens",
    "vllm:request_success": "radixcache_requests_finished",
    "vllm:prompt_tokens": "radixcache_query_tokens",
    "vllm:generation_tokens": "radixcache_generation_tokens",
    "vllm:prefix_cache_queries": "radixcache_query_tokens",
    "vllm:prefix_cache_hits": "radixcache_hit_tokens",
    "vllm:spec_decode_num_drafts": "radixcache_spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens": "radixcache_spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "radixcache_spec_decode_num_accepted_tokens",
    "vllm:num_preemptions": "radixcache_preemptions",
    "vllm:num_requests_running": "radixcache_requests_running",
    "vllm:num_requests_waiting": "radixcache_requests_waiting",
    "vllm:kv_cache_usage_perc": "radixcache_kv_usage",
}
"""Families by vLLM's names, with the names of ours that they repeat."""


_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS),
    ("inter_token_latency_seconds", "Between steps that gave a request tokens.", _SECONDS),
    ("time_per_output_token_seconds", "Of a request, after its first token.", _SECONDS),
    ("request_latency_seconds", "From a request's arrival to its end.", _SECONDS),
    ("queue_time_seconds", "From a request's arrival until it began to run.", _SECONDS),
    ("prefill_time_seconds", "From where a request began to run to its first token.", _SECONDS),
    ("decode_time_seconds", "From a request's first token to its end.", _SECONDS),
    ("request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    ("request_generation_tokens", "Tokens that a completion generated.", _TOKENS),
    (
        "request_longest_generation_tokens",
        "Tokens that the longest completion of a request generated.",
        _TOKENS,
    ),
)


class Metrics:
    """The metrics of one server, in a registry of its own.

    Args:
        model_name: the label of vLLM's families.

    Attributes:
        recent: the last requests that got a first token, oldest first; for the engine's thread.
    """

    def __init__(self, model_name: str) -> None:
        self.recent: deque[RecentRequest] = deque(maxlen=60)
        self._model_name = model_name
        self._last_token: dict[Request, float] = {}
        self._registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

        self._histograms = {
            name: Histogram(f"radixcache_{name}", text, buckets=buckets, registry=registry)
            for name, text, buckets in _HISTOGRAMS
        }
        finished = Counter(
            "radixcache_requests_finished",
            "Requests by how their first completion ended.",
            ["reason"],
            registry=registry,
        )
        self._finished = {reason: finished.labels(reason) for reason in _REASONS}

    def note_token(self, request: Request, now: float) -> None:
        """A step gave `request` one token for each running completion."""
        before = self._last_token.get(request)
        if before is not None:
            self._observe("inter_token_latency_seconds", now - before)
        elif request.ttft is not None:
            self._observe("time_to_first_token_seconds", request.ttft)
            recent = RecentRequest(
                prompt_tokens=len(request.prompt_token_ids),
                cached_tokens=request.sequences[0].cached_tokens,
                loaded_tokens=request.sequences[0].num_loaded,
                load_seconds=sum(part.seconds for part in request.sequences[0].loaded),
                ttft=request.ttft,
            )
            self.recent.append(recent)
        self._last_token[request] = now

    def note_end(self, request: Request) -> None:
        """`request` has ended, for whatever reason; only its finished phases are counted."""
        self._last_token.pop(request, None)
        self._observe("request_latency_seconds", request.latency)
        for phase, start, end in request.phases:
            if end is not None:
                self._observe(f"{phase}_time_seconds", end - start)
        lengths = [len(sequence.generated) for sequence in request.sequences]
        if request.ended is not None and request.first_token is not None and max(lengths) > 1:
            seconds = (request.ended - request.first_token) / (max(lengths) - 1)
            self._observe("time_per_output_token_seconds", seconds)
        self._observe("request_prompt_tokens", len(request.prompt_token_ids))
        for length in lengths:
            self._observe("request_generation_tokens", length)
        self._observe("request_longest_generation_tokens", max(lengths))
        # A request that was given up has no finish reason yet.
        self._finished[request.sequences[0].finish_reason or "abort"].inc()

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def render(self, engine: Iterable[Metric]) -> bytes:
        """Everything in Prometheus' text format, with what `engine_metrics` has read."""
        ours = {family.name: family for family in (*self._registry.collect(), *engine)}
        theirs = [_renamed(ours[name], other, self._model_name) for other, name in VLLM.items()]
        return exposition([*ours.values(), *theirs])


def exposition(families: Iterable[Metric]) -> bytes:
    """Families in Prometheus' text format."""
    return generate_latest(_Families(families))


class _Families(list[Metric]):
    def collect(self) -> list[Metric]:
        return self


def _renamed(family: Metric, name: str, model_name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {"model_name": model_name, **sample.labels}
        if "reason" in labels:
            labels["finished_reason"] = labels.pop("reason")
        renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return renamed


def engine_metrics(llm: LLM) -> list[Metric]:
    """The engine's state, read on its thread; counters never go back, even at a flush.
    O(leased pages)."""
    engine, cache, scheduler = llm.engine, llm.cache, llm.engine.scheduler
    stats, pool, kept = engine.lifetime_stats, cache.pool, scheduler.admission.logits_cache
    leased, used = cache.leased_pages, pool.num_pages - pool.num_free
    counters: dict[str, tuple[str, float]] = {
        "requests_started": ("Requests that began to run.", stats.requests),
        "query_tokens": ("Prompt tokens that were looked up in the cache.", stats.query_tokens),
        "hit_tokens": ("Prompt tokens that the cache held.", stats.hit_tokens),
        "whole_hits": (
            "Completions that computed no prompt token: all was cached, and the logits kept.",
            0 if kept is None else kept.num_used,
        ),
        "generation_tokens": ("Generated tokens.", engine.output_processor.num_generated),
        "preemptions": ("Times that a completion was put back.", scheduler.num_preemptions),
        "evicted_tokens": ("Tokens evicted.", stats.evicted_tokens),
        "evicted_pages": ("Pages evicted.", stats.evicted_pages),
        "copied_pages": ("Half-filled pages copied at a branch.", stats.copied_pages),
    }
    encoded, found, seconds = llm.images.counts
    counters |= {
        "images_encoded": ("Images that the vision tower encoded.", encoded),
        "images_found": ("Encodings that found an image's rows kept.", found),
        "image_seconds": ("Seconds of the vision tower.", seconds),
    }
    lower, tiers = [], [] if llm.offload is None else llm.offload.tiers
    if tiers:
        help_text = "Tokens whose KV came up from host memory or disk."
        counters["loaded_tokens"] = help_text, stats.loaded_tokens
    for tier in tiers:
        medium = tier.medium
        where = _MEDIA[medium]
        for name, count in tier.store.counters._asdict().items():
            counters[f"{medium}_{name}"] = (_LOWER[name].format(where), count)
        evicted = f"KV pages that {where} had no room for.", tier.num_evicted
        counters[f"{medium}_evicted_pages"] = evicted
        slots = {"used": len(tier), "free": tier.num_slots - len(tier)}
        lower.append(_by_state(f"{medium}_pages", _SLOTS, slots))
    gauges: dict[str, tuple[str, float]] = {
        "hit_rate": ("Share of the queried tokens hit since the last flush.", cache.stats.hit_rate),
        "requests_running": ("Completions that run.", len(scheduler.running)),
        "requests_waiting": ("Completions that wait for room.", len(scheduler.waiting)),
        "kv_usage": (
            "Share of the KV pages that requests and pins hold: at 1, requests must wait.",
            leased / pool.num_pages,
        ),
    }
    missed = CounterMetricFamily(
        "radixcache_missed_tokens",
        "Prompt tokens computed, by why they were not cached, but for the last of each prompt.",
        labels=["reason"],
    )
    for reason, count in llm.explainer.missed_tokens.items():
        missed.add_metric([reason], count)
    pages = {"used": used, "free": pool.num_free, "leased": leased, "pinned": cache.pins.num_pages}
    return [
        *(CounterMetricFamily(f"radixcache_{n}", t, value=v) for n, (t, v) in counters.items()),
        *(GaugeMetricFamily(f"radixcache_{n}", t, value=v) for n, (t, v) in gauges.items()),
        missed,
        *_drafts(scheduler.proposer),
        _by_state(
            "pages",
            "KV pages: used + free is all; the leased are among the used, the pinned among these.",
            pages,
        ),
        *(_by_state(n, _BESIDE[n], counts) for n, counts in scheduler.planner.counts().items()),
        *lower,
    ]


_MEDIA = {"host": "host memory", "disk": "disk"}
_SLOTS = "Slots of KV pages in the tier below the KV memory, host memory or disk."
_LOWER = {
    "stored_pages": "KV pages written to {}.",
    "loaded_pages": "KV pages read from {} that were what was written.",
    "dropped_pages": "KV pages not kept, because {} was too slow.",
    "failed_pages": "KV pages that could not be written, or were not what was written.",
}
_DRAFTS = {
    "num_drafts": "Times that tokens were drafted for a sequence, by where they were taken from.",
    "num_draft_tokens": "Tokens computed before they were drawn, by where they were taken from.",
    "num_accepted_tokens": "Drafted tokens that were accepted: each saved its request a step.",
}
_BESIDE = {
    "window_pages": "Pages of layers with a window: of running sequences, kept for a hit, left "
    "behind but found until they are used anew, or free.",
    "recurrent_states": "Slots of recurrent states: of running sequences, kept for a hit, or free.",
}


def _drafts(proposer: DraftProposer | None) -> Iterator[Metric]:
    for name, text in _DRAFTS.items():
        family = CounterMetricFamily(f"radixcache_spec_decode_{name}", text, labels=["source"])
        counts = getattr(proposer, name, {})
        for source in SOURCES:
            family.add_metric([source], counts.get(source, 0))
        yield family


def _by_state(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"radixcache_{name}", text, labels=["state"])
    for state, count in counts.items():
        family.add_metric([state], count)
    return family
