"""What Prometheus is told: latencies as they happen, the engine's state when it asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixcache.base import CacheStats
from radixcache.runtime.engine.request import Request
from radixcache.runtime.llm import LLM

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass(frozen=True)
class EngineState:
    """The engine at one moment."""

    stats: CacheStats
    num_pages: int
    num_free: int
    num_pinned: int
    num_running: int
    num_waiting: int
    missed_tokens: dict[str, int]
    whole_hits: int

    @classmethod
    def of(cls, llm: LLM) -> EngineState:
        """Read it, on the engine's thread. O(pinned pages)."""
        cache, scheduler = llm.cache, llm.engine.scheduler
        return cls(
            stats=CacheStats(**vars(cache.stats)),
            num_pages=cache.pool.num_pages,
            num_free=cache.pool.num_free,
            num_pinned=cache.pinned_pages,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            missed_tokens=dict(llm.explainer.missed_tokens),
            whole_hits=scheduler.kept.num_used if scheduler.kept is not None else 0,
        )


@dataclass(frozen=True)
class Started:
    """A request that got its first token, `ttft` seconds after it came."""

    prompt_tokens: int
    cached_tokens: int
    ttft: float


class Metrics:
    """The metrics of one server, in a registry of its own.

    Attributes:
        recent: the requests that got their first token last, oldest first; the engine thread's.
    """

    def __init__(self) -> None:
        self.recent: deque[Started] = deque(maxlen=60)
        self.registry = CollectorRegistry()
        self._state = _StateCollector()
        self.registry.register(self._state)
        self._ttft = Histogram(
            "radixcache_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            "radixcache_inter_token_latency_seconds",
            "Between the tokens of a request.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._latency = Histogram(
            "radixcache_request_latency_seconds",
            "From a request's arrival to its end.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._generated = Counter(
            "radixcache_generation_tokens", "Generated tokens.", registry=self.registry
        )
        self._finished = Counter(
            "radixcache_requests_finished",
            "Requests by how their first completion ended.",
            ["reason"],
            registry=self.registry,
        )
        self._last_token: dict[Request, float] = {}

    def note_token(self, request: Request, now: float) -> None:
        """A step gave `request` a token, or one for each of its completions."""
        before = self._last_token.get(request)
        if before is not None:
            self._inter_token.observe(now - before)
        elif request.ttft is not None:
            self._ttft.observe(request.ttft)
            cached = request.sequences[0].cached_tokens
            self.recent.append(Started(len(request.prompt_token_ids), cached, request.ttft))
        self._last_token[request] = now

    def note_end(self, request: Request) -> None:
        """`request` is over, whatever the reason."""
        self._last_token.pop(request, None)
        self._latency.observe(request.latency)
        self._generated.inc(sum(len(sequence.generated) for sequence in request.sequences))
        self._finished.labels(request.sequences[0].finish_reason).inc()

    def render(self, state: EngineState) -> bytes:
        """Everything in Prometheus' text format."""
        self._state.latest = state
        return generate_latest(self.registry)


class _StateCollector(Collector):
    """The engine's state as metrics. A flush begins the counters anew, but for missed tokens."""

    latest: EngineState | None = None

    def collect(self) -> Iterator[Metric]:
        state = self.latest
        if state is None:
            return
        stats = state.stats
        for name, text, count in (
            ("requests_started", "Requests that began to run.", stats.requests),
            ("query_tokens", "Prompt tokens that were looked up in the cache.", stats.query_tokens),
            ("hit_tokens", "Prompt tokens that the cache held.", stats.hit_tokens),
            (
                "whole_hits",
                "Completions that computed no prompt token: all was cached, and the logits kept.",
                state.whole_hits,
            ),
            ("evicted_tokens", "Tokens evicted.", stats.evicted_tokens),
            ("evicted_pages", "Pages evicted.", stats.evicted_pages),
            ("copied_pages", "Half-filled pages copied at a branch.", stats.copied_pages),
        ):
            yield CounterMetricFamily(f"radixcache_{name}", text, value=count)
        missed = CounterMetricFamily(
            "radixcache_missed_tokens",
            "Prompt tokens that were computed, by why they were not cached.",
            labels=["reason"],
        )
        for reason, count in state.missed_tokens.items():
            missed.add_metric([reason], count)
        yield missed
        for name, text, value in (
            ("hit_rate", "Share of the queried tokens that were hit.", stats.hit_rate),
            ("requests_running", "Completions that run.", state.num_running),
            ("requests_waiting", "Completions that wait for room.", state.num_waiting),
        ):
            yield GaugeMetricFamily(f"radixcache_{name}", text, value=value)
        pages = GaugeMetricFamily(
            "radixcache_pages",
            "KV pages: used + free is all of them; the pinned are among the used.",
            labels=["state"],
        )
        pages.add_metric(["used"], state.num_pages - state.num_free)
        pages.add_metric(["free"], state.num_free)
        pages.add_metric(["pinned"], state.num_pinned)
        yield pages
