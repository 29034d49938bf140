"""POST /v1/messages: Anthropic's API, and what its `cache_control` does here."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from radixcache.errors import EngineStopped, InvalidRequest
from radixcache.runtime.outputs import RequestOutput
from radixcache.runtime.server.api.chat_turn import Answers, begin, turn_of
from radixcache.runtime.server.api.content_blocks import BlockExchange, Part, Step
from radixcache.runtime.server.api.exchange import JSON, STREAM_RESPONSE, event
from radixcache.runtime.server.api.extension import extension
from radixcache.runtime.server.http.bodies import BodyRoute, on_thread
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.protocol.anthropic import CountRequest, MessagesRequest
from radixcache.runtime.server.protocol.images import with_images
from radixcache.runtime.server.protocol.turn import Turn
from radixcache.runtime.server.serving import ContextDep, ServingContext, client_of
from radixcache.runtime.tokens.conversation import Conversations
from radixcache.runtime.tokens.history import TokenisedText, common_prefix
from radixcache.runtime.tokens.tokenizer import Message, Tokenizer
from radixcache.runtime.tokens.tool_calls import arguments_of, image_parts
from radixcache.tokens import Tokens, as_tokens, common_length

router = APIRouter(route_class=BodyRoute)

_ERRORS: JSON = {"description": "Error", "content": {"application/json": {}}}
_RESPONSES: dict[int | str, JSON] = {"4XX": _ERRORS, "5XX": _ERRORS}


@router.post("/v1/messages", responses={**STREAM_RESPONSE, **_RESPONSES})
async def create_message(body: MessagesRequest, request: Request, context: ContextDep) -> Any:
    """Answer a conversation."""
    model = context.check_model(body.model)
    turn = await on_thread(turn_of, body, context.chat_defaults, context.tokenizer)
    client = client_of(request, body.cache_salt)
    breakpoints = [*body.breakpoints()]
    answers = await begin(context, turn, client)

    def ends(tokenizer: Tokenizer) -> list[tuple[int, float]]:
        return [
            (_length(context.llm.turns, turn, messages, answers.prompt), control.seconds)
            for messages, control in breakpoints
        ]

    try:
        prefixes = await context.tokenizing.run(ends, client) if breakpoints else []
    except BaseException:
        answers.job.end()
        raise
    head: JSON = {"id": f"msg_{uuid.uuid4().hex}", "model": model}
    exchange = _Message(body, context, head, answers, prefixes)
    return await exchange.answer(request, turn.left_out)


@router.post("/v1/messages/count_tokens", responses=_RESPONSES)
async def count_tokens(body: CountRequest, request: Request, context: ContextDep) -> JSON:
    """Count the tokens of a message's prompt."""
    context.check_model(body.model)
    turn = await on_thread(turn_of, body, context.chat_defaults, context.tokenizer)
    client = client_of(request, body.cache_salt)
    messages = await context.images.read(turn.messages, client)
    how = turn.rendering
    prompt = await context.tokenizing.encode_chat(messages, body.cache_salt, client, **how)
    return {"input_tokens": len(prompt.tokens)}


def _length(
    turns: Conversations, turn: Turn, messages: list[Message], prompt: TokenisedText
) -> int:
    """Tokens of the prompt up to the end of `messages`; 0 if the template refuses them alone."""
    try:
        how = {**turn.rendering, "ask": False, "continue_final": False}
        text = turns.render([*map(with_images, messages)], turn.cache_salt, **how)
    except InvalidRequest:
        return 0
    if shown := [placed.image for placed in prompt.images[: len(image_parts(messages))]]:
        text = turns.images.write(text, shown)
    end = common_prefix(text, prompt.text)
    cut = int(np.searchsorted(prompt.cuts[:, 0], end, side="right"))
    start, token = prompt.cuts[cut - 1].tolist() if cut else (0, 0)
    rest = as_tokens(turns.history.tokenizer.encode(prompt.text[start:end], special=False))
    rest = rest[: len(prompt.tokens) - token]
    return token + (common_length(rest, prompt.tokens[token:][: len(rest)]) if len(rest) else 0)


class _Message(BlockExchange[MessagesRequest]):
    """A message whose prompt may have prefixes that are marked to stay cached.

    Args:
        prefixes: the length in tokens, and the lifetime in seconds, of each `cache_control`.
    """

    def __init__(
        self,
        body: MessagesRequest,
        context: ServingContext,
        head: JSON,
        answers: Answers,
        prefixes: list[tuple[int, float]],
    ) -> None:
        super().__init__(body, context, head, answers)
        self._prefixes = prefixes

    def begin(self, num_tokens: int) -> Iterator[JSON]:
        yield {"type": "message_start", "message": self._message(num_tokens)}

    def step(self, step: Step) -> Iterator[JSON]:
        event: JSON = {"type": f"content_block_{_EVENTS[step.kind]}", "index": step.place}
        if step.kind == "open":
            event["content_block"] = _block(replace(step.part, text=""))
        elif step.kind == "more":
            kind, key = _DELTAS[step.part.kind]
            event["delta"] = {"type": kind, key: step.text}
        yield event

    def end(self, whole: JSON) -> Iterator[JSON]:
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        more = {name: whole[name] for name in ("usage", "radixcache")}
        yield {"type": "message_delta", "delta": delta, **more}
        yield {"type": "message_stop"}

    def heartbeat(self) -> str:
        return event({"type": "ping"})

    def fail(self, error: ApiError) -> Iterator[JSON]:
        yield error.body_at("/v1/messages")

    def finish(self, output: RequestOutput) -> JSON:
        """Make the message, and keep its marked prefixes."""
        end = output.outputs[0]
        message = self._message(len(end.token_ids))
        details = {"thinking_tokens": self.answers.num_reasoning_tokens}
        message["usage"]["output_tokens_details"] = details
        if end.finish_reason == "length":
            message["stop_reason"] = "max_tokens"
        elif isinstance(end.stop_reason, str):
            message |= {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
        else:
            has_calls = any(part.kind == "call" for part in self.parts)
            message["stop_reason"] = "tool_use" if has_calls else "end_turn"
        message["content"] = [_block(part) for part in self.parts]
        message["radixcache"] = extension(self.context, self.job, self.answers.turn)
        tokens, salt = self.job.requests[0].prompt_token_ids, self.body.cache_salt
        if self._prefixes:
            with suppress(EngineStopped):
                self.context.llm.worker.call(lambda: self._prefer(tokens, salt))
        return message

    def _prefer(self, tokens: Tokens, cache_salt: str | None) -> None:
        """Keep the marked prefixes cached; call it on the engine's thread."""
        for length, seconds in self._prefixes:
            if length:
                self.context.llm.prefixes.prefer(tokens[:length], seconds, cache_salt)

    def _message(self, num_tokens: int) -> JSON:
        """The message at `num_tokens` tokens, without its content and end."""
        cached = self.job.requests[0].sequences[0].cached_tokens
        marked = max((length for length, _ in self._prefixes), default=0)
        written = max(0, marked - cached) * self.context.llm.cache.caches
        return {
            "id": self.head["id"],
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(self.answers.prompt.tokens) - cached - written,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": written,
                "output_tokens": num_tokens,
            },
        }


_EVENTS = {"open": "start", "more": "delta", "close": "stop"}
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _block(part: Part) -> JSON:
    if part.kind == "call":
        block = {"type": "tool_use", "id": part.call_id, "name": part.name}
        return {**block, "input": arguments_of(part.text)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}
