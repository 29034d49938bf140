"""The app: its routes, who may use them, and what becomes of errors."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixcache import __version__
from radixcache.runtime.llm import LLM
from radixcache.runtime.server import cache, chat, completions, errors, static
from radixcache.runtime.server.backend import Backend, BackendDep, Options, plain_messages
from radixcache.runtime.server.errors import ApiError
from radixcache.runtime.server.metrics import EngineState
from radixcache.runtime.server.protocol import (
    Detokenized,
    DetokenizeRequest,
    Error,
    Health,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizeRequest,
)
from radixcache.runtime.text.tokenizer import Tokenizer

OPEN_PATHS = {"/health", *static.FILES}
"""What needs no API key."""

router = APIRouter()


def create_app(llm: LLM, options: Options | None = None) -> FastAPI:
    """The server of one model; it runs `llm` from the app's start to its end.

    `app.state.backend` is the `Backend` of the routes.
    """
    backend = Backend(llm, options or Options())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        backend.jobs.start()
        yield
        await backend.close()

    app = FastAPI(
        title="radixcache",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    app.state.backend = backend
    for part in (router, chat.router, completions.router, cache.router, static.router):
        app.include_router(part)
    errors.install(app)
    app.add_middleware(
        _Gate, api_key=backend.options.api_key, max_body_size=backend.options.max_body_size
    )
    return app


class _Gate:
    """Lets requests pass that have the API key, and as much of their bodies as is read at most."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_size: int) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._max_body_size = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._api_key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")
            # The scheme's case means nothing (RFC 9110, 11.1).
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
                await ApiError.unauthorized().response(scope, receive, send)
                return
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_size:
            await ApiError.too_large(self._max_body_size).response(scope, receive, send)
            return
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_size:
                raise HTTPException(413, ApiError.too_large(self._max_body_size).message)
            return message

        await self._app(scope, receive_limited, send)


# Routes that are about neither completions nor the cache.


@router.get("/health")
async def health(backend: BackendDep) -> Health:
    """Whether requests are taken: 503 if not."""
    if backend.jobs.draining or not backend.llm.worker.alive:
        raise ApiError.unavailable("the server is shutting down, or its engine has stopped")
    return Health()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(backend: BackendDep) -> PlainTextResponse:
    """Metrics in Prometheus' text format."""
    state = await backend.jobs.call(lambda: EngineState.of(backend.llm))
    return PlainTextResponse(backend.metrics.render(state), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def list_models(backend: BackendDep) -> ModelList:
    """The model, under each of its names."""
    return ModelList(data=[_card(backend, name) for name in backend.names])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, backend: BackendDep) -> ModelCard:
    """The model, if it is served under this name."""
    return _card(backend, backend.check_model(name))


def _card(backend: Backend, name: str) -> ModelCard:
    return ModelCard(id=name, created=backend.created, max_model_len=backend.max_model_len)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, backend: BackendDep) -> Tokenized:
    """The token ids of a text or a conversation."""
    backend.check_model(body.model)

    def encode(tokenizer: Tokenizer) -> list[int]:
        if body.messages is not None:
            text = tokenizer.render_chat(plain_messages(body.messages))
            return tokenizer.encode(text, special=False)
        return tokenizer.encode(body.prompt or "", special=body.add_special_tokens)

    tokens = await backend.tokenize(encode)
    texts = [backend.token_text(token) for token in tokens] if body.return_token_strs else None
    return Tokenized(
        count=len(tokens),
        max_model_len=backend.max_model_len,
        tokens=tokens,
        token_strs=texts,
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, backend: BackendDep) -> Detokenized:
    """The text of token ids, special tokens included."""
    backend.check_model(body.model)
    text = await backend.tokenize(lambda tokenizer: tokenizer.decode(body.tokens, special=True))
    return Detokenized(prompt=text)
