"""Traces, as an OpenTelemetry collector gets them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from radixcache import LLM
from tests.helpers.forks import Forked
from tests.runtime.server import http
from tests.runtime.server.live import LiveServer, ask, live
from tests.runtime.server.processes import ENDLESS, streaming

pytest.importorskip("opentelemetry.instrumentation.fastapi", reason="traces are an extra")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from radixcache.runtime.server.observe import tracing

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Traced:
    """A server, and the spans that it has sent."""

    def __init__(self, server: LiveServer, exporter: InMemorySpanExporter) -> None:
        self.server, self._exporter = server, exporter

    def spans(self, count: int) -> list[Any]:
        """The spans by their starts, the longest first, once there are `count`."""
        tracing: Any = self.server.backend.tracing
        end = time.monotonic() + 10
        while len(self._exporter.get_finished_spans()) < count and time.monotonic() < end:
            tracing.provider.force_flush()
        found = self._exporter.get_finished_spans()
        self._exporter.clear()
        assert len(found) == count, [span.name for span in found]
        return sorted(found, key=lambda span: (times(span)[0], -times(span)[1]))


@pytest.fixture
def traced(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda url: exporter)
    with live(llm, otlp_endpoint="http://collector", served_model_name=["m"]) as server:
        yield Traced(server, exporter)
        server.assert_idle()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[int, int]:
    return span.start_time or 0, span.end_time or 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_trace_below_its_client_s(traced: Traced, stream: bool):
    messages = ask("How old is Nora Holm?")
    traced.server.post(CHAT, {"messages": messages})
    traced.spans(5)
    ours = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"messages": messages, "temperature": 0, "max_tokens": 5, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = traced.server.post(CHAT, body, headers={"traceparent": ours})
    assert response.status_code == 200
    served, whole, _, prefill, _ = spans = traced.spans(5)
    names = ["POST /v1/chat/completions", "chat m", "queue", "prefill", "decode"]
    assert [span.name for span in spans] == names
    assert {span.context.trace_id for span in spans} == {0x0AF7651916CD43DD8448EB211C80319C}
    own = [span.context.span_id for span in spans]
    parents = [0xB7AD6B7169203331, own[0], own[1], own[1], own[1]]
    assert [span.parent.span_id for span in spans] == parents
    header = attributes(served)["http.response.header.x_request_id"]
    assert header == (response.headers["x-request-id"],)
    told = attributes(whole)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    tokens = len(traced.server.post("/tokenize", {"messages": messages}).json()["tokens"])
    named = {name.removeprefix("gen_ai."): value for name, value in told.items()}
    assert named == {
        "operation.name": "chat", "provider.name": "radixcache",
        "request.model": "m", "request.max_tokens": 5, "request.temperature": 0.0,
        "request.top_p": 1.0, "request.choice.count": 1,
        "response.model": "m", "response.finish_reasons": ("length",),
        "usage.input_tokens": tokens, "usage.output_tokens": 5,
        "usage.cache_read.input_tokens": tokens,  # the very same prompt again
    }  # fmt: skip
    assert attributes(prefill)["radixcache.prefilled_tokens"] == 0
    (start, end), inner, *phases = map(times, spans)
    assert start <= inner[0] <= inner[1] <= end
    for (_, before), (after, _) in pairwise(phases):
        assert before == after  # nothing of a request's time is missing
    assert (phases[0][0], phases[-1][1]) == inner


def test_a_prefill_says_what_was_cached_and_why_the_rest_was_not(traced: Traced):
    rest = ", by the sea, of which nobody here has ever heard a word"
    for city in ("Rome", "Oslo"):
        traced.server.post(COMPLETIONS, {"prompt": f"A town: {city}{rest}", "max_tokens": 1})
    _, whole, _, prefill, _ = map(attributes, traced.spans(10)[5:])
    cached = prefill["gen_ai.usage.cache_read.input_tokens"]
    length = whole["gen_ai.usage.input_tokens"]
    assert 0 < cached == length - 1 - prefill["radixcache.missed_tokens.diverged"]
    assert prefill["radixcache.prefilled_tokens"] == length - cached


def test_a_refusal_and_what_nobody_waits_for_are_seen(traced: Traced):
    assert traced.server.post(COMPLETIONS, {"prompt": []}).status_code == 400
    (refused,) = traced.spans(1)
    assert attributes(refused)["http.status_code"] == 400
    with streaming(traced.server):
        pass
    whole = traced.spans(5)[1]
    assert attributes(whole)["gen_ai.response.finish_reasons"] == ("abort",)
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{traced.server.url}{COMPLETIONS}", json=ENDLESS, timeout=0.3)
    whole = traced.spans(5)[1]
    assert not whole.status.is_ok and whole.status.description == "the client has hung up"
    assert attributes(whole)["error.type"] == "499"


def test_probes_and_the_page_leave_no_spans(traced: Traced):
    for path in ("/health", "/metrics", "/v1/cache?rows=3", "/", "/main.js"):
        assert traced.server.get(path).status_code == 200
    traced.server.get("/v1/models")
    (span,) = traced.spans(1)
    assert span.name == "GET /v1/models"


def test_a_collector_gets_them_over_http(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    got: list[tuple[str, ExportTraceServiceRequest]] = []

    def hear(request: BaseHTTPRequestHandler, body: bytes) -> None:
        got.append((request.path, ExportTraceServiceRequest.FromString(body)))

    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with http.stranger(hear) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with live(llm) as server:
            server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    assert [path for path, _ in got] == ["/v1/traces"]  # sent at the latest when the server ends
    (resource,) = got[0][1].resource_spans
    said = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert said["service.name"] == "radixcache"
    assert said["deployment.environment.name"] == "test"
    assert sum(len(scope.spans) for scope in resource.scope_spans) == 5


def test_a_collector_that_is_not_there_costs_no_answer_and_delays_no_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.2)
    with live(llm, otlp_endpoint="http://127.0.0.1:9/") as server:
        response = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        assert response.status_code == 200
        start = time.monotonic()
    assert time.monotonic() - start < 3
    assert any("export" in record.message for record in caplog.records)


def serve_anew() -> int:
    """As if nothing of ours had been imported; whether OpenTelemetry is."""
    for name in [*sys.modules]:
        if name.startswith(("radixcache", "opentelemetry")):
            del sys.modules[name]
    from radixcache import LLM
    from radixcache.runtime.server.app import create_app

    create_app(LLM(kv_cache_memory_bytes="8MiB"))
    return "opentelemetry.sdk" in sys.modules


def test_without_being_asked_for_opentelemetry_is_not_imported(tmp_path: Path):
    process = Forked(tmp_path, serve_anew)
    assert process.wait(60) == 0, process.err.read_text()
