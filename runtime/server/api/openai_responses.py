"""POST /v1/responses, and what is kept of it to go on from."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request

from radixcache.runtime.engine.outputs import RequestOutput
from radixcache.runtime.server.api.chat_turn import Answers, Turn, begin
from radixcache.runtime.server.api.content_blocks import Part, Parts, Step
from radixcache.runtime.server.api.generation import JSON, STREAM_RESPONSE, EventStream, extension
from radixcache.runtime.server.api.openai_chat import template_kwargs
from radixcache.runtime.server.api.response_store import (
    PastsDep,
    ResponseStore,
    StoredResponse,
    compare,
)
from radixcache.runtime.server.http.bodies import BodyRoute, on_thread
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.jobs import PromptDelta
from radixcache.runtime.server.protocol.fields import CacheSalt
from radixcache.runtime.server.protocol.responses import Item, ResponsesRequest, merge
from radixcache.runtime.server.serving import Backend, BackendDep, client_of
from radixcache.runtime.tokens.tokenizer import Message

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses", responses={**STREAM_RESPONSE})
async def create_response(
    body: ResponsesRequest, request: Request, backend: BackendDep, pasts: PastsDep
) -> Any:
    """Answer a conversation, which may go on from an earlier response."""
    conversation = body.messages()
    if body.previous_response_id is not None:
        before = _find(pasts, body.previous_response_id, body.cache_salt)
        conversation = merge([*before.conversation, *conversation])
    response = _begin(body, backend)
    turn = await on_thread(turn_of, body, conversation, backend)
    answers = await begin(backend, turn, client_of(request, body.cache_salt))
    exchange = _Exchange(body, backend, pasts, response, conversation, answers)
    if body.stream:
        return EventStream(answers.job, exchange.of, exchange.last, exchange.failed, end="")
    exchange.parts = Parts.of(*await answers.messages(request))
    return exchange.finish(answers.output)


def turn_of(body: ResponsesRequest, conversation: list[Message], backend: Backend) -> Turn:
    """What a request asks for, of the whole conversation.

    Raises:
        InvalidRequest: a value makes no sense.
    """
    return Turn(
        body.plain_messages(conversation),
        body.sampling_params(backend.chat_defaults),
        tools=body.offered,
        choice=body.choice,
        template_kwargs=template_kwargs(backend, {}, body.effort, "reasoning.effort"),
        cache_salt=body.cache_salt,
        stream=bool(body.stream),
        explain=bool(body.explain or body.compared),
    )


@router.get("/v1/responses/{response_id}")
async def get_response(
    response_id: str, pasts: PastsDep, cache_salt: CacheSalt = None, stream: bool = False
) -> JSON:
    """A response that is kept."""
    if stream:
        raise ApiError.invalid("a response that is kept is not streamed", "stream")
    return _find(pasts, response_id, cache_salt).response or {}


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, pasts: PastsDep, cache_salt: CacheSalt = None) -> JSON:
    """Forget a response."""
    _find(pasts, response_id, cache_salt)
    pasts.drop(response_id, cache_salt)
    return {"id": response_id, "object": "response", "deleted": True}


def _find(pasts: ResponseStore, response_id: str, cache_salt: str | None) -> StoredResponse:
    past = pasts.find(response_id, cache_salt)
    if past is None or past.response is None:
        whose = "without a cache_salt" if cache_salt is None else "with this cache_salt"
        raise ApiError.not_found(f"no response {response_id!r} is kept {whose}")
    return past


def _begin(body: ResponsesRequest, backend: Backend) -> JSON:
    """The response before there is anything of it."""
    given = body.model_dump(mode="json", exclude_none=True)
    defaults = backend.chat_defaults
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": backend.now(),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": backend.check_model(body.model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": given.get("reasoning", {}),
        "store": body.store is not False,
        "temperature": given.get("temperature", defaults.temperature),
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [{"parameters": {}, "strict": False, **t} for t in given.get("tools", ())],
        "top_p": given.get("top_p", defaults.top_p),
        "truncation": "disabled",
        "usage": None,
    }


@dataclass
class _Exchange:
    """One request and its response, as a whole or in events.

    Attributes:
        conversation: all its messages but the instructions.
    """

    body: ResponsesRequest
    backend: Backend
    pasts: ResponseStore
    response: JSON
    conversation: list[Message]
    answers: Answers
    parts: Parts = field(default_factory=Parts)
    num_events: int = 0

    def of(self, news: PromptDelta) -> Iterator[JSON]:
        """The events of a delta."""
        yield from self._begin()
        for step in self.parts.add(self.answers.pieces(news)):
            yield from self._events_of(step)

    def last(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        """The events at the end."""
        self.answers.remember(outputs)
        for step in self.parts.close():
            yield from self._events_of(step)
        response = self.finish(outputs[0])
        yield self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> Iterator[JSON]:
        """The events in place of an end."""
        yield from self._begin()
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        code = codes.get(error.status, "server_error")
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("failed", response=self.response)

    def finish(self, output: RequestOutput) -> JSON:
        """The whole response, which is kept if that is wanted."""
        body, response, answers = self.body, self.response, self.answers
        cut, parts = output.outputs[0].finish_reason == "length", self.parts.parts
        ends = ["completed"] * (len(parts) - 1) + ["incomplete" if cut else "completed"]
        response["status"] = ends[-1]
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        items = enumerate(zip(parts, ends, strict=False))
        response["output"] = [self._item(i, part, end) for i, (part, end) in items]
        response["usage"] = self._usage(output)
        if body.compared is not None:
            past = self.pasts.find(body.compared, body.cache_salt)
            response["prompt_cache_diagnostics"] = self._diagnose(past, output)
        more = extension(self.backend, answers.job, answers.turn)
        response["radixcache"] = more.model_dump()
        if response["store"]:
            said = merge([Item(**item).as_message() for item in response["output"]])
            conversation = [*self.conversation, *said]
            past = StoredResponse(answers.turn, answers.prompt.tokens, conversation, response)
            self.pasts.keep(response["id"], past)
        return response

    def _begin(self) -> Iterator[JSON]:
        if not self.num_events:
            yield self._event("created", response=self.response)
            yield self._event("in_progress", response=self.response)

    def _event(self, kind: str, **more: Any) -> JSON:
        self.num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self.num_events - 1, **more}

    def _events_of(self, step: Step) -> Iterator[JSON]:
        index, part = step.place, step.part
        item = self._item(index, part, "in_progress" if step.kind == "open" else "completed")
        place: JSON = {"output_index": index, "item_id": item["id"]}
        if part.kind != "call":
            place["content_index"] = 0
        if part.kind == "content":
            place["logprobs"] = []
        name = _EVENTS[part.kind]
        if step.kind == "open":
            yield self._event("output_item.added", output_index=index, item=item)
            if part.kind == "content":
                yield self._event("content_part.added", **place, part=_text(""))
        elif step.kind == "more":
            yield self._event(f"{name}.delta", **place, delta=step.text)
        else:
            whole = {"arguments": part.text, "name": part.name}
            yield self._event(
                f"{name}.done", **place, **(whole if part.kind == "call" else {"text": part.text})
            )
            if part.kind == "content":
                yield self._event("content_part.done", **place, part=_text(part.text))
            yield self._event("output_item.done", output_index=index, item=item)

    def _item(self, index: int, part: Part, status: str) -> JSON:
        name = f"{self.response['id'].removeprefix('resp_')}{index}"
        if part.kind == "call":
            call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {"id": f"fc_{name}", "type": "function_call", "status": status, **call}
        if part.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": part.text}]
            return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content}
        content = [] if status == "in_progress" else [_text(part.text)]
        message = {"role": "assistant", "status": status, "content": content}
        return {"id": f"msg_{name}", "type": "message", **message}

    def _usage(self, output: RequestOutput) -> JSON:
        prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
        answer = len(output.outputs[0].token_ids)
        # As the tokenizer splits the text: what the model chose is not known by part.
        reasoning = self.backend.tokenizer.encode(self.parts.reasoning, special=False)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": (prompt - cached) * self.backend.caches,
            },
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": len(reasoning)},
            "total_tokens": prompt + answer,
        }

    def _diagnose(self, past: StoredResponse | None, output: RequestOutput) -> JSON:
        """Why the prompt was not cached as far as an earlier response would have it."""
        if past is None:
            return {"type": "comparison_response_not_found"}
        tokens, granularity = self.answers.prompt.tokens, self.backend.llm.cache.granularity
        cached = output.num_cached_tokens
        change, reused = compare(past, self.answers.turn, tokens, cached, granularity)
        if change in _REASONS:
            return {
                "type": "cache_miss",
                "reason": _REASONS[change],
                "cache_missed_tokens": len(tokens) - reused,
                "comparison_reusable_tokens": len(past.prompt),
            }
        return {"type": "cache_hit" if change == "nothing" else "unavailable"}


_EVENTS = {
    "content": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
_REASONS = {
    "tools": "tools_changed",
    "settings": "reasoning_effort_changed",
    "system": "input_changed",
    "messages": "input_changed",
}


def _text(text: str) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
