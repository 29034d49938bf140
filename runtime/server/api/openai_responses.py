"""POST /v1/responses, and what is kept of it to go on from."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request

from radixcache.runtime.engine.outputs import RequestOutput
from radixcache.runtime.server.api.chat_turn import begin, turn_of
from radixcache.runtime.server.api.content_blocks import BlockExchange, Part, Step
from radixcache.runtime.server.api.generation import JSON, STREAM_RESPONSE, usage
from radixcache.runtime.server.api.response_store import ResponseStore, StoreDep, StoredResponse
from radixcache.runtime.server.http.bodies import BodyRoute, on_thread
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.protocol.fields import CacheSalt
from radixcache.runtime.server.protocol.responses import ResponsesRequest, merge
from radixcache.runtime.server.protocol.turn import call_of
from radixcache.runtime.server.serving import Backend, BackendDep, client_of
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import for_template

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses", responses={**STREAM_RESPONSE})
async def create_response(
    body: ResponsesRequest, request: Request, backend: BackendDep, store: StoreDep
) -> Any:
    """Answer a conversation, which may go on from an earlier response."""
    conversation = body.messages()
    if body.previous_response_id is not None:
        before = _find(store, body.previous_response_id, body.cache_salt)
        conversation = merge([*before.conversation, *conversation])
    turn = await on_thread(turn_of, body, backend, conversation)
    head = _begin(body, backend)
    answers = await begin(backend, turn, client_of(request, body.cache_salt))
    exchange = _Response(body, backend, head, answers, store)
    exchange.conversation = conversation
    return await exchange.answer(request)


@router.get("/v1/responses/{response_id}")
async def get_response(
    response_id: str, store: StoreDep, cache_salt: CacheSalt = None, stream: bool = False
) -> JSON:
    """A response that is kept."""
    if stream:
        raise ApiError(400, "a response that is kept is not streamed", "stream")
    return _find(store, response_id, cache_salt).response or {}


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, store: StoreDep, cache_salt: CacheSalt = None) -> JSON:
    """Forget a response."""
    _find(store, response_id, cache_salt)
    store.drop(response_id, cache_salt)
    return {"id": response_id, "object": "response", "deleted": True}


def _find(store: ResponseStore, response_id: str, cache_salt: str | None) -> StoredResponse:
    stored = store.find(response_id, cache_salt)
    if stored is None or stored.response is None:
        whose = "without a cache_salt" if cache_salt is None else "with this cache_salt"
        raise ApiError(404, f"no response {response_id!r} is kept {whose}")
    return stored


def _begin(body: ResponsesRequest, backend: Backend) -> JSON:
    """The response before there is anything of it."""
    given = body.model_dump(mode="json", exclude_none=True)
    defaults = backend.chat_defaults
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
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


class _Response(BlockExchange[ResponsesRequest]):
    """Its `head` is what is known of it so far.

    Attributes:
        conversation: all its messages but the instructions.
    """

    conversation: list[Message]
    num_events = 0

    def begin(self, num_tokens: int) -> Iterator[JSON]:
        yield self._event("created", response=self.head)
        yield self._event("in_progress", response=self.head)

    def step(self, step: Step) -> Iterator[JSON]:
        index, part = step.place, step.part
        ended = "incomplete" if self.is_cut else "completed"
        item = self._item(index, part, "in_progress" if step.kind == "open" else ended)
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
            call = {"arguments": part.text, "name": part.name}
            whole = call if part.kind == "call" else {"text": part.text}
            yield self._event(f"{name}.done", **place, **whole)
            if part.kind == "content":
                yield self._event("content_part.done", **place, part=_text(part.text))
            yield self._event("output_item.done", output_index=index, item=item)

    def end(self, whole: JSON) -> Iterator[JSON]:
        yield self._event(whole["status"], response=whole)

    def fail(self, error: ApiError) -> Iterator[JSON]:
        yield from self.begin_once()
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        code = codes.get(error.status, "server_error")
        self.head |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("failed", response=self.head)

    def finish(self, output: RequestOutput) -> JSON:
        """It is kept if that is wanted."""
        body, response, answers = self.body, self.head, self.answers
        cut, parts = output.outputs[0].finish_reason == "length", self.parts
        ends = ["completed"] * (len(parts) - 1) + ["incomplete" if cut else "completed"]
        response["status"] = ends[-1]
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        items = enumerate(zip(parts, ends, strict=False))
        response["output"] = [self._item(i, part, end) for i, (part, end) in items]
        response["usage"] = self._usage(output)
        if body.compared is not None:
            earlier = self.store.find(body.compared, body.cache_salt)
            response["prompt_cache_diagnostics"] = self._diagnose(earlier, output.num_cached_tokens)
        response["radixcache"] = self.extension()
        if response["store"]:
            parsed = answers.message(0)
            answer = for_template(
                {
                    "role": "assistant",
                    "content": parsed.content,
                    "reasoning_content": parsed.reasoning or None,
                    "tool_calls": [call_of(*call) for call in parsed.calls] or None,
                }
            )
            conversation = [*self.conversation, answer]
            stored = StoredResponse(answers.turn, answers.prompt.tokens, conversation, response)
            self.store.keep(response["id"], stored)
        return response

    def _event(self, kind: str, **more: Any) -> JSON:
        self.num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self.num_events - 1, **more}

    def _item(self, index: int, part: Part, status: str) -> JSON:
        name = f"{self.head['id'].removeprefix('resp_')}{index}"
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
        counts = usage(self.backend, [output])
        # As the tokenizer splits the text: what the model chose is not known by part.
        thoughts = "".join(part.text for part in self.parts if part.kind == "reasoning")
        reasoning = self.backend.tokenizer.encode(thoughts, special=False)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(reasoning)},
            "total_tokens": counts["total_tokens"],
        }

    def _diagnose(self, earlier: StoredResponse | None, cached: int) -> JSON:
        """Why the prompt was not cached as far as an earlier response would have it."""
        if earlier is None:
            return {"type": "comparison_response_not_found"}
        change, reused = self.compare(earlier, cached)
        if change in _REASONS:
            return {
                "type": "cache_miss",
                "reason": _REASONS[change],
                "cache_missed_tokens": len(self.answers.prompt.tokens) - reused,
                "comparison_reusable_tokens": len(earlier.prompt),
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
