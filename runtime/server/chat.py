"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request

from radixcache.runtime.engine.outputs import RequestOutput
from radixcache.runtime.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    TokenLogprob,
)
from radixcache.runtime.server.backend import Backend, BackendDep, client_of, plain_messages
from radixcache.runtime.server.errors import ApiError
from radixcache.runtime.server.generation import (
    JSON,
    STREAM_RESPONSE,
    EventStream,
    clamp,
    extension,
    finish,
    last_chunk,
    usage,
)
from radixcache.runtime.server.jobs import Job, PromptDelta
from radixcache.runtime.server.requests import ChatRequest
from radixcache.runtime.text.history import TokenisedText

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses={**STREAM_RESPONSE})
async def chat_completions(body: ChatRequest, request: Request, backend: BackendDep) -> Any:
    """Answer a conversation."""
    head: JSON = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": backend.now(),
        "model": backend.check_model(body.model),
    }
    messages = plain_messages(body.messages)
    if prefix := await backend.find_prefix_for(body):
        before = backend.prefix_messages.get(prefix)
        if before is None:
            raise ApiError.invalid(
                f"the prefix {body.prefix!r} was pinned as text: it cannot begin a conversation",
                "prefix",
            )
        messages = [*before, *messages]
    params = body.sampling_params(
        backend.chat_defaults,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=body.max_completion_tokens
        or body.max_tokens
        or backend.chat_defaults.max_tokens,
    )
    client = client_of(request, body.cache_salt)
    prompt = await backend.encode_chat(messages, body.cache_salt, client)
    job = await backend.submit([prompt.tokens], params, body, client)
    if body.stream:
        chunks = _Chunks(body, backend, head, job, prompt)
        return EventStream(job, chunks.of, chunks.last)
    (output,) = await finish(job, request)
    backend.remember(prompt, output)
    choices = [
        ChatChoice(
            index=answer.index,
            message=AssistantMessage(content=answer.text),
            logprobs=_logprobs(backend, body, answer.token_ids, answer.logprobs),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )
        for answer in output.outputs
    ]
    more = extension(backend, job, body)
    return ChatCompletion(**head, choices=choices, usage=usage([output]), radixcache=more)


class _Chunks:
    """The chunks of one streamed answer."""

    def __init__(
        self, body: ChatRequest, backend: Backend, head: JSON, job: Job, prompt: TokenisedText
    ) -> None:
        self._body = body
        self._backend = backend
        self._head = {**head, "object": "chat.completion.chunk"}
        self._usage: JSON = {"usage": None} if body.include_usage else {}
        self._job = job
        self._prompt = prompt
        self._begun: set[int] = set()

    def of(self, news: PromptDelta) -> Iterator[JSON]:
        delta = news.delta
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            yield self._chunk(delta.index, {"role": "assistant", "content": ""})
        logprobs = _logprobs(self._backend, self._body, delta.token_ids, delta.logprobs)
        if delta.text or (logprobs and delta.token_ids):
            shown = logprobs.model_dump() if logprobs else None
            yield self._chunk(delta.index, {"content": delta.text}, logprobs=shown)
        if delta.finish_reason:
            yield self._chunk(
                delta.index,
                {},
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )

    def last(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        self._backend.remember(self._prompt, outputs[0])
        yield from last_chunk(self._backend, self._body, self._head, self._job, outputs)

    def _chunk(self, index: int, delta: JSON, **more: Any) -> JSON:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self._head, "choices": [choice], **self._usage}


def _logprobs(
    backend: Backend,
    body: ChatRequest,
    tokens: list[int],
    logprobs: list[dict[int, float]] | None,
) -> ChatLogprobs | None:
    if logprobs is None:
        return None
    count = body.top_logprobs or 0

    def describe(token: int, logprob: float) -> dict[str, Any]:
        text = backend.token_text(token)
        partial = "\ufffd" in text
        return {
            "token": text,
            "logprob": clamp(logprob),
            "bytes": None if partial else [*text.encode()],
        }

    content = []
    for token, top in zip(tokens, logprobs, strict=True):
        likeliest = sorted(top.items(), key=lambda item: -item[1])[:count]
        content.append(
            ChatTokenLogprob(
                **describe(token, top[token]),
                top_logprobs=[TokenLogprob(**describe(*item)) for item in likeliest],
            )
        )
    return ChatLogprobs(content=content)
