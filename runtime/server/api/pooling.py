"""POST /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from radixcache.runtime.engine.input_processor import naming_prompt
from radixcache.runtime.engine.pooling_inputs import Output, Pooled
from radixcache.runtime.outputs import EmbeddingOutput, PooledOutput
from radixcache.runtime.server.api.exchange import JSON, finish
from radixcache.runtime.server.http.bodies import BodyRoute
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.protocol.pooling import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from radixcache.runtime.server.serving import ContextDep, ServingContext, client_of
from radixcache.tokens import as_tokens

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request, context: ContextDep) -> Response:
    """The vector of each text, as OpenAI's API has it; `radixcache serve` embeds by a chat model
    only with --enable-pooling."""
    inputs = context.llm.pooling_inputs
    head = _head(body, context, "embd")
    make = partial(inputs.embed, body.texts, body.dimensions, body.instruction)
    found = await _pool(make, body, request, context)
    rest = {**head, "usage": _usage(found)}
    write = partial(_write_vectors, found, body.encoding_format == "base64", rest)
    return Response(
        await context.tokenizing.call(write, client_of(request, body.cache_salt)),
        media_type="application/json",
    )


@router.post("/v1/rerank")
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request, context: ContextDep) -> JSON:
    """Documents by how well they fit a query, the best first, as Jina's, Cohere's and vLLM's APIs
    have it."""
    head = _head(body, context, "rerank")
    make = partial(context.llm.pooling_inputs.score, body.query, body.texts, body.instruction)
    found = await _pool(make, body, request, context)
    order = sorted(range(len(found)), key=lambda i: -found[i].score)  # equal ones by index
    results = [
        {"index": i, "relevance_score": found[i].score}
        | ({} if body.return_documents is False else {"document": {"text": body.texts[i]}})
        for i in order[: body.top_n]
    ]
    return {**head, "results": results, "usage": _usage(found)}


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
async def score(body: ScoreRequest, request: Request, context: ContextDep) -> JSON:
    """How well the second text of each pair fits the first, as vLLM's API has it."""
    head = _head(body, context, "score")
    make = partial(context.llm.pooling_inputs.score, body.text_1, body.text_2, body.instruction)
    found = await _pool(make, body, request, context)
    data = [
        {"index": i, "object": "score", "score": output.score} for i, output in enumerate(found)
    ]
    return {**head, "data": data, "usage": _usage(found)}


def _head(body: PoolingRequest, context: ServingContext, prefix: str) -> JSON:
    name = context.check_model(body.model)
    is_chat = context.llm.engine.model.pooler.pooling.task is None
    if is_chat and not context.options.enable_pooling:
        raise ApiError(
            400,
            f"{name!r} is a language model: start the server with --enable-pooling to embed and "
            "score by it",
            "model",
        )
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": "list"}
    return {**head, "created": int(time.time()), "model": name}


async def _pool(
    make: Callable[[], Pooled[Output]],
    body: PoolingRequest,
    request: Request,
    context: ServingContext,
) -> list[Output]:
    """The outputs of all texts, of which only so many wait at a time as may run."""
    client, llm = client_of(request, body.cache_salt), context.llm
    context.jobs.check_room(1, client)

    def prepare() -> Pooled[Output]:
        pooled = make()
        for at, one in enumerate(pooled.inputs):  # before any is computed
            with naming_prompt(at, len(pooled.inputs)):
                llm.engine.check_prompt(as_tokens(one.tokens), answer=False)
        return pooled

    pooled = await context.tokenizing.call(prepare, client)
    timeout = context.options.request_timeout
    running = _run(pooled, body.cache_salt, request, context, timeout)
    try:  # each group has an end of its own, and all of them this one
        return await asyncio.wait_for(running, timeout)
    except asyncio.TimeoutError:
        raise ApiError(504, f"not finished within {timeout:g} seconds") from None


async def _run(
    pooled: Pooled[Output],
    salt: str | None,
    request: Request,
    context: ServingContext,
    timeout: float,
) -> list[Output]:
    client, llm, outputs = client_of(request, salt), context.llm, list[Output]()
    size = min(len(pooled.inputs), llm.engine.scheduler.max_num_seqs)
    with context.jobs.room(size, client):  # also between two groups
        for start in range(0, len(pooled.inputs), size):
            group = pooled.inputs[start : start + size]
            add = partial(llm.add, group, salt, client=client, pools=True)
            job = await context.jobs.submit(add, 0, client=client, timeout=timeout)
            await finish(job, request)
            outputs += [pooled.output(one) for one in job.requests]
    return outputs


def _usage(outputs: Sequence[PooledOutput]) -> JSON:
    tokens = sum(output.num_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return {**counts, "prompt_tokens_details": details}


def _write_vectors(outputs: list[EmbeddingOutput], in_base64: bool, rest: JSON) -> bytes:
    """The answer, vector by vector: no call holds up other threads for long."""
    parts = []
    for index, output in enumerate(outputs):
        vector = output.embedding
        shown = b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist()
        parts.append(json.dumps({"object": "embedding", "index": index, "embedding": shown}))
    return f'{json.dumps(rest)[:-1]}, "data": [{", ".join(parts)}]}}'.encode()
