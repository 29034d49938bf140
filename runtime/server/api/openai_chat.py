"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request

from radixcache.runtime.engine.outputs import RequestOutput
from radixcache.runtime.server.api.chat_turn import Answers, Reply, Turn, begin
from radixcache.runtime.server.api.generation import (
    JSON,
    STREAM_RESPONSE,
    EventStream,
    clamp,
    extension,
    last_chunk,
    progress,
    prompt_logprobs,
    usage,
)
from radixcache.runtime.server.http.bodies import BodyRoute
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.jobs import PromptDelta
from radixcache.runtime.server.protocol.answers import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    TokenLogprob,
    ToolCall,
)
from radixcache.runtime.server.protocol.openai import ChatRequest
from radixcache.runtime.server.serving import Backend, BackendDep, client_of, plain_messages
from radixcache.runtime.tokens.tool_calls import ParsedDelta

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses={**STREAM_RESPONSE})
async def chat_completions(body: ChatRequest, request: Request, backend: BackendDep) -> Any:
    """Answer a conversation."""
    head: JSON = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": backend.now(),
        "model": backend.check_model(body.model),
    }
    turn = turn_of(body, backend)
    answers = await begin(backend, turn, client_of(request, body.cache_salt))
    if body.stream:
        chunks = _Chunks(body, backend, head, answers)
        told = progress(backend, body, chunks.head, answers.job)
        return EventStream(answers.job, chunks.of, chunks.last, prefilled=told)
    choices = [
        ChatChoice(
            index=reply.index,
            message=_message(reply, body),
            logprobs=_logprobs(backend, body, reply.token_ids, reply.logprobs),
            finish_reason=reply.finish_reason,
            stop_reason=reply.stop_reason,
            token_ids=reply.token_ids if body.return_token_ids else None,
        )
        for reply in await answers.messages(request)
    ]
    output = answers.output
    return ChatCompletion(
        **head,
        choices=choices,
        usage=usage(backend, [output]),
        radixcache=extension(backend, answers.job, body),
        prompt_logprobs=prompt_logprobs(backend, body, output),
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
    )


def turn_of(body: ChatRequest, backend: Backend) -> Turn:
    """What a request asks for.

    Raises:
        InvalidRequest: a value makes no sense.
    """
    params = body.sampling_params(
        backend.chat_defaults,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=body.max_completion_tokens
        or body.max_tokens
        or backend.chat_defaults.max_tokens,
    )
    return Turn(
        plain_messages(body.messages),
        params,
        tools=body.offered,
        choice=body.choice,
        template_kwargs=template_kwargs(
            backend, body.chat_template_kwargs or {}, body.reasoning_effort, "reasoning_effort"
        ),
        continue_final=bool(body.continue_final_message),
        ask=body.add_generation_prompt is not False,
        cache_salt=body.cache_salt,
        prefix=body.prefix,
        stream=bool(body.stream),
        explain=bool(body.explain),
    )


def template_kwargs(backend: Backend, values: JSON, effort: str | None, field: str) -> JSON:
    """Values for the chat template: how much to think, as `field` says, may be one of them.

    Raises:
        ApiError: the model cannot be told.
    """
    if effort is None:
        return values
    template = backend.tokenizer.chat_template()
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort, **values}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none", **values}
    if effort == "none" and not backend.tokenizer.reasons:
        return values
    raise ApiError.invalid("one cannot tell this model how much to think", field)


def _message(reply: Reply, body: ChatRequest) -> AssistantMessage:
    reasoning = None if body.include_reasoning is False else reply.reasoning
    return AssistantMessage(
        content=reply.content,
        tool_calls=[
            ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))
            for call_id, name, arguments in reply.calls
        ]
        or None,
        reasoning=reasoning,
        reasoning_content=reasoning,
    )


class _Chunks:
    """The chunks of one streamed answer."""

    def __init__(self, body: ChatRequest, backend: Backend, head: JSON, answers: Answers) -> None:
        self._body = body
        self._backend = backend
        self.head = {**head, "object": "chat.completion.chunk"}
        self._usage: JSON = {"usage": None} if body.include_usage else {}
        self._answers = answers
        self._begun: set[int] = set()

    def of(self, news: PromptDelta) -> Iterator[JSON]:
        delta = news.delta
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            first = self._chunk(delta.index, {"role": "assistant", "content": ""})
            if self._body.return_token_ids:
                first["prompt_token_ids"] = self._answers.prompt.tokens.tolist()
            yield first
        logprobs = _logprobs(self._backend, self._body, delta.token_ids, delta.logprobs)
        shown: JSON = {"logprobs": logprobs.model_dump()} if logprobs and delta.token_ids else {}
        if self._body.return_token_ids and delta.token_ids:
            shown["token_ids"] = delta.token_ids
        pieces = self._answers.pieces(news)
        if self._body.include_reasoning is False:
            pieces = [piece for piece in pieces if piece.kind != "reasoning"]
        for piece in pieces or [ParsedDelta("content", "")] * bool(shown):
            yield self._chunk(delta.index, _delta(piece), **shown)
            shown = {}  # all tokens are in the first
        if delta.finish_reason:
            yield self._chunk(
                delta.index,
                {},
                finish_reason=self._answers.finish_reason(delta),
                stop_reason=delta.stop_reason,
            )

    def last(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        self._answers.remember(outputs)
        yield from last_chunk(self._backend, self._body, self.head, self._answers.job, outputs)

    def _chunk(self, index: int, delta: JSON, **more: Any) -> JSON:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self.head, "choices": [choice], **self._usage}


def _delta(piece: ParsedDelta) -> JSON:
    """What a message gains by a piece."""
    match piece.kind:
        case "content":
            return {"content": piece.text}
        case "reasoning":
            return {"reasoning": piece.text, "reasoning_content": piece.text}
        case "call":
            function = {"name": piece.text, "arguments": ""}
            more = {"id": piece.call_id, "type": "function", "function": function}
        case "arguments":
            more = {"function": {"arguments": piece.text}}
    return {"tool_calls": [{"index": piece.call, **more}]}


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
            "token": backend.token_name(token, body),
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
