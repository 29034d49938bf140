"""The FastAPI app: all routes, in front of one model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timezone
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from radixcache import __version__
from radixcache.errors import InvalidRequest
from radixcache.runtime.llm import LLM
from radixcache.runtime.server import guards
from radixcache.runtime.server.admin import cache, explain, page, prefixes
from radixcache.runtime.server.admin.queries import QUERY
from radixcache.runtime.server.api import anthropic_messages as messages
from radixcache.runtime.server.api import openai_chat as chat
from radixcache.runtime.server.api import openai_completions as completions
from radixcache.runtime.server.api import openai_responses as responses
from radixcache.runtime.server.api import pooling
from radixcache.runtime.server.api.exchange import JSON
from radixcache.runtime.server.api.response_store import ResponseStore
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http import errors, static
from radixcache.runtime.server.http.access import ADMINISTRATOR
from radixcache.runtime.server.http.bodies import BodyRoute
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.observe.metrics import engine_metrics
from radixcache.runtime.server.observe.request_log import REQUEST_ID
from radixcache.runtime.server.protocol.answers import Error
from radixcache.runtime.server.protocol.openai import DetokenizeRequest, TokenizeRequest
from radixcache.runtime.server.serving import ContextDep, ServingContext, client_of
from radixcache.runtime.tokens.tokenizer import Tokenizer

UNTRACED = ("/health", "/metrics", "/v1/cache", *static.FILES)
"""Paths that probes, Prometheus and the page poll."""

router = APIRouter(route_class=BodyRoute)


def create_app(llm: LLM, options: ServerArgs | None = None) -> FastAPI:
    """An app that serves `llm`; `app.state.context` is the `ServingContext` of its routes."""
    context = ServingContext(llm, options or ServerArgs())
    stored = ResponseStore(disk=None if llm.offload is None else llm.offload.disk)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        stored.load()
        with suppress(InvalidRequest):  # requests for structured output say why
            await asyncio.to_thread(llm.grammar_backend.read_vocabulary)
        yield
        await context.close()

    app = FastAPI(
        title="radixcache",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    app.state.context, app.state.frontend, app.state.responses = context, context.jobs, stored
    app.include_router(router, dependencies=[QUERY])
    for module in (chat, completions, responses, messages, pooling, explain, prefixes, cache):
        app.include_router(module.router, dependencies=[QUERY])
    app.include_router(page.router)
    app.include_router(static.router)
    errors.install(app)
    guards.install(app, context.options)
    if context.tracing is not None:
        context.tracing.instrument(app, UNTRACED, [REQUEST_ID])
    return app


# Health, metrics, models and the tokenizer.


@router.get("/health")
async def health(context: ContextDep) -> JSON:
    """Whether the server takes requests; 503 if not."""
    if context.jobs.draining or not context.llm.worker.alive:
        raise ApiError(503, "the server is shutting down, or its engine has stopped")
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse, dependencies=[ADMINISTRATOR])
async def metrics(context: ContextDep) -> PlainTextResponse:
    """Metrics in Prometheus' text format."""
    engine = await context.jobs.call(lambda: engine_metrics(context.llm))
    return PlainTextResponse(context.metrics.render(engine), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def list_models(
    context: ContextDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after_id: str | None = None,
    client_version: str | None = None,
) -> JSON:
    """The model, under each of its names, in pages as Anthropic's API has them."""
    names = context.names
    if after_id in names:
        names = names[names.index(after_id) + 1 :]
    shown = names[:limit]
    first, last = (shown[0], shown[-1]) if shown else (None, None)
    more = {"first_id": first, "last_id": last, "has_more": len(shown) < len(names)}
    return {"object": "list", "data": [_card(context, name) for name in shown], **more}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: ContextDep) -> JSON:
    """The model, if it is served under this name."""
    return _card(context, context.check_model(name))


def _card(context: ServingContext, name: str) -> JSON:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": context.created,
        "created_at": datetime.fromtimestamp(context.created, timezone.utc).isoformat(),
        "owned_by": "radixcache",
        "max_model_len": context.max_model_len,
        "exact": context.llm.engine.model.exact,
    }


@router.get("/tokenizer_info")
async def tokenizer_info(context: ContextDep) -> JSON:
    """The tokenizer as vLLM describes it: its special tokens and its chat template."""
    return {**context.tokenizer.info, "model_max_length": context.max_model_len}


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, context: ContextDep) -> JSON:
    """The token ids of a text or a conversation."""
    context.check_model(body.model)

    def encode(tokenizer: Tokenizer) -> tuple[list[int], list[str] | None]:
        if body.messages is not None:
            text = tokenizer.render_chat([m.plain() for m in body.messages])
            tokens = tokenizer.encode(text, special=False)
        else:
            tokens = tokenizer.encode(body.prompt or "", special=body.add_special_tokens)
        shown = tokens if body.return_token_strs else []
        return tokens, [tokenizer.token_text(token) for token in shown] or None

    tokens, texts = await context.tokenizing.run(encode, client_of(request))
    counts = {"count": len(tokens), "max_model_len": context.max_model_len}
    return {**counts, "tokens": tokens, "token_strs": texts}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, context: ContextDep) -> JSON:
    """The text of token ids, special tokens included."""
    context.check_model(body.model)
    text = await context.tokenizing.run(
        lambda tokenizer: tokenizer.decode(body.tokens, special=True), client_of(request)
    )
    return {"prompt": text}
