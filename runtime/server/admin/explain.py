"""POST /v1/explain: which tokens of a prompt are cached, without computing it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from radixcache.runtime.engine.input_processor import Prompt
from radixcache.runtime.server.api.chat_turn import encode, turn_of
from radixcache.runtime.server.api.extension import describe_misses
from radixcache.runtime.server.api.openai_completions import encode_prompts
from radixcache.runtime.server.http.bodies import BodyRoute
from radixcache.runtime.server.protocol.answers import Explained
from radixcache.runtime.server.protocol.openai import CompletionRequest, ExplainRequest
from radixcache.runtime.server.serving import ContextDep, ServingContext, client_of

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/explain", response_model=Explained)
async def explain(body: ExplainRequest, request: Request, context: ContextDep) -> Any:
    """How much of a prompt is cached, and why the rest is not; computes and changes nothing."""
    model = context.check_model(body.model)
    salt = body.cache_salt
    prompt = await _encode(body, request, context)
    found = await context.jobs.call(lambda: context.llm.explain(prompt, cache_salt=salt))
    return {
        "model": model,
        "prompt_tokens": found.num_tokens,
        "cached_tokens": found.num_cached_tokens,
        "explanation": describe_misses(context, found.misses, body.prefix),
    }


async def _encode(body: ExplainRequest, request: Request, context: ServingContext) -> Prompt:
    """The prompt, tokenised, as in the request that the body describes."""
    client, wanted = client_of(request, body.cache_salt), body.request
    if isinstance(wanted, CompletionRequest):
        (tokens,) = await encode_prompts(wanted, context, request)
        return {"prompt_token_ids": tokens}
    turn = turn_of(wanted, context.chat_defaults, context.tokenizer)
    return await encode(context, turn, client)
