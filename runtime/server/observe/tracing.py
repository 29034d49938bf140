"""OpenTelemetry traces: spans are made from a request's times when it has ended.

Their parent is the span of the HTTP request, which honours the client's `traceparent`.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from threading import Timer
from typing import Any

from fastapi import FastAPI
from opentelemetry import context, metrics, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from radixcache import __version__
from radixcache.runtime.request import Request

CLOSE_SECONDS = 3.0
"""Seconds that a collector has for the last spans."""

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/prefixes": "pin_prefix"}


class Tracing:
    """The traces of one server.

    Args:
        endpoint: address of an OTLP collector; None takes the environment's.
        model: the model's name in the traces.
    """

    def __init__(self, endpoint: str | None, model: str) -> None:
        ours = Resource({"service.name": "radixcache", "service.version": __version__})
        self._exporter = OTLPSpanExporter(endpoint and f"{endpoint.rstrip('/')}/v1/traces")
        self.provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self.provider.get_tracer("radixcache", __version__)
        self._model = model

    def instrument(self, app: FastAPI, but: Iterable[str], headers: list[str]) -> None:
        """Trace each HTTP request, except to the paths `but`; spans record `headers` of answers."""
        FastAPIInstrumentor.instrument_app(
            app,
            tracer_provider=self.provider,
            meter_provider=metrics.NoOpMeterProvider(),
            excluded_urls=",".join(f"{re.escape(path)}$" for path in but),
            http_capture_headers_server_response=headers,
            exclude_spans=["receive", "send"],  # one for each chunk of a stream
        )

    def close(self) -> None:
        """Send the last spans, for a few seconds at most."""
        timer = Timer(CLOSE_SECONDS, self._exporter.shutdown)
        timer.start()
        self.provider.shutdown()
        timer.cancel()

    def follow(self) -> Callable[[list[Request], Exception | None], None]:
        """A function that records the requests of the current HTTP request when it ends."""
        parent = context.get_current()
        route = getattr(trace.get_current_span(parent), "attributes", {}).get("http.route", "")
        operation = _OPERATIONS.get(route, "chat")

        def record(requests: list[Request], error: Exception | None) -> None:
            for request in requests:
                self._record(request, operation, parent, error)

        return record

    def _record(
        self, request: Request, operation: str, parent: context.Context, error: Exception | None
    ) -> None:
        now = time.perf_counter()
        zero = time.time_ns() - int(now * 1e9)

        def unix(seconds: float | None) -> int:
            """The engine's time as Unix time in nanoseconds; None is now."""
            return zero + int((now if seconds is None else seconds) * 1e9)

        whole = self._tracer.start_span(
            f"{operation} {self._model}",
            parent,
            attributes=_describe(request, operation, self._model),
            start_time=unix(request.arrived),
        )
        if error is not None:
            whole.set_attribute("error.type", str(getattr(error, "status", type(error).__name__)))
            whole.set_status(trace.StatusCode.ERROR, str(error))
        below = trace.set_span_in_context(whole, parent)
        for phase, start, end in request.phases:
            attributes = _describe_phase(request, phase)
            span = self._tracer.start_span(
                phase, below, attributes=attributes, start_time=unix(start)
            )
            span.end(unix(end))
        whole.end(unix(request.ended))


def _describe(request: Request, operation: str, model: str) -> dict[str, Any]:
    """A request's attributes, by OpenTelemetry's conventions for generative models."""
    params, sequences = request.params, request.sequences
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "radixcache",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [s.finish_reason or "abort" for s in sequences],
        "gen_ai.response.time_to_first_chunk": request.ttft,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(len(s.generated) for s in sequences),
        "gen_ai.usage.cache_read.input_tokens": sequences[0].cached_tokens,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _describe_phase(request: Request, phase: str) -> dict[str, Any]:
    if phase == "prefill":
        missed = Counter[str]()
        for miss in request.explanation or ():
            missed[f"radixcache.missed_tokens.{miss.reason}"] += len(miss)
        return {
            "gen_ai.usage.cache_read.input_tokens": request.sequences[0].cached_tokens,
            "radixcache.prefilled_tokens": request.prefilled_tokens,
            **missed,
        }
    if phase == "decode":
        return {"radixcache.preemptions": sum(s.preemptions for s in request.sequences)}
    return {}
