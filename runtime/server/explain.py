"""POST /v1/explain: what of a prompt is cached, without computing it."""

from __future__ import annotations

from fastapi import APIRouter, Request

from radixcache.base import TokensLike
from radixcache.runtime.server.answers import Explained
from radixcache.runtime.server.backend import Backend, BackendDep, client_of, plain_messages
from radixcache.runtime.server.chat import template_kwargs
from radixcache.runtime.server.completions import encode_prompts
from radixcache.runtime.server.generation import tell
from radixcache.runtime.server.requests import CompletionRequest, ExplainRequest
from radixcache.runtime.server.turn import Turn, encode

router = APIRouter()


@router.post("/v1/explain")
async def explain(body: ExplainRequest, request: Request, backend: BackendDep) -> Explained:
    """What of a prompt is cached, and why the rest is not; nothing is computed, or changed."""
    model = backend.check_model(body.model)
    salt = body.cache_salt
    tokens = await _encode(body, request, backend)
    found = await backend.jobs.call(
        lambda: backend.llm.explain({"prompt_token_ids": tokens}, cache_salt=salt)
    )
    return Explained(
        model=model,
        prompt_tokens=found.num_tokens,
        cached_tokens=found.num_cached_tokens,
        explanation=tell(backend, found.misses, body.prefix),
    )


async def _encode(body: ExplainRequest, request: Request, backend: Backend) -> TokensLike:
    """The prompt's tokens, as the request that is meant would have them."""
    client = client_of(request, body.cache_salt)
    if body.messages is None:
        meant = body.model_dump(include={"prompt", "add_special_tokens", "cache_salt", "prefix"})
        (tokens,) = await encode_prompts(CompletionRequest(**meant), backend, client)
        return tokens
    turn = Turn(
        plain_messages(body.messages),
        backend.chat_defaults,
        tools=body.offered,
        template_kwargs=template_kwargs(body, backend),
        continue_final=bool(body.continue_final_message),
        ask=body.add_generation_prompt is not False,
        cache_salt=body.cache_salt,
        prefix=body.prefix,
    )
    return (await encode(backend, turn, client)).tokens
